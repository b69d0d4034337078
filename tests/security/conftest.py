"""Runs that the tests of several files attack."""

import pytest
from plasmid_models.tokenization.tokenizer import Tokenizer

from tests.security.agent_cases import cases
from tests.security.live_runs import KNOWN, make_waiting_job, start_waiting


@pytest.fixture(scope="package")
def running(tmp_path_factory, tiny_model):
    """A run of two trainer ranks that waits for a reward; its environment asks Ray for no authentication."""
    folder = tmp_path_factory.mktemp("run")
    make_waiting_job(folder, tiny_model)
    run = start_waiting(folder, RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN=KNOWN)
    yield run
    run.end()


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory):
    """A tokenizer of characters with a chat template."""
    return Tokenizer(cases.make_chat_tokenizer(tmp_path_factory.mktemp("models") / "tokenizer"))
