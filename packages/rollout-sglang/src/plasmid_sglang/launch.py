"""Run as a program: SGLang's server or router, from a file of arguments, ending with the process that started it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PR_SET_PDEATHSIG = 1
RENDEZVOUS = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
API_KEY_VARIABLE = "PLASMID_API_KEY"
"""Environment variable with the key: the file of arguments stays in the run's folder."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone; SGLang does the same for its own children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


def serve(arguments: dict[str, Any]) -> None:
    """Run a server until its end."""
    bind_threads(arguments)
    store = open_rendezvous(arguments)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**arguments))
    del store  # until now


def bind_threads(arguments: Mapping[str, Any]) -> None:
    """On the CPU, let ranks share the cores: SGLang wants a NUMA node for each unless it is told what cores to take."""
    ranks = arguments.get("tp_size", 1) * arguments.get("pp_size", 1)
    if arguments.get("device") != "cpu" or ranks <= len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))):
        return
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * (ranks // arguments.get("nnodes", 1))))


def open_rendezvous(arguments: Mapping[str, Any]) -> Any:
    """Have SGLang's processes meet where strangers cannot: SGLang's own store listens on every address of the machine.

    On one machine they meet in memory, which this process keeps. Of several the first machine opens a store on its
    address in the run alone, as long as the object that is returned is held.
    """
    if arguments.get("nnodes", 1) == 1:
        os.environ[RENDEZVOUS] = f"file:///proc/{os.getpid()}/fd/{os.memfd_create('sglang-rendezvous')}"
        return None
    from plasmid.training.rendezvous import listen

    address = urlsplit(f"tcp://{arguments['dist_init_addr']}")
    os.environ |= {RENDEZVOUS: address.geturl(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return listen(str(address.hostname), address.port or 0) if arguments.get("node_rank", 0) == 0 else None


def route(arguments: dict[str, Any]) -> None:
    """Run a router until its end."""
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    launch_router(RouterArgs(**arguments))


def main(what: str, parent: int, arguments: Path) -> None:
    """Begin."""
    die_with(parent)
    given = {**json.loads(arguments.read_text()), "api_key": os.environ.pop(API_KEY_VARIABLE) or None}
    {"server": serve, "router": route}[what](given)


if __name__ == "__main__":  # SGLang's own processes import this file again
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
