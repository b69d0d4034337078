"""Weights between Hugging Face folders and the parts of them that this rank has."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from plasmid.errors import ModelError, some_of
from plasmid_models.folder import is_torch_dist, weight_files
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .bridge import Architecture
from .families import prediction_layers
from .placement import VOCABULARY, TorchDist, places

HEAD = "score."
"""What transformers calls the head of its token classifiers, whose folders a critic reads and writes."""
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12])\.weight(\d*)$")
"""Modules of their own, or numbered matrices of one (TransformerEngine's)."""
DERIVED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight:
    """One tensor of this rank."""

    name: str
    """mbridge's name of it, with the layer's number in the whole model and the expert's number on this rank."""
    own_name: str
    """The module's name of it, which counts from this rank's first layer."""
    tensor: Tensor
    expert: int | None
    """The expert's number on this rank."""

    def named(self, rank: int, per_rank: int) -> str:
        """mbridge's name of the expert's weight on an expert-parallel rank."""
        return self.name if self.expert is None else f"{self.name}{rank * per_rank + self.expert}"


def weights(chunks: Sequence[nn.Module]) -> list[Weight]:
    """All that a checkpoint of this rank's part of the model has."""
    found = []
    for chunk in chunks:
        named: dict[str, Tensor] = dict(chunk.named_parameters())
        named |= {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")}
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # type: ignore[union-attr]
        for own_name, tensor in named.items():
            name = own_name
            place = LAYER.search(name)
            if place:
                name = name.replace(place[0], f"decoder.layers.{numbers[int(place[1])]}.", 1)
            expert = EXPERT.search(name)
            if expert:
                name = name.replace(expert[0], f".experts.{expert[2]}.weight")
            number = int(expert[1] or expert[3]) if expert else None
            found.append(Weight(name=name, own_name=own_name, tensor=tensor, expert=number))
    return found


def hf_names(architecture: Architecture, name: str) -> list[str]:
    """Names in a folder of what mbridge calls ``name``."""
    if name.startswith(HEAD):
        return [name]
    found: list[str] = architecture.bridge._weight_name_mapping_mcore_to_hf(name)
    return found


def experts_per_rank(architecture: Architecture) -> int:
    """Experts of a layer on each expert-parallel rank."""
    return int(architecture.config.num_moe_experts or 0) // int(mpu.get_expert_model_parallel_world_size())


@torch.no_grad()
def load_weights(
    chunks: Sequence[nn.Module],
    architecture: Architecture,
    path: Path,
    *,
    where: str,
    optional: Collection[str] = (),
    ignored: Collection[str] = (),
) -> set[str]:
    """Fill this rank's weights from a Hugging Face folder, or one of Megatron's distributed format, one at a time.

    Names in ``ignored`` may be in the files as well, those in ``optional`` may be missing from them; what was missing
    is returned. Raises `ModelError` if names or shapes do not fit.
    """
    if is_torch_dist(path):
        return _load_torch_dist(chunks, architecture, path, where=where, optional=optional, ignored=ignored)
    used: set[str] = set()
    absent: set[str] = set()
    with ExitStack() as stack:
        found = _open(stack, path, where)
        for weight in weights(chunks):
            name = weight.named(mpu.get_expert_model_parallel_rank(), experts_per_rank(architecture))
            names = hf_names(architecture, name)
            missing = [n for n in names if n not in found]
            if missing and set(missing) <= set(optional):
                absent.update(missing)
                continue
            if missing:
                raise ModelError(_misfit(path, where, f"lacks {missing[0]}"))
            used.update(names)
            parts = [found[n][...] for n in names]
            whole = parts[0] if name.startswith(HEAD) else _to_megatron(architecture, name, parts, path, where)
            own = split(name, whole, weight)
            if own.shape != weight.tensor.shape:
                shapes = ", ".join(f"{n} {list(part.shape)}" for n, part in zip(names, parts, strict=True))
                raise ModelError(_misfit(path, where, f"has other shapes: {shapes}"))
            weight.tensor.copy_(own)
        further = prediction_layers(architecture.hf)
        _check_surplus({name for name in found if not name.startswith(further)}, used, path, where, ignored)
    return absent


def _load_torch_dist(
    chunks: Sequence[nn.Module],
    architecture: Architecture,
    path: Path,
    *,
    where: str,
    optional: Collection[str],
    ignored: Collection[str],
) -> set[str]:
    files = TorchDist(path, _misfit(path, where, "").rstrip())
    used: set[str] = set()
    absent: set[str] = set()
    for chunk in chunks:
        places_of = places(chunk)
        for weight in weights([chunk]):
            parts = places_of[weight.own_name]
            if weight.name in optional and not files.has(parts):
                absent.add(weight.name)
                continue
            rows = architecture.vocab_size if parts[0].key in VOCABULARY else None
            weight.tensor.copy_(files.read(parts, rows=rows))
            used.update(place.key for place in parts)
    _check_surplus(files.names, used, path, where, ["output_layer.weight"] if "lm_head.weight" in ignored else [])
    return absent


def _open(stack: ExitStack, path: Path, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in weight_files(where, path):
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
            found.update((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{where}.path: {file} cannot be read: {error}") from None
    return found


def _to_megatron(architecture: Architecture, name: str, parts: list[Tensor], path: Path, where: str) -> Tensor:
    try:
        whole: Tensor = architecture.bridge._weight_to_mcore_format(name, parts)
    except (AssertionError, RuntimeError, IndexError):
        shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(hf_names(architecture, name), parts, strict=True))
        raise ModelError(_misfit(path, where, f"has other shapes: {shapes}")) from None
    return whole


def _check_surplus(found: set[str], used: set[str], path: Path, where: str, ignored: Collection[str]) -> None:
    """All ranks call it together: what no rank has read is of another model."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, used)
    surplus = sorted(n for n in found.difference(*everywhere, ignored) if not n.endswith(DERIVED))
    if surplus:
        raise ModelError(_misfit(path, where, f"has unknown {some_of(surplus)}"))


def _misfit(path: Path, where: str, what: str) -> str:
    return f"{where}.path: the weights in {path} do not fit its model: it {what}"


def is_split(weight: Weight) -> bool:
    """True if the ranks of tensor (or expert-tensor) parallelism have parts of the tensor."""
    return bool(getattr(weight.tensor, "tensor_model_parallel", False)) and tensor_group(weight).size() > 1


def tensor_group(weight: Weight) -> dist.ProcessGroup:
    """The ranks that have the other parts."""
    of_expert = weight.expert is not None
    group: dist.ProcessGroup = (
        mpu.get_expert_tensor_parallel_group() if of_expert else mpu.get_tensor_model_parallel_group()
    )
    return group


def split(name: str, whole: Tensor, weight: Weight) -> Tensor:
    """This rank's part of a whole tensor of Megatron's layout."""
    if not is_split(weight):
        return whole
    group, dim = tensor_group(weight), weight.tensor.partition_dim  # type: ignore[attr-defined]
    if "linear_fc1" in name:  # gate above up, each split by itself
        return torch.cat([half.chunk(group.size(), dim)[group.rank()] for half in whole.chunk(2)])
    parts = whole.chunk(group.size(), dim)
    return parts[group.rank()] if len(parts) == group.size() else whole


def join(name: str, parts: Sequence[Tensor], weight: Weight) -> Tensor:
    """The whole tensor of Megatron's layout from the parts of all ranks."""
    if len(parts) == 1:
        return parts[0]
    if "linear_fc1" in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([torch.cat([half[i] for half in halves]) for i in range(2)])
    return torch.cat(list(parts), weight.tensor.partition_dim)  # type: ignore[attr-defined]


def to_hf(architecture: Architecture, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a folder from a whole tensor of Megatron's layout."""
    if name.startswith(HEAD):
        yield name, whole
        return
    names, tensors = architecture.bridge._weight_to_hf_format(name, whole)
    yield from zip(names, (tensor.contiguous() for tensor in tensors), strict=True)


def freeze(chunks: Sequence[nn.Module], architecture: Architecture, patterns: Sequence[str], key: str) -> None:
    """Freeze the weights, by Hugging Face name, that a pattern of the setting ``key`` is found in.

    All ranks call it together. Raises `ModelError`, also for a weight of Megatron that several of a folder make up and
    that would be frozen in part.
    """
    own: Mapping[str, bool] = {}
    for weight in weights(chunks):
        names = hf_names(
            architecture, weight.named(mpu.get_expert_model_parallel_rank(), experts_per_rank(architecture))
        )
        hit = [any(re.search(pattern, name) for pattern in patterns) for name in names]
        if any(hit) and not all(hit):
            free = [name for name, yes in zip(names, hit, strict=True) if not yes]
            raise ModelError(f"{key}: Megatron has {', '.join(names)} in one tensor; freeze {', '.join(free)} as well")
        weight.tensor.requires_grad_(weight.tensor.requires_grad and not all(hit))
        own = {**own, **dict.fromkeys(names, all(hit))}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    frozen = {name: yes for part in gathered for name, yes in part.items()}
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in frozen):
            raise ModelError(f"{key}: {pattern!r} is found in no parameter, for example not in {next(iter(frozen))}")
    if all(frozen.values()):
        raise ModelError(f"{key}: {list(patterns)} freezes every parameter; nothing is left to train")
