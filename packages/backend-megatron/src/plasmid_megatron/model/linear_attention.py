"""Attention of Qwen3-Next and Qwen3.5: gated delta nets, and attention with an output gate.

Megatron-Core's own gated delta net needs another package and refuses packed sequences. t tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from .packing import Sequences


class GatedDeltaNet(nn.Module):
    """The gated delta net of transformers (Yang et al. 2024) with the interface of Megatron's self attention.

    Its recurrence would mix packed sequences, so they are padded on the right. Ranks do not split it.
    """

    def __init__(self, config: Any, layer_number: int, *, layer: type[nn.Module], hf: Any, **unused: Any) -> None:
        """``layer`` is the class of transformers, ``hf`` the model's config. Ignores options for several ranks."""
        super().__init__()
        with torch.device("meta"):  # weights are loaded, so no random numbers are drawn
            self.layer = layer(hf, layer_number - 1).to(config.params_dtype)
        is_default = config.use_cpu_initialization
        self.layer.to_empty(device=torch.get_default_device() if is_default else torch.cuda.current_device())

    def forward(
        self, hidden: Tensor, *unused: Any, packed_seq_params: Sequences, **options: Any
    ) -> tuple[Tensor, None]:
        """Return [t, 1, H], and None as the bias, from hidden states [t, 1, H]."""
        sequences, x = packed_seq_params, hidden[:, 0]
        if sequences.width is not None:
            out = self.layer(x.view(-1, sequences.width, x.shape[1])).flatten(0, 1)
        else:
            out = sequences.block.pack(self.layer(sequences.block.unpack(x)).flatten(0, 1))
        return out[:, None], None


class OutputGatedAttention(SelfAttention):  # type: ignore[misc]
    """Attention whose output is multiplied by the sigmoid of a gate, rounded in the same order as in transformers.

    Megatron's own method rounds in a different order, and is compiled.
    """

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.sigmoid(gate.reshape(x.shape))
