"""Split of a model over ranks, derived from its ``config.json``. Imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from plasmid.components import PlanRow
from plasmid.errors import ConfigError
from plasmid.plugins.registry import get_loaded_families
from plasmid_models.estimates.shape import ModelShape
from plasmid_models.linear_attention import LINEAR_FAMILIES
from plasmid_models.quantized.formats import weight_format

from .settings import Megatron

MODEL_TYPES = (
    "deepseek_v3",
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)
"""Built-in families, which were compared with transformers."""
BIASED_EXPERTS = ("gpt_oss",)
"""Families whose experts Megatron cannot split into parts, because they have biases."""
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
UNEVEN = {
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
}
"""Other fields of Megatron's configuration that give pipeline ranks different numbers of layers."""
Model = Mapping[str, Any]


def layouts() -> dict[str, Callable[[], Any]]:
    """Return the families that plugins register for this trainer, by model type."""
    found = get_loaded_families().items()
    return {name: family.layouts["megatron"] for name, family in found if "megatron" in family.layouts}


def check_split(settings: Megatron, model: Model) -> None:
    """Raise `ConfigError` if a model with this ``config.json`` cannot be split according to the settings."""
    family = model.get("model_type")
    if family is not None and family not in (known := layouts()):
        raise ConfigError(
            f"model.path: model type {family!r} is not supported by trainer 'megatron'; supported types are "
            f"{', '.join(sorted(known))}"
        )
    try:
        weight_format(model)
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from None
    if family in LINEAR_FAMILIES:
        _check_linear(settings)
    for name, by, parts in _splits(settings):
        count = model.get(name)
        if isinstance(count, int) and count % parts:
            raise ConfigError(f"trainer: the model's {name} = {count} cannot be split into {parts} parts ({by})")
    if settings.lora is not None and model.get("kv_lora_rank"):
        raise ConfigError(
            "trainer.lora: trainer 'megatron' cannot train an adapter of a model with latent attention (MLA); use "
            "trainer 'fsdp', or remove the table"
        )
    _check_layers(settings, model)
    _check_experts(settings, model)


def plan(settings: Megatron, model: Model, ranks: int) -> Iterator[PlanRow]:
    """Yield each rank's share of a model with this ``config.json``. Raises `ConfigError` like `check_split`."""
    check_split(settings, model)
    replicas = settings.num_parts(ranks)
    yield "model replicas", str(replicas), f"{ranks} trainer ranks / {settings.ranks_per_replica} of each"
    heads, layers = model.get("num_attention_heads"), layers_of_stages(settings, model)
    if layers is not None and len(layers) > 1:
        shown = str(layers[0]) if len(set(layers)) == 1 else ", ".join(map(str, layers))
        yield "layers of a stage", shown, f"{sum(layers)} over {len(layers)} pipeline ranks"
    if isinstance(heads, int):
        each = heads // settings.tensor_parallel
        yield "attention heads of a rank", str(each), f"{heads} over {settings.tensor_parallel} tensor-parallel ranks"
    experts = _experts(model)
    if experts:
        each = experts // settings.expert_parallel
        yield "experts of a rank", str(each), f"{experts} over {settings.expert_parallel} expert-parallel ranks"


def layers_of_stages(settings: Megatron, model: Model) -> list[int] | None:
    """Return the number of layers of each pipeline rank.

    None if it depends on other fields of Megatron, or if the config has no number of layers.
    """
    layers, stages = model.get("num_hidden_layers"), settings.pipeline_parallel
    if not isinstance(layers, int) or set(settings.transformer) & UNEVEN:
        return None
    counts: Mapping[str, Any] = settings.transformer
    first, last = counts.get(FIRST), counts.get(LAST)
    given = [count for count in (first, last) if count is not None]
    middle = max(stages - len(given), 0)
    each = (layers - sum(given)) // middle if middle else 0
    return [*([first] if first is not None else []), *[each] * middle, *([last] if last is not None else [])]


def _check_layers(settings: Megatron, model: Model) -> None:
    stages, layers = layers_of_stages(settings, model), model.get("num_hidden_layers")
    if stages is None:
        return
    if sum(stages) != layers or any(count < 1 or count % settings.virtual_pipeline for count in stages):
        parts = settings.pipeline_parallel * settings.virtual_pipeline
        uneven = f" with {stages[0]} in the first and {stages[-1]} in the last" if len(set(stages)) > 1 else ""
        raise ConfigError(
            f"trainer: the model's num_hidden_layers = {layers} cannot be split into {parts} parts "
            f"(pipeline_parallel x virtual_pipeline){uneven}; set transformer.{LAST} for an uneven split"
        )


def _check_linear(settings: Megatron) -> None:
    """Raise `ConfigError` for settings that layers with linear attention do not support."""
    for name in ("tensor_parallel", "context_parallel"):
        if getattr(settings, name) > 1:
            raise ConfigError(
                f"trainer.{name}: must be 1 for models with linear attention, whose layers are not split, got "
                f"{getattr(settings, name)}; use pipeline_parallel or expert_parallel"
            )
    if settings.compile is True:
        raise ConfigError("trainer.compile: layers with linear attention cannot be compiled; remove the setting")
    if settings.lora is not None:
        raise ConfigError(
            "trainer.lora: trainer 'megatron' cannot train an adapter of a model with linear attention; use trainer "
            "'fsdp', or remove the table"
        )


def _check_experts(settings: Megatron, model: Model) -> None:
    experts = _experts(model)
    if experts and settings.tensor_parallel > 1 and not settings.splits_sequences:
        raise ConfigError(
            "trainer.sequence_parallel: must be true with experts and tensor_parallel > 1; remove the setting"
        )
    if experts and settings.compile is True:
        raise ConfigError(
            f"trainer.compile: layers with experts cannot be compiled, and the model has {experts}; remove the setting"
        )
    if model.get("model_type") in BIASED_EXPERTS and settings.expert_tensor_size > 1:
        raise ConfigError(
            f"trainer.expert_tensor_parallel: must be 1 for model type {model['model_type']!r}, whose experts have "
            f"biases, got {settings.expert_tensor_size}; set it to 1, and split experts with expert_parallel"
        )
    if experts and settings.lora is not None and _adapts_experts(settings.lora.targets, model):
        if model.get("model_type") in BIASED_EXPERTS:
            raise ConfigError(
                "trainer.lora.targets: match routed experts, which have biases in model type "
                f"{model['model_type']!r} and cannot have an adapter; narrow the patterns"
            )
        if settings.expert_tensor_size > 1:
            raise ConfigError(expert_split_error(settings.expert_tensor_size))
    if settings.expert_parallel > 1 and (not experts or experts % settings.expert_parallel):
        raise ConfigError(
            f"trainer.expert_parallel: the model has {experts} experts, which cannot be split over "
            f"{settings.expert_parallel} ranks"
        )


def _adapts_experts(targets: Sequence[str], model: Model) -> bool:
    """Return True if a pattern matches routed experts. False for models of unknown shape, which ranks check."""
    try:
        adapted = ModelShape.of(model).select_adapted(targets)
    except ConfigError:
        return False
    return any(weight.is_expert for weight in adapted)


def expert_split_error(size: int) -> str:
    """Return the error of adapters of experts whose matrices are split into this many parts."""
    return (
        f"trainer.expert_tensor_parallel: must be 1 for adapters of routed experts, got {size}; set it to 1, and "
        "split experts with expert_parallel"
    )


def _experts(model: Model) -> int:
    return int(model.get("num_experts") or model.get("n_routed_experts") or model.get("num_local_experts") or 0)


def _splits(settings: Megatron) -> Iterator[tuple[str, str, int]]:
    """Yield the key of each number in ``config.json`` that is split, the settings that split it, and the parts."""
    tensor, experts = settings.tensor_parallel, settings.expert_tensor_size
    yield "num_attention_heads", "tensor_parallel x context_parallel", tensor * settings.context_parallel
    yield "num_key_value_heads", "tensor_parallel", tensor
    yield "intermediate_size", "tensor_parallel", tensor
    yield "q_lora_rank", "tensor_parallel", tensor
    yield "moe_intermediate_size", "expert_tensor_parallel", experts
