"""Conversion of a model folder's ``config.json`` and weight names to and from Megatron's, based on mbridge."""

from __future__ import annotations

import enum
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from mbridge.core.bridge import Bridge
from mbridge.core.parallel_states import ParallelStates
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from plasmid.errors import ModelError, one_line
from plasmid_models.building import BUILD_LOCK, text_model_config
from plasmid_models.source import Source
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..model.transformer_engine import IMPL
from ..settings import Megatron
from ..shapes import layouts
from . import families

MAPPINGS = ("_DIRECT_MAPPING", "_ATTENTION_MAPPING", "_MLP_MAPPING", "_OTHER_MAPPING")
NORMS: dict[str, dict[str, list[str]]] = {
    "_OTHER_MAPPING": {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]},
    "_MLP_MAPPING": {
        "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
    },
}
"""Norms are separate modules here; mbridge has the names of TransformerEngine, which fuses them into other modules."""
WITHOUT_FUSION = {
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}
"""Fusions that need TransformerEngine or apex, or change the order of summation compared to other trainers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Architecture:
    """Architecture of a model folder, as configuration of Megatron."""

    hf: PreTrainedConfig
    family: families.Family
    bridge: Any
    """mbridge's object with configuration, names and layouts of weights; its loading and saving are not used."""

    @property
    def config(self) -> TransformerConfig:
        """Megatron's configuration of the model on this rank."""
        return self.bridge.config

    @property
    def is_tied(self) -> bool:
        """True if the head shares the weight of the embedding."""
        return bool(getattr(self.hf, "tie_word_embeddings", False))

    @property
    def vocab_size(self) -> int:
        """Vocabulary size without padding."""
        return int(self.hf.vocab_size)


def read_architecture(source: Source, settings: Megatron, *, states: ParallelStates | None = None) -> Architecture:
    """Read a model folder's config for the current process groups, or for ``states``. Raises `ModelError`."""
    try:
        with BUILD_LOCK:
            hf = text_model_config(source.path, trust_remote_code=source.trust_remote_code)
    except (ValueError, KeyError, ImportError, OSError, StrictDataclassError) as error:
        why = one_line(error)
        raise ModelError(f"{source.where}.path: {source.path} transformers cannot read its config: {why}") from None
    family = _find_family(source, hf.model_type)
    families.prepare(hf)
    if family.needs_local_layers and settings.transformer_engine:
        raise ModelError(
            f"trainer.transformer_engine: would compute model type {hf.model_type!r} differently; remove the setting"
        )
    for setting in family.unsupported(hf):
        raise ModelError(f"{source.where}.path: {source.path} has {setting}, which trainer 'megatron' cannot compute")
    try:
        bridge = _make_bridge_class(family.bridge, hf)(hf, dtype=getattr(torch, settings.dtype), parallel_states=states)
        bridge.set_extra_args(**_overrides(family, hf, settings))
        bridge.dtype = None  # from here on it would only round the weights of folders as they are read
    except (ValueError, AssertionError, NotImplementedError, ZeroDivisionError) as error:
        first = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"trainer: Megatron rejects this parallel layout or configuration: {first}") from None
    architecture = Architecture(hf=hf, family=family, bridge=bridge)
    bridge.vocab_size = architecture.vocab_size
    bridge.make_vocab_size_divisible_by = settings.tensor_parallel
    bridge.padded_vocab_size = -(-architecture.vocab_size // settings.tensor_parallel) * settings.tensor_parallel
    return architecture


def _find_family(source: Source, model_type: str) -> families.Family:
    """Return the family that a plugin registers, built-in or not. Raises `ModelError`."""
    known = layouts()
    if model_type not in known:
        raise ModelError(
            f"{source.where}.path: model type {model_type!r} of {source.path} is not supported by trainer "
            f"'megatron'; supported types are {', '.join(sorted(known))}"
        )
    try:
        found = known[model_type]()
    except Exception as error:
        raise ModelError(f"{source.where}.path: the plugin for {model_type!r} raised {one_line(error)}") from error
    if not isinstance(found, families.Family):
        raise ModelError(
            f"{source.where}.path: the layout of model type {model_type!r} must be a Family of "
            f"plasmid_megatron.weights.families, got {found!r:.80}"
        )
    return found


def inverse_frequencies(hf: PreTrainedConfig, device: Any, *, layers: str = "full_attention") -> tuple[Tensor, float]:
    """Return [d / 2] the inverse rotary frequencies and the factor of cosines and sines, as in transformers.

    They are those of layers of kind ``layers``, if the config has several.
    """
    rope, options = hf.rope_parameters or {}, {}
    if layers in rope:
        rope, options = rope[layers], {"layer_type": layers}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        size = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        size = int(size * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        unscaled: Tensor = 1.0 / rope.get("rope_theta", hf.rope_theta) ** exponents
        return unscaled.to(device), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf, "cpu", **options)
    return frequencies.to(device), float(factor)


def to_upstream(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values of a recipe to those of Megatron's class: names of enum members and dtypes to objects."""
    hints = typing.get_type_hints(cls)
    return {name: _convert(hints[name], value) for name, value in values.items()}


def optimizer_config(**values: Any) -> OptimizerConfig:
    """Create Megatron's `OptimizerConfig` from values of a recipe."""
    return OptimizerConfig(**to_upstream(OptimizerConfig, values))


def _convert(hint: Any, value: Any) -> Any:
    for part in (hint, *typing.get_args(hint)):
        if isinstance(value, str) and isinstance(part, type) and issubclass(part, enum.Enum):
            return part[value]
        if isinstance(value, str) and part is torch.dtype:
            return getattr(torch, value)
    return value


def _make_bridge_class(family: type[Bridge], hf: PreTrainedConfig) -> type[Bridge]:
    """Return a subclass with its own tables, because mbridge modifies the family's for models with tied weights.

    Norms come first, because mbridge looks names up by substrings.
    """
    tables: dict[str, Any] = {name: {**NORMS.get(name, {}), **getattr(family, name)} for name in MAPPINGS}
    if getattr(hf, "tie_word_embeddings", False):
        tables["_DIRECT_MAPPING"]["output_layer.weight"] = tables["_DIRECT_MAPPING"]["embedding.word_embeddings.weight"]
    # families with multi-token prediction override this lookup for layers that are not trained here
    names = {"_weight_name_mapping_mcore_to_hf": Bridge._weight_name_mapping_mcore_to_hf}
    return type(family.__name__, (family,), tables | names)


def _overrides(family: families.Family, hf: PreTrainedConfig, settings: Megatron) -> dict[str, Any]:
    """Return the changes to mbridge's configuration of the family; the recipe's fields take precedence."""
    fields: dict[str, Any] = {
        **WITHOUT_FUSION,
        "sequence_parallel": settings.splits_sequences,
        "expert_tensor_parallel_size": settings.expert_tensor_size,
        "transformer_impl": IMPL if settings.transformer_engine else "local",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "calculate_per_token_loss": True,  # no scaling by numbers of microbatches and ranks
        "variable_seq_lengths": True,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        **family.fields(hf),
    }
    if getattr(hf, "norm_topk_prob", True) is False:
        fields["moe_router_pre_softmax"] = True
    return fields | to_upstream(TransformerConfig, settings.transformer)
