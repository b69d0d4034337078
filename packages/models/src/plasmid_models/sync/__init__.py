"""Weight sync: the sender, and the buckets, checksums and receipts that sender and receiver share."""

from plasmid.types.receipts import compare

from .buckets import make_buckets, unpack
from .checksum import checksum
from .send import send_weights

__all__ = ["checksum", "compare", "make_buckets", "send_weights", "unpack"]
