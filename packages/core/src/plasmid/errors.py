"""Errors that a user can cause. The CLI prints them without a traceback; any other exception is a bug in Plasmid.

All of them can be pickled, since they cross process boundaries.
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

SHOWN = 3
EXIT_MISTAKE = 2
"""Exit code of `rl` after an error that a retry would repeat: a wrong setting, bad data, a user's code that raises."""
EXIT_RETRY = 75
"""Exit code after a process died or did not answer: trying again may help. It is `EX_TEMPFAIL` of sysexits.h."""


def one_line(error: BaseException, *, longest: int = 300) -> str:
    """Format type and message of an exception on one line."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001, `str` of an error may fail, for example for a value nested too deeply
        text = ""
    text = " ".join(f"{type(error).__name__}: {text}".split()).removesuffix(":")
    return text if len(text) <= longest else f"{text[:longest]} ..."


SAMPLE_FAULTS: dict[type[BaseException], str] = {
    OverflowError: "a number is too large",
    RecursionError: "too deeply nested",
    MemoryError: "out of memory",
    UnicodeError: "a character that cannot be encoded",
}
TOO_MANY_DIGITS = "integer string conversion"
"""Part of the `ValueError` that Python raises for integers of more than 4300 digits."""


def sample_fault(error: BaseException) -> str | None:
    """Describe the part of a text that exceeds Python's limits: a number, a nesting or a character.

    Returns None for all other errors, which are bugs of the code that reads the text.
    """
    if isinstance(error, ValueError) and TOO_MANY_DIGITS in str(error):
        return "a number has too many digits"
    return next((reason for kind, reason in SAMPLE_FAULTS.items() if isinstance(error, kind)), None)


def find_line(file: str | Path, error: BaseException) -> int | None:
    """Return the innermost line of ``file`` in an error's traceback; None if the file is not in it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == Path(file).absolute()]
    return lines[-1] if lines else None


def locate_in_class(cls: type, error: BaseException) -> str:
    """Return `` (file.py:12)``, the innermost line of the class's file in an error's traceback; empty if not in it."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    line = find_line(file, error) if file else None
    return f" ({Path(file).name}:{line})" if file and line else ""


def abbreviate(names: Sequence[str]) -> str:
    """Abbreviate a list of names: ``a, b, c and 7 more``."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


class PlasmidError(Exception):
    """Base class for every error with a message meant for the user."""

    exit_code = EXIT_MISTAKE
    """Exit code of `rl` after this error."""


class ConfigError(PlasmidError, ValueError):
    """The run configuration is invalid. Raised before any process or GPU is acquired."""


class PluginError(PlasmidError):
    """A plugin cannot be loaded, or two plugins claim the same name."""


class DataError(PlasmidError):
    """A data file cannot be read, or a row of it cannot be used. Names file and line."""


class ModelError(PlasmidError):
    """A model folder or checkpoint is incomplete, or belongs to another model."""


class EngineError(PlasmidError):
    """A rollout engine cannot serve."""

    exit_code = EXIT_RETRY


class EngineLostError(EngineError):
    """All servers of an engine that should receive weights have died. The sync can be retried once others start."""


class TemplateError(PlasmidError):
    """A chat template cannot extend a conversation without changing its rendered prefix."""


class IsolationError(PlasmidError):
    """Work in a worker process raised, or its process or sandbox cannot be created."""


class RaisedError(IsolationError):
    """A single call in a worker process raised."""


class RewardError(PlasmidError):
    """A reward raised or ran out of time. Names the reward and the sample."""


class AlgorithmError(PlasmidError, ValueError):
    """An algorithm raised, or returned an invalid result. Names the method, and file and line of the code."""


class SyncError(PlasmidError):
    """Trainer and engine do not hold the same weights after a sync."""

    exit_code = EXIT_RETRY


class CheckpointError(PlasmidError):
    """A checkpoint cannot be written or read."""


class DeadlineError(PlasmidError):
    """A remote operation exceeded its deadline. Names the operation and the process."""

    exit_code = EXIT_RETRY


class RewardDeadlineError(RewardError, DeadlineError):
    """A reward ran out of time. Names the reward and the sample."""

    exit_code = EXIT_MISTAKE


class ClusterError(PlasmidError):
    """A cluster could not start a process, or lost an object that a process held. Names the process or machine."""

    exit_code = EXIT_RETRY


class ActorDiedError(ClusterError):
    """A process of the run ended unexpectedly. Names it and quotes the end of its log."""
