"""Mapping between the weights of Hugging Face folders and this rank's shards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from plasmid.errors import ModelError, abbreviate
from plasmid_models.folder import is_torch_dist, open_weights
from plasmid_training.learning_settings import check_frozen
from torch import Tensor, nn

from .bridge import Architecture
from .fused_experts import split_experts
from .placement import VOCABULARY, TorchDist, find_entries

HEAD = "score."
"""Prefix of the head in transformers' token classifiers, the format of a critic's folder."""
ADAPTER = ".adapter."
"""Part of the names of an adapter's parameters in the module, and of no others."""
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12])\.weight(\d*)$")
"""Experts are separate modules, or numbered matrices of one module (TransformerEngine)."""
STACKED = ".mlp.experts."
"""Part of the names of tensors with all experts of a rank (`StackedExperts`), and of single experts."""
DERIVED = (".rotary_emb.inv_freq",)
"""Suffixes of tensors in old Hugging Face folders that no model needs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weight:
    """One tensor of this rank."""

    name: str
    """mbridge's name, with the layer's number in the whole model; for experts, without the expert's number."""
    own_name: str
    """Name in the module, in which layers are counted from this rank's first."""
    tensor: Tensor
    expert: int | None
    """The expert's number on this rank."""
    is_stacked: bool = False
    """True if the first dimension of the tensor indexes the experts of this rank."""

    def full_name(self, rank: int, per_rank: int) -> str:
        """Return mbridge's name, with the expert's number in the whole model on the expert-parallel ``rank``."""
        return self.name if self.expert is None else f"{self.name}{rank * per_rank + self.expert}"


def weights(chunks: Sequence[nn.Module]) -> list[Weight]:
    """Return all weights of this rank's part of the model, without those of an adapter."""
    found = []
    for chunk in chunks:
        named: dict[str, Tensor] = {name: p for name, p in chunk.named_parameters() if ADAPTER not in name}
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
            stacked = expert is None and STACKED in name
            found.append(Weight(name=name, own_name=own_name, tensor=tensor, expert=number, is_stacked=stacked))
    return found


def hf_names(architecture: Architecture, name: str) -> list[str]:
    """Return the names in a Hugging Face folder for mbridge's ``name``."""
    if name.startswith(HEAD):
        return [name]
    found: list[str] = architecture.bridge._weight_name_mapping_mcore_to_hf(name)
    return found


def experts_per_rank(architecture: Architecture) -> int:
    """Return the number of experts of a layer on each expert-parallel rank."""
    return int(architecture.config.num_moe_experts or 0) // int(mpu.get_expert_model_parallel_world_size())


@torch.no_grad()
def load_weights(
    chunks: Sequence[nn.Module],
    architecture: Architecture,
    path: Path,
    *,
    where: str,
    trained: bool = False,
    optional: Collection[str] = (),
    ignored: Collection[str] = (),
) -> set[str]:
    """Fill this rank's weights one at a time, from a Hugging Face folder or one in Megatron's distributed format.

    Weights that are ``trained`` in a smaller dtype than the folder's keep the values of the folder, for the
    optimizer's main weights (`take_exact`). Returns the names in ``optional`` that the files do not contain. Names in
    ``ignored`` are not read. Raises `ModelError` if names or shapes differ.
    """
    options: dict[str, Any] = {"where": where, "trained": trained, "optional": optional, "ignored": ignored}
    if is_torch_dist(path):
        return _load_torch_dist(chunks, architecture, path, **options)
    used: set[str] = set()
    absent: set[str] = set()
    with open_weights(where, path) as saved:
        found = saved if architecture.family.has_stacked_experts else split_experts(saved)
        for weight in weights(chunks):
            name = weight.full_name(mpu.get_expert_model_parallel_rank(), experts_per_rank(architecture))
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
                raise ModelError(_misfit(path, where, f"has different shapes: {shapes}"))
            _fill(weight.tensor, own, trained=trained)
        _check_surplus(set(found), used, path, where, ignored)
    return absent


def _load_torch_dist(
    chunks: Sequence[nn.Module],
    architecture: Architecture,
    path: Path,
    *,
    where: str,
    trained: bool,
    optional: Collection[str],
    ignored: Collection[str],
) -> set[str]:
    files = TorchDist(path, _misfit(path, where, "").rstrip())
    used: set[str] = set()
    absent: set[str] = set()
    for chunk in chunks:
        places, _ = find_entries(chunk)
        for weight in weights([chunk]):
            parts = places[weight.own_name]
            if weight.name in optional and not files.has(parts):
                absent.add(weight.name)
                continue
            rows = architecture.vocab_size if parts[0].key in VOCABULARY else None
            _fill(weight.tensor, files.read(parts, rows=rows), trained=trained)
            used.update(place.key for place in parts)
    _check_surplus(files.names, used, path, where, ["output_layer.weight"] if "lm_head.weight" in ignored else [])
    return absent


def _fill(tensor: Tensor, values: Tensor, *, trained: bool) -> None:
    """Copy ``values``, and attach them to a trained tensor that rounds them."""
    tensor.copy_(values)
    if trained and values.dtype.itemsize > tensor.dtype.itemsize:
        tensor.exact = values.contiguous()  # type: ignore[attr-defined]


def take_exact(tensor: Tensor) -> Tensor | None:
    """Remove and return the values of the folder that `load_weights` attached; None if the tensor has them itself."""
    values: Tensor | None = getattr(tensor, "exact", None)
    if values is not None:
        del tensor.exact  # type: ignore[attr-defined]
    return values


def _to_megatron(architecture: Architecture, name: str, parts: list[Tensor], path: Path, where: str) -> Tensor:
    try:
        whole: Tensor = architecture.bridge._weight_to_mcore_format(name, parts)
    except (AssertionError, RuntimeError, IndexError):
        shapes = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(hf_names(architecture, name), parts, strict=True))
        raise ModelError(_misfit(path, where, f"has different shapes: {shapes}")) from None
    return whole


def _check_surplus(found: set[str], used: set[str], path: Path, where: str, ignored: Collection[str]) -> None:
    """Raise `ModelError` for tensors that no rank has used. All ranks call it together."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, used)
    surplus = sorted(n for n in found.difference(*everywhere, ignored) if not n.endswith(DERIVED))
    if surplus:
        raise ModelError(_misfit(path, where, f"has unknown {abbreviate(surplus)}"))


def _misfit(path: Path, where: str, problem: str) -> str:
    return f"{where}.path: the weights in {path} do not fit its model: it {problem}"


def is_split(weight: Weight) -> bool:
    """Return True if the tensor is split over the ranks of `tensor_group`."""
    return bool(getattr(weight.tensor, "tensor_model_parallel", False)) and tensor_group(weight).size() > 1


def tensor_group(weight: Weight) -> dist.ProcessGroup:
    """Return the group of ranks that the tensor is split over."""
    if weight.is_stacked:
        experts: dist.ProcessGroup = mpu.get_expert_model_parallel_group()
        return experts
    of_expert = weight.expert is not None
    group: dist.ProcessGroup = (
        mpu.get_expert_tensor_parallel_group() if of_expert else mpu.get_tensor_model_parallel_group()
    )
    return group


def split(name: str, whole: Tensor, weight: Weight) -> Tensor:
    """Return this rank's part of a whole tensor, both in Megatron's layout."""
    if not is_split(weight):
        return whole
    group, dim = tensor_group(weight), weight.tensor.partition_dim  # type: ignore[attr-defined]
    if "linear_fc1" in name:  # gate and up are stacked and split separately
        return torch.cat([half.chunk(group.size(), dim)[group.rank()] for half in whole.chunk(2)])
    parts = whole.chunk(group.size(), dim)
    return parts[group.rank()] if len(parts) == group.size() else whole


def join(name: str, parts: Sequence[Tensor], weight: Weight) -> Tensor:
    """Join the parts of all ranks to a whole tensor, both in Megatron's layout."""
    if len(parts) == 1:
        return parts[0]
    if "linear_fc1" in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([torch.cat([half[i] for half in halves]) for i in range(2)])
    return torch.cat(list(parts), weight.tensor.partition_dim)  # type: ignore[attr-defined]


def to_hf(architecture: Architecture, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of a whole tensor in Megatron's layout."""
    if name.startswith(HEAD):
        yield name, whole
        return
    names, tensors = architecture.bridge._weight_to_hf_format(name, whole)
    yield from zip(names, (tensor.contiguous() for tensor in tensors), strict=True)


def row_index(architecture: Architecture, name: str, num_rows: int) -> dict[str, Tensor]:
    """Return, for each Hugging Face tensor of the whole weight ``name``, which of its rows it consists of, in order."""
    # mbridge reshapes fused attention weights to the hidden size, and biases, which have the same rows, to any
    like = name.replace("linear_qkv.weight", "linear_qkv.bias")
    found = to_hf(architecture, like, torch.arange(num_rows))
    return {hf: rows for hf, (_, rows) in zip(hf_names(architecture, name), found, strict=True)}


def freeze(chunks: Sequence[nn.Module], architecture: Architecture, patterns: Sequence[str], key: str) -> None:
    """Freeze the weights whose Hugging Face names match one of the patterns of the setting ``key``.

    All ranks call it together. Raises `ModelError`, also if only some of the Hugging Face weights that Megatron fuses
    into one tensor match.
    """
    own: list[str] = []
    for weight in weights(chunks):
        names = hf_names(
            architecture, weight.full_name(mpu.get_expert_model_parallel_rank(), experts_per_rank(architecture))
        )
        matches = [any(re.search(pattern, name) for pattern in patterns) for name in names]
        if any(matches) and not all(matches):
            free = [name for name, match in zip(names, matches, strict=True) if not match]
            fused = ", ".join(names)
            raise ModelError(f"{key}: Megatron fuses {fused} into one tensor; freeze {', '.join(free)} as well")
        weight.tensor.requires_grad_(weight.tensor.requires_grad and not all(matches))
        own += names
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    check_frozen([name for part in gathered for name in part], patterns, key)
