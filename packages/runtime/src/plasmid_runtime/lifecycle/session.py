"""One run from the configuration to the result: starts its processes, resumes or begins, loops, ends cleanly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pluggy
from plasmid.config.run import RunConfig
from plasmid.plugins.registry import load_plugins
from plasmid.protocols import RunContext
from plasmid.types.runs import Mode, RunResult

from ..checkpoint.folder import CheckpointFolder
from ..checkpoint.resume import ResumePoint
from ..checkpoint.run_folder import RunFolder
from ..observe.dispatch import ObserverQueues, TrackerObserver
from ..observe.journal import read_journal
from .assembly import build_loop, open_evaluator
from .export import export_checkpoint, export_policy, is_exported
from .preparation import PreparedRun, prepare_run
from .shutdown import Interrupts, LoggingExitStack
from .startup import MakeCluster, RunHandles, interruptible, on_ray, start_run


def run(
    config: RunConfig,
    *,
    mode: Mode | None = None,
    observers: Sequence[object] = (),
    make_cluster: MakeCluster | None = None,
) -> RunResult:
    """Run the whole job. Raises `PlasmidError` for everything that a user can mend.

    Ctrl-C (or SIGTERM) ends a run after the current batch, all saved; a second one, or one before there is anything to
    save, ends it at once with `KeyboardInterrupt`. Either way no process is left behind.
    """
    mode, started = mode or Mode(), time.time()
    with ExitStack() as held:
        start = prepare_run(
            config, mode, held, observers=observers
        )  # reads files only: Ctrl-C needs no cleaning up yet
        session = _Session(start.config, mode, observers, make_cluster or on_ray(config), started)
        if start.state is not None and start.state.state.batch >= start.config.run.batches:
            return session.finish(start, start.state)
        return interruptible(session.run(start))


@dataclass(slots=True)
class _Session:
    config: RunConfig
    mode: Mode
    observers: Sequence[object]
    make_cluster: MakeCluster
    started: float

    def finish(self, start: PreparedRun, restored: ResumePoint) -> RunResult:
        """The result of a run that has all its batches. Only an export may be missing, if it was killed before that."""
        folder, batch = start.folder, restored.state.batch
        final = folder.final if self.config.checkpoint.export else None
        if final is not None and not is_exported(final, batch):
            export_checkpoint(restored.path, final, config=self.config, make_cluster=self.make_cluster)
        return replace(self._result(folder, batch, interrupted=False, final=final), was_finished=True)

    async def run(self, start: PreparedRun) -> RunResult:
        folder = start.folder
        with Interrupts() as interrupts:
            folder.create(self.config, start.stream.facts())
            async with LoggingExitStack() as stack:
                plugins = load_plugins(files=map(Path, self.config.plugins))
                queues = await self._open_observers(plugins, folder, stack)
                queues.emit("run_started", run_dir=folder.path, batches=self.config.run.batches)
                batch = 0 if start.state is None else start.state.state.batch
                queues.emit("phase_started", batch=batch, phase="start", version=0)
                handles = await start_run(
                    self.config,
                    folder,
                    self.make_cluster,
                    with_trainer=not self.mode.rollouts_only,
                    with_engine=self._with_engine,
                    is_new=start.state is None,
                )
                stack.add_close("the run", handles.close)
                loop = await build_loop(
                    self.config,
                    handles,
                    folder,
                    start.stream,
                    queues,
                    open_evaluator(self.config, handles, folder, start.sets, queues, stack, state=start.state),
                    state=start.state,
                    replay=self.mode.replay,
                    stack=stack,
                    plugins=plugins,
                )
                interrupts.save_with(loop.stop)
                interrupted = await loop.run()
                interrupts.save_with(None)
                async with loop.trainer_loaded():
                    final = await self._export(folder, handles, interrupted, loop.progress.batch)
        return self._result(folder, loop.progress.batch, interrupted=interrupted, final=final)

    @property
    def _with_engine(self) -> bool:
        return self.mode.replay is None and self.config.rollout is not None

    async def _open_observers(
        self, plugins: pluggy.PluginManager, folder: RunFolder, stack: LoggingExitStack
    ) -> ObserverQueues:
        context = RunContext(seed=self.config.run.seed, run_dir=folder.path)
        for tracker in self.config.trackers:
            await tracker.open(context)
            stack.add_close(f"tracker {type(tracker).__name__}", tracker.close)
        queues = ObserverQueues.of(plugins, *map(TrackerObserver, self.config.trackers), *self.observers)
        stack.add_close("observers", queues.close)
        return queues

    async def _export(self, folder: RunFolder, handles: RunHandles, interrupted: bool, batch: int) -> Path | None:
        if handles.trainer is None or interrupted or not self.config.checkpoint.export:
            return None
        await export_policy(self.config, handles.trainer, folder.final, batch)
        return folder.final

    def _result(self, folder: RunFolder, batch: int, *, interrupted: bool, final: Path | None) -> RunResult:
        curves: dict[str, list[tuple[int, float]]] = {}
        for entry in read_journal(folder.evaluations):
            curves.setdefault(entry.name, []).append((entry.step, entry.metrics[f"eval/{entry.name}/reward"]))
        checkpoints = CheckpointFolder(folder.checkpoints, self.config.checkpoint).all()
        return RunResult(
            run_dir=folder.path,
            steps=batch,
            interrupted=interrupted,
            final=final,
            checkpoint=checkpoints[-1] if checkpoints else None,
            evaluations={name: tuple(points) for name, points in curves.items()},
            seconds=time.time() - self.started,
        )
