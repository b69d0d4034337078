"""Tables ``[run]``, ``[checkpoint]`` and ``[reuse]``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from ..components import RecipeView, Settings
from ..settings.resume import MAY_CHANGE
from ..settings.trust import INERT

Positive = Annotated[int, Field(ge=1)]


class LoopConfig(Settings):
    """``[run]``: batch sizes, optimizer steps per batch, how far sampling may run ahead, and deadlines."""

    dir: Annotated[str, MAY_CHANGE] = "auto"
    """Output folder of the run; ``auto`` is ``runs/<name of the recipe>``, with a number appended if it exists."""
    seed: int = Field(0, ge=0)
    """Seed of all random numbers in the run."""
    deterministic: bool = False
    """Compute trainer and engine with batch-invariant kernels, so that their log-probabilities are bitwise
    equal and two runs are identical; slower. Requires max_staleness = 0, and trainer and engine with such kernels."""
    batches: Annotated[int, MAY_CHANGE] = Field(100, ge=1)
    """Number of batches to train on; fewer if the data ends first."""
    prompts_per_batch: int = Field(32, ge=1)
    """Number of prompt groups per batch."""
    samples_per_prompt: int = Field(8, ge=1)
    """Number of rollouts per prompt."""
    steps_per_batch: int = Field(1, ge=1)
    """Number of optimizer steps per batch; its rollouts are split among them."""
    sync_every: int = Field(1, ge=1)
    """Interval between weight publications, in batches."""
    max_staleness: int = Field(0, ge=0)
    """Maximum lag of a token behind the trainer, in policy versions. 0 is on-policy; with 1 or more, the engine samples
    while the trainer trains."""
    over_sampling: float = Field(1.0, ge=1.0, le=16.0)
    """Factor on the number of groups in flight, to compensate for filtered ones. Requires max_staleness >= 1."""
    max_dropped: Annotated[int, MAY_CHANGE] = Field(1000, ge=1)
    """Maximum number of consecutive groups that filters may drop before the run ends with an error."""
    rollout_timeout_s: Annotated[float, MAY_CHANGE] = Field(600.0, gt=0)
    """Maximum duration of a rollout, in seconds; a rollout that exceeds it becomes a failed sample."""
    data_timeout_s: Annotated[float, MAY_CHANGE] = Field(600.0, gt=0)
    """Maximum time to draw the prompts of a batch from the data, in seconds."""
    train_timeout_s: Annotated[float, MAY_CHANGE] = Field(1800.0, gt=0)
    """Maximum duration of one trainer operation, in seconds."""
    sync_timeout_s: Annotated[float, MAY_CHANGE] = Field(600.0, gt=0)
    """Maximum duration of one weight sync, in seconds."""
    write_timeout_s: Annotated[float, MAY_CHANGE] = Field(600.0, gt=0)
    """Maximum time for a rollout worker to write the samples of a batch, or to save or restore the state of its
    components, in seconds."""
    driver_timeout_s: Annotated[float, MAY_CHANGE] = Field(300.0, ge=0)
    """Maximum time for which a call may block the driver's event loop, such as a ``batch_ready`` hook of a plugin, in
    seconds. 0 disables the check, for debuggers."""
    hang_factor: Annotated[float, MAY_CHANGE] = Field(20.0, ge=0.0)
    """Hang detection: maximum duration of an operation of trainer, engine or weight sync, as a multiple of the longest
    one of its kind so far. train_timeout_s and sync_timeout_s limit the first one and cap the others. 0 disables it."""
    hang_min_s: Annotated[float, MAY_CHANGE] = Field(300.0, gt=0.0)
    """Lower bound on the limits derived from hang_factor, in seconds."""
    max_failed: Annotated[float, MAY_CHANGE] = Field(0.5, ge=0.0, le=1.0)
    """Maximum fraction of failed rollouts among a batch's samples before the run ends with an error."""

    warn_mismatch: Annotated[float, MAY_CHANGE] = Field(0.1, ge=0.0)
    """Threshold of ``train/mismatch_kl`` above which the run warns that trainer and engine assign different
    probabilities to the sampled tokens, in nats per token; 0 never warns."""

    pass_threshold: Annotated[float, MAY_CHANGE] = 1.0
    """Minimum reward of a rollout that counts as passed in the metrics ``reward/pass@1`` and
    ``reward/pass@<samples>``."""

    profile: Annotated[tuple[Positive, ...], MAY_CHANGE] = ()
    """Batches (counted from 1) in which each trainer rank records a ``torch.profiler`` trace of training. Traces, for
    Perfetto (ui.perfetto.dev), and tables of operators are written to the run's folder ``profiles``."""
    token_values_every: Annotated[int, MAY_CHANGE] = Field(0, ge=0)
    """Interval at which trainer ranks store the advantage, probability ratio, clipping and log-probability of every
    loss token for reports, in batches. Files are written to the run's folder ``tokens``; 0 stores none."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        beyond = [number for number in self.profile if number > self.batches]
        if beyond:
            yield f"profile names batch {beyond[0]}, and batches = {self.batches}; name one of 1 to {self.batches}"

    @property
    def rollouts_per_batch(self) -> int:
        """Rollouts in one batch."""
        return self.prompts_per_batch * self.samples_per_prompt


class CheckpointConfig(Settings):
    """``[checkpoint]``: saving of checkpoints and exports, and the checkpoint to start from."""

    every: int = Field(0, ge=0)
    """Checkpoint interval, in batches; 0 saves only at the end and on Ctrl-C."""
    at_end: bool = True
    """Save a checkpoint after the last batch."""
    keep_last: int = Field(2, ge=1)
    """Number of most recent checkpoints to keep."""
    keep_every: int = Field(0, ge=0)
    """Interval of checkpoints that are never deleted, in batches; 0 keeps only the most recent ones."""
    optimizer: bool = True
    """Save the optimizer's state. Checkpoints without it are smaller (with AdamW a third), can be exported,
    evaluated and named by `start_from`, but cannot be resumed."""
    start_from: Annotated[str, INERT] = "none"
    """Checkpoint of another run to initialize policy and optimizer from; ``none`` starts from the model folder. From
    a checkpoint without the optimizer's state, the optimizer and its schedule start from the beginning."""
    export: bool = True
    """Export the final policy as a Hugging Face folder."""
    export_every: int = Field(0, ge=0)
    """Interval of exports to ``exports/batch-<n>``, in batches; 0 exports only the final policy. They are kept."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.keep_every and self.every == 0:
            yield f"keep_every = {self.keep_every} has no effect with every = 0, which only saves at the end; remove it"
        elif self.keep_every and self.keep_every % self.every:
            yield f"keep_every must be a multiple of every = {self.every}, got {self.keep_every}"


class ReuseConfig(Settings):
    """``[reuse]``: experience replay. Trained groups enter a pool, from which later batches draw again.

    Each batch consists of `run.prompts_per_batch` new groups plus groups drawn at random without replacement from the
    pool. Their tokens keep the policy version that sampled them, so the algorithm must correct for off-policy data.
    """

    groups_per_batch: int = Field(ge=1)
    """Number of pool groups added to each batch; fewer while the pool is smaller."""
    max_age: int = Field(4, ge=1)
    """Maximum age of a reused group's oldest token, in policy versions behind the trainer."""
    max_uses: int = Field(2, ge=2)
    """Maximum number of batches that train on a group, including the first one."""
    capacity: int = Field(1024, ge=1)
    """Maximum number of groups in the pool; a full pool evicts the oldest. Groups are held in memory and stored in
    every checkpoint."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.groups_per_batch > self.capacity:
            yield f"groups_per_batch must be at most capacity = {self.capacity}, got {self.groups_per_batch}"
