"""vLLM workers: the processes that hold the model."""

from __future__ import annotations

from typing import Any

import torch
from plasmid.types.routing import Routing
from plasmid_serving.weights.loading import Fusions, execute
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_worker import Worker

from ..completions import EXPERTS_FROM, RECORD_AS
from .expert_recorder import ExpertRecorder, ScheduledTokens
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


class RecordingWorker(PolicyWorker):
    """`PolicyWorker` that records the experts of each token, by request."""

    vllm_config: Any
    rank: int
    _capturer: RoutedExpertsCapturer
    _recorder: ExpertRecorder | None = None

    def load_model(self, **kwargs: Any) -> None:
        """Load the model and let its routers report their choices."""
        super().load_model(**kwargs)
        limit = self.vllm_config.scheduler_config.max_num_batched_tokens
        self._capturer = RoutedExpertsCapturer(max_num_batched_tokens=limit, vllm_config=self.vllm_config)
        bind_routed_experts_capturer(self.model_runner.get_model(), self._capturer)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step and record its experts."""
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens and self.rank == 0:
            rows = self._capturer.snapshot_routing_data(scheduler_output.total_num_scheduled_tokens)
            copied = None
            if rows.is_cuda:
                rows, copied = rows.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
            group, block_size = self._blocks()
            if self._recorder is None:
                layers, choices = self._capturer.shape_per_token
                experts = self.vllm_config.model_config.get_num_experts()
                self._recorder = ExpertRecorder(
                    Routing(layers=layers, choices=choices, experts=experts),
                    num_slots=self.model_runner.kv_cache_config.num_blocks * block_size,
                    block_size=block_size,
                )
            names = self.model_runner.input_batch.req_ids
            counts, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
            outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
            resumed = {name: outputs[name] for name in cached.resumed_req_ids}
            tokens = [self._scheduled(name, counts[name], group, resumed.get(name)) for name in names]
            self._recorder.add(rows, copied, tokens)
        return output

    def _blocks(self) -> tuple[int, int]:
        """Return the KV cache group whose blocks are used as slots, and its block size."""
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        whole = [number for number, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        number = whole[0] if whole else 0
        return number, int(specs[number].block_size)

    def _scheduled(self, name: str, count: int, group: int, num_outputs: int | None) -> ScheduledTokens:
        state = self.model_runner.requests[name]
        wanted = state.sampling_params.extra_args or {}
        return ScheduledTokens(
            name=wanted.get(RECORD_AS),
            wanted_from=wanted.get(EXPERTS_FROM, 0),
            start=state.num_computed_tokens,
            count=count,
            blocks=state.block_ids[group],
            num_kept=None if num_outputs is None else state.num_prompt_tokens + num_outputs,
        )

    def take_experts(self, name: str, count: int) -> bytes:
        """Remove the experts of a request, and return those of up to ``count`` tokens; empty on other ranks."""
        return b"" if self._recorder is None else self._recorder.take(name, count).tobytes()


class GpuPolicyWorker(PolicyWorker, Worker):  # type: ignore[misc]
    """`PolicyWorker` on a GPU."""


class GpuRecordingWorker(RecordingWorker, Worker):  # type: ignore[misc]
    """`RecordingWorker` on a GPU."""
