"""Environment variables of processes with third-party code: no keys, unless a recipe names them."""

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
"""Variables forwarded to all such processes."""
FORWARDED_PREFIXES = ("LC_", "PYTHON")
"""Prefixes of other forwarded variables."""


def make_child_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the forwarded and the named variables that are set in this process."""
    selected = {*FORWARDED, *names}
    return {name: v for name, v in os.environ.items() if name in selected or name.startswith(FORWARDED_PREFIXES)}
