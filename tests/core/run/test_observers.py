"""Objects that observe a run, and the batch numbers passed to hooks."""

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

    def batch_finished(self, batch):
        self.steps.append(batch)


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
            _observer(batch_finish=lambda self, batch: None, batch_finished=lambda self, batch: None),
            "no such hook: 'batch_finish'; did you mean 'batch_finished'? (names that start with _ are not checked)",
        ),
        (
            _observer(batch_finished=lambda self, stepp: None),
            "<lambda>(stepp) Argument(s) {'stepp'} are declared in the hookimpl but can not be found in the hookspec",
        ),
        (
            _observer(step_finished=lambda self, step: None),
            "no such hook: 'step_finished'; step_finished(step, metrics) is now batch_finished(batch, metrics)",
        ),
        (
            _observer(batch_finished=lambda self, step: None),
            "<lambda>(step): the argument 'step' is now 'batch'",
        ),
        (
            _observer(batch_ready=lambda self, batch: None, batch_finished=lambda self, batch: None),
            "batch_ready is not an observer hook; put it into a plugin file (plugins, or --plugin)",
        ),
        (
            _observer(update=lambda self: None),
            "has no observer hook; hooks are run_started, start_advanced, phase_started, group_scored, batch_finished, "
            "evaluation_advanced, evaluation_finished, checkpoint_started, checkpoint_saved",
        ),
    ],
)
def test_an_observer_that_would_not_be_called_as_meant_is_refused_before_the_run(runner, observer, message):
    with pytest.raises(PluginError) as error:
        runner.run(observers=(observer,))
    assert str(error.value) == f"observer 'Mine': {message}"
    assert not (runner.folder / "run").exists()


def test_an_observer_that_is_a_class_or_async_is_refused(runner):
    with pytest.raises(PluginError, match=r"^observer 'Plain': must be an object, got a class; pass Plain\(\)$"):
        runner.run(observers=(Plain,))

    async def batch_finished(self, batch):
        pass

    with pytest.raises(PluginError, match=r"^observer 'Mine': batch_finished must not be async; "):
        runner.run(observers=(_observer(batch_finished=batch_finished),))


def test_batch_ready_numbers_batches_as_metrics_do(runner):
    """From 1, as the terminal prints them."""
    (runner.folder / "noting.py").write_text(NOTING)
    runner.run({"run": {"batches": 2}, "plugins": [*runner.config().plugins, str(runner.folder / "noting.py")]})
    assert (runner.folder / "noting.txt").read_text().split() == ["1", "2"]
    assert [entry.step for entry in read_journal(runner.folder / "run" / "metrics.jsonl")] == [1, 2]
