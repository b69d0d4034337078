"""The real loop, producers and checkpoints in virtual time, around parts whose delays and failures are random."""

import asyncio
import random
import shutil
from dataclasses import dataclass, field, replace

from plasmid.components import PromptStream
from plasmid.errors import DataError
from plasmid.plugins.registry import load_plugins
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig, FakeTrainer
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid.testing.virtual_time import run_virtual
from plasmid.types import PromptGroup, Score, VersionSpan
from plasmid.types.shared_groups import LocalStore, share
from plasmid_runtime.checkpoint.folder import CheckpointFolder
from plasmid_runtime.checkpoint.resume import open_resume_point
from plasmid_runtime.checkpoint.run_folder import RunFolder
from plasmid_runtime.lifecycle.assembly import build_loop
from plasmid_runtime.lifecycle.shutdown import LoggingExitStack
from plasmid_runtime.lifecycle.startup import RunHandles
from plasmid_runtime.observe.dispatch import ObserverQueues
from plasmid_runtime.observe.sample_store import write_samples


@dataclass(frozen=True)
class Chances:
    """How the parts behave; everything random follows from the seed."""

    seed: int
    dropped: float
    """Share of draws that a filter drops."""
    rollout_s: float
    train_s: float
    save_s: float
    write_s: float = 0.0
    """For which a checkpoint is written while the run goes on."""

    def fate(self, draw_id: int) -> str:
        """What becomes of a draw; the same however often it is rolled out."""
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
    """Makes groups after a random delay. New weights may arrive in the middle, as with in-place updates."""

    chances: Chances
    engine: FakeEngine
    store: LocalStore
    delays: random.Random

    async def roll_out(self, job):
        begun = self.engine.version
        await asyncio.sleep(self.delays.expovariate(1 / self.chances.rollout_s))
        fate = self.chances.fate(job.group_id)
        versions = (
            VersionSpan(version=begun, start=0, end=1),
            VersionSpan(version=self.engine.version, start=1, end=2),
        )
        sample = make_sample(
            id=f"{job.group_id}/0",
            group_id=job.group_id,
            prompt_id=job.prompt.id,
            num_generated=2,
            versions=versions,
            score=Score(value=1.0),
        )
        worth = random.Random(f"{self.chances.seed} worth {job.group_id}").random()
        other = replace(sample, id=f"{job.group_id}/1", rollout_id=f"{job.group_id}/1", score=Score(value=worth))
        return share(PromptGroup(id=job.group_id, prompt=job.prompt, samples=(sample, other)), self.store, fate)

    async def write(self, path, groups, step):
        dropped = {group.id: group.dropped_by for group in groups if group.dropped_by}
        write_samples(path, [group.whole.get() for group in groups], step=step, dropped_by=dropped)


class Trainer(FakeTrainer):
    """Trains for a random time and checks what it is given."""

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
    """One run in a folder: begun, stopped or killed at some time, resumed."""

    config: object
    chances: Chances
    limit: int
    """Rows of data; -1 for no end."""
    folder: RunFolder
    trained: dict[int, list[int]] = field(default_factory=dict)
    """Draws by batch, as far as the run's present checkpoint or end counts them."""
    attempts: int = 0
    empty: bool = False
    """The data ended before anything was trained on."""

    def run(self, *, stop_s=None, kill_s=None):
        """Begin, or continue from the newest checkpoint if there is one. True if it came to its own end."""
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
        if state is None:  # as a user must who begins anew
            shutil.rmtree(self.folder.path, ignore_errors=True)
        self.trained = {step: ids for step, ids in self.trained.items() if step <= begun}
        self.folder.create(self.config)
        async with LoggingExitStack() as stack:
            loop = await build_loop(
                self.config,
                parts,
                self.folder,
                Numbers(self.limit),
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
        return CheckpointFolder(self.folder.checkpoints, self.config.checkpoint).all()


@dataclass
class Cluster:
    """As much of a cluster as the loop needs."""

    store: LocalStore
