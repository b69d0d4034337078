"""vLLM executor that starts the workers."""

from __future__ import annotations

import os

from plasmid_serving.processes.launch import end_with_parent
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

SERVER_VARIABLE = "PLASMID_VLLM_SERVER"
"""Environment variable with the process id of the server."""


class BoundExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Exits with the server. It runs in vLLM's scheduler process, which would otherwise outlive a killed server."""

    def _init_executor(self) -> None:
        end_with_parent(int(os.environ[SERVER_VARIABLE]))
        super()._init_executor()
