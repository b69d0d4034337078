"""What it means that no server took the weights."""

from __future__ import annotations

from collections.abc import Iterable

from plasmid.errors import EngineLostError, PlasmidError, SyncError, one_line


def lost(failed: Iterable[Exception]) -> PlasmidError:
    """What to raise when every server has failed in a weight sync: a failed proof as it is, else that all are gone."""
    errors = list(failed)
    proof = next((error for error in errors if isinstance(error, SyncError)), None)
    if proof is not None:
        return proof
    return EngineLostError("; ".join(one_line(error) for error in errors) or "no server runs")
