"""Plugin hooks that change a batch before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pluggy
from plasmid.errors import DeadlineError, PluginError, one_line
from plasmid.types.batch import GroupRef

MAY_CHANGE = ("rewards", "components")
"""Fields of a group that a plugin may change; tokens have already been shared with the trainer's ranks."""


class BatchHooks:
    """Calls the `batch_ready` hooks of all plugins, in the order in which they were loaded."""

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self._implementations = plugins.hook.batch_ready.get_hookimpls()

    def apply(self, batch: int, groups: tuple[GroupRef, ...]) -> tuple[GroupRef, ...]:
        """Return the groups as changed by the plugins. Raises `PluginError` for changes that are not allowed."""
        for implementation in self._implementations:
            given: dict[str, Any] = {"batch": batch, "groups": groups}
            where = f"plugin {implementation.plugin_name!r}: batch_ready"
            try:
                answer: Any = implementation.function(*(given[name] for name in implementation.argnames))
            except DeadlineError as error:  # raised by `LoopWatch`, because the plugin blocked the event loop
                raise DeadlineError(f"{where}: {error}") from None
            except Exception as error:  # boundary: plugins are users' code
                raise PluginError(f"{where} raised on batch {batch}: {one_line(error)}") from error
            if answer is not None:
                for wrong in find_group_errors(groups, answer):
                    raise PluginError(f"{where} {wrong}")
                groups = tuple(answer)
        return groups


def find_group_errors(before: Sequence[GroupRef], after: Any) -> Iterator[str]:
    """Yield invalid changes of groups by users' code."""
    if not isinstance(after, list | tuple) or not all(isinstance(group, GroupRef) for group in after):
        yield f"must return the groups or None, got {after!r:.100}"
        return
    if [group.id for group in before] != [group.id for group in after]:
        yield "must return the same groups in the same order; to drop some, write a Filter"
        return
    for old, new in zip(before, after, strict=True):
        for field in fields(GroupRef):
            if field.name not in MAY_CHANGE and getattr(old, field.name) is not getattr(new, field.name):
                yield f"changed {field.name} of group {old.id}; it may change {' and '.join(MAY_CHANGE)}"
        if np.shape(new.rewards) != np.shape(old.rewards) or not np.isfinite(new.rewards).all():
            yield f"must give each of the {old.num_samples} samples of group {old.id} a finite reward"
