"""Imports of worker processes that convert Megatron checkpoints, for the fork server."""

from __future__ import annotations

import warnings

from ..upstream.imports import import_without_compiler

with warnings.catch_warnings(), import_without_compiler():
    warnings.simplefilter("ignore")
    from . import opened

__all__ = ["opened"]
