"""A command-line coding agent (mini-swe-agent) that repairs a file; its reward is the share of tests that pass.

It runs once per rollout, in its own folder. A row has the columns `files` (name -> text) and `tests` (a Python
file with functions `test_*`).
"""

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

MINI = os.environ.get("MINI_SWE_AGENT", "build/environments/mini-swe-agent/bin/python")
"""Interpreter of the environment in which mini-swe-agent is installed."""
AGENT_S = 240.0
"""Maximum time for the agent, in seconds."""
QUIET = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "true",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Options of mini-swe-agent: no questions to the user, no cost lookup, few retries once the budget is used up."""
RUN_TESTS = """
import importlib.util, sys
token = sys.argv.pop()
spec = importlib.util.spec_from_file_location("checks", sys.argv[1])
checks = importlib.util.module_from_spec(spec)
sys.path.insert(0, ".")
names, passed = sys.argv[2].split(","), 0
try:
    spec.loader.exec_module(checks)
    for name in names:
        try:
            getattr(checks, name)()
            passed += 1
        except Exception:
            pass
except Exception:
    pass
sys.stdout.write(f"\\n{token} {passed}")
"""


def solve(prompt: str, metadata: dict, base_url: str, api_key: str) -> dict:
    """Run the agent on the task, then the hidden tests."""
    python = str(Path(MINI).absolute())
    with tempfile.TemporaryDirectory(prefix="coding-") as name:
        work = Path(name, "work")
        work.mkdir()
        for file, text in metadata["files"].items():
            (work / file).write_text(text)
        command = [python, "-m", "minisweagent.run.mini", "--task", prompt, "--yolo", "--exit-immediately"]
        command += ["--output", str(Path(name, "trajectory.json")), "--model", "policy", "--model-class", "litellm"]
        settings = {
            "agent.cost_limit": "0",
            "model.cost_tracking": "ignore_errors",
            "model.model_kwargs.custom_llm_provider": "openai",
            "model.model_kwargs.api_base": base_url,
            "model.model_kwargs.api_key": api_key,
        }
        for option in ["mini", *(f"{key}={value}" for key, value in settings.items())]:
            command += ["-c", option]
        env = {**os.environ, **QUIET, "MSWEA_GLOBAL_CONFIG_DIR": name}
        done = subprocess.run(command, cwd=work, env=env, input=b"", capture_output=True, timeout=AGENT_S)
        passed, total = count_passed(work, metadata["tests"])
    return {"answer": f"{passed} of {total} tests", "reward": passed / total, "metrics": {"exit_code": done.returncode}}


def count_passed(work: Path, tests: str) -> tuple[int, int]:
    """Return the number of passed tests and of all tests, run in a separate process outside of the agent's folder."""
    names = [line[4:].partition("(")[0] for line in tests.splitlines() if line.startswith("def test_")]
    token = secrets.token_hex()  # so that the agent's code cannot print the result itself
    with tempfile.TemporaryDirectory(prefix="tests-") as folder:
        Path(folder, "checks.py").write_text(tests)
        options = ["-I", "-B", "-X", f"pycache_prefix={folder}", "-c", RUN_TESTS]
        command = [sys.executable, *options, str(Path(folder, "checks.py")), ",".join(names), token]
        try:
            done = subprocess.run(
                command, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
            )
        except subprocess.TimeoutExpired:
            return 0, len(names)
    said, _, count = done.stdout.rpartition("\n")[2].partition(" ")
    return (int(count) if said == token else 0), len(names)
