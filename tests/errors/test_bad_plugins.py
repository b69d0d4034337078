"""Plugins that cannot be used: one line that names the plugin and the fix."""

import sys

import pytest
from plasmid_cli.main import app

HEAD = "from typing import Literal\nfrom plasmid import Filter, Reward, hookimpl\n"
REWARD = HEAD + "class A(Reward):\n    {kind}\n    async def {call}(self, prompt, sample):\n        return 0.0\n"
HOOK = "@hookimpl\ndef {name}({arguments}):\n    return {value}\n"


def reward(*, kind='kind: Literal["a"] = "a"', call="__call__", hook="register_components") -> str:
    return REWARD.format(kind=kind, call=call) + HOOK.format(name=hook, arguments="", value="[A]")


def hook(*, name="register_components", arguments="", value="[]") -> str:
    return HEAD + HOOK.format(name=name, arguments=arguments, value=value)


BAD = [
    (
        "import no_such_module\n",
        "plugin file p.py cannot be loaded: ModuleNotFoundError: No module named 'no_such_module' (line 1)",
    ),
    ("a = 1\nb = a / 0\n", "plugin file p.py cannot be loaded: ZeroDivisionError: division by zero (line 2)"),
    ("def x(:\n", "plugin file p.py cannot be loaded: SyntaxError: invalid syntax (p.py, line 1)"),
    ("raise SystemExit(1)\n", "plugin file p.py cannot be loaded: SystemExit: 1 (line 1)"),
    (
        "def register_components():\n    return []\n",
        "plugin 'p.py': has no hooks; decorate its functions, for example register_components, with @hookimpl",
    ),
    (
        hook() + "def batch_finished(batch):\n    pass\n",
        "plugin 'p.py': batch_finished has no @hookimpl, so it would never be called; decorate it",
    ),
    (
        hook(name="register_component"),
        "plugin 'p.py': no such hook: 'register_component'; did you mean 'register_components'?",
    ),
    (
        hook(arguments="foo"),
        "plugin 'p.py': register_components(foo) Argument(s) {'foo'} are declared in the hookimpl "
        "but can not be found in the hookspec",
    ),
    (
        hook(name="step_finished", arguments="step, metrics"),
        "plugin 'p.py': no such hook: 'step_finished'; step_finished(step, metrics) is now "
        "batch_finished(batch, metrics)",
    ),
    (
        hook(name="checkpoint_begun", arguments="step"),
        "plugin 'p.py': no such hook: 'checkpoint_begun'; checkpoint_begun(step) is now checkpoint_started(batch)",
    ),
    (
        hook(name="checkpoint_saved", arguments="step, path"),
        "plugin 'p.py': checkpoint_saved(step, path): the argument 'step' is now 'batch'",
    ),
    (
        hook(value="3"),
        "plugin 'p.py': register_components must return a list of classes: TypeError: 'int' object is not iterable",
    ),
    (
        hook(value="[1 / 0]"),
        "plugin 'p.py': register_components must return a list of classes: ZeroDivisionError: division by zero",
    ),
    (
        hook(value="['number']"),
        "plugin 'p.py': register_components must return subclasses of Algorithm, BufferPolicy, Converter, DataSource, "
        "Environment, Filter, Reward, RolloutEngineConfig, ServerApi, TeacherConfig, Tool, "
        "Tracker, TrainerConfig, Workflow; got 'number'",
    ),
    (
        reward(kind="size: int = 1"),
        'plugin \'p.py\': plasmid_plugin_p.A has no kind; add `kind: Literal["name"] = "name"` to it',
    ),
    (
        reward(call="call"),
        "plugin 'p.py': plasmid_plugin_p.A lacks methods of plasmid.Reward: __call__",
    ),
    (
        reward().replace("async def", "def"),
        "plugin 'p.py': plasmid_plugin_p.A.__call__ must be async; write `async def __call__(...)`",
    ),
    (
        reward(kind='kind: Literal["number"] = "number"'),
        "rewards: two components are named 'number': plasmid_rewards.mathematics.number.Number of plugin 'rewards' and "
        "plasmid_plugin_p.A of plugin 'p.py'; rename one or set PLASMID_DISABLE_PLUGINS=rewards",
    ),
]


@pytest.mark.parametrize(("source", "message"), BAD, ids=lambda value: value[-50:])
def test_a_bad_plugin_file_is_named_with_what_is_wrong(rl, folder, source, message):
    (folder / "p.py").write_text(source)
    assert rl("plugins", "--plugin", "p.py") == [message]
    assert rl("train", "recipe.toml", "plugins=['p.py']") == [message]


def test_a_plugin_file_that_is_none_is_named(rl, folder):
    (folder / "p.txt").write_text("")
    (folder / "p.py").write_text(reward())
    assert rl("plugins", "--plugin", "no.py") == ["plugins: no such file: no.py"]
    assert rl("plugins", "--plugin", "model") == ["plugins: no such file: model"]
    assert rl("plugins", "--plugin", "p.txt") == ["plugins: p.txt is not a Python file; its name must end in .py"]
    assert rl("plugins", "--plugin", "p.py", "--plugin", "p.py") == ["plugins: p.py is listed twice; remove one"]


@pytest.fixture
def install(folder, monkeypatch):
    """Return a function that installs a distribution with one module and one entry point, as pip would."""

    def install(name: str, source: str) -> None:
        site = folder / "site"
        info = site / f"plasmid_{name}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plasmid-{name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[plasmid]\n{name} = plasmid_{name}\n")
        (site / f"plasmid_{name}.py").write_text(source)
        monkeypatch.syspath_prepend(site)

    yield install
    for module in [m for m in sys.modules if m.startswith("plasmid_test")]:
        del sys.modules[module]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("raise RuntimeError('first line\\nsecond line')\n", "RuntimeError: first line second line"),
    ],
)
def test_an_installed_plugin_that_fails_to_import_is_named_and_can_be_disabled(rl, install, monkeypatch, source, what):
    install("testbroken", source)
    expected = (
        f"plugin 'testbroken' (plasmid-testbroken 1.2) cannot be loaded: {what}; "
        "uninstall it or set PLASMID_DISABLE_PLUGINS=testbroken"
    )
    assert rl("plugins") == [expected]
    assert rl("train", "recipe.toml") == [expected]
    monkeypatch.setenv("PLASMID_DISABLE_PLUGINS", "testbroken")
    assert rl("train", "recipe.toml", "run.batches=0") == ["run.batches: must be at least 1, got 0"]


def test_two_installed_plugins_of_one_kind_are_named_and_either_can_be_disabled(rl, install, monkeypatch):
    install("testnumber", reward(kind='kind: Literal["number"] = "number"'))
    assert rl("train", "recipe.toml") == [
        "rewards: two components are named 'number': plasmid_rewards.mathematics.number.Number of plugin 'rewards' and "
        "plasmid_testnumber.A of plugin 'testnumber'; rename one or set PLASMID_DISABLE_PLUGINS=rewards "
        "or set PLASMID_DISABLE_PLUGINS=testnumber"
    ]
    for name in ("rewards", "testnumber"):
        monkeypatch.setenv("PLASMID_DISABLE_PLUGINS", name)
        assert rl("train", "recipe.toml", "run.batches=0") == ["run.batches: must be at least 1, got 0"]


ALGORITHM = """
from typing import Literal
from plasmid import Algorithm, Needs, TokenLoss, hookimpl

class Mine(Algorithm):
    kind: Literal["mine"] = "mine"
    def needs(self):
        return {needs}
    def roles(self, *, steps):
        return ()
    def advantages(self, inputs):
        return {advantages}
    def loss(self, inputs):
        return {loss}

@hookimpl
def register_components():
    return [Mine]
"""
GOOD = {
    "needs": "Needs()",
    "advantages": "inputs.spread(inputs.table.rewards)",
    "loss": "TokenLoss(loss=-inputs.advantages * inputs.logprobs, metrics={})",
}
BAD_ALGORITHMS = [
    ({"needs": "None"}, "algorithm: needs must return Needs, got None"),
    (
        {"needs": "Needs(groop=True)"},
        "algorithm: needs or roles raised TypeError: Needs.__init__() got an unexpected keyword argument 'groop' "
        "(p.py:8)",
    ),
    (
        {"advantages": "inputs.spread(inputs.rewards)"},
        "algorithm (mine): advantages raised AttributeError: 'AdvantageInputs' object has no attribute 'rewards' "
        "(p.py:12)",
    ),
    (
        {"advantages": "inputs.table.components['nunber']"},
        "algorithm (mine): advantages raised KeyError: 'nunber; reward components are number' (p.py:12)",
    ),
    ({"advantages": "exit(3)"}, "algorithm (mine): advantages raised SystemExit: 3 (p.py:12)"),
    (
        {"advantages": "inputs.spread(inputs.table.rewards) / 0"},
        "algorithm (mine): advantages must be finite, got -inf for token 0 of 20 (p.py:11)",
    ),
    (
        {"loss": "-inputs.advantages * inputs.logprobs"},
        "algorithm (mine): loss must return a TokenLoss, got a Tensor (p.py:13)",
    ),
    (
        {"loss": "TokenLoss(loss=inputs.logprobs.mean(), metrics={})"},
        "algorithm (mine): the loss must have one value per token (20), got shape () (p.py:13)",
    ),
]


@pytest.mark.parametrize(("changed", "message"), BAD_ALGORITHMS, ids=lambda value: str(value)[-40:])
def test_a_mistake_in_an_algorithm_is_one_line_before_anything_starts(rl, folder, changed, message):
    (folder / "p.py").write_text(ALGORITHM.format(**GOOD | changed))
    said = rl("train", "recipe.toml", "plugins=['p.py']", "algorithm={kind='mine'}", "--dry-run")
    assert said == [message]
    assert not (folder / "run").exists()


def test_the_lines_above_are_of_one_mistake_each(folder, capsys):
    (folder / "p.py").write_text(ALGORITHM.format(**GOOD))
    arguments = ["train", "recipe.toml", "plugins=['p.py']", "algorithm={kind='mine'}", "--dry-run"]
    with pytest.raises(SystemExit) as stopped:
        app(arguments)
    assert not stopped.value.code, capsys.readouterr().err
