"""`rl reward`: scores given texts and stored samples without a model."""

import json
import subprocess
import sys

import pytest
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid.types import PromptGroup, Score
from plasmid_cli.display.scores import histogram
from plasmid_cli.main import app
from plasmid_models.testing import make_tiny_tokenizer
from plasmid_runtime.observe.sample_store import write_samples

RECIPE = """
[model]
path = "model"
[data]
path = "nowhere.jsonl"
[trainer]
kind = "fsdp"
[rollout]
kind = "hf"
[algorithm]
kind = "grpo"
[[rewards]]
kind = "exact-match"
[[rewards]]
kind = "length"
max_tokens = 8
slope_tokens = 4
weight = 0.5
[[eval]]
name = "strict"
data = { path = "nowhere.jsonl" }
rewards = [{ kind = "regex", pattern = "a" }]
"""
RAISING = '''
from typing import Literal
from plasmid import Reward, hookimpl

class Picky(Reward):
    """Raises on what it does not like."""
    kind: Literal["picky"] = "picky"
    async def __call__(self, prompt, sample):
        return {"a": 1.0}[sample.text]

@hookimpl
def register_components():
    return [Picky]
'''
ROWS = [
    {"prompt": "1+1=", "response": "2", "target": "2"},
    {"prompt": "1+2=", "response": ["3", "the sum is three"], "target": "3"},
]


@pytest.fixture
def rl(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    make_tiny_tokenizer(tmp_path / "model")

    def rl(*arguments):
        with pytest.raises(SystemExit) as end:
            app(["reward", "recipe.toml", *arguments])
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return rl


def found(out):
    answer = json.loads(out)
    return answer["summary"], {row["id"]: row for row in answer["samples"]}


def test_given_texts_get_the_recipes_rewards_by_component(rl):
    code, out, _ = rl("--data", "rows.jsonl", "--json")
    summary, rows = found(out)
    assert code == 0
    assert list(rows) == ["rows.jsonl:1/0", "rows.jsonl:2/0", "rows.jsonl:2/1"]
    assert rows["rows.jsonl:2/0"]["components"] == {"exact-match": 1.0, "length": 0.0}
    assert rows["rows.jsonl:2/1"]["components"] == {"exact-match": 0.0, "length": -1.0}  # 16 tokens, not 16 words
    assert rows["rows.jsonl:2/1"]["reward"] == -0.5
    assert summary["reward"] == {"mean": 0.5, "std": pytest.approx(0.7071, abs=1e-4), "min": -0.5, "max": 1.0}
    assert summary["histogram"] == [[-0.5, -0.5, 1], [1.0, 1.0, 2]]
    assert set(summary["seconds"]) == {"exact-match", "length"}


def test_the_table_shows_rows_figures_and_a_histogram(rl):
    code, out, _ = rl("--data", "rows.jsonl", "--count", "2")
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert lines[0] == ["sample", "reward", "exact-match", "length", "ms", "response", "error"]
    assert lines[1][:4] == ["rows.jsonl:1/0", "1", "1", "0"]
    assert "3 samples (1 not shown), 0 with an error" in out
    assert [line[0] for line in lines if line[-1].isdigit() and "#" in line[1]] == ["-0.5", "1"]


def test_keys_reach_into_objects_and_other_columns(rl, tmp_path):
    row = {"ask": "1+1=", "out": {"text": "2"}, "answer": "2"}
    (tmp_path / "other.jsonl").write_text(json.dumps(row) + "\n")
    keys = ["--prompt-key", "ask", "--response-key", "out.text", "--target-key", "answer"]
    _, rows = found(rl("--data", "other.jsonl", "--json", *keys)[1])
    assert rows["other.jsonl:1/0"]["reward"] == 1.0
    code, _, err = rl("--data", "other.jsonl")
    assert code == 2
    assert err.strip() == (
        "error: other.jsonl:1: no response under 'response'; the row has: ask, out, answer; set --response-key"
    )


def test_a_reward_that_raises_costs_its_row_and_the_exit_code(rl, tmp_path):
    (tmp_path / "picky.py").write_text(RAISING)
    rows = [{"prompt": "p", "response": text, "target": "a"} for text in ("a", "b")]
    (tmp_path / "ab.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = rl("--data", "ab.jsonl", "--plugin", "picky.py", 'rewards=[{kind="picky"}]', "--json")
    summary, rows = found(out)
    assert code == 1
    assert summary["raised"] == 1
    assert rows["ab.jsonl:1/0"]["reward"] == 1.0
    assert rows["ab.jsonl:2/0"]["reward"] is None
    assert rows["ab.jsonl:2/0"]["error"].startswith("rewards.0 (picky): raised on sample ab.jsonl:2/0: KeyError: 'b'")


def test_stored_samples_are_scored_again_and_compared(rl, tmp_path):
    prompt = make_prompt("1+1=", target="2")
    samples = [
        make_sample(text, id=f"0/{i}", score=Score(value=0.0, components={"exact-match": 0.0}))
        for i, text in enumerate(("2", "3"))
    ]
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    write_samples(
        folder / "samples" / "batch-000001.parquet", [PromptGroup(id=0, prompt=prompt, samples=samples)], step=1
    )
    for data in ("run", "run/samples/batch-000001.parquet"):
        summary, rows = found(rl("--data", data, "--json")[1])
        assert summary["changed"] == 1
        assert (rows["0/0"]["before"], rows["0/0"]["reward"]) == (0.0, 1.0)
    assert "1 scored differently from the stored reward" in rl("--data", "run")[1]


def test_an_evaluation_sets_own_rewards_can_be_asked(rl):
    summary, _ = found(rl("--data", "rows.jsonl", "--eval", "strict", "--json")[1])
    assert list(summary["components"]) == ["regex"]
    code, _, err = rl("--data", "rows.jsonl", "--eval", "nope")
    assert (code, err.strip()) == (2, "error: --eval: no evaluation set is named 'nope'; sets are strict")


def test_no_model_library_is_imported(rl, tmp_path):
    script = (
        "import sys\n"
        "from plasmid_cli.main import app\n"
        "try:\n    app(['reward', 'recipe.toml', '--data', 'rows.jsonl'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_histogram_has_few_bins_and_loses_nothing():
    values = [i / 100 for i in range(100)]
    bins = histogram(values)
    assert len(bins) == 10 and sum(count for *_, count in bins) == 100
    assert (bins[0][0], bins[-1][1]) == (0.0, 0.99)
    assert histogram([]) == []
