"""Script that runs the function of a `Program` in a process that ends with its parent.

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

from plasmid.utils.log_files import write_stacks_to_memory

PR_SET_PDEATHSIG = 1
API_KEY_VARIABLE = "PLASMID_API_KEY"
"""Environment variable with the API key. The arguments file stays in the run folder, so it must not contain the key."""


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def wait_until_allowed() -> None:
    """Wait until this server may allocate GPU memory: until its actor closes the standard input of this process.

    Servers measure the free memory of their GPUs before and after they load the model. If a trainer loads its model on
    the same GPUs in the meantime, they attribute its memory to their own model.
    """
    os.read(sys.stdin.fileno(), 1)


def main(function: str, parent: int, arguments: Path) -> None:
    """Run the function until it returns."""
    end_with_parent(parent)
    given = {**json.loads(arguments.read_text()), "api_key": os.environ.pop(API_KEY_VARIABLE) or None}
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(given)


if __name__ in ("__main__", "__mp_main__"):  # processes that the function spawns import this file again
    write_stacks_to_memory()
if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
