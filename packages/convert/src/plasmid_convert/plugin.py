"""Registers the checkpoint layouts."""

from __future__ import annotations

from plasmid.components import Converter
from plasmid.plugins.hookspecs import hookimpl

from . import DCP, GGUF, HF


@hookimpl
def register_converters() -> list[type[Converter]]:
    return [DCP, GGUF, HF]
