"""A checkpoint folder is complete under its name, or not there at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plasmid.errors import ModelError


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its name at the end, or vanishes if anything goes wrong.

    Raises `ModelError` if the target holds something already or the disk does not take it.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{target}: exists already; remove it or choose another target")
    stage = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(stage, ignore_errors=True)  # what an interrupted conversion left
        stage.mkdir(parents=True)
        yield stage
        os.replace(stage, target)
    except OSError as error:
        shutil.rmtree(stage, ignore_errors=True)
        raise ModelError(f"{target}: cannot write: {_reason(error)}; nothing is left of it") from error
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    return (error.strerror or str(error)).lower()
