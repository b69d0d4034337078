"""Sources that are settings of other sources: their seeds, and their errors."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from plasmid.components import DataSource
from plasmid.errors import CheckpointError, DataError


def seed_for(seed: int, name: str) -> int:
    """The seed of a part of the data, out of the seed of the whole."""
    return int(np.random.SeedSequence([seed, zlib.crc32(name.encode())]).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def located(source: DataSource, key: str) -> Iterator[None]:
    """Let errors of the source that is a setting of another one name its settings where the user wrote them."""
    try:
        yield
    except DataError as error:
        raise DataError(relocated(str(error), source, f"data.{key}")) from None
    except CheckpointError as error:
        raise CheckpointError(relocated(str(error), source, f"data.{key}")) from None


def relocated(message: str, source: DataSource, place: str) -> str:
    """A message that speaks of ``data.path``, about a source that stands in another table than ``[data]``."""
    names = "|".join(type(source).model_fields)
    return re.sub(rf"(?<![\w./])data\.(?=({names})\b)", f"{place}.", message)
