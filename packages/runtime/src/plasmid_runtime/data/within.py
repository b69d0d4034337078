"""Nested data sources: their seeds and error messages."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from plasmid.components import DataSource
from plasmid.errors import CheckpointError, DataError


def seed_for(seed: int, name: str) -> int:
    """Derive the seed of a nested source from the seed of the outer one."""
    return int(np.random.SeedSequence([seed, zlib.crc32(name.encode())]).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def relocate_errors(source: DataSource, key: str) -> Iterator[None]:
    """Rewrite the keys in errors of a nested source to where the user set them."""
    try:
        yield
    except DataError as error:
        raise DataError(relocate_message(str(error), source, f"data.{key}")) from None
    except CheckpointError as error:
        raise CheckpointError(relocate_message(str(error), source, f"data.{key}")) from None


def relocate_message(message: str, source: DataSource, place: str) -> str:
    """Replace ``data.`` in a message by the recipe key of the source."""
    names = "|".join(type(source).model_fields)
    return re.sub(rf"(?<![\w./])data\.(?=({names})\b)", f"{place}.", message)
