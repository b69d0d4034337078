"""Tables of `rl plan`, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plasmid_runtime.observe.progress import duration
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..display.dry_run import batch_algebra

if TYPE_CHECKING:
    from plasmid_runtime.planning.changes import Change
    from plasmid_runtime.planning.plan import Plan, Usage

GIB = 2**30
WIDTH = 80
BAR = 20
PLACES = {
    "shared": "each GPU that trainer and engine share",
    "trainer": "each GPU of the trainer",
    "engine": "each GPU of the engine",
    "reference": "each GPU of the reference",
    "teacher": "each GPU of the teacher",
    "critic": "each GPU of the critic",
}
ON_CPU = {place: name.replace("GPU", "process") for place, name in PLACES.items()}


def print_plan(
    plan: Plan,
    console: Console,
    *,
    models: Mapping[str, Mapping[str, Any]],
    why: str,
    assumed: Sequence[str],
    price: float | None,
) -> None:
    """Print batch, placement, parameters, memory, time and cost."""
    console.print(Text(f"plan of {plan.config.recipe}", style="bold"))
    sections: list[tuple[str, Table | None]] = [
        ("batch", _facts(_batch_rows(plan))),
        ("placement", _facts(_placement_rows(plan, why))),
        ("parameters", _facts(_parameter_rows(plan, models))),
        *_memory_tables(plan),
        ("time of a batch", _time_table(plan)),
        ("run", _facts(_run_rows(plan, price))),
    ]
    for title, table in sections:
        if table is not None and table.row_count:
            console.print()
            console.print(Text(title, style="bold"))
            console.print(table, width=min(console.width, WIDTH))
    if assumed:
        console.print()
        console.print(Text("lengths: " + "; ".join(assumed), style="dim"), width=min(console.width, WIDTH))


def print_advice(plan: Plan, change: Change | None, console: Console) -> None:
    """Print what does not fit, and the smallest change that makes it fit."""
    console.print()
    for usage in plan.overfull[:1]:
        console.print(
            Text.assemble(
                ("does not fit: ", "bold red"),
                f"{_place_name(plan, usage)} needs {usage.total / GIB:.1f} GiB in phase {usage.phase!r}, but has "
                f"{plan.limit / GIB:.1f} GiB",
            ),
        )
    for obstacle in plan.obstacles:
        console.print(Text.assemble(("does not fit: ", "bold red"), obstacle), soft_wrap=True)
    if change is None:
        console.print("no change of settings makes it fit; use a larger GPU (--gpu) or a smaller model")
        return
    console.print("smallest change that fits:", Text(" ".join(change.settings), style="bold"), soft_wrap=True)
    peak = max(usage.total for usage in change.plan.usages)
    before, after = plan.batch_seconds, change.plan.batch_seconds
    slower = f", a batch in {after:.3g} s instead of {before:.3g} s" if before and after else ""
    console.print(f"with it: {peak / GIB:.1f} GiB at most, {change.plan.gpus} GPUs{slower}", soft_wrap=True)


def _facts(rows: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for what, value, how in rows:
        table.add_row(Text(what), Text(value), Text(how))
    return table


def _batch_rows(plan: Plan) -> list[tuple[str, str, str]]:
    load = plan.load
    tokens = f"{load.samples:,} x ({load.prompt_tokens:,} prompt + {load.response_tokens:,} completion)"
    rows = [row for row in batch_algebra(plan.config) if not row[0].startswith("evaluations")]
    rows.append(("tokens per batch", f"{load.tokens:,}", tokens))
    rows.append(("longest sample", f"{load.longest:,}", "tokens, prompt included"))
    if "train" in plan.trainer:
        rows.append(("microbatches of a rank", "", plan.trainer["train"].basis))
    return rows


def _placement_rows(plan: Plan, why: str) -> list[tuple[str, str, str]]:
    config, place = plan.config, plan.config.placement
    device = plan.device
    if device is None:
        rows = [("computes on", "CPU", f"{why}; {plan.limit / GIB:.1f} GiB of memory here")]
        rows.append(("trainer", f"{place.trainer_ranks} ranks", f"kind {_kind(config.trainer)}"))
        if config.engine_ranks:
            rows.append(("engine", f"{config.engine_ranks} ranks", f"kind {_kind(config.rollout)}"))
        rows += [(role.value, f"{count} ranks", "dedicated") for role, count in place.role_ranks.items()]
        return rows
    rows = [("GPUs", f"{plan.gpus} x {device.name}", f"{why}; {device.memory / GIB:.1f} GiB, {device.source}")]
    slots = place.slots(trainers=place.trainer_ranks, engines=config.engine_ranks, evals=place.eval_ranks)
    kinds = {"trainer": config.trainer, "engine": config.rollout}
    for name, own in slots.parts().items():
        how = f"kind {_kind(kinds[name])}" if name in kinds else ""
        turns = ", alternating" if place.colocated and name in kinds else ""
        away = {"trainer": place.offload_trainer, "engine": place.offload_engine}.get(name, False)
        rows.append((name, _span("GPU", own.start, len(own)), how + turns + (", offloaded" if away else "")))
    if place.nodes > 1:
        rows.append(("machines", f"{place.nodes}", "ranks distributed evenly"))
    return rows


def _parameter_rows(plan: Plan, models: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    from plasmid_models.estimates.shape import ModelShape

    rows = []
    for table, model in models.items():
        shape = ModelShape.of(model, where=f"{table}.path")
        how = f"{shape.family}, {shape.layers} layers of {shape.hidden:,}, vocabulary {shape.vocab:,}"
        how += ", tied" if shape.tied else ""
        how += f", {shape.linear} with linear attention" if shape.linear else ""
        rows.append((table, f"{shape.parameters / 1e9:,.3f} B", how))
        if shape.experts:
            each = f"{shape.routed} of {shape.experts} experts of a layer"
            rows.append((f"{table}, active", f"{shape.active / 1e9:,.3f} B", each))
    return rows + [(name, "", text) for name, text in plan.facts().items()]


def _memory_tables(plan: Plan) -> list[tuple[str, Table | None]]:
    places = dict.fromkeys(usage.place for usage in plan.usages)
    by_place = {place: [usage for usage in plan.usages if usage.place == place] for place in places}
    return [(f"memory of {_place_name(plan, own[0])}, GiB", _memory_table(plan, own)) for own in by_place.values()]


def _memory_table(plan: Plan, usages: Sequence[Usage]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for usage in usages:
        table.add_column(usage.phase, justify="right")
    for what in dict.fromkeys(what for usage in usages for what in usage.memory):
        sizes = [usage.memory.get(what) for usage in usages]
        if any(size and size >= 0.005 * GIB for size in sizes):
            table.add_row(what, *("" if size is None else f"{size / GIB:.2f}" for size in sizes))
    limit = plan.limit
    totals = [Text(f"{usage.total / GIB:.2f}", style="bold red" if usage.total > limit else "bold") for usage in usages]
    table.add_row(Text("total", style="bold"), *totals)
    table.add_row(
        Text(f"of {limit / GIB:.1f}", style="dim"), *(Text(_bar(usage.total / limit), style="dim") for usage in usages)
    )
    return table


def _time_table(plan: Plan) -> Table | None:
    seconds = plan.seconds
    if plan.device is None or not seconds:
        return None
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, width=BAR, style="cyan")
    table.add_column(style="dim")
    longest = max(seconds.values()) or 1.0
    for phase, value in seconds.items():
        table.add_row(phase, f"{value:.3g} s", "#" * max(1, round(BAR * value / longest)), plan.basis(phase))
    if plan.batch_seconds is not None:
        overlaps = plan.config.run.max_staleness > 0 and not plan.config.placement.colocated
        how = "sampling overlaps with training" if overlaps else "sequential"
        table.add_row(Text("batch", style="bold"), f"{plan.batch_seconds:.3g} s", "", how)
    return table


def _run_rows(plan: Plan, price: float | None) -> list[tuple[str, str, str]]:
    hours, batches = plan.hours, plan.config.run.batches
    if hours is None:
        why = "no estimates for CPUs" if plan.device is None else "trainer or engine has no estimate"
        return [("time", "not estimated", why)]
    rows = [("time", duration(3600 * hours), f"{batches:,} batches; excluding start, evaluations and saves")]
    rows.append(("GPU hours", f"{hours * plan.gpus:,.2f}", f"{plan.gpus} GPUs"))
    if price is not None:
        rows.append(("cost", f"{hours * plan.gpus * price:,.2f}", f"{price:g} per GPU hour"))
    return rows


def _place_name(plan: Plan, usage: Usage) -> str:
    return (PLACES if plan.device is not None else ON_CPU)[usage.place]


def _bar(share: float) -> str:
    return f"{100 * share:.0f}%"


def _span(what: str, first: int, count: int) -> str:
    return f"{what} {first}" if count == 1 else f"{what} {first}-{first + count - 1}"


def _kind(component: Any) -> str:
    from plasmid.components import kind_of

    return kind_of(component)
