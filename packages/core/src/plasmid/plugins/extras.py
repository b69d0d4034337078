"""Extras of distributions that provide kinds of components."""

from __future__ import annotations

from importlib.metadata import entry_points

GROUP = "plasmid.extras"
"""Entry points of a distribution that name the extra for each kind, such as ``"trainer.own" = "own"``. They refer to
no object, so that the distribution can name kinds whose packages are not installed."""


def find_extra(slot: str, kind: str) -> str | None:
    """Return what to install for a kind of component, such as ``plasmid[hf]``, or None if no distribution names it."""
    for point in entry_points(group=GROUP, name=f"{slot}.{kind}"):
        if point.dist is not None:
            return f"{point.dist.name}[{point.value}]"
    return None
