"""`rl sample`: prompts after templating, and samples with masks and rewards."""

import json

import pytest
from plasmid.testing.fakes import __file__ as fakes
from plasmid_cli.main import app
from plasmid_models.testing import make_empty_model
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.observe.sample_store import read_samples

PARTS = '''
from typing import Literal
import numpy as np
from plasmid import Filter, Reward, Workflow, hookimpl

class Digits(Reward):
    """Share of digits."""
    kind: Literal["digits"] = "digits"
    async def __call__(self, prompt, sample):
        return sum(c.isdigit() for c in sample.text) / max(1, len(sample.text))

class Never(Filter):
    """Drops everything."""
    kind: Literal["never"] = "never"
    def __call__(self, group):
        return False

class Told(Workflow):
    """Two turns with a reply between them that no policy drew."""
    kind: Literal["told"] = "told"
    async def run(self, rollout, prompt):
        first = await rollout.generate(prompt.token_ids)
        reply = rollout.encode(" ok ")
        so_far = np.concatenate([prompt.token_ids, first.token_ids, reply])
        return [rollout.sample(prompt, [first, reply, await rollout.generate(so_far)])]

@hookimpl
def register_components():
    return [Digits, Never, Told]
'''


@pytest.fixture
def rl(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    make_empty_model(tmp_path / "model")
    (tmp_path / "sample_parts.py").write_text(PARTS)
    rows = [{"prompt": f"say {i}", "target": i, "level": "easy"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.toml").write_text(
        f'plugins = ["sample_parts.py", "{fakes}"]\n'
        'model = { path = "model" }\ndata = { path = "rows.jsonl", prompt_as = "chat", shuffle = false }\n'
        'trainer = { kind = "fake" }\nrollout = { kind = "fake" }\nalgorithm = { kind = "fake" }\n'
        'rewards = [{ kind = "digits" }]\n'
        'eval = [{ name = "plain", data = { path = "rows.jsonl@[4:]" } }]\n'
    )

    def rl(*arguments):
        with pytest.raises(SystemExit) as end:
            app(["sample", "recipe.toml", *arguments], make_cluster=lambda _: LocalCluster())
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return rl


def test_dry_sampling_prints_rendered_prompts_without_an_engine(rl):
    code, out, _ = rl("-n", "2", "--dry", "rollout.hang=['']")
    assert code == 0
    assert "prompt rows.jsonl:1, 1 of 2" in out
    assert "<user>say 0<eos><assistant>" in out
    assert "target 0" in out and "level 'easy'" in out
    assert "2 prompts of 8 to 8 tokens" in out


def test_samples_are_shown_with_masks_versions_and_rewards(rl):
    code, out, _ = rl("-n", "2", "--each", "3", "workflow.kind=told", 'filters=[{kind="never"}]')
    assert code == 0
    assert out.count("sample 0/") == 3 and out.count("sample 1/") == 3
    assert "12 given, 8 trained on version 0" in out  # 8 of the prompt, 4 of the reply
    assert "= digits 0." in out
    assert "2 of 2 groups would be dropped by filter never" in out


def test_samples_are_written_and_read_again(rl, tmp_path, capsys):
    assert rl("-n", "3", "--out", "s.parquet")[0] == 0
    groups = read_samples(tmp_path / "s.parquet")
    assert [group.prompt.target for group in groups] == [0, 1, 2]
    assert rl("-n", "3", "--out", "s.jsonl")[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [group.samples[0].reward for group in groups]
    with pytest.raises(SystemExit):
        app(["reward", "recipe.toml", "--data", "s.jsonl", "--json"])
    again = json.loads(capsys.readouterr().out)
    assert [row["reward"] for row in again["samples"]] == [row["reward"] for row in rows]


def test_an_evaluation_set_is_sampled_by_its_name(rl):
    _, out, _ = rl("-n", "9", "--eval", "plain", 'filters=[{kind="never"}]')
    assert out.count("sample ") >= 2 and "rows.jsonl:5" in out and "rows.jsonl:6" in out
    assert "dropped" not in out
    code, _, err = rl("--eval", "nope")
    assert (code, err.strip()) == (2, "error: eval: no evaluation set is named 'nope'; sets are plain")


def test_an_output_that_cannot_be_written_is_refused_before_anything_starts(rl):
    code, _, err = rl("--out", "s.txt")
    assert (code, err.strip()) == (2, "error: --out s.txt: its name must end in .parquet or .jsonl")
    code, _, err = rl("--out", "s.jsonl", "--dry")
    assert (code, err.strip()) == (2, "error: --out s.jsonl: there are no samples with --dry")


RAISING = '''
from typing import Literal
from plasmid import Reward, hookimpl

class Raising(Reward):
    """Always fails."""
    kind: Literal["raising"] = "raising"
    async def __call__(self, prompt, sample):
        raise RuntimeError("no reward today")

@hookimpl
def register_components():
    return [Raising]
'''


def test_the_folder_of_a_failed_sample_is_kept_with_all_that_was_printed(rl, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "raising.py").write_text(RAISING)
    with pytest.raises(SystemExit):
        app(
            ["sample", "recipe.toml", "-n", "1", "rewards=[{kind='raising'}]", "--plugin", "raising.py"],
            make_cluster=lambda _: LocalCluster(),
        )
    (log,) = tmp_path.glob("plasmid-sample-*/logs/driver.log")
    assert "error: " in log.read_text() and "no reward today" in log.read_text()
    assert rl("-n", "1")[0] == 0
    assert len(list(tmp_path.glob("plasmid-sample-*"))) == 1
