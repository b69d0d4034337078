"""The `rl` command: lists, exit codes, and the exact texts of errors."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from plasmid import load_config
from plasmid_cli.display.dry_run import batch_algebra
from plasmid_cli.main import app

ROOT = Path(__file__).parents[2]
LAYOUTS = "dcp, gguf, hf, megatron-torch, torch_dist"
RECIPE = str(ROOT / "recipes/smollm2-sums-cpu.toml")
PLUGIN = """
from typing import Literal
from plasmid import Reward, hookimpl

class Shout(Reward):
    '''1.0 if the text is loud [very loud].'''
    kind: Literal["shout"] = "shout"
    how: Literal["loud", "louder"] = "loud"
    '''How loud.'''
    async def __call__(self, prompt, sample):
        return float(sample.text.isupper())

@hookimpl
def register_components():
    return [Shout]
"""


def rl(*argv: object) -> int:
    """Run the command in this process and return its exit code."""
    with pytest.raises(SystemExit) as stopped:
        app([str(a) for a in argv])
    return int(stopped.value.code or 0)


@pytest.fixture
def plugin(tmp_path) -> Path:
    file = tmp_path / "shout.py"
    file.write_text(PLUGIN)
    return file


def test_the_first_recipe_names_the_run_unless_one_sets_the_name(tmp_path, capsys):
    (tmp_path / "changes.toml").write_text("run.batches = 3\n")
    (tmp_path / "named.toml").write_text('recipe = "mine"\n')
    for more, name in (([], "smollm2-sums-cpu"), ([tmp_path / "named.toml"], "mine"), (["recipe=other"], "other")):
        assert rl("train", RECIPE, tmp_path / "changes.toml", *more, "--dry-run", "--offline") == 0
        assert f'recipe = "{name}"\n' in capsys.readouterr().out


def test_help_is_quick_and_imports_no_backend():
    code = (
        "import sys, contextlib\n"
        "from plasmid_cli.main import app\n"
        "with contextlib.suppress(SystemExit): app(['--help'])\n"
        "print(sorted({'torch', 'ray', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)), file=sys.stderr)\n"
    )
    times = []  # the minimum of several runs, in CPU time, so that a busy machine makes no difference
    while len(times) < 5 and min(times, default=1.0) >= 0.5:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    for command in ("train", "eval", "view", "convert", "export", "plugins", "options"):
        assert command in done.stdout
    assert done.stderr == "[]\n"
    assert min(times) < 0.5, times


def test_the_command_is_built_once_in_a_process(monkeypatch):
    assert rl("--version") == 0
    monkeypatch.setattr("plasmid_cli.main.get_command", None)
    assert rl("--version") == 0


def test_the_version_is_printed(capsys):
    assert rl("--version") == 0
    assert re.fullmatch(r"plasmid \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", [(), ("train",), ("options",)])
def test_the_short_option_for_help_works_everywhere(capsys, command):
    assert rl(*command, "-h") == 0
    short = capsys.readouterr().out
    assert rl(*command, "--help") == 0
    assert short == capsys.readouterr().out and "Usage" in short


def test_shells_complete_commands():
    code = "import sys; sys.argv = ['rl']; from plasmid_cli.main import app; app()"
    asked = {"_RL_COMPLETE": "complete_bash", "COMP_WORDS": "rl tr", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **asked})
    assert done.stdout.split() == ["train"], done.stderr


def test_a_misspelt_end_of_a_recipe_is_suggested(capsys, tmp_path):
    (tmp_path / "mine.toml").write_text("")
    for name in ("mine.tml", "mine"):
        assert rl("train", f"{tmp_path}/{name}", "--dry-run") == 2
        assert capsys.readouterr().err == (
            f"error: {tmp_path}/{name}: not a recipe; its name must end in .toml; did you mean {tmp_path}/mine.toml?\n"
        )


def test_listing_and_checking_import_no_backend(tiny_model):
    """One command after the other in one process, which prints after each what has been imported."""
    floats = "trainer.dtype=float32 rollout.dtype=float32"  # no warning of bfloat16, on any CPU
    dry_run = f"train {RECIPE} model.path={tiny_model} {floats} --dry-run"
    commands = ("--version", "plugins", "options", "options run", "options fsdp", dry_run)
    code = (
        "import sys, contextlib\n"
        "from plasmid_cli.main import app\n"
        "for command in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit): app(command.split())\n"
        "    found = sorted({'torch', 'ray', 'transformers', 'sglang', 'aiohttp'} & set(sys.modules))\n"
        "    print(command, found, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [f"{command} []" for command in commands]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trainer.lrr=1"], "trainer.lrr: no such setting; did you mean 'lr'?"),
        (["trainer.kind=deepspeed"], "trainer.kind: 'deepspeed' is not installed; installed are fsdp, megatron"),
        (["trainer.lr=-1"], "trainer.lr: must be at least 0, got -1"),
        (["trainer.lr"], "override 'trainer.lr' must look like key=value, for example trainer.lr=1e-6"),
        (["rewards=[]"], "rewards: algorithm 'grpo' needs at least one reward; add a [[rewards]] table"),
        (
            ["filters=[{}]"],
            "filters.0.kind: is missing; installed are function, length-range, max-duplicates, max-truncated, "
            "nonzero-spread, reward-range, staleness",
        ),
        (["model.path=no/such/model", "--dry-run"], "model.path: no such folder: no/such/model (searched from HERE)"),
        (["--plugin", "no-such.py"], "plugins: no such file: no-such.py"),
        (["--rollouts-only", "--resume"], "--rollouts-only: starts no trainer; remove --replay and --resume"),
        (["--replay", "runs/x", "--resume"], "--replay: always starts a new run; remove --resume"),
        (["no-such.toml"], "no-such.toml: cannot read the recipe: no such file or directory"),
    ],
)
def test_errors_of_train_name_the_setting_and_the_fix(argv, message, capsys):
    assert rl("train", RECIPE, *argv) == 2
    assert capsys.readouterr().err.replace(str(Path.cwd()), "HERE") == f"error: {message}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "trainer.lr=1"], "no recipe given; add a TOML file, for example recipes/smollm2-sums-cpu.toml"),
        (["eval", RECIPE, "eval=[]"], "eval: the recipe has no evaluation set; add an [[eval]] table"),
        (
            ["eval", RECIPE, "--model", "/no/such"],
            "--model /no/such: no such folder; give a model folder, a run folder or a checkpoint",
        ),
        (["options", "hf"], "'hf' is the kind of several components; use one of converters/hf, rollout/hf"),
        (["options", "fsdb"], "no component or table 'fsdb'; did you mean 'fsdp'?"),
        (["options", "zzz"], "no component or table 'zzz'; `rl options` lists all"),
        (
            ["options", "trainer"],
            "'trainer' is a slot; its settings depend on the component: trainer/fsdp, trainer/megatron",
        ),
        (["convert", "no/such", "out"], "no/such: no such file or folder"),
        (["convert", "no/such", "out", "--from", "hf"], "no/such: no such file or folder"),
        (["convert", "x", "out", "--from", "megatron"], "--from: no layout 'megatron'; installed are " + LAYOUTS),
        (["convert", "x", "out", "--from", "hf", "--to", "y"], "--to: no layout 'y'; installed are " + LAYOUTS),
        (
            ["convert", "x", "out", "--from", "hf", "from.dtypes=1"],
            "from.dtypes: no such setting; did you mean 'dtype'?",
        ),
        (
            ["convert", "x", "out", "--from", "hf", "dtype=1"],
            "'dtype=1': settings of a conversion must start with from. or to., for example from.dtype=float32",
        ),
        (
            ["view", "no/such"],
            "no/such: not a run: it has no config.json and no metrics.jsonl; give the folder of a run",
        ),
    ],
)
def test_an_error_is_one_line_without_a_traceback(argv, message, capsys):
    assert rl(*argv) == 2
    assert capsys.readouterr().err.replace(str(Path.cwd()), "HERE") == f"error: {message}\n"


def test_traceback_option_shows_the_traceback(monkeypatch):
    from plasmid.errors import ConfigError

    with pytest.raises(ConfigError):
        app(["options", "zzz", "--traceback"])
    monkeypatch.setenv("RL_DEBUG", "1")
    with pytest.raises(ConfigError):
        app(["options", "zzz"])


def test_an_unexpected_error_keeps_its_traceback(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text(
        PLUGIN.replace(
            "class Shout", "class Unprintable:\n    def __repr__(self):\n        1 / 0\n\nclass Shout"
        ).replace('how: Literal["loud", "louder"] = "loud"', "how: object = Unprintable()")
    )
    with pytest.raises(ZeroDivisionError):
        app(["options", "shout", "--plugin", str(broken)])


def test_the_error_for_a_missing_package_names_the_install_command(tiny_model, tmp_path, monkeypatch, capsys):
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == "safetensors":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, "safetensors", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    assert rl("convert", tiny_model, tmp_path / "out") == 2
    expected = "error: this needs the package safetensors; pip install 'plasmid'\n"
    assert capsys.readouterr().err == expected


def test_plugins_prints_slot_kind_package_and_purpose(plugin, capsys):
    assert rl("plugins", "--plugin", plugin) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["trainer", "fsdp", "plasmid-fsdp", "0.1.0"] in [line[:4] for line in lines]
    assert ["converters", "gguf", "plasmid-convert", "0.1.0"] in [line[:4] for line in lines]
    shout = next(line for line in lines if line[:2] == ["rewards", "shout"])
    assert " ".join(shout).endswith("1.0 if the text is loud [very loud].")


def test_options_prints_key_type_default_and_meaning(plugin, capsys):
    assert rl("options", "shout", "--plugin", plugin) == 0
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert out[0] == "rewards/shout: 1.0 if the text is loud [very loud]."
    assert 'how "loud" | "louder" "loud" How loud.' in out
    meaning = (
        "Maximum time to compute one sample's score, in seconds, excluding time in queues; exceeding it ends the run."
    )
    assert f"timeout_s float > 0 60.0 {meaning}" in out


def test_options_of_tables_reach_into_tables(capsys):
    assert rl("options", "eval") == 0
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert 'sampling.top_k "all" | int "all" Number of most likely tokens to sample from; ``all`` keeps all.' in out
    assert "every int >= 0 0 Evaluation interval, in batches; 0 evaluates only at the start and the end." in out


@pytest.mark.parametrize(
    "what", ["run", "placement", "model", "reference", "sampling", "checkpoint", "rollout/hf", "grpo"]
)
def test_every_table_and_component_can_be_asked_about(what, capsys):
    assert rl("options", what) == 0
    assert "meaning" in capsys.readouterr().out


def test_a_dry_run_prints_a_recipe_that_resolves_to_the_same(tiny_model, tmp_path, capsys):
    model = f'model.path="{tiny_model}"'
    assert rl("train", RECIPE, model, "run.batches=7", "--dry-run") == 0
    out = capsys.readouterr().out
    text = out[: out.index("\nplan")]
    tables = dict(re.findall(r"^\[(\w+)\]\n((?:[^\[\n].*\n)+)", text, re.MULTILINE))
    for table, first in (
        ("run", "batches = 7"),
        ("trainer", 'kind = "fsdp"\nlr = 1e-05'),
        ("checkpoint", "every = 10"),
    ):
        assert tables[table].startswith(first), "what is set comes before what is default"
    assert text.index("[model]") < text.index("[reference]") and text.index("[sampling]") < text.index("[buffer]")
    copy = tmp_path / "copy.toml"
    copy.write_text(text)
    assert load_config(copy) == load_config(RECIPE, [model, "run.batches=7"])


def test_the_batch_algebra_is_worked_out(tiny_model):
    config = load_config(
        RECIPE,
        [
            f'model.path="{tiny_model}"',
            "run={batches=10, prompts_per_batch=6, samples_per_prompt=5, steps_per_batch=3, sync_every=2}",
            "placement.trainer_ranks=4",
            "eval.0.every=2",
        ],
    )
    rows = {what: (number, how) for what, number, how in batch_algebra(config)}
    assert rows["rollouts per batch"] == ("30", "6 prompts x 5 samples")
    assert rows["total rollouts"][0] == "300"
    assert rows["optimizer steps"] == ("30", "10 x 3 per batch")
    assert rows["samples per rank and step"] == ("2 or 3", "10 over 4 trainer ranks")
    assert rows["publishes of the weights"][0] == "5"


def test_convert_finds_the_layout_and_checks_the_result(tiny_model, tmp_path, capsys):
    out = tmp_path / "out"
    assert rl("convert", tiny_model, out, "to.max_shard_gb=1e-4") == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert len(list(out.glob("*.safetensors"))) > 2
    assert rl("convert", tiny_model, out, "--check") == 0
    assert capsys.readouterr().out == "21 tensors are equal, 0 differ\n"
    assert rl("convert", tiny_model, out, "--check", "from.dtype=bfloat16") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 tensors are equal, 21 differ"


def test_convert_goes_through_the_layouts_of_both_trainers(tiny_model, tmp_path, capsys):
    there, over, back = tmp_path / "there", tmp_path / "over", tmp_path / "back"
    assert rl("convert", tiny_model, there, "--to", "torch_dist", "to.vocab_multiple=64") == 0
    assert rl("convert", there, over, "--to", "dcp") == 0
    assert rl("convert", over, back, "to.max_shard_gb=1e-4") == 0
    assert rl("convert", "--check", back, tiny_model) == 0
    assert rl("convert", "--check", there, over, "--vocab-size", "57") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["21 tensors are equal, 0 differ"] * 2
    assert rl("convert", "--check", there, over, "--vocab-size", "60") == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "model.embed_tokens.weight: float32 [60, 64] and float32 [57, 64]",
        "lm_head.weight: float32 [60, 64] and float32 [57, 64]",
        "19 tensors are equal, 2 differ",
    ]
    assert rl("convert", over, tmp_path / "x", "--vocab-size", "60") == 2
    assert "error: --vocab-size: layout dcp does not pad the vocabulary; installed" in capsys.readouterr().err


def test_convert_verifies_the_digest_first(tmp_path, capsys):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert rl("convert", file, tmp_path / "out", "--sha256", "00") == 2
    assert "x.gguf: has sha256 " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_convert_reports_an_unknown_layout(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    assert rl("convert", tmp_path / "x", tmp_path / "out") == 2
    expected = f"{tmp_path}/x: has an unknown layout; set --from or --to to one of {LAYOUTS}"
    assert capsys.readouterr().err == f"error: {expected}\n"
