"""`rl plugins`."""

from __future__ import annotations

from .arguments import PluginFiles


def plugins(plugin: PluginFiles = None) -> None:
    """List every installed component, and the package it comes from."""
    import inspect

    from plasmid.plugins.registry import installed, load_plugins, origin
    from rich.table import Table

    from ..output import table_console

    table = Table("slot", "kind", "from", "what it does", box=None)
    for slot, classes in installed(load_plugins(files=plugin or ())).items():
        for kind, cls in sorted(classes.items()):
            meaning = (inspect.getdoc(cls) or "").split("\n")[0]
            table.add_row(slot, kind, origin(cls), meaning)
    table_console().print(table, highlight=False)
