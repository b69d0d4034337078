"""The adapter of a sharded policy. Implements `plasmid_training.rank.backend.Adapter`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plasmid_models.lora.layers import LoRALinear, draw_matrices, fingerprint, insert_adapter, linear_layers, merge
from plasmid_models.lora.peft_folder import adapter_config, read_adapter_tensors
from plasmid_models.source import Source
from plasmid_models.sync import Gatherable, Round
from plasmid_training.lora_settings import LoRASettings
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..weights.gathering import gather_tensors
from ..weights.shards import Shard, local


class ShardedAdapter:
    """fp32 LoRA matrices of a frozen language model, sharded by rows over the ranks."""

    def __init__(self, lm: PreTrainedModel, settings: LoRASettings, source: Source) -> None:
        """Freeze ``lm``, which is not yet sharded, and insert the adapter. Raises `ModelError`."""
        lm.requires_grad_(False)
        # else only the first layer's input would not require grad, so it would need its own compiled graphs
        lm.get_input_embeddings().register_forward_hook(_require_grad)
        self._settings, self._linear = settings, linear_layers(lm)
        self.layers: Mapping[str, LoRALinear] = insert_adapter(lm, settings.spec(), dtype=torch.float32)
        self.base = {"path": str(source.path), "sha256": fingerprint(source.where, source.path)}
        """Folder of the base and a hash of its content."""

    def named(self) -> dict[str, Tensor]:
        """Return A and B of every layer, as ``<layer>.lora_A`` and ``<layer>.lora_B``."""
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
        for name, tensor in gather_tensors(self.named(), dtype=dtype):
            yield name, tensor.to(device)

    def gatherables(self, dtype: torch.dtype) -> list[Gatherable]:
        ranks = tuple(range(dist.get_world_size()))
        return [
            Gatherable(key=name, num_bytes=tensor.numel() * dtype.itemsize, ranks=ranks)
            for name, tensor in self.named().items()
        ]

    def shares(
        self, rounds: Sequence[Round], *, dtype: torch.dtype, device: torch.device
    ) -> Iterator[list[tuple[str, Tensor]]]:
        for owners in rounds:
            gathered = gather_tensors(self.named(), dtype=dtype, owners=owners)
            yield [(name, tensor.to(device)) for name, tensor in gathered]

    def config(self, base: str) -> dict[str, Any]:
        return adapter_config(self._settings.spec(), base=base, adapted=self.layers.keys(), linear=self._linear)

    def layer_merges(self, device: torch.device) -> dict[str, LayerMerge]:
        """Return a function per adapted weight that merges the adapter into it. All ranks call this together."""
        whole = dict(self.weights(dtype=torch.float32, device=device))
        return {
            f"{name}.weight": LayerMerge(whole[f"{name}.lora_A"], whole[f"{name}.lora_B"], layer.scale)
            for name, layer in self.layers.items()
        }

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
        named = {f"{name}.weight": tensor for name, tensor in self.named().items()}
        with read_adapter_tensors(folder, {name: tuple(tensor.shape) for name, tensor in named.items()}) as saved:
            for name, tensor in named.items():
                local(tensor).copy_(saved[name][shard.rows(tensor.shape[0])])


class LayerMerge:
    """Function that adds the product of one layer's adapter matrices to its weight."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        self._a, self._b, self._scale = a, b, scale

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the merged weight [out, in] in at least fp32."""
        return merge(weight, self._a, self._b, self._scale)


def _require_grad(module: nn.Module, inputs: Any, hidden: Tensor) -> Tensor:
    return hidden.requires_grad_(torch.is_grad_enabled())
