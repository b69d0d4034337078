"""examples/http-agent: its recipe resolves and trains a model behind the agent, and the commands of its README work."""

import shlex
from pathlib import Path

import pyarrow.parquet
from plasmid import load_config
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run

from tests.forked_rl import run_rl

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "http-agent"
RECIPE = "recipes/smollm2-sums-agent-cpu.toml"
SMALL = ("run.batches=1", "run.prompts_per_batch=2", "run.samples_per_prompt=2", "eval=[]")
LESS = ("checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.export=false")
# one precision, because the threads of a local cluster share torch's default dtype
PLAIN = ("trainer.dtype=float32", "rollout.dtype=float32")


def test_the_agent_answers_and_is_trained(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = (f"model.path={tiny_model}", f"run.dir={tmp_path / 'run'}", *SMALL, *LESS, *PLAIN)
    assert run(load_config(RECIPE, settings), make_cluster=lambda _: LocalCluster()).steps == 1
    (path,) = (tmp_path / "run" / "samples").glob("batch-*.parquet")
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert len({row["rollout_id"] for row in rows}) == 4
    assert [row["error"] for row in rows] == [None] * len(rows)
    # a number that the agent found, or after two tries the last message of the model
    asked_once = [row for row in rows if row["text"].isdigit()]
    assert all(any(row["loss_mask"]) for row in rows)
    assert all('"turns": 1' in row["metadata"] or '"turns": 2' in row["metadata"] for row in asked_once)
    assert all('"turns": 2' in row["metadata"] for row in rows if not row["text"].isdigit())


def test_the_commands_of_its_readme_work(tiny_model):
    block = (EXAMPLE / "README.md").read_text().split("```bash\n")[1].split("```")[0]
    for line in block.splitlines():
        command = shlex.split(line)
        assert command[0] == "rl"
        model = [f"model.path={tiny_model}"] if command[1] == "train" else []
        done = run_rl(*command[1:], *model, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
