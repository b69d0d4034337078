"""vLLM workers: the processes that hold the model."""

from __future__ import annotations

from typing import Any

from plasmid_serving.weights.loading import Fusions, execute
from vllm.v1.worker.gpu_worker import Worker

from .sampler import WholeSampler

FUSIONS = Fusions("vLLM", {})
"""vLLM 0.32 loads the parts of a fused parameter one by one."""


class PolicyWorker:
    """Mixin for vLLM workers: replaceable weights, and log-probabilities suitable for training."""

    model_runner: Any

    def load_model(self, **kwargs: Any) -> None:
        """Load the model and replace the sampler."""
        super().load_model(**kwargs)  # type: ignore[misc]
        sampler = self.model_runner.sampler
        self.model_runner.sampler = WholeSampler(sampler.logprobs_mode, sampler.use_fp64_gumbel)

    def run_command(self, message: bytes) -> None:
        """Execute one command of a weight sync. Never raises."""
        execute(self.model_runner.get_model(), message, FUSIONS)


class GpuPolicyWorker(PolicyWorker, Worker):  # type: ignore[misc]
    """`PolicyWorker` on a GPU."""
