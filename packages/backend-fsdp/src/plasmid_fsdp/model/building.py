"""Building, freezing, sharding and loading of modules, for policy, critic and frozen models."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from plasmid.errors import ConfigError, ModelError, abbreviate
from plasmid_models.building import BUILD_LOCK, choose_expert_products, text_model_config
from plasmid_models.kernels.invariant_modules import make_invariant
from plasmid_models.source import Source
from plasmid_training.compiling import compile_layers
from plasmid_training.learning_settings import NOT_COMPILED_ERROR, check_frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..settings import FSDP
from ..weights.folder_layout import FolderLayout
from ..weights.shards import Shard
from .decoder_input import PACKED, packing_obstacle
from .invariant_attention import INVARIANT
from .linear_attention import gated_delta_nets, separate_samples

COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys of mixture-of-experts families, whose loops over experts in transformers do not compile well."""


def build_on_meta(
    source: Source, settings: FSDP, *, dtype: torch.dtype = torch.float32, invariant: bool = False
) -> PreTrainedModel:
    """Build the folder's causal language model on the meta device; ``invariant`` makes it batch-invariant.

    Raises `ModelError`.
    """
    trust = source.trust_remote_code
    implementation = PACKED if settings.attention == "auto" else settings.attention
    if invariant:
        implementation = INVARIANT
    try:
        config = text_model_config(source.path, trust_remote_code=trust)
        _disable_dropout(config)
        with BUILD_LOCK, torch.device("meta"):
            lm: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust
            )
    except (ValueError, KeyError, ImportError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{source.where}.path: cannot build a causal language model from {source.path}: {first}"
        ) from None
    if not isinstance(lm.get_output_embeddings(), nn.Linear):  # type: ignore[no-untyped-call]
        raise ModelError(
            f"{source.where}.path: the head of {source.path} is not a linear layer, as trainer 'fsdp' requires"
        )
    obstacle = packing_obstacle(lm) if settings.attention == "auto" else None
    if obstacle:
        raise ModelError(
            f"trainer.attention: 'auto' packs samples, which {source.path} does not support: {obstacle}; "
            "set it to 'sdpa'"
        )
    obstacle = settings.context_obstacle(lm.config.to_dict())
    if obstacle:
        raise ModelError(f"trainer.context_parallel: {obstacle} ({source.where}.path = {source.path})")
    separate_samples(lm)
    choose_expert_products(lm, getattr(torch, settings.dtype))
    if invariant:
        make_invariant(lm)
    return lm


def _disable_dropout(config: PreTrainedConfig) -> None:
    """Set all dropout to 0, because the engine samples without it."""
    for name, value in config.to_dict().items():
        if isinstance(value, float) and (name.endswith(("dropout", "_pdrop")) or name == "dropout"):
            setattr(config, name, 0.0)


def prepare_training(model: PreTrainedModel, settings: FSDP) -> None:
    """Enable activation checkpointing if the settings ask for it."""
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    else:
        model.eval()  # type: ignore[no-untyped-call]


def freeze(parameters: Mapping[str, nn.Parameter], layout: FolderLayout, patterns: Sequence[str], key: str) -> None:
    """Freeze the parameters whose names in the folder match a pattern of the setting ``key``.

    Raises `ModelError`, also if only some of the folder's tensors that a parameter consists of would be frozen.
    """
    names = {name: [part.name for part in layout.parts(name)] for name in parameters}
    check_frozen([of_folder for parts in names.values() for of_folder in parts], patterns, key)
    for name, parameter in parameters.items():
        free = [part for part in names[name] if not any(re.search(pattern, part) for pattern in patterns)]
        if not free:
            parameter.requires_grad_(False)
        elif len(free) < len(names[name]):
            raise ModelError(
                f"{key}: transformers fuses {len(names[name])} tensors of the folder into {name}; freeze all or "
                f"none: {abbreviate(free)} would still be trained"
            )


def shard_module(
    root: nn.Module,
    model: PreTrainedModel,
    settings: FSDP,
    *,
    device: torch.device,
    shard: Shard,
    exact: Collection[nn.Module] = (),
) -> None:
    """Shard ``root``, which contains ``model``, layer by layer; the modules ``exact`` always compute in fp32.

    Without `uses_fsdp`, nothing is sharded, and trained models use `ComputeCopies`.
    """
    num_ranks = shard.num_ranks * shard.num_copies
    options: dict[str, Any] = {
        "mesh": _make_mesh(device.type, shard),
        "offload_policy": CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy(),
    }
    low, high = _precision(getattr(torch, settings.dtype)), _precision(torch.float32)
    if _compiles(model, settings, device):
        compile_layers(decoder_layers(model), memory_budget=settings.activation_memory_budget)
    elif settings.activation_memory_budget < 1:
        raise ConfigError(NOT_COMPILED_ERROR)
    if not uses_fsdp(settings, num_ranks):
        return
    for layer in decoder_layers(model):
        fully_shard(layer, mp_policy=low, **options)
    for module in exact:
        fully_shard(module, mp_policy=high, **options)
    fully_shard(root, mp_policy=low, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule) and num_ranks > 1:
            # loss weights already normalize the sum over ranks; gloo supports plain sums only
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _make_mesh(device_type: str, shard: Shard) -> DeviceMesh:
    """Return the mesh of all ranks. Copies are its first dimension: the ranks of a copy are neighbours."""
    if shard.num_copies == 1:
        return init_device_mesh(device_type, (shard.num_ranks,), mesh_dim_names=("ranks",))
    return init_device_mesh(device_type, (shard.num_copies, shard.num_ranks), mesh_dim_names=("copies", "ranks"))


def uses_fsdp(settings: FSDP, num_ranks: int) -> bool:
    """Return True if models are sharded with FSDP2.

    On a single rank, FSDP2 would only copy weights and gradients, parameter by parameter, and its hooks would delay the
    launches of a GPU's kernels. It is needed there to keep the weights on the host.
    """
    return num_ranks > 1 or settings.cpu_offload


def is_sharded(root: nn.Module) -> bool:
    """Return True if ``root`` uses FSDP2."""
    return isinstance(root, FSDPModule)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, the modules in transformers' `_no_split_modules`."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _compiles(model: PreTrainedModel, settings: FSDP, device: torch.device) -> bool:
    if settings.compile != "auto":
        return settings.compile
    experts = any(getattr(model.config, name, None) for name in COUNTS_OF_EXPERTS)
    packs = settings.attention == "auto" and settings.context_parallel == 1
    return device.type == "cuda" and packs and not experts and not gated_delta_nets(model)


def _precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def materialize(
    root: nn.Module, model: PreTrainedModel, settings: FSDP, *, device: torch.device, source: Source
) -> None:
    """Allocate the sharded ``root`` and compute its non-persistent buffers; weights are loaded afterwards."""
    root.to_empty(device="cpu" if settings.cpu_offload else device)
    with BUILD_LOCK:
        if not is_sharded(root):
            model.tie_weights()
        for owner in model.modules():
            _move_buffers(owner, device)
        _compute_buffers(model, source)


def reshard(root: nn.Module) -> None:
    """Free gathered weights; needed after a forward pass without backward, because the shards may change next."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers to the compute device; with CPU offload only parameters stay on the host."""
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)


@torch.no_grad()
def _compute_buffers(model: PreTrainedModel, source: Source) -> None:
    """Compute non-persistent buffers (rotary frequencies), as transformers does after building on the meta device."""
    saved = model.state_dict().keys()
    owners = {name.rpartition(".")[0] for name, _ in model.named_buffers() if name not in saved}
    for owner in sorted(owners):
        module = model.get_submodule(owner)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(torch.nan if buffer.is_floating_point() else 0)
        model._init_weights(module)  # type: ignore[no-untyped-call]
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and bool(buffer.isnan().any()):
                raise ModelError(
                    f"{source.where}.path: {source.path}: transformers does not initialize the buffer {owner}.{name}"
                )
