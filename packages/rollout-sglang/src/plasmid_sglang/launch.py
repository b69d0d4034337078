"""Run as a program: SGLang's server, from a file of arguments, ending with the process that started it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone; SGLang does the same for its own children."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


def main(parent: int, arguments: Path) -> None:
    """Serve until the end."""
    die_with(parent)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**json.loads(arguments.read_text())))


if __name__ == "__main__":  # SGLang's own processes import this file again
    main(int(sys.argv[1]), Path(sys.argv[2]))
