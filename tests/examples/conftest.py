"""Example packages, built and installed into a separate folder as a user would do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_processes import run_pytest
from tests.forked_rl import run_rl

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def installed_example(tmp_path_factory) -> Path:
    """Folder in which the wheel of the example of a reward is installed."""
    return install("reward-plugin", tmp_path_factory.mktemp("site-packages"))


@pytest.fixture(scope="session")
def installed_bigram(tmp_path_factory) -> Path:
    """Folder in which the wheel of the example of an engine and a trainer is installed."""
    return install("bigram", tmp_path_factory.mktemp("site-packages"))


def install(example: str, target: Path) -> Path:
    """Install an example into a folder, and return the folder."""
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
    subprocess.run([*command, str(ROOT / "examples" / example)], check=True)
    return target


@pytest.fixture(scope="session")
def with_example(installed_example):
    """Return a function that runs a command in the repository with the example installed, and returns its output."""
    return make_caller(installed_example)


@pytest.fixture(scope="session")
def with_bigram(installed_bigram):
    """Return a function like `with_example` for the engine and the trainer."""
    return make_caller(installed_bigram)


def make_caller(site_packages: Path):
    """Return a function that runs a command in the repository with these packages, and returns its output."""

    def call(*command: str | Path) -> str:
        paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
        modules = [str(site_packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(modules), "PATH": os.pathsep.join(paths), "COLUMNS": "200"}
        if command[0] == "pytest":
            code, output = run_pytest(*command[1:], env=env, cwd=ROOT)
            assert code == 0, output
            return output
        if command[0] == "rl":
            done = run_rl(*command[1:], env=env, cwd=ROOT)
        else:
            done = subprocess.run([str(c) for c in command], env=env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call
