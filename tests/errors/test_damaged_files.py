"""Runs and models with damaged files: commands end with one clear line, or work without the file."""

import shutil
from pathlib import Path

import pytest
from plasmid.types.runs import Mode
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run

from tests.end_to_end.conftest import Job
from tests.errors.damaged_files import DAMAGE, OF_TEXT, find_problem, run_command

LAST = "run/checkpoints/batch-000002/"
COMMANDS = {
    "view": lambda folder: ["view", f"{folder}/run"],
    "compare": lambda folder: ["compare", f"{folder}/run", f"{folder}/other"],
    "eval": lambda folder: ["eval", "--model", f"{folder}/{LAST}", f"run.dir={folder}/evaluated"],
    "export": lambda folder: ["export", f"{folder}/{LAST}", f"{folder}/exported"],
    "convert": lambda folder: ["convert", f"{folder}/run/checkpoints/batch-000002", f"{folder}/converted"],
    "convert a model": lambda folder: ["convert", f"{folder}/run/final", f"{folder}/converted", "--to", "torch_dist"],
    "check": lambda folder: ["convert", "--check", f"{folder}/run/final", f"{folder}/other/final"],
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model):
    """A folder with a run of the real trainer."""
    folder = tmp_path_factory.mktemp("finished")
    job = Job(folder, tiny_model)
    changes = {
        "run": {"batches": 2, "prompts_per_batch": 2, "samples_per_prompt": 2, "dir": str(folder / "run")},
        "rewards": [{"kind": "number"}],
        "plugins": [],
        "checkpoint": {"every": 1, "export": True},
    }
    plain = job.plain()
    job.plain = lambda: plain | {"rewards": [], "plugins": []}
    run(job.config(changes), mode=Mode(), make_cluster=lambda _: LocalCluster())
    return folder


READ = {
    "view": ("run/config", "run/run.", "run/plan", "run/metrics", "run/evaluations", "run/samples/", "run/final/tok"),
    "compare": ("run/config", "run/run.", "run/metrics", "run/evaluations", "run/samples/", f"{LAST}m", "run/final/"),
    "eval": ("run/config.json", "run/run.", LAST),
    "export": ("run/config.json", "run/run.", LAST),
    "convert": (LAST,),
    "convert a model": ("run/final/",),
    "check": ("run/final/",),
}
"""Prefixes of the names of the files that each command reads."""


def files_of(folder, command):
    found = [path.relative_to(folder).as_posix() for path in sorted((folder / "run").rglob("*")) if path.is_file()]
    return [name for name in found if name.startswith(READ[command])]


def try_damage(finished, folder, command, name, damage):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(finished / "run", folder / "run")
    shutil.copytree(finished / "run", folder / "other")
    file = folder / name
    others = [one for one in sorted(file.parent.iterdir()) if one.is_file() and one != file]
    damage(file, others[0] if others else folder / "run/config.json")
    code, err = run_command(*COMMANDS[command](folder))
    return code, err, find_problem(code, err)


def is_possible(name, damage):
    return damage not in OF_TEXT or name.endswith((".json", ".jsonl"))


ONE_FILE = {
    "view": "run/metrics.jsonl",
    "compare": "run/samples/batch-000001.parquet",
    "eval": f"{LAST}state.json",
    "export": f"{LAST}manifest.json",
    "convert": f"{LAST}trainer/.metadata",
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("command", ONE_FILE)
def test_a_damaged_file_is_one_clear_line(finished, tmp_path, command):
    name, codes = ONE_FILE[command], {}
    for damage in DAMAGE:
        if is_possible(name, damage):
            code, err, problem = try_damage(finished, tmp_path / "tried", command, name, damage)
            assert not problem, f"{damage.__name__}: {problem}"
            codes[damage] = code
            assert not code or command == "compare" or Path(name).name in err or "batch-000002" in err, err
    least = 4 if command == "view" else 5  # a flipped bit in metrics.jsonl may just change a number
    assert sum(code != 0 for code in codes.values()) >= least, codes


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_damage_is_a_traceback_or_a_hang(finished, tmp_path, command):
    problems = []
    for name in files_of(finished, command):
        for damage in DAMAGE:
            if is_possible(name, damage):
                code, err, problem = try_damage(finished, tmp_path / "tried", command, name, damage)
                print(command, name, damage.__name__, code, repr(err[-300:]), flush=True)
                if problem:
                    problems.append(f"{damage.__name__} {name}: {problem}")
    assert not problems, "\n".join(problems)


def test_an_export_is_in_the_log_of_its_run(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    assert run_command("export", f"{tmp_path}/run", f"{tmp_path}/exported")[0] == 0
    logged = (tmp_path / "run/logs/driver.log").read_text()
    assert f"wrote {tmp_path}/exported, the policy after batch 2" in logged
