"""From a model folder to a sharded module with its weights: what policy, critic and frozen models have in common."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from plasmid.errors import ModelError, some_of
from plasmid_models.building import BUILDING
from plasmid_models.source import Source
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..settings import FSDP
from ..weights.folder_layout import FolderLayout
from .decoder_input import PACKED, packing_obstacle

COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings by which families say that their layers have experts, whose loops in transformers do not compile well."""


def on_meta(source: Source, settings: FSDP, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The folder's causal language model without memory for its weights. Raises `ModelError`."""
    trust = source.trust_remote_code
    implementation = PACKED if settings.attention == "auto" else settings.attention
    try:
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust)
        _without_dropout(config)
        with BUILDING, torch.device("meta"):
            lm: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust
            )
    except (ValueError, KeyError, ImportError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{source.where}.path: {source.path} is no causal language model that loads: {first}"
        ) from None
    if not isinstance(lm.get_output_embeddings(), nn.Linear):  # type: ignore[no-untyped-call]
        raise ModelError(f"{source.where}.path: {source.path} has no plain linear head, which trainer 'fsdp' needs")
    obstacle = packing_obstacle(lm) if settings.attention == "auto" else None
    if obstacle:
        raise ModelError(
            f"trainer.attention: 'auto' packs samples, which {source.path} does not allow: {obstacle}; set it to 'sdpa'"
        )
    return lm


def _without_dropout(config: PreTrainedConfig) -> None:
    """The engine samples without dropout, so the policy that is trained has none."""
    for name, value in config.to_dict().items():
        if isinstance(value, float) and (name.endswith(("dropout", "_pdrop")) or name == "dropout"):
            setattr(config, name, 0.0)


def prepare_training(model: PreTrainedModel, settings: FSDP) -> None:
    """Activation checkpointing as the settings say."""
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    else:
        model.eval()  # type: ignore[no-untyped-call]


def freeze(parameters: Mapping[str, nn.Parameter], layout: FolderLayout, patterns: Sequence[str], key: str) -> None:
    """Freeze the parameters, by the folder's names, that a pattern of the setting ``key`` is found in.

    Raises `ModelError`, also for one that several of a folder's tensors make up and that would be frozen in part.
    """
    names = {name: [part.name for part in layout.parts(name)] for name in parameters}
    for pattern in patterns:
        if not any(re.search(pattern, of_folder) for parts in names.values() for of_folder in parts):
            raise ModelError(f"{key}: {pattern!r} is found in no parameter, for example not in {next(iter(names))}")
    for name, parameter in parameters.items():
        free = [part for part in names[name] if not any(re.search(pattern, part) for pattern in patterns)]
        if not free:
            parameter.requires_grad_(False)
        elif len(free) < len(names[name]):
            raise ModelError(
                f"{key}: transformers has {len(names[name])} tensors of the folder in {name}; freeze all of them, or "
                f"none: {some_of(free)} would still be trained"
            )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelError(f"{key}: {list(patterns)} freezes every parameter; nothing is left to train")


def shard_module(
    root: nn.Module,
    model: PreTrainedModel,
    settings: FSDP,
    *,
    device: torch.device,
    num_ranks: int,
    exact: Collection[nn.Module] = (),
) -> None:
    """Shard ``root``, which holds ``model``, layer by layer; the modules ``exact`` compute in fp32 in any case."""
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("ranks",)),
        "offload_policy": CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy(),
    }
    low, high = _precision(getattr(torch, settings.dtype)), _precision(torch.float32)
    compiled = _compiles(model, settings, device)
    for layer in decoder_layers(model):
        if compiled:
            # the method and not the module: FSDP's hooks stay outside of the graph, which all layers share
            layer.forward = torch.compile(layer.forward, dynamic=True)
        fully_shard(layer, mp_policy=low, **options)
    for module in exact:
        fully_shard(module, mp_policy=high, **options)
    fully_shard(root, mp_policy=low, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule) and num_ranks > 1:
            # loss weights already make the sum over ranks right; plain sums are what gloo can do
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """What transformers names as not to be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _compiles(model: PreTrainedModel, settings: FSDP, device: torch.device) -> bool:
    if settings.compile != "auto":
        return settings.compile
    experts = any(getattr(model.config, name, None) for name in COUNTS_OF_EXPERTS)
    return device.type == "cuda" and settings.attention == "auto" and not experts


def compiled_graphs() -> dict[str, float]:
    """``train/graphs``: graphs that `torch.compile` has made in this process; empty if there are none."""
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"train/graphs": float(count)} if count else {}


def _precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def materialize(
    root: nn.Module, model: PreTrainedModel, settings: FSDP, *, device: torch.device, source: Source
) -> None:
    """Give the sharded ``root`` memory, and compute what is in no checkpoint. Its weights are still to be loaded."""
    root.to_empty(device="cpu" if settings.cpu_offload else device)
    for owner in model.modules():
        _move_buffers(owner, device)
    _compute_buffers(model, source)


def reshard(root: nn.Module) -> None:
    """Forget gathered weights. Needed after a forward pass without backward: the sharded ones may change next."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """With CPU offload parameters stay on the host, but buffers are used where the layers compute."""
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)


@torch.no_grad()
def _compute_buffers(model: PreTrainedModel, source: Source) -> None:
    """Fill what is in no checkpoint (rotary frequencies), as transformers does when it loads on the meta device."""
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
                    f"{source.where}.path: {source.path}: transformers cannot compute the buffer {owner}.{name} "
                    "by itself"
                )
