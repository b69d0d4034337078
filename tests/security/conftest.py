"""Runs that several test files attack."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.security.attacked_run import RECIPE, Attacked, Recorder
from tests.security.live_runs import start, write_prompts
from tests.security.rl_command import call_rl


@pytest.fixture
def rl(capsys):
    """Return a function that calls the command and returns its error, which must be a user's mistake and run no
    code."""

    def run(*arguments):
        code, said = call_rl(*arguments), capsys.readouterr().err
        assert code == 2, said
        assert "Traceback" not in said
        assert not Path("TRICKED").exists(), "code of somebody else has run"
        return said

    return run


@pytest.fixture(scope="package")
def attacked(tmp_path_factory, tiny_model):
    """A run that keeps syncing its weights to an SGLang server behind a router until the attacks are over."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; `make dev` does that")
    folder = tmp_path_factory.mktemp("run")
    write_prompts(folder, 40)
    (folder / "job.toml").write_text(RECIPE.format(model=tiny_model))
    recorder = None
    if os.getuid() == 0:
        recorder = Recorder()
        recorder.start()
    run = start(folder, "data.epochs=10000")
    try:
        attacked = Attacked(run, recorder)
        run.train_more()
        yield attacked
    finally:
        run.end()
