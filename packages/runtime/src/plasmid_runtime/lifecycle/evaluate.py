"""Evaluates a model folder, a checkpoint, or whatever a server serves, on the sets of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from plasmid.config.run import RunConfig
from plasmid_models.tokenization.tokenizer import prompt_encoder

from ..checkpoint.folder import read_state
from ..checkpoint.run_folder import RunFolder, unused_folder
from ..evaluation.sets import open_sets
from ..loop.device_scheduler import DeviceScheduler
from ..observe.dispatch import ObserverQueues
from ..observe.observers import check_observers
from .assembly import open_evaluator
from .shutdown import Interrupts, LoggingExitStack
from .startup import MakeCluster, RunHandles, interruptible, on_ray, start_run
from .validation import check


def evaluate(
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    observers: Sequence[object] = (),
    make_cluster: MakeCluster | None = None,
) -> Mapping[str, Mapping[str, float]]:
    """Metrics of ``model.path`` on every ``[[eval]]`` set of the recipe, and of their mean if there are several.

    With a ``checkpoint`` of a run its policy is evaluated instead: the recipe's trainer loads it and sends it to the
    engine. Samples and metrics are kept in a run folder of their own. Raises `PlasmidError`.
    """
    check_observers(observers)
    unused = ("trackers", "data", "filters", "buffer", *(() if checkpoint is not None else ("trainer",)))
    check(config, training=checkpoint is not None, unused=unused)
    sets = open_sets(config, prompt_encoder(config.model))
    state = read_state(checkpoint) if checkpoint is not None else None
    folder = _folder(config)

    async def main() -> Mapping[str, Mapping[str, float]]:
        with Interrupts():
            folder.create(config)
            async with LoggingExitStack() as stack:
                queues = ObserverQueues.of_objects(observers)
                stack.add_close("observers", queues.close)
                handles = await start_run(
                    config,
                    folder,
                    make_cluster or on_ray(config),
                    with_trainer=checkpoint is not None,
                    with_engine=True,
                    is_new=True,
                    evaluating=True,
                )
                stack.add_close("the run", handles.close)
                if checkpoint is not None and state is not None:
                    await _load(config, handles, checkpoint, state.version)
                evaluator = open_evaluator(config, handles, folder, sets, queues, stack, training=False)
                assert evaluator is not None
                return await evaluator.run_all()

    return interruptible(main())


def _folder(config: RunConfig) -> RunFolder:
    """A folder for what is written: never that of the run which is evaluated."""
    if config.run.dir == "auto":
        return unused_folder(Path("runs") / f"{config.recipe}-eval")
    chosen = Path(config.run.dir)
    return unused_folder(chosen.with_name(f"{chosen.name}-eval")) if chosen.exists() else RunFolder(chosen)


async def _load(config: RunConfig, handles: RunHandles, checkpoint: Path, version: int) -> None:
    """Bring the policy of the checkpoint into the engine, by way of its trainer."""
    assert handles.trainer is not None and handles.engine is not None
    await handles.trainer.load(checkpoint / "trainer")
    await DeviceScheduler(config=config, trainer=handles.trainer, engine=handles.engine).start(version)
