"""SGLang's deterministic and on-policy modes, and the settings that conflict with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .schema import choices

if TYPE_CHECKING:
    from plasmid.components import RecipeView

    from .settings import SGLang

TARGET = "rl_on_policy_target"
"""Server argument that names the trainer whose numerics SGLang should match."""
ATTENTION = ("fa3", "fa4", "flashinfer", "triton", "ascend", "intel_xpu")
"""Attention backends whose results do not depend on how requests are batched."""


def exact_arguments(settings: SGLang, trainer_kind: str) -> dict[str, Any]:
    """Return the server arguments of the enabled modes."""
    found: dict[str, Any] = {}
    if settings.deterministic or settings.true_on_policy:
        found["enable_deterministic_inference"] = True
    if settings.true_on_policy:
        found[TARGET] = trainer_kind
    return found


def exactness_errors(settings: SGLang, recipe: RecipeView) -> Iterator[str]:
    """Yield settings with which SGLang would fail or silently ignore the enabled modes."""
    modes = [name for name in ("deterministic", "true_on_policy") if getattr(settings, name)]
    if not modes:
        return
    mode, arguments = modes[-1], settings.server_args
    if recipe.placement.device == "cpu" and not settings.urls:
        yield f"rollout.{mode}: requires GPUs for SGLang's deterministic kernels; remove it"
    attention = arguments.get("attention_backend")
    if attention is not None and attention not in ATTENTION:
        yield (
            f"rollout.server_args.attention_backend: {attention!r} is not deterministic, as rollout.{mode} requires; "
            f"choose one of {', '.join(map(repr, ATTENTION))}"
        )
    sampling = arguments.get("sampling_backend")
    if sampling not in (None, "pytorch", "ascend"):
        yield (
            f'rollout.server_args.sampling_backend: must be "pytorch" with rollout.{mode}, got {sampling!r}; remove it'
        )
    if settings.true_on_policy:
        yield from _target_errors(settings, recipe)


def attached_errors(wanted: Mapping[str, Any], info: Mapping[str, Any], url: str) -> Iterator[str]:
    """Yield the arguments that an attached server lacks."""
    for name, value in wanted.items():
        if info.get(name) != value:
            yield (
                f"rollout.urls: {url} was started with {name} = {info.get(name)!r}, but deterministic or "
                f"true_on_policy in the recipe requires {value!r}"
            )


def _target_errors(settings: SGLang, recipe: RecipeView) -> Iterator[str]:
    release, targets = choices("sglang", TARGET)
    kind = recipe.trainer_kind
    if not targets:
        yield f"rollout.true_on_policy: SGLang {release} has no {TARGET}; install a later release, or remove it"
    elif kind not in targets:
        yield (
            f"rollout.true_on_policy: SGLang {release} supports trainers {', '.join(map(repr, targets))}, but "
            f"trainer.kind is {kind!r}; remove it"
        )
    if recipe.trainer_dtype not in ("auto", "bfloat16"):
        yield (
            f"trainer.dtype: must be 'bfloat16' with rollout.true_on_policy, got {recipe.trainer_dtype!r}; set it or "
            "remove trainer.dtype"
        )
    if settings.dtype not in ("auto", "bfloat16"):
        yield (
            f"rollout.dtype: must be 'bfloat16' with rollout.true_on_policy, got {settings.dtype!r}; set it or "
            "remove rollout.dtype"
        )
