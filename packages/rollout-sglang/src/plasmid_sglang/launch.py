"""Run as a program: SGLang's server or router, from a file of arguments, ending with the process that started it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone; SGLang does the same for its own children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


def serve(arguments: dict[str, Any]) -> None:
    """Run a server until its end."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**arguments))


def route(arguments: dict[str, Any]) -> None:
    """Run a router until its end."""
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    launch_router(RouterArgs(**arguments))


def main(what: str, parent: int, arguments: Path) -> None:
    """Begin."""
    die_with(parent)
    {"server": serve, "router": route}[what](json.loads(arguments.read_text()))


if __name__ == "__main__":  # SGLang's own processes import this file again
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
