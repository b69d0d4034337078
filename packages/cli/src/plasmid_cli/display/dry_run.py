"""What `rl train --dry-run` prints: the resolved configuration as a recipe, and what its numbers come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..output import table_console

if TYPE_CHECKING:
    from plasmid import RunConfig
    from plasmid.components import DataFacts, PlanRow
    from plasmid.config.evaluation import EvalConfig


def print_plan(config: RunConfig, planned: RunConfig, data: DataFacts, models: Sequence[PlanRow]) -> None:
    """Print the configuration as TOML, coloured on a terminal, then models, prompts and the batch algebra.

    ``planned`` has the batches that the data are enough for.
    """
    from rich.syntax import Syntax
    from rich.table import Table

    console = table_console()
    text = to_toml(config)
    if console.is_terminal:
        console.print(Syntax(text, "toml", background_color="default"))
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    table = Table("what", "how many", "from", box=None, title="plan", title_justify="left")
    fewer = planned.run.batches < config.run.batches
    ends = [("batches", f"{planned.run.batches:,}", f"the data end before run.batches = {config.run.batches}")]
    rows = (*machine_rows(config), *prompt_rows(data), *(ends if fewer else ()), *batch_algebra(planned))
    for row in (*models, *rows):
        table.add_row(*row)
    console.print(table)


def prompt_rows(data: DataFacts, name: str = "") -> list[tuple[str, str, str]]:
    """How many prompts there are, and how many of them are left out, for the data and each source of a mixture."""
    what = f"prompts of {name}" if name else "prompts"
    count = "made as they are drawn" if data.num_prompts is None else f"{data.num_prompts:,}"
    why = f"{data.left_out:,} left out as too long" if data.left_out else ""
    rows = [(what, count, why)]
    for part, facts in data.parts.items():
        rows += prompt_rows(facts, f"{name}/{part}" if name else part)
    return rows


def to_toml(config: RunConfig) -> str:
    """The resolved configuration as a recipe that resolves to the same."""
    import tomli_w

    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def batch_algebra(config: RunConfig) -> list[tuple[str, str, str]]:
    """What the numbers of the recipe come to: (what, how many, how it is worked out)."""
    run, ranks = config.run, config.placement.trainer_ranks
    parts = config.trainer.num_parts(ranks)
    part, of = ("rank", "trainer ranks") if parts == ranks else ("replica", "model replicas")
    rollouts, per_step = config.rollouts_per_batch, config.rollouts_per_batch // run.steps_per_batch
    each = rollouts // run.prompts_per_batch
    rows = [
        ("rollouts per batch", f"{rollouts:,}", f"{run.prompts_per_batch} prompts x {each} samples"),
        ("rollouts in all", f"{rollouts * run.batches:,}", f"x {run.batches} batches, filtered groups not counted"),
        (
            "optimizer steps",
            f"{run.batches * run.steps_per_batch:,}",
            f"{run.batches} x {run.steps_per_batch} per batch",
        ),
        ("rollouts per step", f"{per_step:,}", f"{rollouts} / {run.steps_per_batch} steps"),
        (f"samples per {part} and step", _spread(per_step, parts), f"{per_step} over {parts} {of}"),
    ]
    if config.rollout is not None:
        rows += [
            ("publishes of the weights", f"{run.batches // run.sync_every:,}", f"every {run.sync_every} batches"),
            ("staleness", f"at most {run.max_staleness}", "on-policy" if run.max_staleness == 0 else "asynchronous"),
            ("tokens drawn per rollout", *_max_tokens(config)),
        ]
    if config.checkpoint.every:
        rows.append(
            ("checkpoints", f"{run.batches // config.checkpoint.every:,}", f"every {config.checkpoint.every} batches")
        )
    rows += [(f"evaluations of {e.name}", f"{_evaluations(e, run.batches):,}", _when(e)) for e in config.eval]
    return rows


def machine_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    """Which ranks compute on each machine, where there are several."""
    place = config.placement
    if place.nodes == 1:
        return []
    slots = place.slots(trainers=place.trainer_ranks, engines=config.engine_ranks, evals=place.eval_ranks)
    parts = {"trainer": slots.trainer, "engine": slots.engine, "evaluation engine": slots.evaluation}
    rows = []
    for node in range(place.nodes):
        ranks = {name: [i for i, its in enumerate(nodes) if its == node] for name, nodes in parts.items()}
        described = [f"{name} {_numbers(found)}" for name, found in ranks.items() if found]
        rows.append((f"ranks on machine {node}", f"{sum(map(len, ranks.values()))}", ", ".join(described)))
    return rows


def _numbers(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _max_tokens(config: RunConfig) -> tuple[str, str]:
    """The most tokens of a rollout, and the setting that says so."""
    place, sampling = max(config.samplings().items(), key=lambda item: item[1].max_new_tokens)
    return f"at most {sampling.max_new_tokens:,}", f"{place}.max_new_tokens"


def _spread(total: int, parts: int) -> str:
    low, more = divmod(total, parts)
    return f"{low:,}" if not more else f"{low:,} or {low + 1:,}"


def _evaluations(e: EvalConfig, batches: int) -> int:
    during = batches // e.every if e.every else 0
    last_is_due = bool(e.every) and batches % e.every == 0
    return e.at_start + during + (e.at_end and not last_is_due)


def _when(e: EvalConfig) -> str:
    times = [("at the start", e.at_start), (f"every {e.every} batches", e.every > 0), ("at the end", e.at_end)]
    named = ", ".join(text for text, true in times if true)
    return f"{named}; {e.limit} prompts x {e.samples_per_prompt} samples"


def _without_none(data: Any) -> Any:
    """TOML has no null: a setting that is None is left out."""
    if isinstance(data, Mapping):
        return {key: _without_none(value) for key, value in data.items() if value is not None}
    if isinstance(data, list | tuple):
        return [_without_none(value) for value in data]
    return data
