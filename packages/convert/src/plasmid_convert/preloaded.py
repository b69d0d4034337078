"""Imports what all processes of a conversion need, in the process from which they are forked."""

from __future__ import annotations

from contextlib import suppress

import torch
from plasmid.errors import PluginError
from plasmid.plugins.registry import find_components, load_plugins

from . import workers

__all__ = ["torch", "workers"]

with suppress(PluginError):  # the processes report it
    find_components(load_plugins())
