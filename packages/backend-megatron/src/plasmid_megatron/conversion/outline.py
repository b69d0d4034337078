"""A model without memory: which weights Megatron has of it, their names, and where each lies in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from plasmid.errors import ModelError, some_of
from plasmid_models.building import BUILDING
from plasmid_models.source import Source
from torch import Tensor, nn

from ..model.language_model import LanguageModel
from ..settings import Megatron
from ..upstream.compat import define_router_gemm, tell_latent_attention_what_is_installed, without_gpu
from ..weights.bridge import Architecture, read_architecture
from ..weights.placement import VOCABULARY, Place, objects, places
from ..weights.shards import Weight, hf_names, to_hf, weights
from ..weights.untrained import Untrained

UNWANTED = (".rotary_emb.inv_freq",)
"""Names that old Hugging Face folders have and no model needs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One weight of Megatron's, whole."""

    name: str
    """mbridge's, with the numbers of layer and expert."""
    names: tuple[str, ...]
    """Hugging Face's names of what it is made of."""
    weight: Weight
    places: tuple[Place, ...]
    """In a checkpoint of the distributed format."""

    @property
    def over_vocabulary(self) -> bool:
        """True if it has a row for each token."""
        return self.name in VOCABULARY

    @property
    def is_correction(self) -> bool:
        """True if it says which experts are taken too often: models have it in float32 whatever their type is."""
        return self.name.endswith("expert_bias")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outline:
    """All of a model."""

    source: Path
    architecture: Architecture
    entries: tuple[Entry, ...]
    others: tuple[Any, ...]
    """What the distributed format keeps besides tensors (`ShardedObject`)."""

    @cached_property
    def num_tensors(self) -> int:
        """As a Hugging Face folder has them."""
        return sum(len(entry.names) for entry in self.entries)

    def to_hf(self, entry: Entry, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a folder that a weight makes."""
        yield from to_hf(self.architecture, entry.name, whole)

    def untrained(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of the model's folder that no checkpoint of a run has. Raises `ModelError`."""
        yield from Untrained(self.architecture, self.source, where="from.model")

    def from_hf(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Entry, Tensor]]:
        """Whole weights as soon as all that they are made of has come. Raises `ModelError`."""
        wanted = {name: entry for entry in self.entries for name in entry.names}
        waiting: dict[str, Tensor] = {}
        missing, unknown = set(wanted), []
        for name, tensor in tensors:
            if name not in wanted:
                unknown += [] if name.endswith(UNWANTED) else [name]
                continue
            if name not in missing:
                raise ModelError(f"{name}: comes twice in the source")
            missing.remove(name)
            waiting[name] = tensor
            entry = wanted[name]
            if all(part in waiting for part in entry.names):
                yield entry, self._whole(entry, [waiting.pop(part) for part in entry.names])
        for what, names in (("lacks", sorted(missing)), ("has unknown", sorted(unknown))):
            if names:
                raise ModelError(f"the weights do not fit the model: the source {what} {some_of(names)}")

    def _whole(self, entry: Entry, parts: list[Tensor]) -> Tensor:
        shapes = ", ".join(f"{n} {list(part.shape)}" for n, part in zip(entry.names, parts, strict=True))
        try:
            whole: Tensor = self.architecture.bridge._weight_to_mcore_format(entry.name, parts)
        except (AssertionError, RuntimeError, IndexError):
            raise ModelError(f"the weights do not fit the model: the source has other shapes: {shapes}") from None
        if whole.shape != entry.weight.tensor.shape:
            raise ModelError(f"the weights do not fit the model: the source has other shapes: {shapes}")
        return whole


def read_outline(source: Path, *, vocab_size: int | None = None, multiple: int = 1) -> Outline:
    """That of the model which a Hugging Face folder describes. Raises `ModelError`.

    ``vocab_size`` replaces the config's; rows of the vocabulary are filled up to a multiple of ``multiple``.
    """
    settings = Megatron(transformer={"use_cpu_initialization": True}, dtype="float32")
    described = Source(where="model", path=source, trust_remote_code=False)
    with _alone():
        architecture = read_architecture(described, settings)
        bridge = architecture.bridge
        if vocab_size is not None:
            architecture.hf.vocab_size = bridge.vocab_size = vocab_size
        bridge.padded_vocab_size = -(-architecture.vocab_size // multiple) * multiple
        bridge.dtype = None  # weights keep their types
        architecture.config.moe_token_dispatcher_type = "allgather"  # the other one takes a stream of a GPU
        with BUILDING, without_gpu():
            module = LanguageModel(described, architecture, chunk=None, chunk_size="auto")
        return Outline(
            source=source,
            architecture=architecture,
            entries=tuple(_entries(module, architecture)),
            others=tuple(objects(module)),
        )


def _entries(module: nn.Module, architecture: Architecture) -> Iterator[Entry]:
    where: Mapping[str, list[Place]] = places(module)
    for weight in weights([module]):
        name = weight.named(0, 0)
        names = tuple(hf_names(architecture, name))
        yield Entry(name=name, names=names, weight=weight, places=tuple(where[weight.own_name]))


@contextmanager
def _alone() -> Iterator[None]:
    """Groups of one rank, which Megatron asks for wherever it makes a module."""
    if dist.is_initialized():
        raise RuntimeError("checkpoints are converted in a process of their own, not in that of a rank")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        define_router_gemm()
        tell_latent_attention_what_is_installed()
        mpu.initialize_model_parallel()
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
