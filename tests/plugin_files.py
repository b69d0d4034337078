"""The plugin files that many tests use, imported once in each process: their classes take 2 to 5 ms."""

from pathlib import Path

NEVER_STARTED = str(Path(__file__).parent / "backend_fsdp" / "fsdp_plugin.py")


def import_plugins_once(replace):
    """Let `plasmid.plugins` import these files once; ``replace`` sets an attribute, as `setattr` does."""
    from plasmid.plugins import module_file
    from plasmid.testing import fakes

    import_file = module_file.import_file

    def import_once(path, name, *, again=False):
        if str(path) == fakes.__file__:
            return fakes
        return import_file(path, name, again=again and str(path) != NEVER_STARTED)

    replace(module_file, "import_file", import_once)
