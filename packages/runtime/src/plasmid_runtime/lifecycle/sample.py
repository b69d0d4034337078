"""Sample and score a few prompts as a run does, without training."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from plasmid.config.evaluation import EvalConfig
from plasmid.config.profiles import check_named
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid.types import Prompt, PromptGroup
from plasmid.utils.seeds import seed_of
from plasmid.utils.waiting import run_together
from plasmid_models.source import download_models
from plasmid_models.tokenization.tokenizer import prompt_encoder

from ..checkpoint.run_folder import RunFolder
from ..cluster.opening import cluster_address
from ..observe.driver_log import Transcript
from ..rollout.worker import Job
from .hang_report import report_hangs
from .shutdown import Interrupts, LoggingExitStack, raise_cluster_failures
from .startup import MakeCluster, make_ray_factory, run_interruptible, start_run
from .validation import check


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledGroup:
    """One prompt group, and the filter that drops it, if any."""

    group: PromptGroup
    dropped_by: str


def draw_prompts(config: RunConfig, count: int, *, eval_set: str = "") -> list[Prompt]:
    """Draw the first prompts of a run or of an evaluation set. Raises `DataError`."""
    config, _ = download_models(config, weights=False)
    encode = prompt_encoder(config.model)
    if eval_set:
        return list(islice(_set(config, eval_set).data.prompts(encode), count))
    with closing(config.data.stream(encode, seed=config.run.seed)) as stream:
        check_named(stream.facts(), config.profiles)
        return [prompt for _ in range(count) if (prompt := stream.draw()) is not None]


def sample(
    config: RunConfig,
    prompts: Sequence[Prompt],
    *,
    each: int,
    eval_set: str = "",
    make_cluster: MakeCluster | None = None,
    transcript: Transcript | None = None,
) -> list[SampledGroup]:
    """Roll out every prompt ``each`` times with the recipe's engine and workflow, and score.

    The run folder is temporary. After an error it is kept, with its logs and the ``transcript``. Raises `PlasmidError`.
    """
    config, _ = download_models(config)
    check(config, training=False, unused=("trackers", "trainer", "teacher", "buffer", "data" if eval_set else "eval"))
    folder = RunFolder(_folder(config))

    async def main() -> list[SampledGroup]:
        with Interrupts():
            folder.create(config)
            if transcript is not None:
                transcript.run_started(folder.path)
            async with LoggingExitStack() as stack, report_hangs(folder, config.run) as hangs:
                handles = await start_run(
                    config,
                    folder,
                    hangs.wrap_cluster(make_cluster or make_ray_factory(config)),
                    with_trainer=False,
                    with_engine=True,
                    is_new=True,
                    evaluating=True,
                )
                stack.add_close("the engine", handles.close)
                assert handles.workers is not None and handles.engine is not None
                jobs = [_job(config, index, prompt, each, eval_set) for index, prompt in enumerate(prompts)]
                sessions = [session for job in jobs for session in job.sessions()]
                await handles.engine.expect(sessions)
                async with raise_cluster_failures(handles.cluster):
                    groups = await run_together(handles.workers.roll_out(job) for job in jobs)
                return [SampledGroup(group=ref.whole.get(), dropped_by=ref.dropped_by) for ref in groups]

    found = run_interruptible(main())
    shutil.rmtree(folder.path, ignore_errors=True)  # after an error the folder is kept, for its logs
    return found


def _folder(config: RunConfig) -> Path:
    """Create a temporary folder; on a cluster it is next to the runs, where all machines can access it."""
    if cluster_address(config.placement) is None:
        return Path(tempfile.mkdtemp(prefix="plasmid-sample-"))
    runs = Path("runs") if config.run.dir == "auto" else Path(config.run.dir).parent
    runs.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".sample-", dir=runs))


def _set(config: RunConfig, name: str) -> EvalConfig:
    for set_ in config.eval:
        if set_.name == name:
            return set_
    names = ", ".join(set_.name for set_ in config.eval) or "none"
    raise ConfigError(f"eval: no evaluation set is named {name!r}; sets are {names}")


def _job(config: RunConfig, index: int, prompt: Prompt, each: int, eval_set: str) -> Job:
    own = _set(config, eval_set).sampling if eval_set else None
    return Job(
        group_id=index,
        name=str(index),
        prompt=prompt,
        num_samples=each,
        sampling=config.sampling_of(prompt, own),
        seed=seed_of(config.run.seed, index),
        filtered=not eval_set,
        eval_set=eval_set,
    )
