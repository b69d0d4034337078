"""`rl plugins` and `rl options`: list components and their settings."""

from __future__ import annotations

from typing import Annotated

import typer

from .arguments import PluginFiles


def plugins(plugin: PluginFiles = None) -> None:
    """List all installed components and their packages."""
    import inspect

    from plasmid.plugins.registry import describe_origin, find_components, load_plugins

    from ..display.tables import FittingTable
    from ..output import table_console

    rows = []
    for slot, classes in find_components(load_plugins(files=plugin or ())).items():
        for kind, cls in sorted(classes.items()):
            meaning = (inspect.getdoc(cls) or "").split("\n")[0]
            rows.append((slot, kind, describe_origin(cls), meaning))
    table = FittingTable(("slot", "kind", "from", "what it does"), rows, num_heads=2, wraps_last=True)
    table_console().print(table, highlight=False)


What = Annotated[
    str | None,
    typer.Argument(metavar="KIND|SLOT/KIND|TABLE", help="A component of `rl plugins`, or a table of the recipe."),
]


def options(what: What = None, plugin: PluginFiles = None) -> None:
    """Show all settings of a component or table: rl options fsdp, rl options rollout/hf, rl options run"""
    from plasmid.plugins.registry import find_components, load_plugins

    from ..display.settings_help import find_settings, print_choices, print_settings

    slots = find_components(load_plugins(files=plugin or ()))
    if what is None:
        print_choices(slots)
    else:
        print_settings(*find_settings(what, slots))
