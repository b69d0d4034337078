"""Weights of a checkpoint in Megatron's older format, combined from the memory-mapped pickles of all ranks."""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import enums, rerun_state_machine
from megatron.core.transformer import enums as transformer_enums
from plasmid.errors import ModelError, abbreviate, one_line
from torch import Tensor

from ..weights.shards import join
from .outline import Entry, Outline

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.mlp\.experts\.linear_fc([12])\.weight(\d+)$")
FUSED = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_weight$"), ".input_layernorm.weight"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_weight$"), ".pre_mlp_layernorm.weight"),
    (re.compile(r"\.linear_q_up_proj\.layer_norm_weight$"), ".q_layernorm.weight"),
    (re.compile(r"\.linear_kv_up_proj\.layer_norm_weight$"), ".kv_layernorm.weight"),
)
"""Names of norms that TransformerEngine fuses into other modules, and their names here."""
RECONSTRUCT = np.empty(0).__reduce__()[0]
CLASSES: list[Any] = [
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    *((RECONSTRUCT, f"numpy.{package}.multiarray._reconstruct") for package in ("core", "_core")),
    *(type(np.dtype(kind)) for kind in ("uint8", "uint32", "uint64", "int32", "int64", "float32", "float64")),
    *(
        item
        for module in (enums, transformer_enums, rerun_state_machine)
        for item in vars(module).values()
        if isinstance(item, type) and item.__module__.startswith("megatron.core")
    ),
]
"""Classes allowed in the pickles besides tensors and plain values; Megatron saves its arguments with the weights."""
Ranks = Mapping[tuple[int, int, int], Path]


class RankFiles:
    """Weights by the names of the whole model. The files are memory-mapped, so that only what is read uses memory."""

    def __init__(self, folder: Path, files: Ranks, outline: Outline) -> None:
        """Open the files. Raises `ModelError` if one is missing or unreadable, or does not have the model's weights."""
        self._error_prefix = f"{folder}: the weights do not fit the model in {outline.source}: it"
        self._rows = outline.architecture.vocab_size
        tensors, stages, experts = (1 + max(place[axis] for place in files) for axis in range(3))
        self._parts: dict[str, list[Tensor]] = {}
        for t in range(tensors):
            for e in range(experts):
                ranks = [_load(folder, files, (t, p, e)) for p in range(stages)]
                self._collect(ranks, outline, first_expert=e * _per_rank(outline, experts), again=e > 0)
        known = {entry.weight.own_name for entry in outline.entries}
        surplus = sorted(self._parts.keys() - known)
        if surplus:
            raise ModelError(f"{self._error_prefix} has unknown {abbreviate(surplus)}")

    def _collect(self, ranks: Sequence[dict[str, Any]], outline: Outline, *, first_expert: int, again: bool) -> None:
        """Collect the stages of one tensor-parallel rank; with ``again`` only experts, because all else is the same."""
        first = 0
        chunks = 1 if "model" in ranks[0] else sum(bool(re.fullmatch(r"model\d+", key)) for key in ranks[0])
        for chunk in range(chunks):
            for rank in ranks:
                state = _weights_of(rank, chunk if chunks > 1 else None, self._error_prefix)
                layers = {int(found[1]) for name in state if (found := LAYER.search(name))}
                for name, tensor in state.items():
                    own = _own_name(name, first, first_expert)
                    if not (again and ".local_experts." not in own):
                        self._parts.setdefault(own, []).append(tensor)
                first += len(layers)

    def dtype(self, entry: Entry) -> torch.dtype:
        """Return the dtype of a weight. Raises `ModelError` if it is missing."""
        return self._parts_of(entry)[0].dtype

    def read(self, entry: Entry) -> Tensor:
        """Return a whole weight. Raises `ModelError`."""
        parts, wanted = self._parts_of(entry), entry.weight.tensor.shape
        if entry.over_vocabulary:
            whole = torch.cat(parts)
            if len(whole) < self._rows:
                raise ModelError(
                    f"{self._error_prefix} has {len(whole)} vocabulary rows in {entry.name}, at least {self._rows} are "
                    "required"
                )
            whole = whole[: self._rows]
        else:
            split = getattr(entry.weight.tensor, "tensor_model_parallel", False) and parts[0].shape != wanted
            whole = join(entry.name, parts, entry.weight) if split else parts[0]
        if whole.shape != wanted:
            shapes = f"{list(whole.shape)} instead of {list(wanted)}"
            raise ModelError(f"{self._error_prefix} has different shapes: {entry.weight.own_name} {shapes}")
        return whole

    def _parts_of(self, entry: Entry) -> list[Tensor]:
        parts = self._parts.get(entry.weight.own_name)
        if parts is None:
            raise ModelError(f"{self._error_prefix} lacks {entry.weight.own_name}")
        return parts


def _per_rank(outline: Outline, ranks: int) -> int:
    return int(outline.architecture.config.num_moe_experts or 0) // ranks


def _weights_of(rank: Mapping[str, Any], chunk: int | None, error_prefix: str) -> dict[str, Tensor]:
    state = rank.get("model" if chunk is None else f"model{chunk}")
    if not isinstance(state, Mapping):
        raise ModelError(f"{error_prefix} has no weights under 'model'")
    if "language_model" in state:
        raise ModelError(f"{error_prefix} is older than Megatron-Core ('language_model'); convert it with Megatron")
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor) and "_extra_state" not in name}


def _own_name(name: str, first_layer: int, first_expert: int) -> str:
    """Return the name in an unsharded model without TransformerEngine."""
    layer = LAYER.search(name)
    if layer:
        name = f"decoder.layers.{first_layer + int(layer[1])}.{name[layer.end() :]}"
    grouped = EXPERT.search(name)
    if grouped:
        name = f"{name[: grouped.start()]}.mlp.experts.local_experts.{grouped[2]}.linear_fc{grouped[1]}.weight"
    local = re.search(r"\.local_experts\.(\d+)\.", name)
    if local:
        name = name.replace(local[0], f".local_experts.{first_expert + int(local[1])}.", 1)
    for fused, plain in FUSED:
        name = fused.sub(plain, name)
    return name


def _load(folder: Path, files: Ranks, place: tuple[int, int, int]) -> dict[str, Any]:
    file = files.get(place)
    if file is None:
        t, p, e = place
        raise ModelError(f"{folder}: the file of rank {t} (tensor), {p} (pipeline), {e} (expert) is missing")
    try:
        with torch.serialization.safe_globals(CLASSES):
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        if unsafe:
            raise ModelError(f"{file}: contains a pickled {unsafe[1]}, which could execute code; not loaded") from None
        reason = f"{one_line(error)}; the file is truncated, corrupt or too old"
        raise ModelError(f"{file}: cannot be read: {reason}") from error
    if not isinstance(state, dict):
        raise ModelError(f"{file}: contains {type(state).__name__}, not a checkpoint of Megatron")
    return state
