"""The command `rl` as it is installed, and a recipe for tests that score texts or call servers."""

import sys
from importlib.metadata import entry_points
from pathlib import Path

RL = [str(Path(sys.executable).with_name("rl"))]
"""Command line to start it as a process."""
RECIPE = """
[model]
path = "model"
[data]
path = "rows.jsonl"
[trainer]
kind = "fsdp"
[rollout]
kind = "hf"
[algorithm]
kind = "grpo"
"""


def call_rl(*arguments):
    """Call the command in this process, which is faster than starting one. Returns the exit code."""
    (command,) = entry_points(group="console_scripts", name="rl")
    try:
        command.load()(list(map(str, arguments)))
    except SystemExit as end:
        return end.code or 0
    raise AssertionError("the command returned")
