"""Run a recipe as a whole (`run`) or step by step (`Session`): start its processes, and stop them cleanly."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pluggy
from plasmid.config.run import RunConfig
from plasmid.errors import PlasmidError
from plasmid.plugins.registry import load_plugins
from plasmid.protocols import RunContext
from plasmid.types.batch import GroupRef
from plasmid.types.runs import Mode, RunResult
from plasmid.utils.waiting import wait_within
from plasmid_models.folder import read_text_config

from ..checkpoint.folder import CheckpointFolder
from ..checkpoint.resume import ResumePoint
from ..checkpoint.run_folder import RunFolder
from ..cluster.opening import EarlyRay
from ..control.server import ControlServer
from ..loop.batch_hooks import find_group_errors
from ..loop.loop import Batch, Loop
from ..observe.dispatch import ObserverQueues, TrackerObserver
from ..observe.driver_log import DriverLog
from ..observe.journal import read_journal
from ..observe.progress import RunState, StreamProgress
from ..planning.measured import PlanWriter
from ..rollout.producers.draws import Draws
from ..rollout.producers.producer import ProducedGroups
from .assembly import build_loop, open_evaluator
from .export import export_checkpoint, export_policy, read_exported_batch
from .hang_report import HangReporter, queue_depths, report_hangs
from .preparation import PreparedRun, prepare_run
from .shutdown import Interrupts, LoggingExitStack, raise_cluster_failures
from .startup import MakeCluster, RunHandles, make_ray_factory, run_interruptible, start_run

T = TypeVar("T")


def run(
    config: RunConfig,
    *,
    mode: Mode | None = None,
    observers: Sequence[object] = (),
    make_cluster: MakeCluster | None = None,
    progress: bool = False,
) -> RunResult:
    """Run a recipe to its end. Raises `PlasmidError` for errors that a user can fix.

    Ctrl-C or SIGTERM ends the run after the current batch, with a checkpoint. A second one, or one before the first
    batch is sampled, ends it immediately with `KeyboardInterrupt`. All processes are stopped in any case.
    """
    mode, started = mode or Mode(), time.time()
    with ExitStack() as stack:
        observers = stack.enter_context(_driver_log(config, observers, progress)).observers
        early = stack.enter_context(EarlyRay(config.placement))
        meanwhile = early.start if make_cluster is None else None
        # not yet `run_interruptible`: on Ctrl-C, closing the stack ends Ray and releases the folder
        start = prepare_run(config, mode, stack, observers=observers, meanwhile=meanwhile)
        job = RecipeRun(start.config, mode, observers, make_cluster or make_ray_factory(config, early), started)
        if start.state is not None and start.state.state.batch >= start.config.run.batches:
            return job.finish(start, start.state)
        if meanwhile is not None:
            meanwhile()  # if Ray has not started yet: on the event loop, its start would delay Ctrl-C
        return run_interruptible(job.run(start))


def _driver_log(config: RunConfig, observers: Sequence[object], progress: bool) -> DriverLog:
    return DriverLog(config, [*observers, *([StreamProgress(RunState(config))] if progress else [])])


@dataclass(slots=True)
class RecipeRun:
    """Starts, runs and ends a recipe's loop."""

    config: RunConfig
    mode: Mode
    observers: Sequence[object]
    make_cluster: MakeCluster
    started: float

    def finish(self, start: PreparedRun, restored: ResumePoint) -> RunResult:
        """Return the result of a run that has trained all batches. Exports the policy first if no export exists."""
        folder, batch = start.folder, restored.state.batch
        final = folder.final if self.config.checkpoint.export else None
        if final is not None and read_exported_batch(final) != batch:
            export_checkpoint(restored.path, final, config=self.config, make_cluster=self.make_cluster)
        return replace(self._result(folder, batch, interrupted=False, final=final), was_finished=True)

    async def run(self, start: PreparedRun) -> RunResult:
        control = ControlServer(self.config)
        watched = replace(self, observers=[*self.observers, control])
        with Interrupts() as interrupts:
            async with (
                control.listen(start.folder.path),
                watched.open_loop(start) as (loop, handles, _),
                raise_cluster_failures(handles.cluster),
            ):
                interrupts.save_with(loop.stop)
                control.serve(loop)
                interrupted = await loop.run()
                interrupts.save_with(None)
                control.serve(None)
                final = await self.export(start.folder, loop, handles, interrupted=interrupted)
        return self._result(start.folder, loop.progress.batch, interrupted=interrupted, final=final)

    @asynccontextmanager
    async def open_loop(self, start: PreparedRun) -> AsyncIterator[tuple[Loop, RunHandles, HangReporter]]:
        """Start the run and provide its loop. Stops everything at the end of the block."""
        folder = start.folder
        folder.create(self.config, start.facts)
        async with LoggingExitStack() as stack, report_hangs(folder, self.config.run) as hangs:
            plugins = load_plugins(files=map(Path, self.config.plugins))
            queues = await self._open_observers(plugins, folder, stack)
            queues.emit("run_started", run_dir=folder.path, batches=self.config.run.batches)
            batch = 0 if start.state is None else start.state.state.batch
            queues.emit("phase_started", batch=batch, phase="start", version=0)
            handles = await start_run(
                self.config,
                folder,
                hangs.wrap_cluster(self.make_cluster),
                with_trainer=not self.mode.rollouts_only,
                with_engine=self._with_engine,
                is_new=start.state is None,
                emit=queues.emit,
            )
            stack.add_close("the run", handles.close)
            loop = await build_loop(
                self.config,
                handles,
                folder,
                Draws(start.stream, start.data, timeout_s=self.config.run.data_timeout_s),
                queues,
                open_evaluator(self.config, handles, folder, start.sets, queues, stack, state=start.state),
                state=start.state,
                replay=self.mode.replay,
                stack=stack,
                plugins=plugins,
            )
            hangs.depths = partial(queue_depths, loop, queues)
            yield loop, handles, hangs

    @property
    def _with_engine(self) -> bool:
        return self.mode.replay is None and self.config.rollout is not None

    async def _open_observers(
        self, plugins: pluggy.PluginManager, folder: RunFolder, stack: LoggingExitStack
    ) -> ObserverQueues:
        model_type = str(read_text_config("model", Path(self.config.model.path)).get("model_type", ""))
        context = RunContext(seed=self.config.run.seed, run_dir=folder.path, model_type=model_type)
        for tracker in self.config.trackers:
            name = f"tracker {type(tracker).__name__}"
            await wait_within(self.config.placement.start_timeout_s, f"{name}.open", tracker.open(context))
            stack.add_close(name, tracker.close)
        trackers = map(TrackerObserver, self.config.trackers)
        queues = ObserverQueues.of(plugins, *trackers, PlanWriter(self.config, folder.plan), *self.observers)
        stack.add_close("observers", queues.close)
        return queues

    async def export(self, folder: RunFolder, loop: Loop, handles: RunHandles, *, interrupted: bool) -> Path | None:
        """Export the final policy, unless the recipe disables it or the run was interrupted."""
        if handles.trainer is None or interrupted or not self.config.checkpoint.export:
            return None
        async with loop.trainer_loaded():
            await export_policy(self.config, handles.trainer, folder.final, loop.progress.batch)
        return folder.final

    def _result(self, folder: RunFolder, batch: int, *, interrupted: bool, final: Path | None) -> RunResult:
        curves: dict[str, list[tuple[int, float]]] = {}
        for entry in read_journal(folder.evaluations):
            curves.setdefault(entry.name, []).append((entry.step, entry.metrics[f"eval/{entry.name}/reward"]))
        checkpoints = CheckpointFolder(folder.checkpoints, self.config.checkpoint).list_all()
        return RunResult(
            run_dir=folder.path,
            steps=batch,
            interrupted=interrupted,
            final=final,
            checkpoint=checkpoints[-1] if checkpoints else None,
            evaluations={name: tuple(points) for name, points in curves.items()},
            seconds=time.time() - self.started,
        )


class Session:
    """Implements `plasmid.api.Session`: the loop of a run, step by step.

    The run has its own event loop in a separate thread, so that servers and rollouts continue between two calls.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        mode: Mode,
        observers: Sequence[object] = (),
        make_cluster: MakeCluster | None = None,
        progress: bool = False,
    ) -> None:
        self.config, self.run_dir = config, Path()
        self._mode, self._make_cluster = mode, make_cluster
        self._log = _driver_log(config, observers, progress)
        self._sampled: ProducedGroups | None = None
        self._batch: Batch | None = None
        self._is_broken = False
        self._event_loop = asyncio.new_event_loop()
        self._stack = ExitStack()
        self._opened: AbstractAsyncContextManager[tuple[Loop, RunHandles, HangReporter]] | None = None
        self._hangs: HangReporter | None = None
        """Explains the errors of calls; None while the run starts or ends, when `open_loop` explains them."""

    @property
    def batch(self) -> int:
        return self._loop.progress.batch

    @property
    def version(self) -> int:
        return self._loop.progress.version

    def __enter__(self) -> Session:
        started = time.time()
        observers = self._log.__enter__().observers
        try:
            self._start = prepare_run(self.config, self._mode, self._stack, observers=observers)
            self.config, self.run_dir = self._start.config, self._start.folder.path
            make_cluster = self._make_cluster or make_ray_factory(self.config)
            self._run = RecipeRun(self.config, self._mode, observers, make_cluster, started)
            threading.Thread(target=self._event_loop.run_forever, name="session", daemon=True).start()
            self._stack.callback(self._end_thread)
            self._opened = self._run.open_loop(self._start)
            self._loop, self._handles, self._hangs = self._call(self._opened.__aenter__())
            self._call(self._loop.start())
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def sample(self) -> tuple[GroupRef, ...]:
        if self._sampled is not None:
            raise PlasmidError(
                "session.sample: the groups of the last call have not been trained on; call score and train with the "
                "groups to keep, which drops the others"
            )
        if self._batch is not None and self._batch.will_publish:
            raise PlasmidError(
                f"session.sample: batch {self.batch} has been trained but not published; call publish, or raise "
                f"run.sync_every above {self.config.run.sync_every} to train more batches before it"
            )
        if self._batch is not None:
            self._end_batch(self._batch)
        if self.batch >= self.config.run.batches:
            return ()
        self._sampled = self._call(self._loop.sample())
        return () if self._sampled is None else self._sampled.groups

    def score(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        if self._sampled is None or self._batch is not None:
            raise PlasmidError("session.score: there are no unscored groups; call sample first")
        if not groups:
            raise PlasmidError("session.score: must get at least one group, got none")
        chosen = {group.id for group in groups}
        known = tuple(group for group in self._sampled.groups if group.id in chosen)
        for error in find_group_errors(known, list(groups)):
            raise PlasmidError(f"session.score: the program {error}")
        self._batch = self._call(self._loop.score(self._sampled, tuple(groups)))
        return dict(self._batch.metrics)

    def train(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        if self._sampled is None or self._batch is None:
            raise PlasmidError("session.train: no groups have been scored; call score first")
        if [id(group) for group in groups] != [id(group) for group in self._batch.ref.groups]:
            raise PlasmidError("session.train: must get the groups that were scored, in the same order")
        self._call(self._loop.train(self._batch))
        self._sampled = None
        return dict(self._batch.metrics)

    def publish(self) -> Mapping[str, float]:
        if self._batch is None or self._sampled is not None:
            raise PlasmidError("session.publish: no batch has been trained since the last call; call train first")
        batch = self._batch
        self._call(self._loop.publish(batch))
        self._end_batch(batch)
        return dict(batch.metrics)

    def _end_batch(self, batch: Batch) -> None:
        self._batch = None
        self._call(self._loop.end_batch(batch))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with ExitStack() as stack:
            stack.push(self._log)
            stack.enter_context(self._stack)
            if error is not None:
                self._log.write_error(error)
            if self._opened is None:
                return
            try:
                if error is None and not self._is_broken:
                    self._finish()
            finally:
                self._is_broken, self._hangs = False, None
                self._call(self._opened.__aexit__(None, None, None))

    def _finish(self) -> None:
        """Complete the last batch, write the last checkpoint, and export the policy.

        Groups that have been sampled but not trained on become part of the checkpoint.
        """
        if self._sampled is not None:
            self._call(self._loop.give_back(self._batch))
        elif self._batch is not None:
            if self._loop.progress.unpublished:
                self._call(self._loop.publish(self._batch))
            self._end_batch(self._batch)
        self._call(self._loop.finish())
        self._call(self._run.export(self._start.folder, self._loop, self._handles, interrupted=False))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the run's thread and wait for it. After an exception, the session can only be closed."""
        if self._is_broken:
            work.close()
            raise PlasmidError("session: an earlier call failed; leave the with block and start a new session")
        future = asyncio.run_coroutine_threadsafe(self._explain_hangs(work), self._event_loop)
        try:
            return future.result()
        except BaseException:
            self._is_broken = True
            future.cancel()
            raise

    async def _explain_hangs(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except PlasmidError as error:
            if self._hangs is not None:
                await self._hangs.explain(error)
            raise

    def _end_thread(self) -> None:
        self._event_loop.call_soon_threadsafe(self._event_loop.stop)
