"""Output of `rl train --dry-run`: the resolved configuration as a recipe, and numbers derived from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..output import table_console

if TYPE_CHECKING:
    from plasmid import RunConfig
    from plasmid.components import DataFacts, PlanRow
    from plasmid.config.evaluation import EvalConfig


MARK = "settings-with-defaults-follow"
"""Placeholder key, which is replaced by a comment."""


def print_plan(config: RunConfig, planned: RunConfig, data: DataFacts, models: Sequence[PlanRow]) -> None:
    """Print the configuration as TOML, with colors on a terminal, then models, prompts and the batch algebra.

    In ``planned``, `run.batches` is limited to the number of batches that the data provides.
    """
    from rich.syntax import Syntax

    from .tables import FittingTable

    console = table_console()
    text = to_toml(config)
    if console.is_terminal:
        console.print(Syntax(text, "toml", background_color="default"))
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    fewer = planned.run.batches < config.run.batches
    ends = [("batches", f"{planned.run.batches:,}", f"the data ends before run.batches = {config.run.batches}")]
    rows = (*machine_rows(config), *prompt_rows(data), *(ends if fewer else ()), *batch_algebra(planned))
    columns = ("what", "how many", "from")
    console.print(FittingTable(columns, [*models, *rows], wraps_last=True, title="plan"))


def prompt_rows(data: DataFacts, name: str = "") -> list[tuple[str, str, str]]:
    """Return the numbers of prompts and of dropped ones, for the data and each source of a mixture."""
    what = f"prompts of {name}" if name else "prompts"
    count = "generated on demand" if data.num_prompts is None else f"{data.num_prompts:,}"
    notes = [
        f"format of {data.format}" if data.format else "",
        f"{data.left_out:,} dropped as too long" if data.left_out else "",
        f"{data.truncated:,} truncated" if data.truncated else "",
    ]
    rows = [(what, count, ", ".join(filter(None, notes)))]
    for part, facts in data.parts.items():
        rows += prompt_rows(facts, f"{name}/{part}" if name else part)
    return rows


def to_toml(config: RunConfig) -> str:
    """Format the resolved configuration as an equivalent recipe: explicit settings first, then defaults.

    A comment separates them in each table. Tables without explicit settings come last.
    """
    import tomli_w

    dumped = _drop_none(_sort_settings(config, config.model_dump(mode="json"), marks=True))
    text = tomli_w.dumps(dumped).replace(f"{MARK} = true\n", "# defaults:\n")
    return "# settings below '# defaults:' are not in the recipe\n" + text


def batch_algebra(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return numbers derived from the recipe, as (name, value, computation)."""
    run, ranks = config.run, config.placement.trainer_ranks
    parts = config.trainer.num_parts(ranks)
    part, of = ("rank", "trainer ranks") if parts == ranks else ("replica", "model replicas")
    rollouts, per_step = config.rollouts_per_batch, config.rollouts_per_batch // run.steps_per_batch
    each = rollouts // run.prompts_per_batch
    rows = [
        ("rollouts per batch", f"{rollouts:,}", f"{run.prompts_per_batch} prompts x {each} samples"),
        ("total rollouts", f"{rollouts * run.batches:,}", f"x {run.batches} batches, filtered groups not counted"),
        (
            "optimizer steps",
            f"{run.batches * run.steps_per_batch:,}",
            f"{run.batches} x {run.steps_per_batch} per batch",
        ),
        ("rollouts per step", f"{per_step:,}", f"{rollouts} / {run.steps_per_batch} steps"),
        (f"samples per {part} and step", _describe_share(per_step, parts), f"{per_step} over {parts} {of}"),
    ]
    if config.rollout is not None:
        rows += [
            ("publishes of the weights", f"{run.batches // run.sync_every:,}", f"every {run.sync_every} batches"),
            ("staleness", f"at most {run.max_staleness}", "on-policy" if run.max_staleness == 0 else "asynchronous"),
            ("tokens generated per rollout", *_describe_max_tokens(config)),
        ]
    if config.checkpoint.every:
        rows.append(
            ("checkpoints", f"{run.batches // config.checkpoint.every:,}", f"every {config.checkpoint.every} batches")
        )
    rows += [
        (f"evaluations of {e.name}", f"{_count_evaluations(e, run.batches):,}", _describe_times(e)) for e in config.eval
    ]
    return rows


def machine_rows(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return the ranks of each machine, if there are several machines."""
    place = config.placement
    if place.nodes == 1:
        return [(f"dedicated ranks of the {role.value}", f"{count}", "") for role, count in place.role_ranks.items()]
    slots = place.slots(trainers=place.trainer_ranks, engines=config.engine_ranks, evals=place.eval_ranks)
    rows = []
    for node in range(place.nodes):
        ranks = {
            name: [i for i, its in enumerate(slots.nodes_of(own)) if its == node] for name, own in slots.parts().items()
        }
        described = [f"{name} {_format_ranks(found)}" for name, found in ranks.items() if found]
        rows.append((f"ranks on machine {node}", f"{sum(map(len, ranks.values()))}", ", ".join(described)))
    return rows


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _describe_max_tokens(config: RunConfig) -> tuple[str, str]:
    """Return the maximum number of tokens per rollout, and the setting that limits it."""
    place, sampling = max(config.samplings().items(), key=lambda item: item[1].max_new_tokens)
    return f"at most {sampling.max_new_tokens:,}", f"{place}.max_new_tokens"


def _describe_share(total: int, parts: int) -> str:
    low, more = divmod(total, parts)
    return f"{low:,}" if not more else f"{low:,} or {low + 1:,}"


def _count_evaluations(e: EvalConfig, batches: int) -> int:
    during = batches // e.every if e.every else 0
    last_is_due = bool(e.every) and batches % e.every == 0
    return e.at_start + during + (e.at_end and not last_is_due)


def _describe_times(e: EvalConfig) -> str:
    times = [("at the start", e.at_start), (f"every {e.every} batches", e.every > 0), ("at the end", e.at_end)]
    named = ", ".join(text for text, true in times if true)
    return f"{named}; {e.limit} prompts x {e.samples_per_prompt} samples"


def _sort_settings(value: Any, dumped: Any, *, marks: bool = False) -> Any:
    """Reorder dumped settings: explicit ones first, followed by `MARK` in tables of a recipe."""
    if isinstance(value, BaseModel):
        given = {name for name in dumped if _is_given(value, name)}
        names = sorted(dumped, key=lambda name: (name not in given, name != "kind"))
        table: dict[str, Any] = {}
        for name in names:
            if marks and MARK not in table and name not in given:
                table[MARK] = True
            item = getattr(value, name, None)
            table[name] = _sort_settings(item, dumped[name], marks=not isinstance(item, list | tuple))
        return table
    if isinstance(value, Mapping) and isinstance(dumped, Mapping):
        return {name: _sort_settings(value.get(name), item, marks=marks) for name, item in dumped.items()}
    if isinstance(value, list | tuple) and isinstance(dumped, list):
        return [_sort_settings(*pair) for pair in zip(value, dumped, strict=True)]
    return dumped


def _is_given(settings: BaseModel, name: str) -> bool:
    """Return True if the recipe sets this setting, or anything within it."""
    field, value = type(settings).model_fields.get(name), getattr(settings, name, None)
    if field is None:
        return False
    if isinstance(value, BaseModel):
        return any(_is_given(value, inner) for inner in type(value).model_fields)
    return name in settings.model_fields_set or value != field.get_default(call_default_factory=True)


def _drop_none(data: Any) -> Any:
    """Remove settings that are None, since TOML has no null."""
    if isinstance(data, Mapping):
        return {key: _drop_none(value) for key, value in data.items() if value is not None}
    if isinstance(data, list | tuple):
        return [_drop_none(value) for value in data]
    return data
