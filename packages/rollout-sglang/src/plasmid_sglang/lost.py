"""What it means that no server took the weights, and how errors of its processes are passed on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plasmid.errors import EngineError, EngineLostError, PlasmidError, SyncError, one_line


class CutOffError(SyncError):
    """An update ended by no fault of the server: the sender failed, or another member of a broadcast."""


KINDS: Mapping[str, type[PlasmidError]] = {"cut off": CutOffError, "proof": SyncError, "engine": EngineError}


def told(error: Exception) -> dict[str, Any]:
    """The error as a message to another process."""
    kind = next((name for name, type_ in KINDS.items() if isinstance(error, type_)), "proof")
    return {"error": str(error) if isinstance(error, PlasmidError) else one_line(error), "kind": kind}


def heard(message: Mapping[str, Any]) -> PlasmidError | None:
    """The error of such a message; None if it tells of none."""
    return KINDS[message["kind"]](message["error"]) if "error" in message else None


def gone(broken: RuntimeError) -> EngineError:
    """What it means that the control channel of a server cannot be reached."""
    return EngineError(f"what is beside the server is gone: {one_line(broken)}")


def lost(failed: Iterable[Exception]) -> PlasmidError:
    """What to raise when every server has failed in a weight sync: a failed proof as it is, else that all are gone."""
    errors = list(failed)
    wrong = [error for error in errors if isinstance(error, SyncError)]
    proof = next((error for error in wrong if not isinstance(error, CutOffError)), None)
    if proof is not None or (wrong and len(wrong) == len(errors)):
        return proof or wrong[0]
    return EngineLostError("; ".join(one_line(error) for error in errors) or "no server runs")
