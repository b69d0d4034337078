"""Objects that observe a run, and the numbers that hooks give to batches."""

import pytest
from plasmid.errors import PluginError
from plasmid_runtime.observe.journal import read_journal

NOTING = """
from pathlib import Path
from plasmid import hookimpl

@hookimpl
def batch_ready(batch, groups):
    with Path(__file__).with_suffix(".txt").open("a") as file:
        file.write(f"{batch} ")
"""


class Plain:
    """Observes without ``@hookimpl``."""

    def __init__(self):
        self.steps = []

    def step_finished(self, step):
        self.steps.append(step)


def test_an_observer_needs_no_mark_on_its_methods(runner):
    plain = Plain()
    runner.run({"run": {"batches": 2}}, observers=(plain,))
    assert plain.steps == [1, 2]


def _observer(**methods):
    return type("Mine", (), methods)()


@pytest.mark.parametrize(
    ("observer", "message"),
    [
        (
            _observer(step_finish=lambda self, step: None, step_finished=lambda self, step: None),
            "there is no hook 'step_finish'; did you mean 'step_finished'? (a name that begins with _ is never a hook)",
        ),
        (
            _observer(step_finished=lambda self, stepp: None),
            "<lambda>(stepp) Argument(s) {'stepp'} are declared in the hookimpl but can not be found in the hookspec",
        ),
        (
            _observer(batch_ready=lambda self, batch: None, step_finished=lambda self, step: None),
            "batch_ready is not asked of observers; put it into a plugin file (plugins, or --plugin)",
        ),
        (
            _observer(update=lambda self: None),
            "has no method that a run would call; there are run_started, phase_started, group_scored, step_finished, "
            "evaluation_advanced, evaluation_finished, checkpoint_begun, checkpoint_saved",
        ),
    ],
)
def test_an_observer_that_would_not_be_called_as_meant_is_refused_before_the_run(runner, observer, message):
    with pytest.raises(PluginError) as error:
        runner.run(observers=(observer,))
    assert str(error.value) == f"observer 'Mine': {message}"
    assert not (runner.folder / "run").exists()


def test_an_observer_that_is_a_class_or_async_is_refused(runner):
    with pytest.raises(PluginError, match=r"^observer 'Plain': is a class; pass an object of it, Plain\(\)$"):
        runner.run(observers=(Plain,))

    async def step_finished(self, step):
        pass

    with pytest.raises(PluginError, match=r"^observer 'Mine': step_finished must not be async; "):
        runner.run(observers=(_observer(step_finished=step_finished),))


def test_batch_ready_numbers_batches_as_metrics_do(runner):
    """From 1, as the terminal prints them."""
    (runner.folder / "noting.py").write_text(NOTING)
    runner.run({"run": {"batches": 2}, "plugins": [*runner.config().plugins, str(runner.folder / "noting.py")]})
    assert (runner.folder / "noting.txt").read_text().split() == ["1", "2"]
    assert [entry.step for entry in read_journal(runner.folder / "run" / "metrics.jsonl")] == [1, 2]
