"""Evaluation during training, on the rollout engine or its own: what is recorded, and what a resume repeats."""

import asyncio
import json
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
from plasmid.config.load import merge, resolve
from plasmid.errors import ConfigError, DataError, EngineLostError, RewardError
from plasmid.plugins.hookspecs import hookimpl
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid.testing.virtual_time import run_virtual
from plasmid.types import PromptGroup, SamplingParams, Score, StopReason
from plasmid.types.shared_groups import LocalStore
from plasmid_runtime.cluster.layout import Layout, check_gpus
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.evaluation.evaluator import Evaluator, Sampler, mean_over_sets, summarize
from plasmid_runtime.evaluation.sets import EvaluationSet
from plasmid_runtime.lifecycle.evaluate import evaluate
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples
from pydantic import PrivateAttr

SLOW = "eval-few-0-000000"
"""The first rollout of the evaluation before the first batch."""
FIFTH = "16/0"
"""A rollout of the fifth batch, which is not trained on before the run stops."""


def few(runner, rows="0:3", **fields):
    return {"name": "few", "data": {"path": f"{runner.folder}/prompts.jsonl@[{rows}]"}, **fields}


def journal(runner):
    return [(e.name, e.step, e.metrics) for e in read_journal(runner.folder / "run" / "evaluations.jsonl")]


def made(runner):
    return sorted((name, step) for name, step, _ in journal(runner))


class Heard:
    def __init__(self):
        self.events = []

    @hookimpl
    def batch_finished(self, batch):
        self.events.append(f"batch {batch}")

    @hookimpl
    def evaluation_finished(self, batch, name):
        self.events.append(f"{name} {batch}")

    @hookimpl
    def evaluation_advanced(self, batch, name, done, total):
        self.events.append(f"{name} {batch}: {done}/{total}")


def test_a_floating_evaluation_never_delays_training_and_is_awaited_at_the_end(runner):
    heard = Heard()
    changes = {
        "run": {"max_staleness": 1, "rollout_timeout_s": 4.0},
        "rollout": {"hang": [SLOW]},
        "eval": [few(runner, mode="floating", every=4)],
    }
    result = runner.run(changes, observers=(heard,))
    assert [step for step, _ in result.evaluations["few"]] == [0, 4, 8]
    assert heard.events.index("batch 1") < heard.events.index("few 0")
    assert "few 0: 0/3" in heard.events and "few 8: 3/3" in heard.events


def test_floating_samples_record_the_version_that_sampled_them(runner):
    changes = {
        "run": {"max_staleness": 1},
        "rollout": {"max_delay_s": 0.05},
        "trainer": {"seconds": 0.02},
        "eval": [few(runner, "0:30", mode="floating", concurrency=1, at_end=False)],
    }
    runner.run(changes)
    ((_, _, metrics),) = journal(runner)
    groups = read_samples(runner.folder / "run" / "samples" / "eval-few-000000.parquet")
    versions = [sample.oldest_version for group in groups for sample in group.samples]
    assert min(versions) == metrics["eval/few/version_min"] < metrics["eval/few/version_max"] == max(versions)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_dedicated_engine_evaluates_the_version_of_the_batch(runner, staleness):
    heard = Heard()
    changes = {
        "run": {"max_staleness": staleness, "batches": 6, "rollout_timeout_s": 2.0},
        "rollout": {"hang": [SLOW]},
        "placement": {"eval_ranks": 1},
        "eval": [
            few(runner, mode="engine", every=2),
            {**few(runner, "3:5", mode="engine", every=3), "name": "other"},
        ],
    }
    runner.run(changes, observers=(heard,))
    assert made(runner) == [
        *(("few", step) for step in (0, 2, 4, 6)),
        *(("mean", step) for step in (0, 6)),
        *(("other", step) for step in (0, 3, 6)),
    ]
    for name, step, metrics in journal(runner):
        if name != "mean":
            versions = metrics[f"eval/{name}/version_min"], metrics[f"eval/{name}/version_max"]
            assert versions == (step, step)
    assert heard.events.index("batch 1") < heard.events.index("few 0")


def test_a_wrong_sum_of_weights_of_the_evaluation_engine_ends_the_run(runner):
    changes = {
        "rollout": {"corrupt_version": 2},
        "run": {"sync_every": 1, "batches": 4},
        "placement": {"eval_ranks": 1},
        "eval": [few(runner, mode="engine", every=2)],
    }
    with pytest.raises(Exception, match="checksum"):
        runner.run(changes)


class Restarting(FakeEngine):
    """Loses its weights at the first request of an evaluation, and answers no such request until it has them again."""

    def __init__(self):
        super().__init__(FakeEngineConfig(max_delay_s=0.0))
        self.lost, self.received, self.failures = False, [], 0

    def needs_weights(self):
        return self.lost

    async def generate(self, request):
        if request.session_id.startswith("eval-few-0"):
            self.lost = self.lost or len(self.received) == 1
            while self.lost:
                await asyncio.sleep(0.01)
        return await super().generate(request)

    async def receive(self, plan, version):
        if self.lost and not self.failures:
            self.failures += 1
            raise EngineLostError("the server died again")
        self.received.append(version)
        self.lost = False
        return await super().receive(plan, version)


class RestartingConfig(FakeEngineConfig):
    _engines: list[Restarting] = PrivateAttr(default_factory=list)

    async def build(self, context):
        self._engines.append(Restarting())
        return self._engines[-1]


@pytest.mark.parametrize("mode", ["block", "engine"])
def test_a_server_that_restarts_during_an_evaluation_gets_the_weights(runner, monkeypatch, mode):
    monkeypatch.setattr("plasmid_runtime.loop.policy_sync.POLL_S", 0.01)
    monkeypatch.setattr("plasmid_runtime.loop.device_scheduler.RETRY_S", 0.01)
    rollout = RestartingConfig()
    changes = {
        "run": {"batches": 1, "rollout_timeout_s": 5.0},
        "placement": {"eval_ranks": int(mode == "engine")},
        "eval": [few(runner, mode=mode)],
    }
    config = runner.config(changes).model_copy(update={"rollout": rollout})
    run(config, make_cluster=lambda _: LocalCluster())
    first = journal(runner)[0]
    assert first[:2] == ("few", 0) and first[2]["eval/few/failed"] == 0
    restarted = [engine for engine in rollout._engines if engine.failures]
    assert [engine.failures for engine in restarted] == [1]
    assert restarted[0].received[0] == 0 and len(restarted[0].received) == 3


class Interrupt:
    """Sends Ctrl-C after a batch."""

    def __init__(self, step):
        self.step = step

    @hookimpl
    def batch_finished(self, batch):
        if batch == self.step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("mode", ["floating", "engine"])
def test_an_interrupted_evaluation_runs_once_after_resume(runner, mode):
    changes = {
        "run": {"max_staleness": int(mode == "floating"), "rollout_timeout_s": 20.0},
        "rollout": {"hang": [SLOW] if mode == "floating" else ["eval-few-4-000000", FIFTH]},
        "trainer": {"seconds": 0.05},
        "placement": {"eval_ranks": int(mode == "engine")},
        "eval": [few(runner, mode=mode, every=4)],
    }
    at = 2 if mode == "floating" else 4
    stopped = runner.run(changes, observers=(Interrupt(at),))
    assert stopped.interrupted
    state = json.loads((stopped.checkpoint / "state.json").read_text())
    assert ["few", at - at % 4] in state["evaluations"]
    assert ("few", at - at % 4) not in made(runner)
    runner.run({**changes, "run": {**changes["run"], "rollout_timeout_s": 2.0}}, resume=True)
    assert made(runner) == [("few", 0), ("few", 4), ("few", 8)]
    if mode == "engine":
        assert {step: metrics["eval/few/version_min"] for _, step, metrics in journal(runner)} == {0: 0, 4: 4, 8: 8}


def test_an_evaluation_that_ended_after_the_checkpoint_is_not_made_again(runner):
    changes = {
        "run": {"max_staleness": 1, "rollout_timeout_s": 1.5},
        "rollout": {"hang": [SLOW]},
        "checkpoint": {"every": 2, "keep_last": 10},
        "eval": [few(runner, mode="floating", at_end=False)],
    }
    runner.run(changes)
    (before,) = journal(runner)
    for step in (4, 6, 8):
        shutil.rmtree(runner.folder / "run" / "checkpoints" / f"batch-{step:06d}")
    runner.run(changes, resume=True)
    assert journal(runner) == [before]


BAD = '''
from typing import Literal
from plasmid import Reward, Workflow, hookimpl

class Bad(Reward):
    """Raises."""
    kind: Literal["bad"] = "bad"
    async def __call__(self, prompt, sample):
        raise KeyError("answer")

class Constant(Reward):
    """Says the same of everything."""
    kind: Literal["constant"] = "constant"
    value: float = 1.0
    async def __call__(self, prompt, sample):
        return self.value

class Twice(Workflow):
    """Two turns."""
    kind: Literal["twice"] = "twice"
    async def run(self, rollout, prompt):
        first = await rollout.generate(prompt.token_ids)
        return [rollout.sample(prompt, [first, await rollout.generate(prompt.token_ids)])]

@hookimpl
def register_components():
    return [Bad, Constant, Twice]
'''


def with_parts(runner, changes):
    (runner.folder / "parts.py").write_text(BAD)
    plugins = runner.config().model_dump(mode="json")["plugins"]
    return {"plugins": [*plugins, str(runner.folder / "parts.py")], **changes}


@pytest.mark.parametrize("mode", ["block", "floating", "engine"])
def test_a_reward_that_raises_in_an_evaluation_ends_the_run_with_its_place(runner, mode):
    changes = {
        "run": {"max_staleness": 1, "batches": 50},
        "placement": {"eval_ranks": int(mode == "engine")},
        "eval": [few(runner, mode=mode, rewards=[{"kind": "bad"}])],
    }
    with pytest.raises(RewardError, match=r"eval.0.rewards.0 \(bad\): raised on sample eval-few-0-00000\d/0: KeyErr"):
        runner.run(with_parts(runner, changes))


def test_a_set_inherits_each_setting_of_sampling_that_it_does_not_set(runner):
    run = {"batches": 1, "prompts_per_batch": 4}
    sampling = {"max_new_tokens": 7, "stop": ["#"], "temperature": 0.5}
    runner.run({"run": run, "sampling": sampling, "eval": [few(runner, sampling={"temperature": 0.0})]})
    sets = runner.folder / "run" / "samples" / "eval-few-000001.parquet"
    for sample in (sample for group in read_samples(sets) for sample in group.samples):
        assert sample.sampling == SamplingParams(temperature=0.0, max_new_tokens=7, stop=("#",))
    batch = runner.folder / "run" / "samples" / "batch-000001.parquet"
    assert {s.sampling.temperature for group in read_samples(batch) for s in group.samples} == {0.5}


def test_inherited_sampling_settings_of_a_set_survive_the_stored_recipe(runner):
    config = runner.config({"sampling": {"stop": ["#"]}, "eval": [few(runner, sampling={"temperature": 0.0})]})
    changed = resolve(merge(config.model_dump(mode="json"), {"sampling": {"stop": ["!"]}}))
    prompt = make_prompt()
    assert changed.sampling_of(prompt, changed.eval[0].sampling) == SamplingParams(temperature=0.0, stop=("!",))


def test_an_evaluation_set_can_have_separate_rewards_and_workflow(runner):
    sets = [
        few(runner, rewards=[{"kind": "constant", "value": 0.25}], workflow={"kind": "twice"}),
        {**few(runner), "name": "plain"},
    ]
    runner.run(with_parts(runner, {"eval": sets, "run": {"batches": 1}}))
    found = {(name, step): metrics for name, step, metrics in journal(runner)}
    assert found["few", 0]["eval/few/reward"] == found["few", 0]["eval/few/constant"] == 0.25
    assert found["few", 0]["eval/few/length_mean"] == 8
    assert "eval/plain/digits" in found["plain", 0] and found["plain", 0]["eval/plain/length_mean"] == 4
    mean = (0.25 + found["plain", 0]["eval/plain/reward"]) / 2
    assert found["mean", 0]["eval/mean/reward"] == pytest.approx(mean)


def test_evaluation_only_writes_every_set_and_the_mean_to_a_folder(runner):
    sets = [few(runner, mode="engine"), {**few(runner, "3:5"), "name": "other", "weight": 3.0}]
    config = runner.config({"eval": sets, "placement": {"eval_ranks": 1}})
    (runner.folder / "run").mkdir()
    found = evaluate(config, make_cluster=lambda _: LocalCluster())
    assert list(found) == ["few", "other", "mean"]
    few_, other = found["few"]["eval/few/reward"], found["other"]["eval/other/reward"]
    assert found["mean"]["eval/mean/reward"] == pytest.approx(0.25 * few_ + 0.75 * other)
    assert {e.name for e in read_journal(runner.folder / "run-eval" / "evaluations.jsonl")} == {"few", "other", "mean"}


class InterruptEvaluation:
    """Sends Ctrl-C when an evaluation begins."""

    @hookimpl
    def evaluation_advanced(self, done):
        if done == 0:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_evaluation_is_ended_by_ctrl_c_at_once(runner):
    config = runner.config({"eval": [few(runner)], "rollout": {"hang": ["eval-"]}})
    with pytest.raises(KeyboardInterrupt):
        evaluate(config, observers=(InterruptEvaluation(),), make_cluster=lambda _: LocalCluster())
    assert not (runner.folder / "run" / "evaluations.jsonl").exists()


def test_results_are_split_by_a_column(runner):
    rows = [{"prompt": f"say {i}", "target": i, "level": {"name": "hard" if i % 3 else "easy"}} for i in range(9)]
    path = runner.folder / "levels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    set_ = {"name": "few", "data": {"path": str(path)}, "by": "level.name", "pass_at": [1], "pass_threshold": 0.5}
    metrics = evaluate(runner.config({"eval": [set_]}), make_cluster=lambda _: LocalCluster())["few"]
    easy, hard = (metrics[f"eval/few/level.name={value}/reward"] for value in ("easy", "hard"))
    assert metrics["eval/few/level.name=hard/prompts"] == 6
    assert metrics["eval/few/reward"] == pytest.approx((3 * easy + 6 * hard) / 9)
    assert 0 < metrics["eval/few/level.name=easy/stderr/reward"] < 1


@pytest.mark.parametrize(
    ("by", "error", "message"),
    [
        ("levl", ConfigError, r"eval.0.by: no row has a column 'levl'; columns are level"),
        (
            "level",
            ConfigError,
            r"eval.0.by: must have at most 64 values, but column 'level' has 70; choose a coarser column",
        ),
    ],
)
def test_a_column_that_cannot_split_results_is_an_error_before_the_run(runner, by, error, message):
    path = runner.folder / "levels.jsonl"
    path.write_text("".join(json.dumps({"prompt": "say", "target": i, "level": i}) + "\n" for i in range(70)))
    with pytest.raises(error, match=message):
        runner.run({"eval": [{"name": "few", "data": {"path": str(path)}, "by": by}]})


def test_a_set_without_prompts_is_an_error(runner):
    with pytest.raises(DataError, match="the slice is empty"):
        runner.run({"eval": [few(runner, "0:0")]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"eval": {"mode": "floating"}},
            'eval.0.mode: "floating" evaluates concurrently .* run.max_staleness of at',
        ),
        ({"eval": {"mode": "engine"}}, 'eval.0.mode: "engine" needs a separate engine; set placement.eval_ran'),
        ({"placement": {"eval_ranks": 2}}, "placement.eval_ranks: 2 has no effect, since no evaluation set has"),
        ({"eval": {"name": "mean"}}, "eval.0.name: 'mean' is reserved for the mean over all sets"),
        ({"eval": {"rewards": [{"kind": "digit"}]}}, "eval.0.rewards.0.kind: 'digit' is not installed; did you mean"),
        ({"eval": {"rewards": 3}}, r"eval.0.rewards: must be a list of tables \(\[\[eval.rewards\]\]\), got 3"),
        ({"eval": {"workflow": {"kind": "single-turm"}}}, "eval.0.workflow.kind: 'single-turm' is not installed; did"),
    ],
)
def test_modes_and_parts_that_do_not_fit_are_found_at_validation(runner, changes, message):
    set_ = few(runner) | changes.pop("eval", {})
    with pytest.raises(ConfigError, match=message):
        runner.config({"eval": [set_], **changes})


def test_the_engine_for_evaluations_gets_gpus_behind_all_others(runner):
    changes = {"placement": {"device": "cuda", "trainer_ranks": 2, "engine_ranks": 2, "eval_ranks": 1}}
    config = runner.config({**changes, "eval": [few(runner, mode="engine")]})
    layout = Layout.of(config, 5, with_trainer=True, with_engine=True, with_eval=True)
    gpus = [tuple(bundle.gpu for bundle in part) for part in (layout.trainer, layout.engine, layout.evaluation)]
    assert gpus == [(0, 1), (2, 3), (4,)]
    with pytest.raises(ConfigError, match="the ranks need 5 GPUs, but this machine has 4"):
        check_gpus(layout.shares(1), 4)


class OneByOne:
    """Workers with an engine that serves one rollout at a time. The deadline includes waiting for the engine."""

    def __init__(self, seconds, deadline_s):
        self.seconds, self.deadline_s = seconds, deadline_s
        self.lock = asyncio.Lock()
        self.written = []

    async def roll_out(self, job):
        return scored(job.group_id, [await self._rollout() for _ in job.sessions()])

    async def _rollout(self):
        try:
            async with asyncio.timeout(self.deadline_s):
                async with self.lock:
                    await asyncio.sleep(self.seconds)
        except TimeoutError:
            return None
        return 1.0

    async def write(self, path, groups, step):
        self.written.append(path.name)

    async def expect(self, sessions):
        return None


def scored(group_id, rewards):
    from plasmid.types.shared_groups import store_group

    failed = {"stop_reason": StopReason.ERROR, "error": "late", "versions": ()}
    samples = [
        make_sample(
            id=f"{group_id}/{i}",
            group_id=group_id,
            score=Score(value=reward or 0.0),
            **(failed if reward is None else {}),
        )
        for i, reward in enumerate(rewards)
    ]
    return store_group(PromptGroup(id=group_id, prompt=make_prompt(), samples=samples), LocalStore())


class Silent:
    def report_progress(self, batch, name, done, total):
        return None

    def save_results(self, batch, name, metrics):
        return None


@pytest.mark.parametrize(("concurrency", "failed"), [("auto", 0), (500, 470)])
def test_a_large_set_on_a_slow_engine_does_not_run_into_the_deadline_of_rollouts(runner, tmp_path, concurrency, failed):
    set_ = EvaluationSet(
        settings=runner.config({"eval": [few(runner, concurrency=concurrency)]}).eval[0],
        prompts=tuple(make_prompt(id=str(i)) for i in range(500)),
    )
    workers = OneByOne(seconds=1.0, deadline_s=30.5)
    sampler = Sampler(workers=workers, engine=workers)
    evaluator = Evaluator(
        runner.config(), [set_], shared=sampler, samples_dir=tmp_path, journal=Silent(), training=False
    )
    metrics = run_virtual(evaluator.run(set_, 0))
    assert metrics["eval/few/failed"] == failed
    assert workers.written == ["eval-few-000000.parquet"]


def test_standard_errors_are_over_prompts(runner):
    set_ = runner.config({"eval": [few(runner, pass_at=[1, 2], samples_per_prompt=2)]}).eval[0]
    groups = [scored(0, [1.0, 1.0]), scored(1, [1.0, 0.0]), scored(2, [0.0, None])]
    metrics = summarize(set_, groups)
    per_prompt = np.array([1.0, 0.5, 0.0])
    assert metrics["eval/few/reward"] == metrics["eval/few/pass@1"] == 0.5
    assert metrics["eval/few/stderr/reward"] == pytest.approx(per_prompt.std(ddof=1) / np.sqrt(3))
    assert metrics["eval/few/pass@2"] == pytest.approx(2 / 3)
    assert metrics["eval/few/stderr/pass@2"] == pytest.approx(np.array([1, 1, 0]).std(ddof=1) / np.sqrt(3))
    assert metrics["eval/few/failed"] == 1


def test_rollouts_pass_and_not_samples_and_failed_ones_never_do(runner):
    settings = few(runner, pass_at=[1, 2], samples_per_prompt=2, pass_threshold=0.0)
    set_ = runner.config({"eval": [settings]}).eval[0]
    fan_out = replace(scored(0, [-1.0, 0.5, 0.5]), rollout_ids=("0/0", "0/1", "0/1"))
    metrics = summarize(set_, [fan_out, scored(1, [-1.0, None])])
    assert (metrics["eval/few/pass@1"], metrics["eval/few/pass@2"]) == (0.25, 0.5)
    assert metrics["eval/few/reward"] == (-0.25 - 0.5) / 2


def test_the_mean_over_sets_weights_values_and_errors(runner):
    sets = [few(runner, pass_at=[1, 2], samples_per_prompt=2), {**few(runner, pass_at=[1]), "name": "b", "weight": 3.0}]
    config = runner.config({"eval": sets})
    found = {
        "few": {"eval/few/reward": 1.0, "eval/few/stderr/reward": 0.4, "eval/few/pass@1": 1.0},
        "b": {"eval/b/reward": 0.0, "eval/b/stderr/reward": 0.2, "eval/b/pass@1": 0.5},
    }
    mean = mean_over_sets(config.eval, found)
    assert mean["eval/mean/reward"] == 0.25
    assert mean["eval/mean/stderr/reward"] == pytest.approx(np.hypot(0.25 * 0.4, 0.75 * 0.2))
    assert mean["eval/mean/pass@1"] == 0.625
    assert "eval/mean/pass@2" not in mean
