"""Registers the embedded rollout engine ``hf``. Does not import torch."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from .settings import HF


@hookimpl
def register_components() -> list[type[Component]]:
    return [HF]
