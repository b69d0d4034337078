"""One run from the configuration to the result: starts the parts, resumes or begins, loops, ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..config import RunConfig
from ..data.tokenizer import prompt_encoder
from ..observe.dispatch import ObserverQueues, TrackerObserver
from ..observe.journal import Journal, read_journal
from ..plugins import load_plugins
from ..protocols import Cluster, RunContext
from .checkpoint import CheckpointFolder
from .evaluation import EvaluationSet, Evaluator, open_sets
from .folder import RunFolder, new_folder, newest_folder
from .loop import Loop
from .parts import Parts, start_parts
from .preflight import check
from .replay import stored_batches
from .setup import build_loop, restore

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
MakeCluster = Callable[[RunFolder], Cluster]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run reached and wrote."""

    run_dir: Path
    steps: int
    """Batches trained, those before a resume included."""
    interrupted: bool
    """True if it was stopped (Ctrl-C) before its last batch."""
    final: Path | None
    """Hugging Face folder of the final policy."""
    checkpoint: Path | None
    """Newest checkpoint."""
    evaluations: Mapping[str, tuple[tuple[int, float], ...]]
    """Set name -> (batches trained, mean reward)."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What kind of run this is."""

    resume: bool = False
    replay: Path | None = None
    """Train on the stored samples of this run; no engine is started."""
    rollouts_only: bool = False
    """Sample and score only; no trainer is started."""


def run(
    config: RunConfig,
    *,
    mode: Mode | None = None,
    observers: Sequence[object] = (),
    make_cluster: MakeCluster | None = None,
) -> RunResult:
    """Run the whole job. Raises `PlasmidError` for everything that a user can mend."""
    return asyncio.run(_Session(config, mode or Mode(), observers, make_cluster or _ray).run())


def _ray(folder: RunFolder) -> Cluster:
    from .cluster import RayCluster  # imports ray: only a run needs it

    return RayCluster(log_dir=folder.logs)


@dataclass(slots=True)
class _Session:
    config: RunConfig
    mode: Mode
    observers: Sequence[object]
    make_cluster: MakeCluster
    started: float = field(default_factory=time.time)

    async def run(self) -> RunResult:
        check(self.config)
        encode = prompt_encoder(self.config.model)
        stream = self.config.data.stream(encode, seed=self.config.run.seed)
        sets = open_sets(self.config, encode) if self._with_engine else ()
        if self.mode.replay is not None:
            stored_batches(self.mode.replay)
        folder = newest_folder(self.config) if self.mode.resume else new_folder(self.config)
        state = restore(folder, self.config) if self.mode.resume else None
        folder.create(self.config)
        async with contextlib.AsyncExitStack() as stack:
            queues = await self._open_observers(folder, stack)
            queues.emit("phase_started", batch=0, phase="start", version=0)
            parts = await self._start(folder)
            stack.push_async_callback(parts.close)
            evaluator = self._evaluator(folder, parts, sets, queues, stack)
            loop = await build_loop(
                self.config, parts, folder, stream, queues, evaluator, state=state, replay=self.mode.replay, stack=stack
            )
            with _stop_on_signals(loop):
                interrupted = await loop.run()
            final = await self._export(folder, parts, interrupted)
        return self._result(folder, loop, interrupted, final)

    async def _start(self, folder: RunFolder) -> Parts:
        """Start the parts. A new run that could not start has not taken its folder."""
        try:
            return await start_parts(
                self.config,
                self.make_cluster(folder),
                folder.path,
                with_trainer=not self.mode.rollouts_only,
                with_engine=self._with_engine,
            )
        except BaseException:
            if not self.mode.resume:
                folder.vacate()
            raise

    @property
    def _with_engine(self) -> bool:
        return self.mode.replay is None and self.config.rollout is not None

    async def _open_observers(self, folder: RunFolder, stack: contextlib.AsyncExitStack) -> ObserverQueues:
        context = RunContext(seed=self.config.run.seed, run_dir=folder.path)
        for tracker in self.config.trackers:
            await tracker.open(context)
            stack.push_async_callback(tracker.close)
        plugins = load_plugins(files=map(Path, self.config.plugins))
        queues = ObserverQueues.of(plugins, *map(TrackerObserver, self.config.trackers), *self.observers)
        stack.callback(queues.close)
        return queues

    def _evaluator(
        self,
        folder: RunFolder,
        parts: Parts,
        sets: Sequence[EvaluationSet],
        queues: ObserverQueues,
        stack: contextlib.AsyncExitStack,
    ) -> Evaluator | None:
        if parts.workers is None or parts.engine is None:
            return None
        journal = Journal(folder.evaluations)
        stack.callback(journal.close)

        async def report(batch: int, name: str, metrics: Mapping[str, float]) -> None:
            journal.append(batch, metrics=metrics, name=name)
            queues.emit("evaluation_finished", step=batch, name=name, metrics=metrics)

        return Evaluator(
            self.config,
            sets,
            workers=parts.workers,
            engine=parts.engine,
            samples_dir=folder.samples,
            report=report,
        )

    async def _export(self, folder: RunFolder, parts: Parts, interrupted: bool) -> Path | None:
        if parts.trainer is None or interrupted or not self.config.checkpoint.export:
            return None
        await parts.trainer.export(folder.final)
        return folder.final

    def _result(self, folder: RunFolder, loop: Loop, interrupted: bool, final: Path | None) -> RunResult:
        curves: dict[str, list[tuple[int, float]]] = {}
        for entry in read_journal(folder.evaluations):
            curves.setdefault(entry.name, []).append((entry.step, entry.metrics[f"eval/{entry.name}/reward"]))
        checkpoints = CheckpointFolder(folder.checkpoints, self.config.checkpoint).all()
        return RunResult(
            run_dir=folder.path,
            steps=loop.progress.batch,
            interrupted=interrupted,
            final=final,
            checkpoint=checkpoints[-1] if checkpoints else None,
            evaluations={name: tuple(points) for name, points in curves.items()},
            seconds=time.time() - self.started,
        )


@contextlib.contextmanager
def _stop_on_signals(loop: Loop) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends the run after the current batch, all saved; the second ends it at once."""
    events = asyncio.get_running_loop()

    def first() -> None:
        log.warning("stopping: saving the run; press Ctrl-C again to quit without")
        loop.stop()
        remove()

    def remove() -> None:
        for number in SIGNALS:
            events.remove_signal_handler(number)

    try:
        for number in SIGNALS:
            events.add_signal_handler(number, first)
    except (ValueError, RuntimeError):  # not the main thread: somebody else handles signals
        yield
        return
    try:
        yield
    finally:
        remove()


def evaluate(config: RunConfig, *, make_cluster: MakeCluster | None = None) -> Mapping[str, Mapping[str, float]]:
    """Evaluate ``model.path`` on every ``[[eval]]`` set of the recipe; no trainer is started."""

    async def main() -> dict[str, dict[str, float]]:
        check(config)
        sets = open_sets(config, prompt_encoder(config.model))
        folder = new_folder(config)
        folder.create(config)
        parts = await start_parts(
            config, (make_cluster or _ray)(folder), folder.path, with_trainer=False, with_engine=True
        )
        try:
            assert parts.workers is not None and parts.engine is not None
            journal = Journal(folder.evaluations)

            async def report(batch: int, name: str, metrics: Mapping[str, float]) -> None:
                journal.append(batch, metrics=metrics, name=name)

            evaluator = Evaluator(
                config,
                sets,
                workers=parts.workers,
                engine=parts.engine,
                samples_dir=folder.samples,
                report=report,
            )
            return {set_.settings.name: await evaluator.run(set_, 0) for set_ in sets}
        finally:
            await parts.close()

    return asyncio.run(main())
