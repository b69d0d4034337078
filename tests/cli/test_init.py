"""`rl init` writes recipes for known data sets that resolve for every supported size and number of GPUs."""

import pytest
from plasmid import load_config
from plasmid_cli.commands.init import MIN_GPUS, RECIPES
from plasmid_cli.main import app

TASKS = sorted(file.stem for file in (RECIPES / "tasks").glob("*.toml"))
GPUS = (1, 4, 8)


def rl(*argv):
    with pytest.raises(SystemExit) as stopped:
        app([str(a) for a in argv])
    return int(stopped.value.code or 0)


def test_there_is_a_task_of_each_sort():
    assert TASKS == ["dapo-math-17k", "dapo-math-python", "gsm8k", "mbpp", "no-robots"]
    assert sorted(int(file.stem) for file in (RECIPES / "gpus").glob("*.toml")) == list(GPUS)
    assert {file.stem for file in (RECIPES / "sizes").glob("*.toml")} == set(MIN_GPUS)


def test_every_task_recipe_states_whether_it_was_run():
    for file in (RECIPES / "tasks").glob("*.toml"):
        first = file.read_text().partition("\n")[0]
        assert first.startswith("# ") and first.endswith((" Not run.", " Run on a GPU."))


@pytest.mark.parametrize("task", TASKS)
def test_written_recipes_resolve(task, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for size, least in MIN_GPUS.items():
        for gpus in (number for number in GPUS if number >= least):
            file = f"{task}-{size}-{gpus}.toml"
            assert rl("init", task, "--size", size, "--gpus", gpus, "--out", file) == 0
            assert capsys.readouterr().out == f"wrote {file}; check it with: rl train {file} --dry-run\n"
            config = load_config(file)
            assert config.placement.trainer_ranks == gpus
            assert config.model.path.startswith("Qwen/Qwen3-")
            assert (config.rollout is None) == (config.algorithm.kind == "sft")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gsm9k"], "TASK: unknown 'gsm9k'; known are dapo-math-17k, dapo-math-python, gsm8k, mbpp, no-robots"),
        (["gsm8k", "--size", "7b"], "--size: unknown '7b'; known are 0.6b, 4b, 8b, 30b-a3b"),
        (["gsm8k", "--gpus", "3"], "--gpus: unknown '3'; known are 1, 4, 8"),
        (["gsm8k", "--size", "8b"], "--gpus: must be at least 4 for a model of 8b, got 1"),
        (["gsm8k", "--out", "x.txt"], "--out x.txt: not a recipe; its name must end in .toml"),
        (["gsm8k", "--out", "there.toml"], "there.toml: already exists; set another file with --out"),
    ],
)
def test_invalid_options_are_one_line(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("mine")
    assert rl("init", *argv) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert (tmp_path / "there.toml").read_text() == "mine"


def test_without_a_task_all_are_listed_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert rl("init") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    listed = [tuple(line.split()[:2]) for line in lines if not line.startswith(" ")]
    assert [name for what, name in listed if what == "--size"] == ["0.6b", "4b", "8b", "30b-a3b"]
    assert {name for _, name in listed} == {*TASKS, *MIN_GPUS, *map(str, GPUS)}


def test_rows_of_mbpp_become_prompts_with_tests():
    from plasmid_rewards.code.known_sets import mbpp

    row = {
        "text": "Add.",
        "task_id": 2,
        "test_setup_code": "",
        "test_list": ["assert f(1) == 2", "assert set(f(1)) == {2}"],
    }
    made = mbpp(row)
    assert made["target"] == ["assert f(1) == 2"] and made["prompt"].endswith("assert f(1) == 2")
    assert mbpp({**row, "test_list": row["test_list"][1:]}) is None
    assert mbpp({**row, "test_setup_code": "x = 1"}) is None
