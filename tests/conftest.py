"""Fixtures shared by several test folders."""

import atexit
import gc
import os
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

from tests.forked_processes import share_server
from tests.forked_workers import use_forks
from tests.plugin_files import import_plugins_once

# a shell starts background processes without SIGINT, nohup without SIGHUP; the processes of tests would inherit it
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

_to_enum = signal._int_to_enum
# in Python 3.11, signal.getsignal fails to convert asyncio.run's handler to an enum, and formats it for the message:
# with its task, and all tensors that the task returned
signal._int_to_enum = lambda value, enum: _to_enum(value, enum) if isinstance(value, int) else value

settings.register_profile("plasmid", deadline=None)  # a busy machine is no error
settings.load_profile("plasmid")


def pytest_configure(config):
    """Let all processes of a test run fork ranks from one server."""
    if hasattr(config, "workerinput"):
        share_server(Path(config.option.basetemp).parent)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    use_forks(specs)


def pytest_collection_modifyitems(items):
    """Run the tests that share an SGLang server first.

    Workers of xdist get contiguous parts of the tests and steal from the end of each other's: elsewhere in the order,
    each worker would start a server, which takes over a minute of CPU time.
    """
    items.sort(key=lambda item: "tests/rollout_sglang/" not in item.nodeid)


def pytest_collection():
    """Disable garbage collection while tests are imported: it takes a tenth of the collection time."""
    gc.disable()


def pytest_collection_finish():
    """Exclude modules and tests from garbage collection: visiting them takes half a second each time."""
    gc.enable()
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """Do the same for modules that a test file has imported. Unclosed resources are reported first."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# Let the interpreter free everything at its end: extension modules report what it leaves. No earlier, because pytest
# collects garbage several times when it ends.
atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def count_no_graphs_of_earlier_tests():
    """Let reports of a trainer in this process contain ``train/graphs`` only if its own layers are compiled."""
    yield
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


@pytest.fixture(scope="session", autouse=True)
def import_plugin_files_once():
    """Import the plugin files that many tests use once, not twice for each run."""
    with pytest.MonkeyPatch.context() as patch:
        import_plugins_once(patch.setattr)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random two-layer Llama with a character tokenizer, as a Hugging Face folder."""
    from plasmid_models.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def full_disk():
    """Limit file sizes to this many bytes: writing more fails as on a full disk, for any user."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="session")
def make_character_tokenizer(tmp_path_factory):
    """A tokenizer of single characters and some special tokens, with a chat template."""

    import json
    import string

    from plasmid_runtime.data import Tokenizer

    def make(template, *, special, eos):
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Fast

        path = tmp_path_factory.mktemp("tokenizer")
        words = ["<unk>", *special, *string.printable]
        fast = Fast(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
        fast.add_special_tokens(["<unk>", *special])
        fast.save(str(path / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": eos}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        return Tokenizer(path)

    return make


@pytest.fixture(scope="module")
def forked_workers():
    """Fork workers of rewards from a process that has prepared them for calls."""
    yield from fork_workers("Popen")


@pytest.fixture(scope="module")
def small_forked_workers():
    """Fork workers of rewards and tools that import no large library."""
    yield from fork_workers("SmallPopen")


@pytest.fixture(scope="module")
def forked_environments():
    """Fork processes of environments from a process that has imported their modules."""
    yield from fork_workers("SmallPopen", "plasmid_workflows.episodes.client")


def fork_workers(popen, module="plasmid_sandbox.pool"):
    from tests import forked_python

    names = {name: getattr(forked_python, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    with pytest.MonkeyPatch.context() as patch:
        replaced = SimpleNamespace(Popen=getattr(forked_python, popen), **names)
        patch.setattr(f"{module}.subprocess", replaced)
        yield
