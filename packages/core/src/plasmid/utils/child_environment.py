"""The environment variables that processes with other people's code get: no keys, unless a recipe names them."""

from __future__ import annotations

import os
from collections.abc import Iterable

FORWARDED = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP", "TERM"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR", "NLTK_DATA"),
        *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"),
        *("TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        *("CUDA_VISIBLE_DEVICES",),
    )
)
"""Variables that every such process gets."""
FORWARDED_PREFIXES = ("LC_", "PYTHON")
"""Beginnings of further ones."""


def child_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """The forwarded variables of this process, and those named. One that is not set is left out."""
    wanted = {*FORWARDED, *names}
    return {name: v for name, v in os.environ.items() if name in wanted or name.startswith(FORWARDED_PREFIXES)}
