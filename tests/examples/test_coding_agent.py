"""examples/coding-agent: mini-swe-agent repairs files with the policy's endpoint, and hidden tests give the reward."""

import asyncio
import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plasmid import load_config
from plasmid.protocols import RunContext
from plasmid.settings.validation import validate
from plasmid.testing.rewards import make_prompt
from plasmid_agents import Agent
from plasmid_workflows.execution import execute

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/coding-agent/coding_agent.py"
ROWS = [json.loads(line) for line in (ROOT / "recipes/data/repairs.jsonl").read_text().splitlines()]
ENVIRONMENTS = Path(os.environ.get("PLASMID_ENVIRONMENTS", ROOT / "build" / "environments"))
REPAIRS = {
    "area.py": "def area(width, height):\n    return width * height\n",
    "words.py": "def count(text):\n    return len(text.split())\n",
    "largest.py": "largest = max\n",
    "even.py": "def is_even(number):\n    return number % 2 == 0\n",
}


@pytest.mark.parametrize("row", ROWS, ids=[next(iter(row["files"])) for row in ROWS])
def test_tests_distinguish_the_broken_file_from_the_repaired_one(row, tmp_path):
    count_passed = runpy.run_path(str(EXAMPLE))["count_passed"]
    for name, text in row["files"].items():
        (tmp_path / name).write_text(text)
    passed, total = count_passed(tmp_path, row["tests"])
    assert passed < total == 2
    for name in row["files"]:
        (tmp_path / name).write_text(REPAIRS[name])
    assert count_passed(tmp_path, row["tests"]) == (2, 2)


def test_a_file_that_ends_the_process_or_prints_passes_no_test(tmp_path):
    count_passed = runpy.run_path(str(EXAMPLE))["count_passed"]
    for text in (
        "import sys\nprint(2)\nsys.exit()",
        "import os\nos._exit(0)",
        "raise KeyError",
    ):
        (tmp_path / "area.py").write_text(text)
        assert count_passed(tmp_path, ROWS[0]["tests"])[0] == 0


def test_the_recipe_of_the_coding_agent_resolves(tiny_model, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config("recipes/smollm2-coding-agent-cpu.toml", [f"model.path={tiny_model}"])
    assert config.workflow.function == "examples/coding-agent/coding_agent.py:solve"


@pytest.mark.long
def test_mini_swe_agent_repairs_a_file(tmp_path, monkeypatch):
    python = ENVIRONMENTS / "mini-swe-agent" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python}; make environments builds it")
    sys.path.insert(0, str(ROOT / "tests" / "agents"))
    from agent_cases import ScriptedEngine, make_chat_tokenizer, make_rollout
    from plasmid_models.tokenization.tokenizer import Tokenizer

    tokenizer = Tokenizer(make_chat_tokenizer(tmp_path / "tokenizer"))
    monkeypatch.setenv("MINI_SWE_AGENT", str(python))
    repair = "sed -i 's/+/*/' area.py && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    call = f"Multiply.\n<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': repair}})}</tool_call>"
    settings = {
        "kind": "agent",
        "function": f"{EXAMPLE}:solve",
        "environment": ["MINI_SWE_AGENT"],
        "unsupported_options": "ignore",
        "max_turns": 3,
    }

    async def main():
        workflow = validate(Agent, settings)
        await workflow.open(RunContext(seed=1, run_dir=Path()))
        try:
            row = ROWS[0]
            metadata = {key: row[key] for key in ("files", "tests")}
            prompt = replace(make_prompt(row["prompt"]), text=row["prompt"], messages=(), metadata=metadata)
            engine = ScriptedEngine(tokenizer, lambda said: call)
            run = make_rollout(tokenizer, engine, sampling={"max_new_tokens": 400}, max_length=20000)
            return await execute(workflow, run, prompt, 280.0)
        finally:
            await workflow.close()

    *_, sample = asyncio.run(main())
    assert sample.error is None
    assert sample.metadata["reward"] == 1.0 and sample.text == "2 of 2 tests"
    assert sample.loss_mask.sum() == len(tokenizer.encode(call)) + 1
