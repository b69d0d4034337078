"""`rl sample`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .arguments import Items, PluginFiles, check_sampling_overrides, load

if TYPE_CHECKING:
    from plasmid_runtime.lifecycle.sample import SampledGroup

Number = Annotated[int, typer.Option("-n", "--prompts", min=1, help="Number of prompts.")]
Each = Annotated[int, typer.Option("--each", min=1, help="Number of rollouts per prompt.")]
Dry = Annotated[bool, typer.Option("--dry", help="Only show prompts and their tokens, without an engine.")]
Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Sample from this OpenAI-compatible or SGLang server.")
]
EvalSet = Annotated[
    str, typer.Option("--eval", metavar="NAME", help="Use prompts, workflow and rewards of this evaluation set.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Also write the samples: .parquet (complete) or .jsonl (texts)."),
]


def sample(
    context: typer.Context,
    items: Items,
    number: Number = 4,
    each: Each = 1,
    dry: Dry = False,
    url: Url = None,
    evaluation: EvalSet = "",
    out: Out = None,
    plugin: PluginFiles = None,
) -> None:
    """Generate and show samples with loss masks and rewards: rl sample recipe.toml -n 4"""
    from plasmid.errors import ConfigError
    from plasmid_runtime.lifecycle.sample import draw_prompts
    from plasmid_runtime.lifecycle.sample import sample as run

    from ..output import output_console, transcript
    from ..reports.samples import print_prompts, print_samples

    served = [] if url is None else ["rollout.kind=server", f"rollout.url={json.dumps(url)}"]
    if out is not None and (dry or out.suffix not in (".parquet", ".jsonl")):
        reason = "there are no samples with --dry" if dry else "its name must end in .parquet or .jsonl"
        raise ConfigError(f"--out {out}: {reason}")
    config = load([*served, *items], plugin)
    if config.rollout is None and not dry:
        raise ConfigError("rollout: the recipe has no engine to sample with; add --dry to only show prompts")
    if evaluation:
        check_sampling_overrides(config, items, eval_set=evaluation)
    prompts = draw_prompts(config, number, eval_set=evaluation)
    console = output_console()
    if dry:
        print_prompts(config, prompts, console)
        return
    found = run(config, prompts, each=each, eval_set=evaluation, make_cluster=context.obj, transcript=transcript())
    print_samples(config, found, console)
    if out is not None:
        _write(out, found)
        console.print(f"wrote {out}", soft_wrap=True)


def _write(path: Path, found: Sequence[SampledGroup]) -> None:
    from plasmid_runtime.observe.sample_store import write_samples

    if path.suffix == ".parquet":
        dropped = {one.group.id: one.dropped_by for one in found if one.dropped_by}
        write_samples(path, [one.group for one in found], step=0, dropped_by=dropped)
        return
    rows = [_row(one, sample) for one in found for sample in one.group.samples]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows), encoding="utf-8")


def _row(one: SampledGroup, sample: Any) -> Mapping[str, Any]:
    """Convert a sample to a row that `rl reward --data` can read."""
    prompt, score = one.group.prompt, sample.score
    return {
        "prompt": list(map(dict, prompt.messages)) if prompt.messages else prompt.text,
        "response": sample.text,
        "target": prompt.target,
        **prompt.metadata,
        "reward": None if score is None else score.value,
        "components": {} if score is None else dict(score.components),
        "stop_reason": sample.stop_reason.value,
        "error": sample.error,
    }
