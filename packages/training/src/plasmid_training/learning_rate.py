"""The learning rate of every optimizer step, in closed form: nothing to save, nothing to drift."""

from __future__ import annotations

import math

from .learning_settings import LearningSettings


def learning_rate(settings: LearningSettings, *, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step``, counted from 0, in a run of ``total_steps``."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    return settings.lr * _decay(settings, step, total_steps)


def _decay(settings: LearningSettings, step: int, total_steps: int) -> float:
    if settings.schedule == "constant":
        return 1.0
    end = total_steps if settings.decay_steps == "auto" else settings.decay_steps
    progress = min(1.0, (step - settings.warmup_steps) / max(1, end - settings.warmup_steps))
    height = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.min_lr_fraction + (1 - settings.min_lr_fraction) * height
