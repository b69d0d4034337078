"""vLLM sampler that returns log-probabilities of the full distribution at the sampling temperature."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

EPSILON = 1e-5
"""vLLM treats lower temperatures as greedy sampling."""


class WholeSampler(Sampler):  # type: ignore[misc]
    """Samples as vLLM does. Reports -inf for tokens removed by top-p, top-k and min-p, and the full log-softmax of
    logits / temperature for the others; vLLM's own ``processed_logprobs`` would normalize over the remaining tokens.
    Grammars, penalties and biases have changed the logits before, so log-probabilities include them."""

    def sample(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return sampled tokens [N] and log-probabilities [N, V], or None for the latter if no request wants them."""
        temperature = sampling_metadata.temperature
        if temperature is None or sampling_metadata.all_greedy or sampling_metadata.max_num_logprobs is None:
            plain: tuple[Tensor, Tensor | None] = super().sample(logits, sampling_metadata, logprobs_mode_override)
            return plain
        divisor = torch.where(temperature < EPSILON, 1.0, temperature)
        whole = self.compute_logprobs(logits / divisor[:, None])
        sampled, within = super().sample(logits, sampling_metadata, logprobs_mode_override)
        return sampled, whole if within is None else whole.masked_fill_(within.isneginf(), -torch.inf)
