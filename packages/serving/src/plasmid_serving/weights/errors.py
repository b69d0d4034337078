"""Errors of weight syncs: their encoding between processes, and the one to raise if no server completed a sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plasmid.errors import EngineError, EngineLostError, PlasmidError, SyncError, one_line


class SyncAbortedError(SyncError):
    """An update ended through no fault of this server: the sender failed, or another member of a broadcast."""


KINDS: Mapping[str, type[PlasmidError]] = {"aborted": SyncAbortedError, "proof": SyncError, "engine": EngineError}


def encode_error(error: Exception) -> dict[str, Any]:
    """Encode an error as a message to another process."""
    kind = next((name for name, type_ in KINDS.items() if isinstance(error, type_)), "proof")
    return {"error": str(error) if isinstance(error, PlasmidError) else one_line(error), "kind": kind}


def decode_error(message: Mapping[str, Any]) -> PlasmidError | None:
    """Return the error in a message, or None if it has none."""
    return KINDS[message["kind"]](message["error"]) if "error" in message else None


def connection_lost_error(broken: RuntimeError) -> EngineError:
    """Return the error for a server whose control channel cannot be reached."""
    return EngineError(f"lost connection to the server's control process: {one_line(broken)}")


def sync_failure(failed: Iterable[Exception]) -> PlasmidError:
    """Return the error to raise when every server has failed in a weight sync.

    A verification error is returned as is, because a retry cannot help. Otherwise `EngineLostError`, which the loop
    retries.
    """
    errors = list(failed)
    wrong = [error for error in errors if isinstance(error, SyncError)]
    proof = next((error for error in wrong if not isinstance(error, SyncAbortedError)), None)
    if proof is not None or (wrong and len(wrong) == len(errors)):
        return proof or wrong[0]
    return EngineLostError("; ".join(one_line(error) for error in errors) or "no server is running")
