"""Print the table of docs/design/plan.md, which compares `rl plan` with the measurements in benchmarks/results.

python benchmarks/plan_accuracy.py
"""

import json
import tempfile
from pathlib import Path

import trainer_ceiling
from plasmid import load_config
from plasmid.types.estimates import BatchLoad, EstimateContext
from plasmid_models.estimates.accelerators import ACCELERATORS
from random_qwen3 import COMMON, SHAPES

RESULTS = Path(__file__).parent / "results"
CONFIGS = {
    "qwen3-0.6b-random": "0.6b",
    "qwen3-4b": "4b",
}
BASE = (
    'model.path="model"',
    'data.kind="demonstrations"',
    'data.path="rows.jsonl"',
    'algorithm.kind="sft"',
    "run.samples_per_prompt=1",
    'placement.device="cuda"',
    'trainer.dtype="bfloat16"',
)
SAMPLES = {45571: 128, 96112: 256, 21989: 64, 65536: 0}
"""Number of samples in a step, by its number of tokens; 0 for rows of one length."""


def config_json(shape):
    """Return the ``config.json`` of a shape of ``random_qwen3.py``."""
    own = {**COMMON, **SHAPES[shape]}
    return {
        "model_type": own["family"],
        "num_hidden_layers": own.pop("num_layers"),
        "tie_word_embeddings": own.pop("tied"),
        **own,
    }


def trainer_rows():
    """Return the rows of `rl train` that were measured with current trainer code."""
    files = [RESULTS / f"{name}.json" for name in ("trainer-h200", "trainer-h100", "lora-h200")]
    rows = [row for file in files for row in json.loads(file.read_text())]
    old = ("padded", "layers not compiled")
    return [row for row in rows if row["name"].startswith("rl train") and not row.get("code", "").startswith(old)]


def estimate(row):
    """Return the planned peak bytes and training seconds for a batch like that of the row."""
    samples = SAMPLES[row["tokens"]]
    longest = int(row["rows"].removesuffix("k")) * 1024 if not samples else 1234
    samples = samples or row["tokens"] // longest
    mean = row["tokens"] // samples
    megatron = "megatron" in row["name"]
    settings = [*BASE, f"run.prompts_per_batch={samples}", f'trainer.kind="{"megatron" if megatron else "fsdp"}"']
    settings += [setting for setting in row.get("settings", ()) if not setting.startswith("run.profile")]
    if row.get("recompute"):
        settings.append("trainer.activation_checkpointing=true")
    with tempfile.TemporaryDirectory() as name:
        recipe = Path(name) / "recipe.toml"
        recipe.write_text("\n".join(settings))
        config = load_config(recipe)
    load = BatchLoad(samples=samples, prompts=samples, prompt_tokens=0, response_tokens=mean, longest=longest, steps=1)
    context = EstimateContext(
        config=config,
        models={"model": config_json(CONFIGS[row["model"]])},
        device=ACCELERATORS["h100" if "H100" in row["device"] else "h200"],
        load=load,
    )
    return {phase.phase: phase for phase in config.trainer.estimate(context)}


def table():
    """Return the lines of the Markdown table, and the ratios of memory and time by row."""
    lines = [
        "| run | rows | peak GiB, plan | measured | ratio | train s, plan | measured | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ratios = {}
    for row in trainer_rows():
        train = estimate(row)["train"]
        memory, seconds = train.total / 2**30, train.seconds
        of_memory, of_time = memory / row["peak_gib"], seconds / row["step_s"]
        name = row["model"].removesuffix("-random") + row["name"].removeprefix("rl train, fsdp").removeprefix(
            "rl train"
        )
        name += ", recomputed" if row.get("recompute") else ""
        device = "H100 " if "H100" in row["device"] else ""
        name = f"{name} ({device}{row['run']})" if "run" in row else name
        ratios[name, row["rows"]] = of_memory, of_time
        lines.append(
            f"| {name} | {row['rows']}, {row['tokens']:,} tokens | {memory:.1f} | {row['peak_gib']:.1f} | "
            f"{of_memory:.2f} | {seconds:.2f} | {row['step_s']:.2f} | {of_time:.2f} |"
        )
    return lines, ratios


if __name__ == "__main__":
    assert trainer_ceiling.KINDS
    print("\n".join(table()[0]))
