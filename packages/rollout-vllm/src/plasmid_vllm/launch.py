"""Entry point of a vLLM server process (see `plasmid_serving.processes.launch`)."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from plasmid_serving.processes.launch import wait_until_allowed

POLL_S = 0.5
"""Interval for checking whether vLLM's processes have exited, in seconds."""


def serve(arguments: dict[str, Any]) -> None:
    """Run a server until it exits."""
    asyncio.run(_serve(**arguments))


async def _serve(
    *, host: str, port: int, name: str, api_key: str, engine: dict[str, Any], worker: str, ranks: int
) -> None:
    if not api_key:
        raise SystemExit("the server requires an API key")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from .executor import SERVER_VARIABLE, BoundExecutor
    from .server import Gauges, Server

    os.environ[SERVER_VARIABLE] = str(os.getpid())
    server = Server(name, api_key, ranks=ranks)
    await server.listen(host, port)  # fail on a port in use before the model is loaded
    await asyncio.to_thread(wait_until_allowed)
    arguments = AsyncEngineArgs(**engine, worker_cls=worker, distributed_executor_backend=BoundExecutor)
    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda config, index: Gauges(server.load)])
    try:
        await llm.update_weight_version("0")
        server.engine = llm
        while not llm.errored:
            await asyncio.sleep(POLL_S)
        raise SystemExit("vLLM's processes have exited")
    finally:
        await server.close()
        llm.shutdown()
