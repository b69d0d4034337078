"""Modules that are imported on first use: each test process collects all tests but runs only some of them."""

from importlib import import_module


class LazyModule:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith(("_", "pytest")):
            raise AttributeError(name)  # pytest asks every object of a test module for such names
        return getattr(import_module(self._name), name)
