"""A version is trained on only if trainer and engine agree on a canary; engines get missing weights."""

import asyncio

import numpy as np
import pytest
from plasmid.components import CanaryPlan, RolloutEngineConfig
from plasmid.components import TrainerConfig as TrainerSettings
from plasmid.errors import EngineError, SyncError
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig, FakeTrainer, FakeTrainerConfig
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.loop.canary import PROMPT, Canary
from pydantic import PrivateAttr

NEARLY = 0.001


class Engine(FakeEngine):
    """Samples every token with log-probability -0.5."""

    def __init__(self, version=0):
        super().__init__(FakeEngineConfig(max_delay_s=0.0, num_tokens=4))
        self.version = version
        self.lost = 0
        """Versions after which a part of the engine restarts."""
        self.calls = []

    def needs_weights(self):
        if self.lost < 0:
            raise EngineError("too few servers are left")
        return self.lost > 0 and not self.calls

    async def receive(self, plan, version):
        self.calls.append(version)
        return await super().receive(plan, version)


class Trainer(FakeTrainer):
    """Scores every token with the same log-probability."""

    def __init__(self, logprob):
        super().__init__()
        self.logprob = logprob
        self.checked = []

    async def logprobs(self, batch):
        if batch.groups[0].prompt_id == "canary":
            self.checked.append(batch)
        return tuple(np.full(int(group.lengths[0]), self.logprob, np.float32) for group in batch.groups)


def canary(engine, trainer, *, tolerance=0.01, every=1, **settings):
    plan = CanaryPlan(tolerance=tolerance, every=every)
    return Canary(engine, trainer, plan, **({"copies": 3, "limit_s": 10} | settings))


@pytest.mark.parametrize("off_by", [0.0, NEARLY, -NEARLY])
def test_a_matching_canary_reports_the_difference(off_by):
    async def test():
        trainer = Trainer(-0.5 + off_by)
        probe = canary(Engine(version=7), trainer)
        probe.start(7)
        return trainer, await probe.check(), await probe.check()

    trainer, first, second = asyncio.run(test())
    assert first == {"sync/canary_difference": pytest.approx(abs(off_by), abs=1e-6)}
    assert second == {}, "a version is checked once"
    (batch,) = trainer.checked
    assert len(batch.groups) == 3, "every rank has a sample"
    assert batch.groups[0].rows.get().token_ids[: len(PROMPT)].tolist() == PROMPT.tolist()


@pytest.mark.parametrize("logprob", [-0.6, float("nan")])
def test_a_canary_mismatch_ends_the_run(logprob):
    async def test():
        probe = canary(Engine(version=2), Trainer(logprob))
        probe.start(2)
        await probe.check()

    with pytest.raises(SyncError, match="weight sync of version 2: trainer and engine differ by"):
        asyncio.run(test())


def test_a_canary_of_another_version_proves_nothing(caplog):
    async def test():
        probe = canary(Engine(version=1), Trainer(-9.0))
        probe.start(2)
        return await probe.check()

    assert asyncio.run(test()) == {}
    assert "the canary of version 2 was aborted" in caplog.text


def test_a_failed_canary_names_the_engines_reason():
    engine = Engine()
    engine._settings = FakeEngineConfig(max_delay_s=0.0, fail=("canary",))

    async def test():
        probe = canary(engine, Trainer(0.0))
        probe.start(1)
        await probe.check()

    with pytest.raises(EngineError, match="the canary of version 1 failed"):
        asyncio.run(test())


class EngineConfig(FakeEngineConfig):
    _engine: FakeEngine = PrivateAttr()
    _tolerance: float | None = PrivateAttr(None)
    _alone: bool = PrivateAttr(False)

    def canary(self):
        return None if self._tolerance is None else CanaryPlan(tolerance=self._tolerance, alone=self._alone)

    async def build(self, context):
        return self._engine


class TrainerConfig(FakeTrainerConfig):
    _trainer: FakeTrainer = PrivateAttr()

    async def build(self, context):
        return self._trainer


def run_with(runner, engine, trainer, *, tolerance=None, alone=False, changes=None):
    config = runner.config(changes or {"run": {"batches": 2}})
    rollout, training = EngineConfig(max_delay_s=0.0), TrainerConfig()
    rollout._engine, rollout._tolerance, training._trainer = engine, tolerance, trainer
    rollout._alone = alone
    return run(
        config.model_copy(update={"trainer": training, "rollout": rollout}), make_cluster=lambda _: LocalCluster()
    )


def test_a_run_checks_every_version_before_it_trains_on_it(runner):
    trainer = Trainer(-0.5)
    run_with(runner, Engine(), trainer, tolerance=0.01)
    assert len(trainer.checked) == 2


@pytest.mark.parametrize("off_by", [0.0, 1e-7])
def test_a_deterministic_run_tolerates_no_difference(runner, monkeypatch, off_by):
    for settings in (TrainerSettings, RolloutEngineConfig):
        monkeypatch.setattr(settings, "is_batch_invariant", lambda _: True)
    trainer, changes = Trainer(np.float32(-0.5 + off_by)), {"run": {"batches": 1, "deterministic": True}}
    if not off_by:
        run_with(runner, Engine(), trainer, tolerance=0.25, changes=changes)
        assert len(trainer.checked) == 1 and trainer.step == 1
        return
    message = r"differ by \S+ in the mean log-probability of the canary prompt, more than 0; the engine does not have"
    with pytest.raises(SyncError, match=message):
        run_with(runner, Engine(), trainer, tolerance=0.25, changes=changes)
    assert trainer.step == 0


@pytest.mark.parametrize(("leaves", "expected"), [(True, [0, 1, 1, 2, 2, 3]), (False, [0, 1, 2, 3])])
def test_an_engine_that_was_stopped_for_a_checkpoint_is_asked_again(runner, leaves, expected):
    """Its memory was released, so its weights must be checked again, and its first answer may have been aborted."""
    asked = []

    class Asked(Engine):
        async def generate(self, request):
            if request.id.startswith("canary/"):
                asked.append(int(request.id.removeprefix("canary/").partition("#")[0]))
            return await super().generate(request)

        async def receive(self, plan, version):
            self.version = version
            return await super().receive(plan, version)

    trainer = Trainer(-0.5)
    place = {"colocated": True, "offload_trainer": leaves, "offload_engine": leaves}
    changes = {"run": {"batches": 3}, "placement": place, "checkpoint": {"every": 1, "at_end": False}}
    run_with(runner, Asked(), trainer, tolerance=0.01, changes=changes)
    assert asked == expected
    assert len(trainer.checked) == 3


def test_a_run_ends_before_it_trains_on_an_unverified_version(runner):
    trainer = Trainer(-2.0)
    with pytest.raises(SyncError, match="weight sync of version 0"):
        run_with(runner, Engine(), trainer, tolerance=0.01)
    assert trainer.step == 0


def test_a_restarted_engine_gets_the_current_version_again(runner, monkeypatch):
    monkeypatch.setattr("plasmid_runtime.loop.policy_sync.POLL_S", 0.01)

    class Slow(Engine):
        def needs_weights(self):
            if self.calls == [0]:
                self.lost = 1
            return self.lost == 1 and self.calls == [0]

        async def generate(self, request):
            await asyncio.sleep(0.1)
            return await super().generate(request)

    engine = Slow()
    run_with(runner, engine, Trainer(-0.5))
    assert engine.calls == [0, 0, 1, 2]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("alone", [False, True])
def test_a_canary_that_was_asked_of_a_server_that_died_is_asked_again(runner, monkeypatch, alone):
    """The canary is answered only after the engine has received its weights again, which only the waiting run can
    send."""
    monkeypatch.setattr("plasmid_runtime.loop.policy_sync.POLL_S", 0.01)

    class Dying(Engine):
        def needs_weights(self):
            return self.calls == [0, 1]

        async def generate(self, request):
            if request.id == "canary/1#0" and self.calls == [0, 1]:
                await asyncio.Event().wait()
            return await super().generate(request)

        async def receive(self, plan, version):
            self.version = version
            return await super().receive(plan, version)

    engine, trainer = Dying(), Trainer(-0.5)
    run_with(runner, engine, trainer, tolerance=0.01, alone=alone)
    assert engine.calls == [0, 1, 1, 2]
    assert len(trainer.checked) == 2 and trainer.step == 2


def test_a_run_ends_when_too_little_is_left_of_the_engine(runner, monkeypatch):
    monkeypatch.setattr("plasmid_runtime.loop.policy_sync.POLL_S", 0.01)
    engine = Engine()
    engine.lost = -1
    engine._settings = FakeEngineConfig(max_delay_s=5.0, num_tokens=4)
    with pytest.raises(EngineError, match="too few servers are left"):
        run_with(runner, engine, Trainer(-0.5))


@pytest.mark.parametrize(("version", "asked"), [(0, True), (1, False), (2, False), (3, True)])
def test_a_canary_is_asked_in_every_kth_version_only(version, asked):
    async def test():
        trainer = Trainer(-0.5)
        probe = canary(Engine(version=version), trainer, every=3)
        probe.start(version)
        assert (probe.pending is not None) == asked
        assert bool(await probe.check()) == bool(trainer.checked) == asked
        await probe.close()

    asyncio.run(test())
