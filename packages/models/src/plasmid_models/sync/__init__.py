"""Weight sync: the sender, and the buckets, checksums and results that sender and receiver share."""

from plasmid.types.receipts import compare

from .buckets import make_buckets, unpack
from .checksum import checksum
from .send import send_share, send_weights
from .shares import Gatherable, Round, divide

__all__ = [
    "Gatherable",
    "Round",
    "checksum",
    "compare",
    "divide",
    "make_buckets",
    "send_share",
    "send_weights",
    "unpack",
]
