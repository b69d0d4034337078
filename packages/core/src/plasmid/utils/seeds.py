"""Seeds that depend on the object that is sampled, not on the order of sampling."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """Derive a 63-bit seed from the run's seed and the identity of what is drawn (group, sample, turn, ...)."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
