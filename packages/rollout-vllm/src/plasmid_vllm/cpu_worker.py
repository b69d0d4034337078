"""vLLM worker on the CPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (vLLM requires this import to be first)

import torch
from vllm.model_executor.layers import utils

from .worker import PolicyWorker

dispatch_packed = utils.dispatch_cpu_unquantized_gemm


def dispatch_plain(layer: Any, remove_weight: bool) -> None:
    """Make a linear layer use its own weight. vLLM's packed copy would not receive weight syncs."""
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        dispatch_packed(layer, remove_weight)


class CpuPolicyWorker(PolicyWorker, CPUWorker):  # type: ignore[misc]
    """`PolicyWorker` on the CPU."""

    def load_model(self, **kwargs: Any) -> None:
        """Load the model without packed copies of its weights."""
        utils.dispatch_cpu_unquantized_gemm = dispatch_plain
        super().load_model(**kwargs)
