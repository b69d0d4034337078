"""The adapter of a sharded policy. Implements `plasmid_training.rank.backend.Adapter`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plasmid_models.lora.experts import LoRAExperts
from plasmid_models.lora.insertion import adaptable_layers, adapter_pieces, folder_layers, insert_adapter
from plasmid_models.lora.layers import Merge, combine_merges, draw_matrices, fingerprint
from plasmid_models.lora.peft_folder import adapter_config, read_adapter_tensors
from plasmid_models.pieces import Piece
from plasmid_models.source import Source
from plasmid_models.sync import Gatherable, Round
from plasmid_training.lora_settings import LoRASettings
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..weights.gathering import gather_tensors
from ..weights.loading import fill_shard
from ..weights.shards import Shard, local


class ShardedAdapter:
    """fp32 LoRA matrices of a frozen language model, sharded by rows over the ranks."""

    def __init__(self, lm: PreTrainedModel, settings: LoRASettings, source: Source) -> None:
        """Freeze ``lm``, which is not yet sharded, and insert the adapter. Raises `ModelError`."""
        lm.requires_grad_(False)
        # else only the first layer's input would not require grad, so it would need its own compiled graphs
        lm.get_input_embeddings().register_forward_hook(_require_grad)
        self._settings, self._adaptable = settings, adaptable_layers(lm)
        self.layers = insert_adapter(lm, settings.spec(), dtype=torch.float32)
        self._pieces = adapter_pieces(self.layers)
        self.base = {"path": str(source.path), "sha256": fingerprint(source.where, source.path)}
        """Folder of the base and a hash of its content."""

    def named_tensors(self) -> dict[str, Tensor]:
        """Return A and B of every layer, as ``<layer>.lora_A`` and ``<layer>.lora_B``; those of experts are stacked."""
        return {
            f"{name}.{matrix}": getattr(layer, matrix)
            for name, layer in self.layers.items()
            for matrix in ("lora_A", "lora_B")
        }

    @property
    def is_on(self) -> bool:
        """False within `disable`."""
        return all(layer.is_on for layer in self.layers.values())

    @contextmanager
    def disable(self) -> Iterator[None]:
        for layer in self.layers.values():
            layer.is_on = False
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.is_on = True

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in gather_tensors(self.named_tensors(), dtype=dtype):
            yield from self._split(name, tensor.to(device))

    def _split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices of the folder's layers in a tensor of `named_tensors`."""
        for piece in self._parts(name):
            yield piece.name, piece.of(tensor)

    def _parts(self, name: str) -> tuple[Piece, ...]:
        return self._pieces.get(name, (Piece(name),))

    def gatherables(self, dtype: torch.dtype) -> list[Gatherable]:
        ranks = tuple(range(dist.get_world_size()))
        return [
            Gatherable(key=name, num_bytes=tensor.numel() * dtype.itemsize, ranks=ranks)
            for name, tensor in self.named_tensors().items()
        ]

    def shares(
        self, rounds: Sequence[Round], *, dtype: torch.dtype, device: torch.device
    ) -> Iterator[list[tuple[str, Tensor]]]:
        for owners in rounds:
            gathered = gather_tensors(self.named_tensors(), dtype=dtype, owners=owners)
            yield [part for name, tensor in gathered for part in self._split(name, tensor.to(device))]

    def config(self, base: str) -> dict[str, Any]:
        adapted = folder_layers(self.layers)
        return adapter_config(self._settings.spec(), base=base, adapted=adapted, adaptable=self._adaptable)

    def layer_merges(self, device: torch.device) -> dict[str, Merge]:
        """Return a function per adapted weight that merges the adapter into it. All ranks call this together."""
        whole = {name: tensor.to(device) for name, tensor in gather_tensors(self.named_tensors(), dtype=torch.float32)}
        return combine_merges(
            (
                layer.weight_name if isinstance(layer, LoRAExperts) else f"{name}.weight",
                partial(layer.merge_into, a=whole[f"{name}.lora_A"], b=whole[f"{name}.lora_B"]),
            )
            for name, layer in self.layers.items()
        )

    @torch.no_grad()
    def fill(self, shard: Shard, *, seed: int) -> None:
        """Load `start_from`, or initialize A like PyTorch's linear layers and B to 0: the policy equals the base.

        The result is the same for any number of ranks. Raises `ModelError`.
        """
        if self._settings.start_from != "none":
            self._read(Path(self._settings.start_from), shard)
            return
        layers = list(self.layers.values())
        for layer, whole in zip(layers, draw_matrices((x.lora_A.shape for x in layers), seed=seed), strict=True):
            local(layer.lora_A).copy_(whole[shard.rows(len(whole))])
            local(layer.lora_B).zero_()

    def _read(self, folder: Path, shard: Shard) -> None:
        parts = [(part, tensor) for name, tensor in self.named_tensors().items() for part in self._parts(name)]
        shapes = {f"{part.name}.weight": part.shape(tensor.shape) for part, tensor in parts}
        with read_adapter_tensors(folder, shapes) as saved:
            for part, tensor in parts:
                fill_shard(tensor, part, saved[f"{part.name}.weight"], shard)


def _require_grad(module: nn.Module, inputs: Any, hidden: Tensor) -> Tensor:
    return hidden.requires_grad_(torch.is_grad_enabled())
