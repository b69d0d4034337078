"""SGLang's modes that repeat draws bit by bit, or compute as the trainer does, and what contradicts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .schema import choices

if TYPE_CHECKING:
    from plasmid.config.run import RunConfig

    from .settings import SGLang

TARGET = "rl_on_policy_target"
"""The server argument that names the trainer whose numbers are to be met."""
ATTENTION = ("fa3", "fa4", "flashinfer", "triton", "ascend", "intel_xpu")
"""Attention backends that do not depend on how requests are batched."""


def exact_arguments(settings: SGLang, config: RunConfig) -> dict[str, Any]:
    """Server arguments of the modes that are on."""
    found: dict[str, Any] = {}
    if settings.deterministic or settings.true_on_policy:
        found["enable_deterministic_inference"] = True
    if settings.true_on_policy:
        found[TARGET] = _kind(config)
    return found


def exact_mistakes(settings: SGLang, config: RunConfig) -> Iterator[str]:
    """What would end the server, or be set aside by it without a word, with the modes that are on."""
    modes = [name for name in ("deterministic", "true_on_policy") if getattr(settings, name)]
    if not modes:
        return
    mode, arguments = modes[-1], settings.server_args
    if config.placement.device == "cpu" and not settings.urls:
        yield f"rollout.{mode}: SGLang's deterministic kernels run on GPUs only; remove it"
    attention = arguments.get("attention_backend")
    if attention is not None and attention not in ATTENTION:
        yield (
            f"rollout.server_args.attention_backend: {attention!r} is not deterministic, as rollout.{mode} wants it; "
            f"choose one of {', '.join(map(repr, ATTENTION))}"
        )
    sampling = arguments.get("sampling_backend")
    if sampling not in (None, "pytorch", "ascend"):
        yield (
            f'rollout.server_args.sampling_backend: SGLang draws by "pytorch" with rollout.{mode}; remove {sampling!r}'
        )
    if settings.true_on_policy:
        yield from _unmet_target(settings, config)


def attached_mistakes(wanted: Mapping[str, Any], info: Mapping[str, Any], url: str) -> Iterator[str]:
    """Arguments that a server of others lacks."""
    for name, value in wanted.items():
        if info.get(name) != value:
            yield (
                f"rollout.urls: {url} was started with {name} = {info.get(name)!r}, and the recipe's deterministic or "
                f"true_on_policy needs {value!r}"
            )


def _unmet_target(settings: SGLang, config: RunConfig) -> Iterator[str]:
    release, targets = choices("sglang", TARGET)
    kind = _kind(config)
    if not targets:
        yield f"rollout.true_on_policy: SGLang {release} has no {TARGET}; install a later release, or remove it"
    elif kind not in targets:
        yield (
            f"rollout.true_on_policy: SGLang {release} computes as trainers {', '.join(map(repr, targets))} do, and "
            f"trainer.kind is {kind!r}; remove it"
        )
    computed = getattr(config.trainer, "dtype", "auto")
    if computed not in ("auto", "bfloat16"):
        yield (
            f"trainer.dtype: {computed!r} with rollout.true_on_policy, where the engine's is bfloat16; set "
            '"bfloat16" or remove it'
        )
    if settings.dtype not in ("auto", "bfloat16"):
        yield (
            f"rollout.dtype: {settings.dtype!r} with rollout.true_on_policy, whose logits are bfloat16; set "
            '"bfloat16" or remove it'
        )


def _kind(config: RunConfig) -> str:
    return str(type(config.trainer).model_fields["kind"].default)
