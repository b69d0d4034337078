"""Stand-ins for what `plasmid_vllm` imports from vLLM, for tests in environments without it."""

import sys
from types import ModuleType, SimpleNamespace

import torch


class ClientError(Exception):
    """`vllm.exceptions.VLLMError`."""


class DeadError(ClientError):
    """`vllm.v1.engine.exceptions.EngineDeadError`."""


class Sampler(torch.nn.Module):
    """Keeps the two most likely tokens and takes the first of them, like vLLM's sampler with top_k = 2."""

    compute_logprobs = staticmethod(lambda logits: logits.log_softmax(-1))

    def __init__(self, *options):
        super().__init__()

    def sample(self, logits, metadata, mode=None):
        if metadata.all_greedy:
            return logits.argmax(-1), self.compute_logprobs(logits)
        logits = logits.div_(metadata.temperature[:, None])
        cut = logits.masked_fill(logits < logits.topk(2).values[:, -1:], -torch.inf)
        return cut.argmax(-1), self.compute_logprobs(cut)


class Capturer:
    """`RoutedExpertsCapturer`: returns the rows that the test sets."""

    shape_per_token, model, rows = (2, 3), None, None

    def __init__(self, *, max_num_batched_tokens, vllm_config):
        self.limit = max_num_batched_tokens

    def snapshot_routing_data(self, num_tokens):
        return self.rows[:num_tokens]


class FullAttentionSpec:
    """Blocks of all tokens."""

    def __init__(self, block_size):
        self.block_size = block_size


def bind(model, capturer):
    """Stand in for `bind_routed_experts_capturer`."""
    capturer.model = model


CAPTURING = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
NAMES = {
    "vllm": {"SamplingParams": SimpleNamespace, "__version__": "0.32.0"},
    "vllm.exceptions": {"VLLMError": ClientError},
    "vllm.inputs": {"tokens_input": lambda ids: {"prompt_token_ids": ids}},
    "vllm.sampling_params": {
        "RequestOutputKind": SimpleNamespace(FINAL_ONLY=2),
        "StructuredOutputsParams": SimpleNamespace,
    },
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.fused_moe": {},
    CAPTURING: {"RoutedExpertsCapturer": Capturer, "bind_routed_experts_capturer": bind},
    "vllm.v1": {},
    "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec},
    "vllm.v1.worker": {},
    "vllm.v1.worker.gpu_worker": {"Worker": object},
    "vllm.engine": {},
    "vllm.engine.arg_utils": {"AsyncEngineArgs": SimpleNamespace},
    "vllm.v1.executor": {},
    "vllm.v1.executor.multiproc_executor": {"MultiprocExecutor": object},
    "vllm.v1.engine": {},
    "vllm.v1.engine.async_llm": {"AsyncLLM": object},
    "vllm.v1.engine.exceptions": {"EngineDeadError": DeadError},
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.loggers": {"StatLoggerBase": object},
    "vllm.v1.sample": {},
    "vllm.v1.sample.metadata": {"SamplingMetadata": SimpleNamespace},
    "vllm.v1.sample.sampler": {"Sampler": Sampler},
}


def install(monkeypatch):
    """Make these names importable during a test."""
    for name, values in NAMES.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("server", "executor", "worker_process.sampler", "worker_process.gpu"):
        monkeypatch.delitem(sys.modules, f"plasmid_vllm.{name}", raising=False)
