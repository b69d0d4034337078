"""Evaluate a model folder, a checkpoint, or the model of a server on the evaluation sets of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from plasmid.config.run import RunConfig
from plasmid_models.source import download_models
from plasmid_models.tokenization.tokenizer import prompt_encoder

from ..checkpoint.folder import check_intact, read_state
from ..checkpoint.run_folder import RunFolder, find_unused_folder
from ..evaluation.sets import open_sets
from ..loop.device_scheduler import DeviceScheduler
from ..observe.dispatch import ObserverQueues
from ..observe.driver_log import DriverLog
from ..observe.observers import check_observers
from .assembly import open_evaluator
from .hang_report import report_hangs
from .shutdown import Interrupts, LoggingExitStack, raise_cluster_failures
from .startup import MakeCluster, RunHandles, make_ray_factory, run_interruptible, start_run
from .validation import check


def evaluate(
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    observers: Sequence[object] = (),
    make_cluster: MakeCluster | None = None,
) -> Mapping[str, Mapping[str, float]]:
    """Evaluate ``model.path`` on every ``[[eval]]`` set of the recipe. Returns metrics by set, and their mean.

    With a ``checkpoint``, evaluates its policy instead: the recipe's trainer loads it and sends it to the engine.
    Samples and metrics are stored in a separate run folder. Raises `PlasmidError`.
    """
    check_observers(observers)
    config, _ = download_models(config)
    unused = ("trackers", "teacher", "data", "filters", "buffer", *(() if checkpoint is not None else ("trainer",)))
    check(config, training=checkpoint is not None, unused=unused)
    sets = open_sets(config, prompt_encoder(config.model))
    state = None
    if checkpoint is not None:
        state = read_state(checkpoint)
        check_intact(checkpoint)
    folder = _folder(config)

    async def main() -> Mapping[str, Mapping[str, float]]:
        with Interrupts(), DriverLog(config, observers) as log:
            folder.create(config)
            async with LoggingExitStack() as stack, report_hangs(folder, config.run) as hangs:
                queues = ObserverQueues.of_objects(log.observers)
                stack.add_close("observers", queues.close)
                queues.emit("run_started", run_dir=folder.path, batches=0)
                handles = await start_run(
                    config,
                    folder,
                    hangs.wrap_cluster(make_cluster or make_ray_factory(config)),
                    with_trainer=checkpoint is not None,
                    with_engine=True,
                    is_new=True,
                    evaluating=True,
                    emit=queues.emit,
                )
                stack.add_close("the run", handles.close)
                async with raise_cluster_failures(handles.cluster):
                    if checkpoint is not None and state is not None:
                        await _load(config, handles, checkpoint, state.version)
                    evaluator = open_evaluator(config, handles, folder, sets, queues, stack, training=False)
                    assert evaluator is not None
                    return await evaluator.run_all()

    return run_interruptible(main())


def _folder(config: RunConfig) -> RunFolder:
    """Choose an unused folder for the results, separate from that of the evaluated run."""
    if config.run.dir == "auto":
        return find_unused_folder(Path("runs") / f"{config.recipe}-eval")
    chosen = Path(config.run.dir)
    return find_unused_folder(chosen.with_name(f"{chosen.name}-eval")) if chosen.exists() else RunFolder(chosen)


async def _load(config: RunConfig, handles: RunHandles, checkpoint: Path, version: int) -> None:
    """Load the checkpoint's policy into the trainer, and send it to the engine."""
    assert handles.trainer is not None and handles.engine is not None
    await handles.trainer.load(checkpoint / "trainer")
    await DeviceScheduler(config=config, trainer=handles.trainer, engine=handles.engine).start(version)
