"""The hooks of pre-commit run the checks of `.ci/run`."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_hooks_run_what_ci_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = {hook["entry"] for hook in hooks}
    targets = set(re.findall(r"make --no-print-directory ([a-z-]+)", (ROOT / ".ci" / "run").read_text())) - {"dev"}
    assert {"lint", "types", "test"} <= targets
    assert {f"make {target}" for target in targets - {"lint"}} <= entries
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"\$\(BIN\)/(ruff [a-z]+)", makefile):
        assert any(entry.startswith(f".venv/bin/{command}") for entry in entries), command
