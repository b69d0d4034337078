"""Entry points of SGLang's server and router processes (see `plasmid_serving.processes.launch`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

RENDEZVOUS = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"


def serve(arguments: dict[str, Any]) -> None:
    """Run a server until it exits."""
    bind_threads(arguments)
    store = open_rendezvous(arguments)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**arguments))
    del store  # keeps the store alive until now


def bind_threads(arguments: Mapping[str, Any]) -> None:
    """On the CPU, let ranks share the cores. SGLang otherwise requires a NUMA node per rank."""
    ranks = arguments.get("tp_size", 1) * arguments.get("pp_size", 1)
    if arguments.get("device") != "cpu" or ranks <= len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))):
        return
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * (ranks // arguments.get("nnodes", 1))))


def open_rendezvous(arguments: Mapping[str, Any]) -> Any:
    """Open a rendezvous for SGLang's processes, whose own store would listen on all addresses of the machine.

    On one machine it is an in-memory file of this process. With several machines, the first opens a store that listens
    only on its address in the run. The rendezvous exists as long as the returned object.
    """
    if arguments.get("nnodes", 1) == 1:
        os.environ[RENDEZVOUS] = f"file:///proc/{os.getpid()}/fd/{os.memfd_create('sglang-rendezvous')}"
        return None
    from plasmid_models.sync.rendezvous import listen

    address = urlsplit(f"tcp://{arguments['dist_init_addr']}")
    os.environ |= {RENDEZVOUS: address.geturl(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return listen(str(address.hostname), address.port or 0) if arguments.get("node_rank", 0) == 0 else None


def route(arguments: dict[str, Any]) -> None:
    """Run a router until it exits."""
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    launch_router(RouterArgs(**arguments))
