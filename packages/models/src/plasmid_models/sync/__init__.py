"""The sending half of weight sync, and what both halves share: buckets, checksums, receipts."""

from plasmid.types.receipts import compare

from .buckets import make_buckets, unpack
from .checksum import checksum
from .send import send_weights

__all__ = ["checksum", "compare", "make_buckets", "send_weights", "unpack"]
