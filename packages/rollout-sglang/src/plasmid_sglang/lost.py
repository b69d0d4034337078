"""What it means that no server took the weights."""

from __future__ import annotations

from collections.abc import Iterable

from plasmid.errors import EngineLostError, PlasmidError, SyncError, one_line


class CutOffError(SyncError):
    """An update ended by no fault of the server: the sender failed, or another member of a broadcast."""


def lost(failed: Iterable[Exception]) -> PlasmidError:
    """What to raise when every server has failed in a weight sync: a failed proof as it is, else that all are gone."""
    errors = list(failed)
    wrong = [error for error in errors if isinstance(error, SyncError)]
    proof = next((error for error in wrong if not isinstance(error, CutOffError)), None)
    if proof is not None or (wrong and len(wrong) == len(errors)):
        return proof or wrong[0]
    return EngineLostError("; ".join(one_line(error) for error in errors) or "no server runs")
