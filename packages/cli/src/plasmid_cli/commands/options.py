"""`rl options`."""

from __future__ import annotations

from typing import Annotated

import typer

from .arguments import PluginFiles

What = Annotated[
    str | None,
    typer.Argument(metavar="KIND|SLOT/KIND|TABLE", help="A component of `rl plugins`, or a table of the recipe."),
]


def options(what: What = None, plugin: PluginFiles = None) -> None:
    """Show every setting of a component or table: rl options fsdp, rl options rollout/hf, rl options run"""
    from plasmid.plugins.registry import installed, load_plugins

    from ..display.settings_help import find_settings, print_choices, print_settings

    slots = installed(load_plugins(files=plugin or ()))
    if what is None:
        print_choices(slots)
    else:
        print_settings(*find_settings(what, slots))
