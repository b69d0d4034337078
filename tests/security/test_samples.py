"""Texts of a policy that try to end the run get the failure value, and a broken reward is still reported at once."""

import json

import pytest

from tests.forked_rl import run_rl
from tests.security.model_files import make_tokenizer
from tests.security.rl_command import RECIPE

PLUGIN = '''
import asyncio, json, time
from typing import Literal
from plasmid import Reward, Score, hookimpl

DEEP = "[" * 100_000

class Trusting(Reward):
    """Does what the text says, as a reward does that does not expect it."""
    kind: Literal["trusting"] = "trusting"
    async def __call__(self, prompt, sample):
        match sample.text.split()[0]:
            case "huge": return 10**400
            case "float": return float(10**400)
            case "digits": return float(int("9" * 5000))
            case "deep": return float(len(json.loads(DEEP)))
            case "surrogate": return float(len("\\ud800".encode()))
            case "component": return Score(value=1.0, components={"size": 10**400})
            case "names": return Score(value=1.0, components={f"n{i}": 1.0 for i in range(5000)})
            case "terminal": return Score(value=1.0, components={"\\x1b[2J": 1.0})
            case "sum": return 1.7e308
            case "hang": time.sleep(1000)
            case "block": time.sleep(0.2)
            case "thread": await asyncio.to_thread(time.sleep, 0.3)
            case "key": return {}["answer"]
            case "nan": return float("nan")
            case "text": return "1.0"
            case "part": return Score(value=1.0, components={"part": float("nan")})
        return 1.0

@hookimpl
def register_components():
    return [Trusting]
'''
LIMITS = ["huge", "float", "digits", "deep", "surrogate", "component", "names", "terminal", "sum"]
"""Texts that exceed Python's limits on numbers, nesting and characters."""


@pytest.fixture
def score(tmp_path):
    """Return a function that runs `rl reward` in a separate process on one prompt with all texts.

    It returns the exit code and the scored samples by id.
    """
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "trusting.py").write_text(PLUGIN)

    def score(rewards, *texts, target=None, each_alone=False, columns=None):
        groups = [[text] for text in texts] if each_alone else [list(texts)]
        rows = [{"prompt": "p", "target": target, "response": group, **(columns or {})} for group in groups]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = ["reward", "recipe.toml", "--data", "rows.jsonl", "--plugin", "trusting.py", "--json"]
        done = run_rl(*given, f"rewards=[{rewards}]", cwd=tmp_path)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)["samples"]

    return score


def test_a_text_beyond_the_limits_of_python_gets_the_failure_value(score):
    code, samples = score('{kind="trusting", weight=10.0}', *LIMITS, "well")
    assert code == 0
    assert [s["reward"] for s in samples] == [0.0] * len(LIMITS) + [10.0]
    assert all(s["error"] for s in samples[:-1]) and not samples[-1]["error"]


def test_the_same_within_other_rewards_and_in_workers(score):
    inner = '{kind="trusting"}'
    isolated = f'{{kind="isolated", failure_value=-2.0, workers=1, reward={inner}}}'
    nested = f'{{kind="sum", rewards=[{{kind="product", rewards=[{inner}, {inner}]}}]}}'
    texts = [text for text in LIMITS if text != "sum"]
    code, samples = score(f"{isolated}, {nested}", *texts, "sum", "well")
    assert code == 0
    assert [s["components"]["isolated"] for s in samples] == [-2.0] * len(texts) + [1.7e308, 1.0]
    assert [s["components"]["sum"] for s in samples] == [0.0] * len(texts) + [0.0, 1.0]


def test_a_broken_reward_is_reported_at_once(score):
    code, samples = score('{kind="trusting"}', "key", "nan", "text", "part", "well", each_alone=True)
    assert code == 1
    assert [s["reward"] for s in samples] == [None, None, None, None, 1.0]
    told = [
        "raised on sample rows.jsonl:1/0: KeyError",
        "must return a finite number or a Score, got nan",
        "got '1.0' (str)",
        "component 'part' must be a finite number, got nan",
    ]
    for sample, expected in zip(samples, told, strict=False):
        assert expected in sample["error"] and sample["error"].startswith("rewards.0 (trusting): ")


@pytest.mark.long
def test_a_text_on_which_a_checker_raises_gets_the_failure_value(score):
    row = {"instruction_id_list": ["format:quote_unquote"], "kwargs": [{}]}
    code, samples = score('{kind="ifbench", workers=1}', "(123)", "well", columns=row)
    assert code == 0
    assert [s["reward"] for s in samples] == [0.0, 1.0]
    assert "IndexError" in samples[0]["error"]


def test_a_program_that_returns_a_number_too_large_for_a_float_fails_its_test(score):
    program = "```python\ndef f():\n    return 10**400\n```"
    right = "```python\ndef f():\n    return 0.5\n```"
    cases = [{"call": "f", "args": [], "expected": 0.5}]
    code, samples = score('{kind="code", workers=1}', program, right, target=cases)
    assert code == 0
    assert [s["reward"] for s in samples] == [0.0, 1.0]


def test_hanging_samples_do_not_use_up_the_time_of_waiting_samples(score):
    """With 8 hanging samples, a regression makes the last ones wait longer than timeout_s, which ends the run."""
    programs = [f"```python\nimport time\ntime.sleep(60 + {i})\n```" for i in range(8)]
    settings = 'kind="code", workers=1, timeout_s=5.0, sandbox.wall_s=1.0'
    cases = [{"input": "", "output": "1"}]
    code, samples = score(f"{{{settings}}}", *programs, "```python\nprint(1)\n```", target=cases)
    assert code == 0
    assert [s["reward"] for s in samples] == [0.0] * 8 + [1.0]


def test_samples_that_wait_for_the_loop_or_for_a_thread_have_their_whole_time(score):
    code, samples = score('{kind="trusting", timeout_s=1.0}', *["block"] * 8, *["thread"] * 40)
    assert code == 0
    assert {s["reward"] for s in samples} == {1.0}


def test_the_tests_of_one_program_that_hangs_in_each_end_with_its_time(score):
    program = "```python\nimport time\ntime.sleep(600)\n```"
    cases = [{"input": str(i), "output": "1"} for i in range(20)]
    settings = 'kind="code", score="fraction", timeout_s=1.0, workers=1, sandbox.wall_s=0.4'
    code, samples = score(f"{{{settings}}}", program, target=cases)
    assert (code, samples[0]["reward"]) == (0, 0.0)


TEXT_REWARDS = ", ".join(
    [
        '{kind="number"}',
        '{kind="exact-match", where="anywhere", ignore_case=true}',
        '{kind="dapo", window=300000}',
        '{kind="f1"}',
        '{kind="gpqa"}',
        '{kind="format", tags=["think", "answer"]}',
        '{kind="boxed", reward={kind="number"}}',
        r"""{kind="regex", pattern='(\w+\s?)+=', match_timeout_s=0.2}""",
        '{kind="distinct"}',
        '{kind="length", max_tokens=8, slope_tokens=4}',
    ]
)
HUGE = [
    "9" * 300_000,
    "1," * 100_000,
    "\\boxed{" * 30_000,
    "\\boxed" * 30_000,
    "{" * 200_000 + "\\boxed{1}",
    "\\text{" * 30_000 + "}" * 30_000,
    "answer: " * 30_000,
    "\\frac" * 30_000,
    "(A) " * 50_000,
    "The answer is " * 15_000,
    "<think>" * 30_000,
    " " * 300_000,
    "\u0663\u00b2\x00" * 1000,
    "1e999999999",
    "nan inf -inf",
]


@pytest.mark.long
def test_no_text_makes_a_reward_of_texts_slow_or_raise(score):
    code, samples = score(TEXT_REWARDS, *HUGE, target=3)
    assert code == 0
    assert all(abs(s["reward"]) < 100 for s in samples)
    slow = {name: seconds for name, seconds in samples[0]["seconds"].items() if seconds > 10}
    assert not slow


SHOW = ["sample", "recipe.toml", "-n", "1", "--dry", 'rewards=[{kind="number"}]']


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([{"role": "user", "content": "a"}] * 300_000, "has 300000 messages, more than the limit of 10000"),
        ([{"role": "user", "content": "a" * 1000}] * 5000, "has more than 4000000 characters"),
        ("a" * 5_000_000, "has more than 4000000 characters"),
    ],
    ids=["messages", "characters", "text"],
)
def test_a_row_of_millions_of_messages_is_refused_before_it_is_rendered(tmp_path, prompt, reason):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "target": 2}, {"prompt": prompt, "target": 2}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_tokenizer(tmp_path / "model")
    done = run_rl(*SHOW, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"error: rows.jsonl:2: 'prompt' {reason}; remove the row\n"


def test_a_prompt_of_very_many_tokens_is_shown_in_part(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    row = {"prompt": "first " + "a1" * 100_000 + " last", "target": "2" * 200_000}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    make_tokenizer(tmp_path / "model")
    done = run_rl(*SHOW, cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    assert len(done.stdout) < 200_000
    assert "first" in done.stdout and "a1 last" in " ".join(done.stdout.replace("\u2502", "").split())
    assert "tokens are not shown ..." in done.stdout and "characters are not shown ..." in done.stdout


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [{"role": "user", "content": "a"}] * 300_000, "response": "1"}, "'prompt' has 300000 messages"),
        ({"prompt": "a" * 5_000_000, "response": "1"}, "'prompt' has more than 4000000 characters"),
        ({"response": ["1"] * 300_000}, "'response' has 300000 texts"),
        ({"response": ["1", "a" * 5_000_000]}, "'response' has more than 4000000 characters"),
    ],
    ids=["messages", "prompt", "responses", "response"],
)
def test_a_row_of_millions_of_characters_is_refused_before_it_is_scored(tmp_path, row, reason):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"response": "1"}) + "\n" + json.dumps(row) + "\n")
    given = ["reward", "--data", "rows.jsonl", 'rewards=[{kind="number"}]']
    (tmp_path / "recipe.toml").write_text(RECIPE)
    given.insert(1, "recipe.toml")
    done = run_rl(*given, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: rows.jsonl:2: {reason}")
    assert done.stderr.endswith("; remove the row\n") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("chat", "completion", "reason"),
    [
        ([("user", "a"), ("assistant", "b")] * 5000, None, "5000 turns to train on and 10000 messages, whose product"),
        ([("user", "a" * 900), ("assistant", "b")] * 490, None, "490 turns to train on and 4"),
        ([("user", "a")], "b" * 5_000_000, "the completion has more than 4000000 characters"),
    ],
    ids=["turns", "characters", "completion"],
)
def test_a_demonstration_that_would_be_rendered_for_minutes_is_refused(tmp_path, chat, completion, reason):
    row = {"messages": [{"role": role, "content": content} for role, content in chat]}
    settings = 'kind = "demonstrations"\npath = "rows.jsonl"'
    if completion is not None:
        row["completion"], settings = completion, settings + '\ncompletion_key = "completion"'
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    recipe = RECIPE.replace('path = "rows.jsonl"', settings).replace('[rollout]\nkind = "hf"', "")
    (tmp_path / "recipe.toml").write_text(recipe.replace("grpo", "sft"))
    make_tokenizer(tmp_path / "model")
    given = ["sample", "recipe.toml", "-n", "1", "--dry"]
    done = run_rl(*given, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: rows.jsonl:1: ") and done.stderr.count("\n") == 1
    assert reason in done.stderr
