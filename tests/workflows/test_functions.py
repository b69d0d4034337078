"""Workflows defined as functions, and fan-out."""

import asyncio
from typing import Literal

import pytest
from plasmid.components import Workflow
from plasmid.config.load import _pick
from plasmid.plugins.registry import find_components, load_plugins
from plasmid.types import StopReason
from plasmid_workflows import CalculatorTool, EnvironmentWorkflow, FunctionWorkflow, Tools
from plasmid_workflows.execution import execute
from plasmid_workflows.testing import check_workflow

from tests.workflows.scripted import chat, coloured, rollout

pytestmark = pytest.mark.usefixtures("forked_environments")
FILE = """
from plasmid_workflows.transcript import Transcript

async def twice(rollout, prompt, question="sure?"):
    transcript = Transcript.of_prompt(rollout, prompt)
    transcript.append(await rollout.generate(transcript.token_ids))
    first = transcript.sample(rollout, prompt, metadata={"part": "first"})
    transcript.add([{"role": "user", "content": question}])
    transcript.append(await rollout.generate(transcript.token_ids, max_new_tokens=4))
    return [first, transcript.sample(rollout, prompt, metadata={"part": "second"})]

async def plain(rollout, prompt):
    return rollout.sample(prompt, [await rollout.generate(prompt.token_ids)])

async def nothing(rollout, prompt):
    return []

async def rubbish(rollout, prompt):
    return {"text": "4"}

async def exits(rollout, prompt):
    raise SystemExit(3)

def not_async(rollout, prompt):
    return []
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ways.py"
    path.write_text(FILE)
    return path


def run(workflow, one, prompt):
    return asyncio.run(execute(workflow, one, prompt, 60.0))


def test_one_rollout_may_make_several_samples_that_count_once(chatml, file):
    workflow = FunctionWorkflow(function=f"{file}:twice", settings={"question": "really?"})
    one = rollout(chatml, ["4", "yes, of course"])
    first, second = run(workflow, one, chat(chatml, "2+2?"))
    assert (first.id, second.id) == ("7/0", "7/0.1") and first.rollout_id == second.rollout_id == "7/0"
    assert [text for text, trained in coloured(chatml, second) if trained] == ["4<|im_end|>", "yes,"]
    assert "really?" in chatml.decode(second.token_ids)


def test_the_return_value_of_a_function_is_validated(chatml, file):
    errors = {
        "nothing": "workflow FunctionWorkflow: must return at least one sample",
        "rubbish": f"{file}:rubbish must return a Sample or a list of them, got {{'text': '4'}}",
        "exits": "SystemExit: 3",
    }
    for name, error in errors.items():
        (sample,) = run(FunctionWorkflow(function=f"{file}:{name}"), rollout(chatml, []), chat(chatml, "?"))
        assert sample.error == error


def test_the_samples_of_a_workflow_are_read_only_and_of_the_right_type(chatml, file):
    (sample,) = run(FunctionWorkflow(function=f"{file}:plain"), rollout(chatml, ["4"]), chat(chatml, "2+2?"))
    for array in (sample.token_ids, sample.loss_mask, sample.rollout_logprobs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0

    class Texts(Workflow):
        kind: Literal["texts"] = "texts"

        async def run(self, rollout, prompt):
            sample = rollout.sample(prompt, [await rollout.generate(prompt.token_ids)])
            return sample if self.bare else ["4"]

        bare: bool = False

    (sample,) = run(Texts(), rollout(chatml, ["4"]), chat(chatml, "2+2?"))
    assert sample.error == "workflow Texts: must return samples, got one of type str"
    (sample,) = run(Texts(bare=True), rollout(chatml, ["4"]), chat(chatml, "2+2?"))
    assert sample.error == "workflow Texts: must return a list of samples, got one value of type Sample"


def test_a_cancellation_that_the_run_did_not_ask_for_fails_the_rollout(chatml, tmp_path):
    text = "import asyncio\nasync def cancels(rollout, prompt):\n    raise asyncio.CancelledError('gone')\n"
    (tmp_path / "cancels.py").write_text(text)
    workflow = FunctionWorkflow(function=f"{tmp_path}/cancels.py:cancels")
    (sample,) = run(workflow, rollout(chatml, ["4"]), chat(chatml, "2+2?"))
    assert sample.error == "CancelledError: gone"


CHANGES = [
    ("text=3", "text of sample 7/0 must be a string, got 3"),
    ("text=None", "text of sample 7/0 must be a string, got None"),
    ("metadata=['a']", "metadata of sample 7/0 must be a mapping, got ['a']"),
    (
        "loss_mask=np.ones(len(prompt.token_ids) + 2, np.bool_)",
        "loss_mask of sample 7/0 contains the first token, which has no log-probability; set loss_mask[0] to False",
    ),
    ("token_ids=[5] * (len(prompt.token_ids) + 2)", "token_ids of sample 7/0 must be a NumPy array, got [5, 5, 5"),
    ("token_ids=np.full(len(prompt.token_ids) + 2, -1)", "token_ids of sample 7/0 must be from 0 to 499, got -1"),
    ("token_ids=np.full(len(prompt.token_ids) + 2, 500)", "token_ids of sample 7/0 must be from 0 to 499, got 500"),
    ("is_baseline=True", "is_baseline of sample 7/0 must be False"),
    ("rollout_id='x'", "rollout_id of sample 7/0 must be '7/0', got 'x'; create samples by rollout.sample"),
    ("group_id=5", "group_id of sample 7/0 must be"),
]


@pytest.mark.parametrize(("change", "mistake"), CHANGES)
def test_a_malformed_sample_fails_its_rollout_with_the_workflow_and_the_field(chatml, tmp_path, change, mistake):
    (tmp_path / "odd.py").write_text(
        "import numpy as np\n"
        "async def odd(rollout, prompt):\n"
        "    completion = await rollout.generate(prompt.token_ids)\n"
        f"    return rollout.sample(prompt, [completion], {change})\n"
    )
    workflow, execution = FunctionWorkflow(function=f"{tmp_path}/odd.py:odd"), rollout(chatml, ["4"])
    execution.vocab_size = 500
    (sample,) = run(workflow, execution, chat(chatml, "2+2?"))
    assert sample.stop_reason is StopReason.ERROR
    assert sample.error.startswith(f"workflow FunctionWorkflow: {mistake}")


@pytest.mark.parametrize(
    ("data", "mistake"),
    [
        ({}, "workflow.function: is required"),
        ({"function": "FILE:never"}, "has no function 'never'"),
        ({"function": "FILE:not_async"}, "must be async: `async def not_async(rollout, prompt)`"),
        ({"function": "FILE:twice", "settings": {"x": 1}}, "got an unexpected keyword argument 'x'"),
        ({"function": "no.such.module:f"}, "No module named 'no'"),
    ],
)
def test_mistakes_in_a_recipe_are_found_before_anything_runs(file, data, mistake):
    data = {key: value.replace("FILE", str(file)) if isinstance(value, str) else value for key, value in data.items()}
    checked = _pick("workflow", {"kind": "function", **data}, find_components(load_plugins()), "workflow")
    assert any(mistake in line for line in checked.mistakes), checked.mistakes


def test_tools_satisfy_the_contract_of_workflows(chatml):
    workflow = Tools(tools=(CalculatorTool(),), workers=1)
    asyncio.run(check_workflow(workflow, prompt=chat(chatml, "6+6?"), codec=chatml))


ENVIRONMENTS = find_components(load_plugins())["environments"]


@pytest.mark.parametrize("kind", sorted(ENVIRONMENTS))
def test_our_environments_satisfy_the_contract_of_workflows(kind, tmp_path):
    (tmp_path / "notes.txt").write_text("The Elbe flows through Dresden.")
    settings = {"corpus": str(tmp_path / "notes.txt")} if kind == "search" else {}
    asyncio.run(check_workflow(EnvironmentWorkflow(environment=ENVIRONMENTS[kind](**settings), max_turns=3)))


def test_functions_satisfy_the_contract_of_workflows(file):
    asyncio.run(check_workflow(FunctionWorkflow(function=f"{file}:plain")))


def test_every_installed_workflow_is_checked_somewhere():
    # agent in tests/agents/test_workflow.py, the plain one in tests/core/rollout/test_contracts.py, the others above;
    # openenv and verifiers are agents whose programs need libraries: tests/agents/test_foreign_environments.py
    assert set(find_components(load_plugins())["workflow"]) == {
        "tools",
        "environment",
        "function",
        "single-turn",
        "agent",
        "openenv",
        "verifiers",
    }
