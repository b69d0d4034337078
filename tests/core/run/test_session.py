"""A session, step by step, is the same run as `plasmid.train`."""

import json
from dataclasses import replace

import numpy as np
import pytest
from plasmid.errors import DeadlineError, EngineError, PlasmidError
from plasmid.types.runs import Mode
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import Session, run
from plasmid_runtime.observe.sample_store import read_samples

NOT_COMPARED = ("perf/", "memory/", "sync/transfer_s")


def open_session(runner, changes=None, **mode):
    return Session(runner.config(changes), mode=Mode(**mode), make_cluster=lambda _: LocalCluster())


def train_one(session) -> bool:
    groups = session.sample()
    if groups:
        session.score(groups)
        session.train(groups)
        session.publish()
    return bool(groups)


def repeatable(metrics):
    return [{k: v for k, v in batch.items() if not k.startswith(NOT_COMPARED)} for batch in metrics]


def test_four_calls_are_the_run_that_train_makes(make_runner):
    changes = {"run": {"sync_every": 2, "batches": 5}, "checkpoint": {"every": 2}}
    whole, by_calls = make_runner("whole"), make_runner("calls")
    whole.run(changes)
    with open_session(by_calls, changes) as session:
        while groups := session.sample():
            session.score(groups)
            session.train(groups)
            if session.batch % 2 == 0 or session.batch == 5:
                session.publish()
        assert (session.batch, session.version) == (5, 3)
    assert repeatable(by_calls.metrics()) == repeatable(whole.metrics())
    saved = [sorted(p.name for p in (r.folder / "run" / "checkpoints").iterdir()) for r in (whole, by_calls)]
    assert saved[0] == saved[1] and len(saved[0]) > 1


@pytest.mark.parametrize("bound", [0, 2])
def test_sampling_keeps_the_bound_on_staleness(runner, bound):
    with open_session(runner, {"run": {"max_staleness": bound, "batches": 4}}) as session:
        while train_one(session):
            pass
    assert len(runner.metrics()) == 4
    assert max(m["rollout/staleness_max"] for m in runner.metrics()) <= bound


def test_weights_may_be_published_sooner_than_due(runner):
    with open_session(runner, {"run": {"sync_every": 4, "batches": 3}}) as session:
        while train_one(session):
            assert session.version == session.batch
    assert [m["version"] for m in runner.metrics()] == [1, 2, 3]


def test_rewards_may_be_changed_and_groups_left_out(runner):
    with open_session(runner, {"run": {"batches": 1}}) as session:
        groups = session.sample()
        assert groups[0].whole.get().samples[0].text.isdigit()
        better = [replace(group, rewards=np.arange(3.0)) for group in groups[1:]]
        session.score(better)
        assert session.train(better)["train/loss"] == session.publish()["train/loss"]
    stored = read_samples(runner.folder / "run" / "samples" / "batch-000001.parquet")
    assert {group.id for group in stored} == {group.id for group in groups}
    assert runner.metrics()[0]["rollout/dropped/left-out"] == 1


def test_a_session_resumes(runner):
    with open_session(runner, {"run": {"batches": 2}}) as session:
        assert train_one(session)
        first = session.run_dir
    with open_session(runner, {"run": {"batches": 4}}, resume=True) as session:
        assert (session.batch, session.run_dir) == (1, first)
        while train_one(session):
            pass
    assert [m["version"] for m in runner.metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize(("sync_every", "bound"), [(1, 0), (2, 0), (1, 2), (2, 2)])
def test_groups_that_were_sampled_but_not_trained_on_are_not_lost(runner, scored, sync_every, bound):
    changes = {"run": {"batches": 4, "sync_every": sync_every, "max_staleness": bound}}
    with open_session(runner, changes) as session:
        groups = session.sample()
        session.score(groups)
        session.train(groups)
        if session.batch % sync_every == 0:
            session.publish()
        left = session.sample()
        if scored:
            session.score(left)
    texts = {group.id: [s.text for s in group.whole.get().samples] for group in left}
    state = json.loads((runner.folder / "run/checkpoints/batch-000001/state.json").read_text())
    assert not bound or state["producer"]["takes"] == 1 % sync_every
    with open_session(runner, changes, resume=True) as session:
        assert (session.batch, session.version) == (1, 1)
        while groups := session.sample():
            session.score(groups)
            session.train(groups)
            if session.batch % sync_every == 0:
                session.publish()
    files = sorted((runner.folder / "run" / "samples").glob("batch-*.parquet"))
    trained = [group for path in files for group in read_samples(path)]
    assert len({group.id for group in trained}) == len(trained) == 16
    resumed = {group.id: [s.text for s in group.samples] for group in trained}
    assert {id_: resumed[id_] for id_ in texts} == texts


@pytest.mark.parametrize("bound", [0, 2])
def test_a_batch_with_reused_groups_is_drawn_again(runner, bound):
    changes = {
        "run": {"batches": 6, "max_staleness": bound},
        "reuse": {"groups_per_batch": 2, "max_uses": 2},
        "algorithm": {"kind": "grpo", "old_policy": "rollout"},
    }
    with open_session(runner, changes) as session:
        assert train_one(session) and train_one(session)
        left = [(group.id, group.uses) for group in session.sample()]
    with open_session(runner, changes, resume=True) as session:
        assert [(group.id, group.uses) for group in session.sample()] == left
        assert sorted(uses for _, uses in left) == [0, 0, 0, 0, 1, 1]


HALVES = """
from dataclasses import replace
from plasmid import hookimpl

@hookimpl
def batch_ready(groups):
    return tuple(replace(group, rewards=group.rewards / 2) for group in groups)
"""


def test_hooks_see_groups_that_a_session_gave_back_as_they_were_sampled(runner):
    (runner.folder / "halves.py").write_text(HALVES)
    plugins = [*runner.config().model_dump(mode="json")["plugins"], str(runner.folder / "halves.py")]
    changes = {"plugins": plugins, "run": {"batches": 2, "max_staleness": 1}}
    with open_session(runner, changes) as session:
        assert train_one(session)
        given = {group.id: group.rewards.tolist() for group in session.sample()}
    with open_session(runner, changes, resume=True) as session:
        assert {group.id: group.rewards.tolist() for group in session.sample()} == given
        assert any(any(rewards) for rewards in given.values())


def test_calls_in_a_wrong_order_are_refused(runner):
    with open_session(runner) as session:
        with pytest.raises(PlasmidError, match=r"session\.score: .*call sample first"):
            session.score([])
        groups = session.sample()
        with pytest.raises(PlasmidError, match=r"session\.sample: .*have not been trained on"):
            session.sample()
        with pytest.raises(PlasmidError, match=r"session\.train: no groups have been scored"):
            session.train(groups)
        with pytest.raises(PlasmidError, match=r"session\.score: must get at least one group"):
            session.score([])
        with pytest.raises(PlasmidError, match=r"session\.score: the program changed lengths of group 0"):
            session.score([replace(groups[0], lengths=groups[0].lengths + 1)])
        session.score(groups)
        with pytest.raises(PlasmidError, match=r"session\.publish: no batch has been trained"):
            session.publish()
        with pytest.raises(PlasmidError, match=r"session\.train: must get the groups that were scored"):
            session.train(groups[:1])
        session.train(groups)
        with pytest.raises(PlasmidError, match=r"session\.sample: batch 1 has been trained but not published"):
            session.sample()
        session.publish()


def test_a_failure_ends_the_session_and_saves_nothing(runner):
    fail = {"rollout": {"fail": [str(i) for i in range(10)]}}
    with pytest.raises(EngineError, match="asked to fail"), open_session(runner, fail) as session:
        with pytest.raises(EngineError):
            session.sample()
        with pytest.raises(PlasmidError, match="an earlier call failed"):
            session.sample()
        raise EngineError("asked to fail")
    assert not list((runner.folder / "run").glob("checkpoints/*"))
    with open_session(runner, {"run": {"dir": str(runner.folder / "again")}}) as session:  # nothing is left locked
        assert train_one(session)


def test_a_run_shows_progress_on_standard_error(runner, capsys):
    config = runner.config({"run": {"batches": 2}})
    run(config, make_cluster=lambda _: LocalCluster(), progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert "starting" in lines[0]
    assert [line.split("  ")[0] for line in lines if "reward" in line] == ["batch 1/2", "batch 2/2"]


def test_a_call_that_hangs_is_named_with_its_phase_and_report(runner):
    changes = {"trainer": {"seconds": 3600}, "run": {"train_timeout_s": 1}}
    explained = r"^trainer\.train \(run\.train_timeout_s\): no end within 1\.25 s; in batch 1, train; stacks of all "
    with pytest.raises(DeadlineError, match=explained), open_session(runner, changes) as session:
        train_one(session)
    (report,) = (runner.folder / "run/hangs").glob("*/report.txt")
    assert "trainer.train" in report.read_text()
