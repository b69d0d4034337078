"""A plugin file for tests: a filter whose state a resumed run must restore."""

from typing import Literal

from plasmid import Filter, hookimpl


class EveryThird(Filter):
    """Drops every third group."""

    kind: Literal["every-third"] = "every-third"
    _seen: int = 0

    def __call__(self, group):
        self._seen += 1
        return self._seen % 3 != 0

    def state(self):
        return {"seen": self._seen}

    def restore(self, state):
        self._seen = state["seen"]


@hookimpl
def register_components():
    return [EveryThird]
