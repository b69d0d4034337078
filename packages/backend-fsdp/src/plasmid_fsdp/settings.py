"""The settings of the FSDP2 trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from plasmid import RunConfig
from plasmid.components import Algorithm, BuildContext, TrainerConfig
from plasmid.errors import ConfigError
from plasmid.protocols import Trainer
from plasmid_models.source import check_models
from pydantic import Field

from .optimizer_settings import CriticSettings, OptimizerSettings

ON_CPU = "trainer.cpu_offload: moves weights between GPU and host, but the trainer runs on the cpu"


class FSDP(OptimizerSettings, TrainerConfig):
    """PyTorch FSDP2 over Hugging Face models: parameters, gradients and optimizer are sharded over the ranks.

    Weights and optimizer are always kept in fp32, and gradients are always summed in fp32, whatever `dtype` says.
    """

    kind: Literal["fsdp"] = "fsdp"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What forward and backward compute in; ``auto`` is what the engine computes in, as far as it is one of these."""
    activation_checkpointing: bool = False
    """Keep only the input of every decoder layer for the backward pass and compute the rest again."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in host memory and compute on the GPU layer by layer."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Maximum tokens of a microbatch of one rank, padding included where `attention` is not ``auto``; a longer sample
    has a microbatch of its own."""
    microbatch_samples: Literal["auto"] | int = "auto"
    """Fixed number of samples in a microbatch; ``auto`` fills microbatches up to `microbatch_tokens`."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Implementation of attention; ``auto`` packs samples one after another without padding, the others pad them."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the decoder layers with `torch.compile`; ``auto`` does so on a GPU for models without experts."""
    logprob_chunk: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Tokens whose logits exist at one time; ``auto`` lets them take 1.25 GiB on a GPU and 128 MiB on a CPU."""
    critic: CriticSettings = CriticSettings()
    """Optimizer and first weights of the critic, for algorithms that have one."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.microbatch_samples != "auto" and self._is_set("microbatch_tokens"):
            yield "microbatch_tokens has no effect where microbatch_samples is set; remove one of them"
        if isinstance(self.microbatch_samples, int) and self.microbatch_samples < 1:
            yield f"microbatch_samples must be 'auto' or at least 1, got {self.microbatch_samples}"

    def mistakes(self, algorithm: Algorithm) -> Iterator[str]:
        """A critic's settings without a critic."""
        if self.critic != CriticSettings() and not algorithm.needs().critic:
            yield "trainer.critic: the algorithm has no critic, so it is never read; remove the table"

    def check(self, config: RunConfig) -> None:
        """The folders of models, and what needs a GPU."""
        if self.cpu_offload and config.placement.device == "cpu":
            raise ConfigError(ON_CPU)
        check_models(config)

    async def build(self, context: BuildContext) -> Trainer:
        """Start one process for each rank. Raises `ConfigError` or `ModelError` before any is started, where it can."""
        from .trainer import start

        return await start(self, context)
