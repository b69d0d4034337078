"""The fuzzer finds planted failures, and none in the parsers and endpoints of Plasmid."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_rl import run_rl

TOP = Path(__file__).parents[2]
FUZZ = TOP / "tests/security/fuzz.py"
LIGHT = ("toml", "override", "jsonl", "tool-calls", "boxes", "reward-number", "reward-gpqa", "reward-dapo")
"""Targets that import little."""
SECONDS = 120
MEMORY_MB = 1024
FORKED = "import sys; from tests.security import fuzz; sys.exit(fuzz.main(sys.argv[1:]))"
"""The fuzzer with the short targets, in a process that has imported what most of them need."""
PLANTED = """
import contextlib, os, sys, time
sys.path.insert(0, TOP)
from tests.security import fuzz
from tests.security.fuzz_targets import Finding, Target, plain
from plasmid.errors import DataError

def planted(fault, examples=(b"ab",), **settings):
    def check(data):
        if data == b"ab":
            return
        if data[-1] % 4 == 0:
            fault()
        raise DataError("no")
    return Target(share=1, examples=lambda: list(examples), mutate=lambda random, data, all: random.randbytes(3),
                  opened=lambda: plain(check), modules=(), **settings)

def refuse(text):
    raise DataError(text)

def endless():
    while True:
        pass

faults = {
    "KeyError": lambda: {}["x"],
    "hang": endless,
    "crash": lambda: os._exit(9),
    "slow": lambda: [sum(range(1000)) for _ in range(80_000) if time.process_time() < after()],
    "memory": lambda: b"x" * (300 << 20),
    "reaches out": lambda: open("../../elsewhere", "w"),
    "finding": lambda: (_ for _ in ()).throw(Finding("x")),
    "traceback": lambda: print("Traceback (most recent call last):"),
    "control characters": lambda: os.write(1, b"\\x1b[2J"),
    "no clear line": lambda: refuse(""),
}
start = []
def after():
    start[:] = start or [time.process_time()]
    return start[0] + 0.3

targets = {kind: planted(fault, cpu_s=0.2 if kind in ("hang", "slow") else 5.0) for kind, fault in faults.items()}
targets["valid example refused"] = planted(lambda: None, examples=(b"cd",))
targets["none"] = planted(lambda: None)
sys.exit(fuzz.main(["--inputs", "1", "--seed", "1", "--out", "out.json"], targets))
"""


def test_the_fuzzer_finds_every_kind_of_planted_failure(tmp_path):
    program = PLANTED.replace("TOP", repr(str(TOP)), 1)
    done = run_rl(program, program="python -c", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())["targets"]
    kinds = {name: {finding["kind"] for finding in target["findings"]} for name, target in found.items()}
    assert kinds == {name: set() if name == "none" else {name} for name in kinds}, done.stdout
    saved = [file for target in found.values() for finding in target["findings"] for file in finding["saved"]]
    assert saved and all(Path(file).is_file() for file in saved)
    assert "--target KeyError --replay" in done.stdout


def fuzz(folder, run, *arguments):
    """Return the figures of a run without failures."""
    done = run("--out", "out.json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return json.loads((folder / "out.json").read_text())


def test_light_targets_take_their_examples_and_refuse_what_is_wrong(tmp_path):
    def run(*arguments):
        return run_rl(FORKED, *arguments, program="python -c", cwd=tmp_path)

    targets = [part for name in LIGHT for part in ("--target", name)]
    found = fuzz(tmp_path, run, "--inputs", "1", "--seed", "1", *targets)
    assert set(found["targets"]) == set(LIGHT)
    assert all(target["inputs"] == 20 and target["accepted"] for target in found["targets"].values())
    assert found["targets"]["toml"]["refused"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_parser_and_endpoint_takes_or_refuses_inputs_of_a_fresh_seed(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-W", "ignore", str(FUZZ), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    found = fuzz(tmp_path, run, "--inputs", "8000", "--seconds", str(SECONDS))
    assert found["total"]["inputs"] > 1000
    assert all(target["accepted"] for target in found["targets"].values()), found
    assert found["total"]["peak_mib"] < MEMORY_MB
