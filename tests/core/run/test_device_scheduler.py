"""Trainer and engine on shared GPUs: which of them holds memory at any time, for every combination of settings."""

import asyncio
import itertools
import json

import pytest
from plasmid.errors import DeadlineError, EngineError, EngineLostError
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig, FakeTrainer, FakeTrainerConfig
from plasmid.types.runs import Mode
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import Session, run
from plasmid_runtime.loop.device_scheduler import DeviceScheduler
from pydantic import PrivateAttr

SWITCHES = list(itertools.product([False, True], [False, True]))


class Gpu:
    """The contents of the shared memory, and all calls in order."""

    def __init__(self, *, trainer_leaves, engine_leaves):
        self.trainer_leaves, self.engine_leaves = trainer_leaves, engine_leaves
        self.trainer = self.weights = self.cache = self.holds_policy = True
        self.serving = True
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.kept = 0
        """Requests that arrived while the engine was paused."""
        self.calls = []

    def note(self, call):
        self.calls.append(call)
        assert not self.serving or self.cache, f"the engine serves without memory after {self.calls}"
        assert not self.serving or self.holds_policy, f"the engine serves what it found in memory after {self.calls}"
        started = "send" in self.calls
        if started and self.trainer_leaves:
            assert not (self.serving and self.trainer), f"the engine serves beside the trainer after {self.calls}"
        if started and self.trainer_leaves and self.engine_leaves:
            assert not (self.trainer and self.cache), f"both need the GPU after {self.calls}"


class Trainer(FakeTrainer):
    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    async def onload(self):
        self.gpu.trainer = True
        self.gpu.note("onload")

    async def offload(self):
        self.gpu.trainer = False
        self.gpu.note("offload")

    async def train(self, batch, scores):
        assert self.gpu.trainer and not self.gpu.serving
        self.gpu.note("train")
        return await super().train(batch, scores)

    async def send(self, plan, version):
        assert self.gpu.trainer and not self.gpu.serving and self.gpu.weights
        self.gpu.note("send")
        return await super().send(plan, version)

    async def save(self, path):
        assert self.gpu.trainer
        self.gpu.note("save")
        return await super().save(path)

    async def export(self, path):
        assert self.gpu.trainer
        self.gpu.note("export")
        await super().export(path)


class Engine(FakeEngine):
    """Holds requests that arrive while it is paused until it resumes, as every engine must."""

    def __init__(self, gpu):
        super().__init__(FakeEngineConfig(max_delay_s=0.0))
        self.gpu = gpu

    async def generate(self, request):
        self.gpu.kept += not self.gpu.serving
        await self.gpu.resumed.wait()
        assert self.gpu.serving and self.gpu.cache
        return await super().generate(request)

    async def pause(self, mode):
        self.gpu.serving = False
        self.gpu.resumed.clear()
        self.gpu.note("pause")

    async def resume(self):
        self.gpu.serving = True
        self.gpu.resumed.set()
        self.gpu.note("resume")

    async def receive(self, plan, version):
        self.gpu.holds_policy = True
        return await super().receive(plan, version)

    async def sleep(self, *, keep_weights=True):
        assert not self.gpu.serving and self.gpu.weights, "engines cannot sleep twice"
        self.gpu.weights = self.gpu.cache = False
        self.gpu.holds_policy = self.gpu.holds_policy and keep_weights
        self.gpu.note("sleep")

    async def wake(self, *, kv_cache=True):
        self.gpu.weights = True
        self.gpu.cache = self.gpu.cache or kv_cache
        self.gpu.note("wake" if kv_cache else "wake weights")


class TrainerConfig(FakeTrainerConfig):
    _gpu: Gpu = PrivateAttr()

    async def build(self, context):
        return Trainer(self._gpu)


class EngineConfig(FakeEngineConfig):
    _gpu: Gpu = PrivateAttr()

    async def build(self, context):
        return Engine(self._gpu)


def run_on(gpu, runner, changes):
    """Run with components that record their calls; rollout workers use the plain fakes."""
    config = runner.config(changes)
    trainer, engine = TrainerConfig(), EngineConfig()
    trainer._gpu = engine._gpu = gpu
    run(config.model_copy(update={"trainer": trainer, "rollout": engine}), make_cluster=lambda _: LocalCluster())


@pytest.mark.parametrize(
    ("sync_every", "bound"),
    [(1, 0), (2, 1), *(pytest.param(*pair, marks=pytest.mark.long) for pair in [(1, 1), (2, 0)])],
)
@pytest.mark.parametrize(("trainer_leaves", "engine_leaves"), SWITCHES)
def test_parts_that_share_gpus_never_both_need_their_memory(runner, trainer_leaves, engine_leaves, sync_every, bound):
    gpu = Gpu(trainer_leaves=trainer_leaves, engine_leaves=engine_leaves)
    place = {"colocated": True, "offload_trainer": trainer_leaves, "offload_engine": engine_leaves}
    changes = {"placement": place, "run": {"batches": 4, "sync_every": sync_every, "max_staleness": bound}}
    run_on(gpu, runner, changes | {"checkpoint": {"every": 2, "export": True}})
    assert gpu.calls.count("train") == 4
    assert gpu.calls.count("send") == 1 + 4 // sync_every
    assert gpu.serving and gpu.cache
    assert bound or not gpu.kept, "on-policy rollouts end before the engine is paused"
    assert gpu.trainer != trainer_leaves
    assert ("sleep" in gpu.calls) == engine_leaves
    assert ("offload" in gpu.calls) == trainer_leaves


@pytest.mark.parametrize("sync_every", [1, 2, 3])
@pytest.mark.parametrize("scored", [False, True])
def test_a_session_that_ends_before_it_trains_a_batch_frees_the_gpu_for_its_checkpoint(runner, sync_every, scored):
    gpu = Gpu(trainer_leaves=True, engine_leaves=True)
    config = runner.config({"placement": SHARED, "run": {"sync_every": sync_every, "max_staleness": 1}})
    trainer, engine = TrainerConfig(), EngineConfig()
    trainer._gpu = engine._gpu = gpu
    config = config.model_copy(update={"trainer": trainer, "rollout": engine})
    with Session(config, mode=Mode(), make_cluster=lambda _: LocalCluster()) as session:
        groups = session.sample()
        session.score(groups)
        session.train(groups)
        if sync_every == 1:
            session.publish()
        left = session.sample()
        if scored:
            session.score(left)
        assert gpu.calls.count("send") == 1 + (sync_every == 1)
    assert gpu.calls.count("save") == 1 and gpu.serving and gpu.cache and not gpu.trainer
    assert gpu.calls.count("send") == {(1, False): 2, (1, True): 3}.get((sync_every, scored), 2)


def test_the_order_of_turns_on_shared_gpus(runner):
    gpu = Gpu(trainer_leaves=True, engine_leaves=True)
    place = {"colocated": True, "offload_trainer": True, "offload_engine": True}
    changes = {"run": {"batches": 2, "sync_every": 2}, "checkpoint": {"export": True}}
    run_on(gpu, runner, {"placement": place, **changes})
    first = ["pause", "sleep", "wake weights", "send", "offload", "wake", "resume"]
    unpublished = ["pause", "sleep", "onload", "train", "offload", "wake", "resume"]
    published = ["pause", "sleep", "onload", "train", "wake weights", "send", "offload", "wake", "resume"]
    saved, exported = ([*unpublished[:3], what, *unpublished[4:]] for what in ("save", "export"))
    assert gpu.calls == first + unpublished + published + saved + exported


SHARED = {"colocated": True, "offload_trainer": True, "offload_engine": True}
SYNC = ["pause", "sleep", "onload", "wake weights", "send", "offload", "wake", "resume"]
"""A weight sync without training before it, to an engine that is serving."""


FIRST_BATCH = """
from typing import Literal
from plasmid import Filter, hookimpl

class FirstBatch(Filter):
    \"""Drops all groups but the first four.\"""
    kind: Literal["first-batch"] = "first-batch"
    def __call__(self, group):
        return group.id < 4

@hookimpl
def register_components():
    return [FirstBatch]
"""


def test_data_that_end_before_a_sync_was_due_are_synced_on_shared_gpus(runner):
    gpu = Gpu(trainer_leaves=True, engine_leaves=True)
    rows = [json.dumps({"prompt": f"say {i}", "target": i}) for i in range(8)]
    (runner.folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    plugin = runner.folder / "first_batch.py"
    plugin.write_text(FIRST_BATCH)
    changes = {
        "plugins": [*runner.config().plugins, str(plugin)],
        "filters": [{"kind": "first-batch"}],
        "data": {"epochs": 1},
    }
    run_on(gpu, runner, {"placement": SHARED, "run": {"batches": 2, "sync_every": 2}, **changes})
    trained = gpu.calls.index("train")
    assert gpu.calls[trained + 4 : trained + 12] == SYNC


def test_a_server_that_is_started_anew_between_batches_gets_what_was_trained_on_shared_gpus(runner, monkeypatch):
    monkeypatch.setattr("plasmid_runtime.loop.policy_sync.POLL_S", 0.01)
    gpu = Gpu(trainer_leaves=True, engine_leaves=True)

    class Restarted(Engine):
        async def generate(self, request):
            await asyncio.sleep(0.1)
            return await super().generate(request)

        def needs_weights(self):
            return gpu.calls.count("train") == 1 and gpu.calls.count("send") == 1

    class RestartedConfig(EngineConfig):
        async def build(self, context):
            return Restarted(gpu)

    trainer, engine = TrainerConfig(), RestartedConfig()
    trainer._gpu = gpu
    config = runner.config({"placement": SHARED, "run": {"batches": 2, "sync_every": 2}})
    run(config.model_copy(update={"trainer": trainer, "rollout": engine}), make_cluster=lambda _: LocalCluster())
    trained = gpu.calls.index("train")
    assert gpu.calls[trained + 4 : trained + 12] == SYNC
    assert [metrics["version"] for metrics in runner.metrics()] == [0, 2]


def test_parts_on_separate_gpus_train_while_the_engine_serves(runner):
    gpu = Gpu(trainer_leaves=False, engine_leaves=False)

    class Beside(Trainer):
        async def train(self, batch, scores):
            assert gpu.serving
            return await FakeTrainer.train(self, batch, scores)

    class BesideConfig(TrainerConfig):
        async def build(self, context):
            return Beside(gpu)

    trainer, engine = BesideConfig(), EngineConfig()
    engine._gpu = gpu
    config = runner.config({"run": {"batches": 2, "max_staleness": 1}})
    run(config.model_copy(update={"trainer": trainer, "rollout": engine}), make_cluster=lambda _: LocalCluster())
    assert gpu.calls == [*["pause", "send", "resume"] * 3, "save"]


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("pause", r"engine.pause \(run.sync_timeout_s\): no end within 0.25 s"),
        ("resume", r"engine.resume \(run.sync_timeout_s\): no end within 0.25 s"),
        ("expect", r"engine.expect \(run.sync_timeout_s\): no end within 0.25 s"),
        ("plan_sync", r"weight sync of version 0 \(run.sync_timeout_s\): no end within 0.2 s"),
        ("receive", r"weight sync of version 0 \(run.sync_timeout_s\): no end within 0.2 s"),
    ],
)
def test_an_engine_that_does_not_answer_ends_the_run(runner, operation, message):
    async def never(self, *args, **kwargs):
        await asyncio.sleep(3600)

    class SilentConfig(FakeEngineConfig):
        async def build(self, context):
            return type("Silent", (FakeEngine,), {operation: never})(self)

    config = runner.config({"run": {"sync_timeout_s": 0.2}})
    with pytest.raises(DeadlineError, match=message):
        run(config.model_copy(update={"rollout": SilentConfig()}), make_cluster=lambda _: LocalCluster())


@pytest.mark.parametrize("operation", ["score", "train", "metrics", "save", "export"])
def test_a_trainer_that_does_not_answer_ends_the_run(runner, operation):
    async def never(self, *args):
        await asyncio.sleep(3600)

    class SilentConfig(FakeTrainerConfig):
        async def build(self, context):
            return type("Silent", (FakeTrainer,), {operation: never})()

    config = runner.config({"run": {"train_timeout_s": 0.2, "batches": 1}, "checkpoint": {"export": True}})
    with pytest.raises(DeadlineError, match=rf"trainer.{operation} \(run.train_timeout_s\): no end within 0.25 s"):
        run(config.model_copy(update={"trainer": SilentConfig()}), make_cluster=lambda _: LocalCluster())


class Leaving(FakeEngine):
    """Is lost during the first attempts of each weight sync; `health` reports when nothing is left."""

    def __init__(self, times, *, left=True):
        super().__init__(FakeEngineConfig(max_delay_s=0.0))
        self.times, self.left, self.lost = times, left, 0

    async def receive(self, plan, version):
        if self.lost < self.times:
            self.lost += 1
            raise EngineLostError("server 0 ended")
        self.lost = 0
        return await super().receive(plan, version)

    async def health(self):
        if not self.left:
            raise EngineError("0 of 1 servers are running")


def test_a_weight_sync_is_tried_again_with_what_comes_up(runner, monkeypatch):
    monkeypatch.setattr("plasmid_runtime.loop.device_scheduler.RETRY_S", 0.0)
    engine = Leaving(2)
    turns = DeviceScheduler(config=runner.config(), trainer=FakeTrainer(), engine=engine)
    assert asyncio.run(turns.publish(3)).version == 3
    assert engine.version == 3


def test_a_weight_sync_to_an_engine_of_which_nothing_is_left_ends_the_run(runner):
    turns = DeviceScheduler(config=runner.config(), trainer=FakeTrainer(), engine=Leaving(1, left=False))
    with pytest.raises(EngineError, match="0 of 1 servers are running"):
        asyncio.run(turns.publish(3))


def test_moves_during_the_start_belong_to_no_batch(runner):
    """The first batch reported two offloads, which could take longer than its sync."""
    turns = DeviceScheduler(config=runner.config(), trainer=FakeTrainer(), engine=Leaving(1))
    asyncio.run(turns.start(0))
    assert turns.take_seconds() == {}
    asyncio.run(turns.publish(1))
    assert turns.take_seconds().keys() >= {"pause", "resume"}


def test_batches_say_what_their_turns_took(runner):
    gpu = Gpu(trainer_leaves=True, engine_leaves=True)
    place = {"colocated": True, "offload_trainer": True, "offload_engine": True}
    saves = {"at_end": False, "export": False}  # a checkpoint also offloads the trainer
    run_on(gpu, runner, {"placement": place, "run": {"batches": 2}, "checkpoint": saves})
    for metrics in runner.metrics():
        assert all(metrics[f"perf/{turn}_s"] >= 0 for turn in ("pause", "sleep", "onload", "wake", "offload", "resume"))
        assert metrics["perf/offload_s"] <= metrics["perf/sync_s"]
        assert 0 <= metrics["sync/transfer_s"] <= metrics["perf/sync_s"]
