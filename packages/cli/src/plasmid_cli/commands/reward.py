"""`rl reward`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import Items, PluginFiles, load

if TYPE_CHECKING:
    from plasmid import PromptGroup, RunConfig
    from plasmid_runtime.rollout.scored.rescoring import RescoredGroup

    from ..display.scores import Row

Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Rows (.jsonl, .parquet), a sample file, or a run folder (its newest sample file).",
    ),
]
PromptKey = Annotated[str, typer.Option("--prompt-key", metavar="KEY", help="Column of the prompt.")]
ResponseKey = Annotated[
    str, typer.Option("--response-key", metavar="KEY", help="Column of the response: a string, or a list of strings.")
]
TargetKey = Annotated[str, typer.Option("--target-key", metavar="KEY", help="Column of the ground truth.")]
EvalSet = Annotated[str, typer.Option("--eval", metavar="NAME", help="Score with the rewards of this evaluation set.")]
Count = Annotated[int, typer.Option("--count", min=0, help="Number of samples to show; statistics cover all.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def reward(
    items: Items,
    data: Data,
    prompt_key: PromptKey = "prompt",
    response_key: ResponseKey = "response",
    target_key: TargetKey = "target",
    evaluation: EvalSet = "",
    count: Count = 20,
    plugin: PluginFiles = None,
    as_json: Json = False,
) -> None:
    """Score existing texts with the recipe's rewards: rl reward recipe.toml --data answers.jsonl

    Loads no model. Exits with 1 if a reward raised.
    """
    import asyncio

    from plasmid.errors import ConfigError
    from plasmid_runtime.data.rows.given_texts import Keys
    from plasmid_runtime.rollout.scored.rescoring import rescore

    from ..display.scores import render, summarize
    from ..output import print_line, table_console

    config = load(items, plugin)
    if evaluation and evaluation not in [set_.name for set_ in config.eval]:
        names = ", ".join(set_.name for set_ in config.eval) or "none"
        raise ConfigError(f"--eval: no evaluation set is named {evaluation!r}; sets are {names}")
    groups = _groups(data, Keys(prompt=prompt_key, response=response_key, target=target_key), config)
    found = asyncio.run(rescore(config, groups, eval_set=evaluation))
    rows = [row for one in found for row in _rows(one)]
    if as_json:
        samples = [{name: getattr(row, name) for name in type(row).__slots__} for row in rows]
        print_line(json.dumps({"summary": summarize(rows), "samples": samples}, indent=1))
    else:
        table_console().print(render(rows, count=count), highlight=False, soft_wrap=False)
    if any(one.error for one in found):
        raise typer.Exit(1)


def _groups(data: str, keys: Any, config: RunConfig) -> Sequence[PromptGroup]:
    """Read the samples to score."""
    from plasmid_runtime.data.rows.given_texts import read_responses

    path = Path(data)
    if path.is_dir():
        from ..reports.run_data import load_run
        from ..reports.view import sample_file

        run = load_run(path)
        path = run.sample_files()[sample_file(run, step=None, evaluation=None)]
    if path.suffix == ".parquet" and _holds_samples(path):
        from plasmid_runtime.observe.sample_store import read_samples

        return read_samples(path)
    return read_responses(data, keys, _make_encoder(config))


def _holds_samples(path: Path) -> bool:
    """Return True for a file of the sample store, False for other rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return {"sample_id", "loss_mask"} <= set(pq.read_schema(path).names)
    except (OSError, pa.ArrowException):
        return False  # the reader of rows reports the error


def _make_encoder(config: RunConfig) -> Callable[[str], Any]:
    """Create a tokenizing function, for rewards that count tokens. Returns no tokens if the tokenizer is missing."""
    import numpy as np

    from ..reports.tokens import load_tokenizer

    tokenizer = load_tokenizer(config.model.tokenizer_path)
    if tokenizer is None:
        return lambda text: np.zeros(0, np.int32)
    return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def _rows(one: RescoredGroup) -> list[Row]:
    from ..display.scores import Row

    rows = []
    for before, after in zip(one.group.samples, one.samples, strict=True):
        score = None if one.error else after.score
        known = {n.removeprefix("score_s/"): s for n, s in after.timings.items() if n.startswith("score_s/")}
        row = Row(
            id=after.id,
            text=after.text,
            reward=None if score is None else score.value,
            before=None if before.score is None else before.score.value,
            components={} if score is None else score.components,
            error=one.error or (score.error or "" if score is not None else ""),
            seconds={} if one.error else known,
        )
        rows.append(row)
    return rows
