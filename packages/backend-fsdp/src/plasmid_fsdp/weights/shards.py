"""Names and local shards of the weights of a sharded module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Position of a rank's shard in every tensor: rows, split like `torch.chunk`."""

    rank: int
    """Rank within its copy of the model."""
    num_ranks: int
    """Number of ranks that share one copy."""
    num_copies: int = 1

    def rows(self, count: int) -> slice:
        """Return this rank's rows out of ``count``."""
        size = -(-count // self.num_ranks)
        return slice(min(self.rank * size, count), min((self.rank + 1) * size, count))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def named_weights(lm: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by transformers' name; tied ones once, under their first name."""
    named: dict[str, Tensor] = dict(lm.named_parameters())
    saved = lm.state_dict(keep_vars=True).keys()  # detaching a sharded parameter takes 20 us
    named.update((name, buffer) for name, buffer in lm.named_buffers() if name in saved)
    return named


def find_aliases(lm: nn.Module) -> set[str]:
    """Return the names of parameters that are tied to one in `named_weights`."""
    every = {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in lm.named_parameters()}
