"""Plugins that change a sample before it is scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pluggy
from plasmid.errors import PluginError, one_line
from plasmid.types import Prompt, Sample

MAY_CHANGE = ("loss_mask", "text", "metadata", "stop_reason")
"""Fields of a sample that a plugin may change. What a policy drew, and with which probability, is a fact."""


class SampleHooks:
    """Asks every plugin with `sample_generated`, one after another, in the order in which they were loaded."""

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self._asked = plugins.hook.sample_generated.get_hookimpls()

    def apply(self, sample: Sample, prompt: Prompt) -> Sample:
        """The sample as the plugins leave it. Raises `PluginError` for changes that are against the rules."""
        for implementation in self._asked:
            given: dict[str, Any] = {"sample": sample, "prompt": prompt}
            where = f"plugin {implementation.plugin_name!r}: sample_generated"
            try:
                answer: Any = implementation.function(*(given[name] for name in implementation.argnames))
            except Exception as error:  # boundary: plugins are users' code
                raise PluginError(f"{where} raised on sample {sample.id}: {one_line(error)}") from error
            if answer is not None:
                for mistake in _mistakes(sample, answer):
                    raise PluginError(f"{where} {mistake}")
                sample = answer
        return sample


def _mistakes(before: Sample, after: Any) -> Iterator[str]:
    if not isinstance(after, Sample):
        yield f"must return a Sample or nothing, got {after!r:.100} for sample {before.id}"
        return
    for field in fields(Sample):
        if field.name not in MAY_CHANGE and not _same(getattr(before, field.name), getattr(after, field.name)):
            allowed = ", ".join(MAY_CHANGE)
            yield f"changed {field.name} of sample {before.id}; it may change {allowed} (a reward belongs in a Reward)"
    if len(after.loss_mask) == len(before.loss_mask) and (after.loss_mask & ~before.loss_mask).any():
        yield f"put tokens of sample {before.id} into the loss that were not in it; it may only take some out"


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, np.ndarray):
        return before is after or np.array_equal(before, after)
    return before is after or bool(before == after)
