"""Megatron's weights of a model, their names and places in a checkpoint, from a model on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from plasmid.errors import ModelError, abbreviate
from plasmid_models.building import BUILD_LOCK
from plasmid_models.folder import folder_names
from plasmid_models.folder_writer import UntrainedWeights
from plasmid_models.source import Source
from plasmid_models.text_model import FolderNames
from torch import Tensor, nn

from ..network.language_model import LanguageModel
from ..settings import Megatron
from ..upstream.compat import build_without_gpu, define_router_gemm, fix_latent_attention
from ..upstream.imports import skip_docstrings
from ..weights.bridge import Architecture, read_architecture
from ..weights.placement import VOCABULARY, Place, find_entries
from ..weights.shards import DERIVED, Weight, hf_names, to_hf, weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One unsharded weight of Megatron."""

    name: str
    """mbridge's name, with the indices of layer and expert."""
    names: tuple[str, ...]
    """Hugging Face names of the tensors that it consists of."""
    weight: Weight
    places: tuple[Place, ...]
    """Places in a checkpoint of the distributed format."""

    @property
    def over_vocabulary(self) -> bool:
        """True if it has a row per token of the vocabulary."""
        return self.name in VOCABULARY

    @property
    def is_correction(self) -> bool:
        """True for the expert bias that balances routing, which always stays in float32."""
        return self.name.endswith("expert_bias")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outline:
    """All weights of a model."""

    source: Path
    names: FolderNames
    """Names of the weights in the folder ``source``."""
    architecture: Architecture
    entries: tuple[Entry, ...]
    others: tuple[Any, ...]
    """Non-tensor entries of the distributed format (`ShardedObject`)."""

    @cached_property
    def num_tensors(self) -> int:
        """Number of tensors in a Hugging Face folder."""
        return sum(len(entry.names) for entry in self.entries)

    def to_hf(self, entry: Entry, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face tensors of a weight."""
        for name, tensor in to_hf(self.architecture, entry.name, whole):
            yield self.names.in_folder(name), tensor

    def untrained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the model's folder that checkpoints of runs do not have. Raises `ModelError`."""
        yield from UntrainedWeights(self.source, where="from.model")

    def entries_of(self, names: Collection[str]) -> list[Entry]:
        """Return all weights in the order of the source's names. Raises `ModelError` if it has other ones."""
        wanted = {name: entry for entry in self.entries for name in entry.names}
        unknown = [name for name in names if name not in wanted and not name.endswith(DERIVED)]
        _raise_misfit(wanted.keys() - set(names), unknown)
        return list(dict.fromkeys(wanted[name] for name in names if name in wanted))

    def from_hf(
        self, tensors: Iterable[tuple[str, Tensor]], entries: Iterable[Entry]
    ) -> Iterator[tuple[Entry, Tensor]]:
        """Yield each of the weights ``entries`` as soon as all its tensors have been read. Raises `ModelError`."""
        wanted = {name: entry for entry in entries for name in entry.names}
        waiting: dict[str, Tensor] = {}
        missing, unknown = set(wanted), []
        for name, tensor in tensors:
            if name not in wanted:
                unknown += [] if name.endswith(DERIVED) else [name]
                continue
            if name not in missing:
                raise ModelError(f"{name}: occurs twice in the source")
            missing.remove(name)
            waiting[name] = tensor
            del tensor  # so that its memory can be reused while the next one is read
            entry = wanted[name]
            if all(part in waiting for part in entry.names):
                yield entry, self._whole(entry, [waiting.pop(part) for part in entry.names])
        _raise_misfit(missing, unknown)

    def _whole(self, entry: Entry, parts: list[Tensor]) -> Tensor:
        if entry.over_vocabulary and parts[0].shape == entry.weight.tensor.shape:
            return parts[0]  # mbridge would copy it to add no padding
        shapes = ", ".join(f"{n} {list(part.shape)}" for n, part in zip(entry.names, parts, strict=True))
        try:
            whole: Tensor = self.architecture.bridge._weight_to_mcore_format(entry.name, parts)
        except (AssertionError, RuntimeError, IndexError):
            raise ModelError(f"the weights do not fit the model: the source has different shapes: {shapes}") from None
        if whole.shape != entry.weight.tensor.shape:
            raise ModelError(f"the weights do not fit the model: the source has different shapes: {shapes}")
        return whole


def _raise_misfit(missing: Iterable[str], unknown: Iterable[str]) -> None:
    for what, names in (("lacks", sorted(missing)), ("has unknown", sorted(unknown))):
        if names:
            raise ModelError(f"the weights do not fit the model: the source {what} {abbreviate(names)}")


def read_outline(source: Path, *, vocab_size: int | None = None, multiple: int = 1) -> Outline:
    """Build the outline of a Hugging Face folder's model. Raises `ModelError`.

    ``vocab_size`` replaces the config's; the vocabulary is padded to a multiple of ``multiple``.
    """
    settings = Megatron(transformer={"use_cpu_initialization": True}, dtype="float32")
    described = Source(where="model", path=source, trust_remote_code=False)
    with _make_single_rank_groups():
        with skip_docstrings():
            architecture = read_architecture(described, settings)
        bridge = architecture.bridge
        if vocab_size is not None:
            architecture.hf.vocab_size = bridge.vocab_size = vocab_size
        bridge.padded_vocab_size = -(-architecture.vocab_size // multiple) * multiple
        bridge.dtype = None  # weights keep their dtypes
        config = architecture.config
        config.moe_token_dispatcher_type = "allgather"  # the default one needs a CUDA stream
        # not perform_initialization=False: Megatron then does not mark the dimensions that ranks split
        config.init_method = config.output_layer_init_method = config.embedding_init_method = _keep
        with BUILD_LOCK, build_without_gpu():
            module = LanguageModel(described, architecture, chunk=None, chunk_size="auto")
        names = folder_names("model", source)
        places, others = find_entries(module)
        return Outline(
            source=source,
            names=names,
            architecture=architecture,
            entries=tuple(_entries(module, places, architecture, names)),
            others=tuple(others),
        )


def _keep(weight: Tensor) -> Tensor:
    """Initialize a weight on the meta device: drawing random numbers for it takes torch a millisecond."""
    return weight


def _entries(
    module: nn.Module, places: Mapping[str, Sequence[Place]], architecture: Architecture, folder: FolderNames
) -> Iterator[Entry]:
    for weight in weights([module]):
        name = weight.full_name(0, 0)
        names = tuple(map(folder.in_folder, hf_names(architecture, name)))
        yield Entry(name=name, names=names, weight=weight, places=tuple(places[weight.own_name]))


@contextmanager
def _make_single_rank_groups() -> Iterator[None]:
    """Create process groups of one rank, which Megatron needs to build modules."""
    if dist.is_initialized():
        raise RuntimeError("checkpoints must be converted in a separate process, not in that of a rank")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        define_router_gemm()
        fix_latent_attention()
        mpu.initialize_model_parallel()
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
