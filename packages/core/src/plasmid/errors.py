"""Errors a user can cause. The CLI prints these without a traceback; anything else is our bug.

All of them can be pickled: they cross process boundaries.
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

SHOWN = 3


def one_line(error: BaseException, *, longest: int = 300) -> str:
    """Kind and text of an error that others raised, on one line."""
    try:
        said = str(error)
    except Exception:  # noqa: BLE001, of an error that holds a value which cannot be shown, such as one nested too deeply
        said = ""
    text = " ".join(f"{type(error).__name__}: {said}".split()).removesuffix(":")
    return text if len(text) <= longest else f"{text[:longest]} ..."


SAMPLE_FAULTS: dict[type[BaseException], str] = {
    OverflowError: "a number is too large",
    RecursionError: "too deeply nested",
    MemoryError: "more memory than there is",
    UnicodeError: "a character that cannot be encoded",
}
TOO_MANY_DIGITS = "integer string conversion"
"""Part of the `ValueError` that Python raises for integers of more than 4300 digits."""


def sample_fault(error: BaseException) -> str | None:
    """What in a text made correct code raise: a number, a nesting or a character beyond what Python takes.

    None for all other errors: they are mistakes of the code that read the text.
    """
    if isinstance(error, ValueError) and TOO_MANY_DIGITS in str(error):
        return "a number has too many digits"
    return next((reason for kind, reason in SAMPLE_FAULTS.items() if isinstance(error, kind)), None)


def line_in(file: str | Path, error: BaseException) -> int | None:
    """The line of ``file`` that an error came from, the deepest one; None if it came from elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == Path(file).absolute()]
    return lines[-1] if lines else None


def place_in_class(cls: type, error: BaseException) -> str:
    """`` (file.py:12)``: the line of the class's file that an error came from; empty if it came from elsewhere."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    line = line_in(file, error) if file else None
    return f" ({Path(file).name}:{line})" if file and line else ""


def some_of(names: Sequence[str]) -> str:
    """The first names of a list that may be long, and how many more there are: ``a, b, c and 7 more``."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


class PlasmidError(Exception):
    """Base class for every error with a message meant for the user."""


class ConfigError(PlasmidError, ValueError):
    """The run configuration is wrong. Raised before any process or GPU is acquired."""


class PluginError(PlasmidError):
    """A plugin cannot be loaded, or two plugins claim the same name."""


class DataError(PlasmidError):
    """A data file cannot be read, or a row of it cannot be used. Names file and line."""


class ModelError(PlasmidError):
    """A model folder or checkpoint is missing something, or belongs to another model."""


class EngineError(PlasmidError):
    """A rollout engine cannot serve."""


class EngineLostError(EngineError):
    """Every part of an engine went away that was to take weights. Others may come up; the sync can be tried again."""


class TemplateError(PlasmidError):
    """A chat template cannot continue a conversation without rendering its past anew."""


class IsolationError(PlasmidError):
    """Work in a worker process raised, or a process or sandbox for it cannot be made."""


class RewardError(PlasmidError):
    """A reward raised or ran out of time. Names the reward and the sample."""


class AlgorithmError(PlasmidError, ValueError):
    """An algorithm raised, or returned what no trainer can use. Names the method, and file and line of the code."""


class SyncError(PlasmidError):
    """Trainer and engine do not hold the same weights after a sync."""


class CheckpointError(PlasmidError):
    """A checkpoint cannot be written or read."""


class DeadlineError(PlasmidError):
    """A remote operation did not answer in time. Names the operation and the party."""


class ActorDiedError(PlasmidError):
    """A process of the run ended by itself. Names it and its last words."""
