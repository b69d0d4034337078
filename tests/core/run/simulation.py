"""The real loop, producers and checkpoints in virtual time, with components whose delays and failures are random."""

import asyncio
import random
import shutil
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
from plasmid.components import PromptStream
from plasmid.errors import DataError
from plasmid.plugins.registry import load_plugins
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig, FakeTrainer
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid.testing.virtual_time import run_virtual
from plasmid.types import Completion, PromptGroup, Score, StopReason, VersionSpan
from plasmid.types.shared_groups import LocalRef, LocalStore, store_group
from plasmid_runtime.checkpoint.folder import CheckpointFolder
from plasmid_runtime.checkpoint.resume import open_resume_point
from plasmid_runtime.checkpoint.run_folder import RunFolder
from plasmid_runtime.checkpoint.saver import IN_FLIGHT
from plasmid_runtime.lifecycle.assembly import build_loop
from plasmid_runtime.lifecycle.shutdown import LoggingExitStack
from plasmid_runtime.lifecycle.startup import RunHandles
from plasmid_runtime.observe.dispatch import ObserverQueues
from plasmid_runtime.observe.sample_store import write_samples
from plasmid_runtime.rollout.in_flight import read_turns, write_turns
from plasmid_runtime.rollout.producers.draws import Draws
from plasmid_workflows.turns import Turn

UNLIKE = count(1)


@dataclass(frozen=True)
class Chances:
    """Probabilities of delays and failures; everything random follows from the seed."""

    seed: int
    dropped: float
    """Fraction of draws that a filter drops."""
    rollout_s: float
    train_s: float
    save_s: float
    write_s: float = 0.0
    """Time for writing a checkpoint in the background, in seconds."""

    def fate(self, draw_id: int) -> str:
        """Return the outcome of a draw, the same for every rollout of it."""
        at = random.Random(f"{self.seed} {draw_id}").random()
        return "filter" if at < self.dropped else ""


class Numbers(PromptStream):
    """A prompt stream that counts up to a limit."""

    def __init__(self, limit):
        self.next, self.limit = 0, limit

    def draw(self):
        if self.next == self.limit:
            return None
        self.next += 1
        return self.prompt(f"row:{self.next - 1}")

    def prompt(self, id):
        return make_prompt(id=id)

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


@dataclass
class Workers:
    """Creates groups after a random delay.

    New weights may arrive in the meantime, as with in-place updates. The first token is sampled at once and gets a
    unique log-probability, so that it can be recognized in checkpoints.
    """

    chances: Chances
    engine: FakeEngine
    store: LocalStore
    delays: random.Random
    resumed: dict[str, Any] = field(default_factory=dict)
    running: dict[str, Turn] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    drawn: dict[str, Any] = field(default_factory=dict)

    async def roll_out(self, job):
        begun = self.resumed[job.name].get()[0] if job.name in self.resumed else self._begin(job)
        self.running[job.name] = begun
        self.finished.discard(job.name)
        await asyncio.sleep(self.delays.expovariate(1 / self.chances.rollout_s))
        del self.running[job.name]
        self.finished.add(job.name)
        version = self.engine.version
        await asyncio.sleep(self.delays.choice([0.0, 0.01]))  # the answer is on its way
        fate = self.chances.fate(job.group_id)
        versions = (
            VersionSpan(version=begun.completion.versions[0].version, start=0, end=1),
            VersionSpan(version=version, start=1, end=2),
        )
        sample = make_sample(
            id=f"{job.group_id}/0",
            group_id=job.group_id,
            prompt_id=job.prompt.id,
            num_generated=2,
            versions=versions,
            score=Score(value=1.0),
        )
        logprobs = np.concatenate([begun.completion.logprobs, sample.rollout_logprobs[1:]])
        sample = replace(sample, rollout_logprobs=logprobs)
        worth = random.Random(f"{self.chances.seed} worth {job.group_id}").random()
        other = replace(sample, id=f"{job.group_id}/1", rollout_id=f"{job.group_id}/1", score=Score(value=worth))
        self.resumed.pop(job.name, None)
        return store_group(PromptGroup(id=job.group_id, prompt=job.prompt, samples=(sample, other)), self.store, fate)

    def _begin(self, job):
        completion = Completion(
            request_id=f"{job.name}/0#0",
            token_ids=np.array([1], np.int32),
            logprobs=np.array([-next(UNLIKE) / 1024], np.float32),
            versions=(VersionSpan(version=self.engine.version, start=0, end=1),),
            stop_reason=StopReason.ABORT,
        )
        return Turn(rollout_id=f"{job.name}/0", number=0, seed=1, request_hash="", completion=completion)

    async def snapshot(self):
        self.drawn = dict(self.resumed) | {name: LocalRef((turn,)) for name, turn in self.running.items()}
        finished = set(self.finished)
        self.drawn = {name: turns for name, turns in self.drawn.items() if name not in finished}
        await asyncio.sleep(self.delays.choice([0.0, 0.5]))
        return finished

    async def write_turns(self, path):
        if self.drawn:
            write_turns(path, {name: ref.get() for name, ref in self.drawn.items()})

    async def write(self, path, groups, step):
        dropped = {group.id: group.dropped_by for group in groups if group.dropped_by}
        write_samples(path, [group.whole.get() for group in groups], step=step, dropped_by=dropped)


class Trainer(FakeTrainer):
    """Trains for a random time, and checks its inputs."""

    def __init__(self, simulation, engine, delays):
        super().__init__(write_s=simulation.chances.write_s)
        self.simulation, self.engine, self.delays = simulation, engine, delays

    async def pass_time(self, mean_s):
        await asyncio.sleep(self.delays.expovariate(1 / mean_s))

    async def train(self, batch, scores):
        bound = self.simulation.config.run.max_staleness
        for group in batch.groups:
            assert self.engine.version - group.oldest_version <= bound
            assert not group.dropped_by
        self.simulation.trained[batch.index + 1] = [group.id for group in batch.groups]
        await self.pass_time(self.simulation.chances.train_s)
        return await super().train(batch, scores)

    async def send(self, plan, version):
        await self.pass_time(self.simulation.chances.train_s / 4)
        return await super().send(plan, version)

    async def save(self, path):
        await self.pass_time(self.simulation.chances.save_s)
        return await super().save(path)


@dataclass
class Simulation:
    """One run in a folder: started, stopped or killed at some time, and resumed."""

    config: object
    chances: Chances
    limit: int
    """Number of data rows; -1 for no end."""
    folder: RunFolder
    trained: dict[int, list[int]] = field(default_factory=dict)
    """Draws by batch, as counted by the run's current checkpoint or end."""
    first_tokens: dict[int, float] = field(default_factory=dict)
    """Log-probability of the first token by draw, for rollouts that a resume continued, from its newest checkpoint."""
    attempts: int = 0
    empty: bool = False
    """True if the data ended before any training."""

    def run(self, *, stop_s=None, kill_s=None):
        """Start, or resume from the newest checkpoint if there is one. Returns True if the run reached its end."""
        return run_virtual(self._run(stop_s, kill_s))

    async def _run(self, stop_s, kill_s):
        self.attempts += 1
        delays = random.Random(f"{self.chances.seed} {self.attempts}")
        engine, store = FakeEngine(FakeEngineConfig()), LocalStore()
        trainer = Trainer(self, engine, delays)
        workers = Workers(self.chances, engine, store, delays)
        parts = RunHandles(cluster=Cluster(store), trainer=trainer, engine=engine, workers=workers)
        state = open_resume_point(self.folder, self.config) if self.checkpoints() else None
        assert state is None or not list(self.folder.checkpoints.glob(".tmp-*"))
        begun = state.state.batch if state else 0
        for name, (turn,) in read_turns(state.path / IN_FLIGHT).items() if state else ():
            self.first_tokens[int(name)] = turn.completion.logprobs[0]
        if state is None:  # as a user must do to start over
            shutil.rmtree(self.folder.path, ignore_errors=True)
        self.trained = {step: ids for step, ids in self.trained.items() if step <= begun}
        self.folder.create(self.config)
        async with LoggingExitStack() as stack:
            loop = await build_loop(
                self.config,
                parts,
                self.folder,
                Draws(Numbers(self.limit)),
                ObserverQueues([]),
                None,
                state=state,
                replay=None,
                stack=stack,
                plugins=load_plugins(installed=False),
            )
            if stop_s is not None:
                asyncio.get_running_loop().call_later(stop_s, loop.stop)
            try:
                async with asyncio.timeout(kill_s):
                    return not await loop.run()
            except TimeoutError:
                return False
            except DataError:
                self.empty = True
                return True

    def checkpoints(self):
        return CheckpointFolder(self.folder.checkpoints, self.config.checkpoint).list_all()


@dataclass
class Cluster:
    """The parts of a cluster that the loop needs."""

    store: LocalStore
