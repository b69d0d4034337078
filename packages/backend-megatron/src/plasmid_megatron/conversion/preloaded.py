"""Imports Megatron in the process from which those of a conversion are forked."""

from __future__ import annotations

import warnings

from plasmid_convert.distributed.collection import paused_collection

from ..upstream.imports import import_without_compiler

with warnings.catch_warnings(), paused_collection(), import_without_compiler():
    warnings.simplefilter("ignore")
    from . import opened

__all__ = ["opened"]
