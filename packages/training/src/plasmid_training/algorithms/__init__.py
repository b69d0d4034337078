"""The algorithms that come with Plasmid, one short file each, composed of what `parts` holds."""

from __future__ import annotations

from plasmid.components import Algorithm


def is_custom(algorithm: Algorithm) -> bool:
    """True if the algorithm does not come with Plasmid: what it raises is its author's mistake."""
    return not type(algorithm).__module__.startswith(f"{__name__}.")
