"""Run as a program: a function of a `Program` in a process that ends with the one that started it.

python -m plasmid_serving.processes.launch MODULE:FUNCTION PARENT_PID ARGUMENTS_FILE
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

PR_SET_PDEATHSIG = 1
API_KEY_VARIABLE = "PLASMID_API_KEY"
"""Environment variable with the API key. The file of arguments stays in the run folder, so the key is not in it."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def main(function: str, parent: int, arguments: Path) -> None:
    """Run the function until its end."""
    die_with(parent)
    given = {**json.loads(arguments.read_text()), "api_key": os.environ.pop(API_KEY_VARIABLE) or None}
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(given)


if __name__ == "__main__":  # processes that the function spawns import this file again
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
