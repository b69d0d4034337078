"""Runs that fail while they are running: one line, and all files written before are kept."""

import json
import re
from pathlib import Path

import plasmid.testing.fakes
import pytest
from plasmid.config.load import load_config
from plasmid.errors import PlasmidError
from plasmid.types.runs import Mode, RunResult
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples

PLUGIN = str(Path(__file__).with_name("failing_plugin.py"))
FAKES = plasmid.testing.fakes.__file__
BASE = [
    f"plugins=['{PLUGIN}', '{FAKES}']",
    "trainer={kind='growing'}",
    "rollout={kind='fake'}",
    "algorithm={kind='fake'}",
    "rewards=[{kind='bad', from_group=1000}]",
    "eval=[]",
    "checkpoint={every=1, export=false, keep_last=9}",
    "run.samples_per_prompt=2",
    "sampling.max_new_tokens=4",
]


def train(*overrides: str, **mode) -> RunResult:
    config = load_config("recipe.toml", [*BASE, *overrides])
    return run(config, mode=Mode(**mode), make_cluster=lambda _: LocalCluster())


def failure(*overrides: str, **mode) -> str:
    with pytest.raises(PlasmidError) as caught:
        train(*overrides, **mode)
    return str(caught.value)


SLOW = "make the reward faster, or raise timeout_s"
NUMBER = "must return a finite number or a Score"
REWARDS = [
    (
        "how='raise'",
        "rewards.0 (bad): raised on sample 8/{i}: RuntimeError: answer is not there (failing_plugin.py:27); ",
    ),
    ("how='wait', timeout_s=0.2", f"rewards.0 (bad): no score for sample 8/{{i}} within timeout_s = 0.2; {SLOW}"),
    ("how='block', timeout_s=0.2", f"rewards.0 (bad): no score for sample 8/{{i}} within timeout_s = 0.2; {SLOW}"),
    ("how='none'", f"rewards.0 (bad): {NUMBER}, got None for sample 8/{{i}}"),
    ("how='nan'", f"rewards.0 (bad): {NUMBER}, got nan for sample 8/{{i}}"),
    ("how='text'", f"rewards.0 (bad): {NUMBER}, got '1.0' (str) for sample 8/{{i}}"),
]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(("how", "message"), REWARDS)
def test_a_reward_that_fails_ends_the_run_with_everything_before_kept(folder, how, message, staleness):
    said = failure(f"rewards=[{{kind='bad', from_group=8, {how}}}]", f"run.max_staleness={staleness}")
    said, hang, report = said.partition("; in batch ")
    assert bool(hang) is ("timeout_s" in how)
    assert not hang or re.fullmatch(r"\d, \w+; .*stacks of all processes: run/hangs/batch-\d-\w+(-\d+)?", report)
    named = {message.replace("8/{i}", f"{group}/{i}") for group in range(8, 16) for i in range(2)}
    assert said in named or any(said.startswith(f"{name}the text was '") for name in named if name.endswith("; "))
    trained = [entry.step for entry in read_journal(folder / "run" / "metrics.jsonl")]
    assert trained == [1, 2][: len(trained)]
    assert staleness or trained == [1, 2]
    for step in trained:
        assert len(read_samples(folder / "run" / "samples" / f"batch-{step:06d}.parquet")) == 4
        assert (folder / "run" / "checkpoints" / f"batch-{step:06d}" / "state.json").is_file()


def test_a_group_reward_that_forgets_a_sample_is_named(folder):
    expected = "rewards.0 (short): score_group returned 1 scores for 2 samples"
    assert failure("rewards=[{kind='short'}]") == expected


def test_a_filter_that_raises_is_named_with_the_prompt(folder):
    said = failure("filters=[{kind='bad'}]", "data.shuffle=false", "run.prompts_per_batch=1")
    assert said == "filters.0 (bad): raised on prompt prompts.jsonl:1: ZeroDivisionError: no spread"


def test_filters_that_drop_everything_end_the_run_with_their_names(folder):
    assert failure("filters=[{kind='bad', how='drop'}]", "run.max_dropped=6") == (
        "filters: 6 consecutive groups were dropped (bad: 6); loosen the filters, use other prompts, or raise "
        "run.max_dropped"
    )


def test_rollouts_that_all_fail_end_the_run_with_their_reason(folder):
    assert failure("rollout.fail=['']") == (
        "rollouts: all samples of 4 consecutive prompt groups failed; the last error: asked to fail"
    )


def test_weights_that_arrive_differently_end_the_run(folder):
    said = failure("rollout.corrupt_version=2")
    assert said.startswith("weight sync of version 2: bucket 0 (8 bytes) was sent with checksum 0000000000000002")
    assert "\n" not in said
    assert [entry.step for entry in read_journal(folder / "run" / "metrics.jsonl")] == [1]


def test_a_setting_that_may_not_change_on_resume_is_named_with_both_values(folder):
    train("run.batches=2")
    assert failure("run.batches=3", "run.seed=7", resume=True) == (
        "run.seed: must not change on resume, was 0, got 7; change it back, or start a new run with "
        "checkpoint.start_from=<the checkpoint>"
    )
    assert train("run.batches=3", resume=True).steps == 3


def test_a_torn_checkpoint_is_named_and_the_one_before_is_used(folder, caplog):
    train("run.batches=2")
    newest = folder / "run" / "checkpoints" / "batch-000002"
    state = (newest / "state.json").read_text()
    (newest / "state.json").write_text(state[: len(state) // 2])
    assert train("run.batches=3", resume=True).steps == 3
    assert f"run/checkpoints/batch-000002: damaged: state.json has {len(state) // 2} bytes" in caplog.text
    assert "using the previous checkpoint, run/checkpoints/batch-000001" in caplog.text


def test_data_that_changed_since_the_checkpoint_are_named(folder):
    train("run.batches=2")
    with (folder / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "new", "target": 1}\n')
    said = failure("run.batches=3", resume=True)
    assert "prompts.jsonl" in said
    assert "\n" not in said


def test_a_torn_sample_file_ends_a_replay_with_its_name(folder):
    train("run.batches=1")
    (folder / "run" / "samples" / "batch-000001.parquet").write_bytes(b"PAR1")
    said = failure("run.dir='again'", replay=Path("run"))
    assert said.startswith("run/samples/batch-000001.parquet: ")
    assert "\n" not in said


def test_a_full_disk_while_saving_keeps_the_checkpoint_before_and_the_run_goes_on_from_there(folder, full_disk):
    full_disk(100_000)
    checkpoints = folder / "run" / "checkpoints"
    assert failure() == (
        "run/checkpoints: cannot save batch 3: file too large; run/checkpoints/batch-000002 is intact; "
        "free some space and continue with --resume"
    )
    assert sorted(path.name for path in checkpoints.iterdir()) == ["batch-000001", "batch-000002"]
    assert [entry.step for entry in read_journal(folder / "run" / "metrics.jsonl")] == [1, 2, 3]
    full_disk(10_000_000)
    assert train(resume=True).steps == 4
    assert [entry.step for entry in read_journal(folder / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_disk_full_from_the_start_is_reported_with_nothing_saved(folder, full_disk):
    full_disk(30_000)
    assert failure() == ("run/checkpoints: cannot save batch 1: file too large; nothing was saved before")


def test_a_run_that_could_not_start_leaves_its_folder_free(folder):
    class Refusing(LocalCluster):
        async def start(self, *args, **kwargs):
            raise PlasmidError("no process can be started here")

    config = load_config("recipe.toml", BASE)
    for _ in range(2):
        with pytest.raises(PlasmidError, match="no process can be started here"):
            run(config, make_cluster=lambda _: Refusing())
    assert train().steps == 4
    assert json.loads((folder / "run" / "run.json").read_text())["recipe"] == "recipe"
