"""Write the tables of docs/performance.md from benchmarks/results: python scripts/performance_page.py"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- table ([a-z0-9-]+): .*? -->\n\n)(?:\|.*\n)*\n*")
Row = Mapping[str, Any]
Table = tuple[Sequence[str], Iterable[Sequence[str]]]


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def device_of(row: Row) -> str:
    """Return the short name of a GPU, such as H100."""
    return next(word for word in row["device"].split() if re.fullmatch(r"[A-Z]+\d+", word))


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def weight_sync() -> Table:
    head = [
        "model, wire, GPU",
        "buckets",
        "transfer, ms",
        "of which loading in SGLang",
        "receiving bytes",
        "checksum",
        "SGLang's load call",
        "plain copy or broadcast",
        "SGLang's own update",
    ]
    keys = ("transfer", "load", "receive", "checksum", "load_call", "plain_copy", "sglang_update")
    rows = read("weight-sync-gpu")["rows"]
    return head, ([row["case"], str(row["buckets"]), *(number(row[f"{key}_ms"]) for key in keys)] for row in rows)


def sampling() -> Table:
    def rows() -> Iterator[Sequence[str]]:
        for row in read("sampling-h200")["rows"]:
            each, together = row["one_by_one_tokens_per_s"], row["one_call_tokens_per_s"]
            yield [row["requests"], f"{each:,} tok/s", f"{together:,} tok/s", number(each / together, 3)]

    return ["requests", "one by one", "in one call", "ratio"], rows()


def listed(name: str) -> Table:
    """Return a table whose result file lists every cell."""
    found = read(name)
    head = [found["measure"], *found["rows"][0]["values"]]
    return head, ([row["name"], *row["values"].values()] for row in found["rows"])


READ_BACK_S = 0.5
"""Weight transfers that take longer include reading back all weights."""


def step() -> Table:
    """Return medians of runs without offloading, over all batches except the first and those that read weights back."""

    def cells(row: Row) -> Sequence[str]:
        batches = [b for b in row["batches"][1:] if b["sync/transfer_s"] < READ_BACK_S]
        parts = ("perf/batch_s", "perf/sample_s", "perf/train_s", "sync/transfer_s")
        medians = [median(b[part] for b in batches) for part in parts]
        first = row["batches"][0]["perf/train_s"]
        return [
            device_of(row),
            row["case"],
            *(number(value, 2) for value in medians[:3]),
            number(medians[3] * 1e3, 0),
            number(first),
            row["started"].partition(" ")[0].removesuffix(":"),
        ]

    head = ["GPU", "run", "batch, s", "sampling, s", "training, s", "weight transfer, ms", "first training, s"]
    return [*head, "start, s"], (cells(row) for row in [*read("step-h100")[1:2], *read("step-h200")])


def phases() -> Table:
    """Return the phases of a step in a run, and those of engine and trainer alone."""
    found = read("step-phases-h100")
    names = ("sample", "score", "train", "transfer", "pause", "resume", "rest", "step")
    rows = [[name, number(found["step"][name], 3), number(found["apart"].get(name), 3)] for name in names]
    return ["s", "in the run", "separately"], [*rows, ["sum of the parts", "", number(found["apart"]["sum"], 3)]]


def asynchronous() -> Table:
    parts = ("batch", "sample", "train", "pause", "transfer")

    def cells(name: str, found: Row) -> Sequence[str]:
        medians = found.get("medians_s", {})
        seconds = [number(medians[part], 3) if part in medians else "" for part in parts]
        return [name, number(found["tokens_per_s"], 0), *seconds]

    head = ["", "tok/s", "batch, s", "waiting for samples, s", "training, s", "pause of the engine, s", "transfer, s"]
    return head, (cells(*item) for item in read("async-h100")["rates"].items())


def deterministic() -> Table:
    """Return medians of all batches except the first."""
    head = ["run.deterministic", "batch, s", "sampling, s", "training, s", "mean difference of log-probabilities"]
    parts = ("perf/batch_s", "perf/sample_s", "perf/train_s")

    def cells(name: str, found: Row) -> Sequence[str]:
        medians = found["medians_without_the_first"]
        return [f"`{name}`", *(number(medians[part], 2) for part in parts), f"{medians['train/logprob_diff_mean']:.2g}"]

    return head, (cells(*item) for item in read("deterministic-h100")["deterministic"].items())


def on_policy() -> Table:
    found = read("on-policy-h100")["products_bfloat16"].items()
    head = ["rows x in x out", "batch-invariant, us", "torch, us", "ratio"]

    def cells(size: str, own: float, torch: float) -> Sequence[str]:
        return [size.replace("x", " x "), number(own), number(torch), number(own / torch)]

    return head, (cells(size, row["invariant_us"], row["torch_us"]) for size, row in found)


def ceiling_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the fastest plain loop on the same samples and GPU model, preferably of the same run."""
    same = [r for r in rows if "packed, compiled" in r["name"] and r["device"] == row["device"]]
    same = [r for r in same if (r["rows"], r["recompute"]) == (row["rows"], row["recompute"])]
    together = [r for r in same if r["run"] == row["run"]]
    return max(together or same, key=lambda r: r["tokens_per_s"], default=None)


def training() -> Table:
    head = ["GPU, run", "samples", "trainer", "tok/s", "fastest plain loop", "ratio", "peak memory, GiB"]
    rows = [*read("trainer-h200"), *read("trainer-h100")]

    def cells(row: Row) -> Sequence[str]:
        samples = row["rows"] + (", activations recomputed" if row["recompute"] else "")
        code = row.get("code") or row.get("note", "").partition(";")[0]
        trainer = row["name"].removeprefix("rl train, ") + (f": {code}" if code else "")
        best = ceiling_of(row, rows)
        if best is None:
            plain, ratio = "not measured", ""
        else:
            other = "" if best["run"] == row["run"] else f" (run {best['run']})"
            plain, ratio = f"{best['tokens_per_s']:,.0f}{other}", number(row["tokens_per_s"] / best["tokens_per_s"], 2)
        run = device_of(row) + ("" if row["run"] == device_of(row) else f", {row['run']}")
        return [run, samples, trainer, number(row["tokens_per_s"], 0), plain, ratio, number(row["peak_gib"])]

    return head, (cells(row) for row in rows if row["name"].startswith("rl train"))


def trainer_rows(name: str, *, run: str | None = None) -> Table:
    """Return rows of benchmarks/trainer.py, without ceilings; with ``run``, only those of this run."""
    found = (row for row in read(name) if run is None or row["run"] == run)
    rows = ([row["name"].removeprefix("rl train, "), *figures(row)] for row in found)
    return ["trainer", "tok/s", "step, s", "peak memory, GiB"], rows


def figures(row: Row) -> Sequence[str]:
    return number(row["tokens_per_s"], 0), number(row["step_s"], 3), number(row["peak_gib"])


def shared_prefix() -> Table:
    rows = {(row["prompt"], row["share"]): row for row in read("shared-prefix-h200")["rows"]}

    def cells(prompt: int) -> Sequence[str]:
        shared, plain = rows[prompt, True], rows[prompt, False]
        tokens = f"{plain['row_tokens']:,}, {shared['row_tokens']:,}"
        seconds = [plain["seconds"], shared["seconds"]]
        return [f"{prompt:,}", tokens, *(number(s, 3) for s in seconds), number(seconds[1] / seconds[0], 2)]

    head = ["prompt tokens", "tokens computed: plain, shared", "plain, s", "shared, s", "ratio"]
    return head, (cells(prompt) for prompt in sorted({prompt for prompt, _ in rows}))


def driver() -> Table:
    head = ["engines", "samples in flight", "groups/s", "MB/s", "bytes of memory per sample"]
    rows = read("driver-scale-cpu")["after"]["rows"]
    return head, (
        [
            f"{row['engines']:,}",
            f"{row['samples_in_flight']:,}",
            number(row["events_per_s"], 0),
            number(row["bytes_per_s"] / 1e6),
            number(row["memory_bytes_per_sample"], 0),
        ]
        for row in rows
    )


def head_to_head() -> Table:
    differences = ("loss_difference", "grad_norm_difference")
    return ["device", "trainer", "tok/s", "relative difference of losses", "of gradient norms"], (
        [device, name, number(found[name]["tokens_per_s"], 0), *(f"{found[name][key]:.1g}" for key in differences)]
        for device, found in (("CPU", read("head-to-head-cpu")), ("H100", read("head-to-head-h100")))
        for name in ("plasmid", "trl", "plain loop")
    )


def published() -> Table:
    """Return figures that other projects published, with their sources."""
    rows = read("published")["rows"]
    return ["system", "setting", "GPUs", "published figure"], (
        [f"[{row['system']}]({row['source']})", row["setting"], row["gpus"], row["figure"]] for row in rows
    )


def cpu_step() -> Table:
    head = ["weights of TRL", "Plasmid, s", "TRL, s", "TRL / Plasmid", "Plasmid, CPU s", "TRL, CPU s", "TRL / Plasmid"]

    def cells(run: Row) -> Sequence[str]:
        ours, theirs, ratio = run["plasmid"], run["trl"], run["speedup"]
        pairs = ((ours[key], theirs[key], ratio[key]) for key in ("wall_s", "cpu_s"))
        return [run["trl_weights"], *(number(value, 2) for pair in pairs for value in pair)]

    return head, (cells(run) for run in read("cpu-step")["runs"])


def real_sizes() -> Table:
    """Return medians of all batches except the first."""
    head = [
        "trainer",
        "batch, s",
        "sampling, s",
        "training, s",
        "training, tok/s",
        "share of peak in training",
        "sync, ms",
        "peak of a trainer rank, GB",
    ]

    def cells(name: str, found: Row) -> Sequence[str]:
        medians = found["medians"]
        seconds = [number(medians[f"perf/{part}_s"], 2) for part in ("batch", "sample", "train")]
        share = medians.get("share of peak in training")
        rest = (medians["sync/transfer_s"] * 1e3, medians["trainer peak GB"])
        speed = [number(medians["training, tok/s"], 0), "" if share is None else number(share, 2)]
        return [name, *seconds, *speed, *(number(value, 0) for value in rest)]

    experts = {"megatron EP4 and one server EP4, 28 layers of Qwen3-30B-A3B": read("ep4-h200")}
    return head, (cells(*item) for item in (read("real-sizes-h200")["runs"] | experts).items())


def megatron_curves() -> Table:
    """Return the held-out rewards of runs of 60 batches and more after every tenth batch."""
    runs = read("smollm2-megatron-h200")["runs"]
    steps = [str(batch) for batch in range(0, 61, 10)]
    rewards = ([name, *(number(found["held_out_reward"][step], 2) for step in steps)] for name, found in runs.items())
    return ["held-out reward after", *(f"{step} batches" for step in steps)], rewards


def start_up() -> Table:
    """Return the seconds until the first sample of each run, and what the run said that took them."""
    found = read("start-up-h200")
    runs = [(f"0.6B, one GPU, {name}", said) for name, said in found["0.6B on one GPU"]["started"].items()]
    runs += found["started"].items()
    return ["run", "s", "stages, s"], ([name, *said.replace(" | ", ", ").split(" s: ", 1)] for name, said in runs)


TABLES: Mapping[str, Callable[[], Table]] = {
    "weight-sync": weight_sync,
    "sampling": sampling,
    "whole-runs": lambda: listed("whole-runs-h200"),
    "step": step,
    "step-phases": phases,
    "start-up": start_up,
    "asynchronous": asynchronous,
    "smollm2-sums": lambda: listed("smollm2-sums-h200"),
    "smollm2-megatron": megatron_curves,
    "real-sizes": real_sizes,
    "on-policy": on_policy,
    "deterministic": deterministic,
    "training": training,
    "training-4b": lambda: trainer_rows("trainer-4b-h200", run="A"),
    "adapters": lambda: trainer_rows("lora-h200"),
    "experts": lambda: trainer_rows("experts-h200"),
    "shared-prefix": shared_prefix,
    "driver": driver,
    "head-to-head": head_to_head,
    "published": published,
    "cpu-step": cpu_step,
}


def lines_of(table: Table) -> Iterator[str]:
    head, rows = table
    yield from (f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def page(text: str) -> str:
    """Return the page with regenerated tables. Raises `KeyError` for an unknown table."""

    def write(found: re.Match[str]) -> str:
        return found[1] + "".join(f"{line}\n" for line in lines_of(TABLES[found[2]]())) + "\n"

    return TABLE.sub(write, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
