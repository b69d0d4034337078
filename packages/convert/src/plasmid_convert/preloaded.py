"""Imports of all worker processes of a conversion, for the fork server."""

from __future__ import annotations

from contextlib import suppress

import torch
from plasmid.errors import PluginError
from plasmid.plugins.registry import find_components, load_plugins

from . import workers

__all__ = ["torch", "workers"]

with suppress(PluginError):  # workers report it
    find_components(load_plugins())
