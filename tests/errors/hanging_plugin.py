"""A plugin whose trainer ranks, engine and rewards are processes that hang as configured. Imports no torch."""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from plasmid import Reward, RolloutEngineConfig, TrainerConfig, hookimpl
from plasmid.components.interaction import Environment, Episode, Step
from plasmid.protocols import Resources, TrainReport
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig, FakeTrainer
from plasmid_training.driver.group import RankGroup


def stop_here():
    """Stop this process, as a debugger or a full terminal would."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)  # the signal may take a moment


class HangingRank:
    """One rank; all ranks meet in every step."""

    def __init__(self, rank: int, num_ranks: int, folder: Path, settings: "Ranks") -> None:
        self._rank, self._num_ranks, self._folder, self._settings = rank, num_ranks, folder, settings

    def train(self, step: int) -> None:
        if step == self._settings.at and self._rank == self._num_ranks - 1:
            if self._settings.how == "stop":
                stop_here()
            elif self._settings.how == "die":
                print("Loading weights:   0%|          | 0/12\rLoading weights:  50%|#####     | 6/12")
                print("MemoryError: no room for the gradients")
                os.kill(os.getpid(), signal.SIGKILL)
            elif self._settings.how == "absent":
                return
        self.all_reduce(step)

    def all_reduce(self, step: int) -> None:
        """Wait for the other ranks."""
        (self._folder / f"met-{step}-{self._rank}").touch()
        while len(list(self._folder.glob(f"met-{step}-*"))) < self._num_ranks:
            time.sleep(0.02)


class RanksTrainer(FakeTrainer):
    """A trainer of processes."""

    def __init__(self, actors, timeout_s: float) -> None:
        super().__init__()
        self._ranks = RankGroup(actors, timeout_s=timeout_s)

    async def train(self, batch, scores) -> TrainReport:
        await self._ranks.call_all(HangingRank.train, batch.index + 1)
        return await super().train(batch, scores)

    async def close(self) -> None:
        await self._ranks.stop()


class Ranks(TrainerConfig):
    """A trainer of two processes, of which the last one hangs."""

    kind: Literal["ranks"] = "ranks"
    how: Literal["stop", "absent", "die", "never"] = "never"
    """What the last rank does in the batch `at`."""
    at: int = 2
    """Batch, from 1."""

    async def build(self, context):
        actors = [
            await context.cluster.start(
                HangingRank, rank, 2, context.run_dir.absolute(), self, name=f"trainer-{rank}", resources=Resources()
            )
            for rank in range(2)
        ]
        return RanksTrainer(actors, context.config.run.train_timeout_s)


class HangingServer:
    """The process of the engine."""

    def __init__(self, settings: "Served") -> None:
        self._engine, self._settings = FakeEngine(FakeEngineConfig()), settings

    async def generate(self, request):
        if int(request.session_id.partition("/")[0]) >= self._settings.from_group:
            stop_here()
        return await self._engine.generate(request)


class Client:
    """Calls the process."""

    def __init__(self, actor) -> None:
        self._actor = actor

    async def generate(self, request):
        return await self._actor.call("generate", request, timeout_s=600.0)

    async def abort(self, request_ids) -> None:
        return None

    async def end_sessions(self, session_ids) -> None:
        return None

    async def disconnect(self) -> None:
        return None


class ServedEngine(FakeEngine):
    """The engine of the process."""

    def __init__(self, actor) -> None:
        super().__init__(FakeEngineConfig())
        self._actor = actor

    @property
    def client(self):
        return Client(self._actor)


class Served(RolloutEngineConfig):
    """An engine in a process, which stops itself."""

    kind: Literal["served"] = "served"
    from_group: int = 1000
    """First group at which it stops."""

    async def build(self, context):
        actor = await context.cluster.start(HangingServer, self, name="engine-0", resources=Resources())
        return ServedEngine(actor)


CALL = '<tool_call>\n{"name": "stuck", "arguments": {}}\n</tool_call>'


class CallingEngine(FakeEngine):
    """Calls a tool in the first turn of a rollout, and answers in the second."""

    def __init__(self, tokens: "list[int]") -> None:
        super().__init__(FakeEngineConfig(max_delay_s=0.0, num_tokens=len(tokens)))
        self._tokens = tokens

    async def generate(self, request):
        completion = await super().generate(request)
        if request.id.endswith("#0"):
            return replace(completion, token_ids=np.array(self._tokens, np.int32))
        return completion


class Calling(RolloutEngineConfig):
    """Builds the engine above, with the tokenizer's characters."""

    kind: Literal["calling"] = "calling"

    async def build(self, context):
        from plasmid_models.tokenization.tokenizer import Tokenizer

        tokenizer = Tokenizer(Path(context.config.model.path))
        return CallingEngine([int(i) for i in tokenizer.encode(CALL)])


class HangingReward(Reward):
    """Gives 1.0 until a certain group, then hangs."""

    kind: Literal["hanging"] = "hanging"
    how: Literal["wait", "block", "stop", "never"] = "never"
    """How it hangs."""
    from_group: int = 4
    """First group for which it hangs."""

    async def __call__(self, prompt, sample):
        if sample.group_id >= self.from_group:
            if self.how == "wait":
                await asyncio.sleep(3600)
            elif self.how == "block":
                time.sleep(3600)
            elif self.how == "stop":
                stop_here()
        return 1.0


class HangingEnvironment(Environment):
    """An environment whose steps never end."""

    kind: Literal["hanging"] = "hanging"

    def episode(self):
        return HangingEpisode()


class ThreadedHangingEnvironment(HangingEnvironment):
    """The same in threads of the rollout worker."""

    kind: Literal["hanging-in-threads"] = "hanging-in-threads"
    isolated: ClassVar[bool] = False


class HangingEpisode(Episode):
    """An episode whose first step never ends."""

    def reset(self, seed, prompt):
        return ""

    def step(self, action):
        time.sleep(3600)
        return Step()


@hookimpl
def batch_ready(batch, groups):
    """Block the driver's event loop in batch 2, if the environment variable is set."""
    if os.environ.get("HANGING_HOOK") == "sleep" and batch == 2:
        time.sleep(3600)
    if os.environ.get("HANGING_HOOK") == "stubborn" and batch == 2:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(3600)


@hookimpl
def register_components():
    return [Ranks, Served, Calling, HangingReward, HangingEnvironment, ThreadedHangingEnvironment]
