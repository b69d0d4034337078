"""For any delays, filters, failures and interruptions: staleness is bounded, and nothing is lost or done twice."""

import sys
import tempfile
from itertools import product
from pathlib import Path

import plasmid.testing.fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.config.load import resolve
from plasmid.plugins.registry import find_components, load_plugins
from plasmid_runtime.checkpoint.folder import read_state
from plasmid_runtime.checkpoint.run_folder import RunFolder
from plasmid_runtime.checkpoint.saver import BUFFER
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples, read_table

sys.path.insert(0, str(Path(__file__).parent))
from simulation import Chances, Simulation

PLUGIN = '''
from typing import Literal
from plasmid import Reward, hookimpl

class One(Reward):
    """Always 1."""
    kind: Literal["one"] = "one"
    async def __call__(self, prompt, sample):
        return 1.0

@hookimpl
def register_components():
    return [One]
'''


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "one.py").write_text(PLUGIN)
    return resolve(
        {
            "model": {"path": "none"},
            "plugins": [str(folder / "one.py"), plasmid.testing.fakes.__file__],
            "data": {"path": "none.jsonl"},
            "trainer": {"kind": "fake"},
            "rollout": {"kind": "fake"},
            "algorithm": {"kind": "fake"},
            "rewards": [{"kind": "one"}],
        }
    )


CHANCES = st.builds(
    Chances,
    seed=st.integers(0, 10**6),
    dropped=st.sampled_from([0.0, 0.3, 0.7]),
    rollout_s=st.sampled_from([0.1, 1.0, 10.0]),
    train_s=st.sampled_from([0.1, 1.0, 10.0]),
    save_s=st.sampled_from([0.1, 10.0]),
    write_s=st.sampled_from([0.0, 1.0, 30.0]),
)
RUNS = st.fixed_dictionaries(
    {
        "max_staleness": st.integers(0, 3),
        "sync_every": st.integers(1, 3),
        "prompts_per_batch": st.integers(1, 4),
        "batches": st.integers(1, 10),
        "over_sampling": st.sampled_from([1.0, 1.5, 3.0]),
    }
)
BUFFERS = st.tuples(
    st.sampled_from(["oldest-first", "freshest-first", "priority"]), st.sampled_from(["drop", "resample", "wait"])
)
MOMENTS = st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.1])
"""Times of interruptions, as fractions of the approximate duration of the run."""


def waiting(simulation):
    """Return the draws in the last checkpoint: running, finished, or dropped since the last take."""
    checkpoint = simulation.checkpoints()[-1]
    pending = [item["id"] for item in read_state(checkpoint).producer["pending"]]
    buffer = checkpoint / BUFFER
    return [*pending, *(group.id for group in read_samples(buffer))] if buffer.exists() else pending


def read_groups(simulation):
    """Return name, number, ids and filters of the groups of each sample file: batch-000001, ..., then end-000012."""
    found = []
    for path in sorted(simulation.folder.samples.glob("*.parquet")):
        name, number = path.stem.split("-")
        table = read_table(path, columns=("group_id", "dropped_by"))
        pairs = zip(*(table.column(column).to_pylist() for column in table.column_names), strict=True)
        found.append((name, int(number), dict(pairs)))
    return found


def recorded(files, *, until=10**6):
    """Return the trained and dropped draws in these sample files up to a batch."""
    trained, dropped = [], []
    for name, number, groups in files:
        if number > until or (name == "end" and until < 10**6):
            continue  # groups dropped at the end of the data may follow the checkpoint
        trained += [id_ for id_, why in groups.items() if not why]
        dropped += [(id_, why) for id_, why in groups.items() if why]
    return trained, dropped


EVERYTHING = {
    "chances": CHANCES,
    "run": RUNS,
    "rows": st.sampled_from([-1, 3, 20]),
    "every": st.integers(0, 2),
    "buffer": BUFFERS,
    "breaks": st.lists(st.tuples(st.sampled_from(["stop", "kill"]), MOMENTS), min_size=1, max_size=3),
}


BROKEN = list(product((0, 2), (1, 2), ("stop", "kill"), (0.0, 2.0)))
PAIRS = [(0, 1, "stop", 0.0), (0, 2, "kill", 2.0), (2, 1, "kill", 0.0), (2, 2, "stop", 2.0), (2, 1, "stop", 2.0)]
"""Cases that cover all pairs of values of two settings except three pairs."""


@pytest.mark.parametrize(
    ("bound", "sync_every", "how", "write_s"),
    [*PAIRS, *(pytest.param(*case, marks=pytest.mark.long) for case in BROKEN if case not in PAIRS)],
)
def test_a_run_that_is_broken_twice_loses_nothing(plain, bound, sync_every, how, write_s):
    run = {"max_staleness": bound, "sync_every": sync_every, "prompts_per_batch": 3, "batches": 6, "over_sampling": 1.0}
    chances = Chances(seed=1, dropped=0.3, rollout_s=1.0, train_s=0.5, save_s=0.5, write_s=write_s)
    every = 1 if how == "kill" else 0  # a stop saves work in progress by itself
    simulate(plain, chances, run, -1, every, ("oldest-first", "drop"), [(how, 0.3), (how, 0.3)])


@pytest.mark.parametrize("rollout_s", [3.0, pytest.param(10.0, marks=pytest.mark.long)])
@pytest.mark.parametrize(("bound", "sync_every"), [(1, 1), (2, 1), (2, 2), pytest.param(4, 1, marks=pytest.mark.long)])
def test_no_group_is_lost_to_the_bound_if_the_trainer_waits(plain, bound, sync_every, rollout_s):
    run = {"max_staleness": bound, "sync_every": sync_every, "prompts_per_batch": 3, "batches": 12}
    chances = Chances(seed=1, dropped=0.3, rollout_s=rollout_s, train_s=0.3, save_s=0.5)
    run["over_sampling"] = 1.0
    assert "stale" in simulate(plain, chances, run, -1, 0, ("oldest-first", "drop"), [])
    assert "stale" not in simulate(plain, chances, run, -1, 0, ("oldest-first", "wait"), [])


@pytest.mark.parametrize("kind", ["freshest-first", pytest.param("priority", marks=pytest.mark.long)])
def test_prompts_are_sampled_again_in_place_of_being_dropped(plain, kind):
    run = {"max_staleness": 1, "sync_every": 1, "prompts_per_batch": 3, "batches": 8, "over_sampling": 2.0}
    chances = Chances(seed=1, dropped=0.0, rollout_s=1.0, train_s=1.0, save_s=0.5)
    assert "stale" in simulate(plain, chances, run, -1, 0, (kind, "drop"), [])
    assert "stale" not in simulate(plain, chances, run, -1, 0, (kind, "resample"), [])


@settings(max_examples=10, deadline=None)
@given(**EVERYTHING)
def test_nothing_is_lost_or_done_twice(plain, chances, run, rows, every, buffer, breaks):
    simulate(plain, chances, run, rows, every, buffer, breaks)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(**EVERYTHING)
def test_nothing_is_lost_or_done_twice_in_many_runs(plain, chances, run, rows, every, buffer, breaks):
    simulate(plain, chances, run, rows, every, buffer, breaks)


def simulate(plain, chances, run, rows, every, buffer, breaks):
    """Simulate one run with its interruptions, and check what it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        config = plain.model_copy(
            update={
                "run": plain.run.model_copy(update={**run, "max_dropped": 10**6}),
                "buffer": policy(*buffer) if run["max_staleness"] else plain.buffer,
                "checkpoint": plain.checkpoint.model_copy(update={"every": every * run["sync_every"]}),
            }
        )
        simulation = Simulation(config, chances, rows, RunFolder(Path(folder) / "run"))
        about_s = run["batches"] * (2 * chances.rollout_s + 1.3 * chances.train_s)
        finished = False
        for how, moment in breaks:
            if not finished:
                finished = simulation.run(**{f"{how}_s": moment * about_s})
        if not finished:
            assert simulation.run()
        files = read_groups(simulation)
        check(simulation, run, rows, files)
        if buffer[1] != "resample":
            check_first_tokens(simulation)
        reasons = {why for _, why in recorded(files)[1]}
        waits = buffer[1] == "wait" and run["over_sampling"] == 1
        if buffer[1] == "resample" or waits:
            assert "stale" not in reasons
        return reasons


def policy(kind, when_stale):
    return find_components(load_plugins())["buffer"][kind](when_stale=when_stale)


def check_first_tokens(simulation):
    """Check that tokens sampled before a resume were not sampled again."""
    for path in simulation.folder.samples.glob("*.parquet"):
        for group in read_samples(path):
            expected = simulation.first_tokens.get(group.id, group.samples[0].rollout_logprobs[0])
            assert group.samples[0].rollout_logprobs[0] == expected


def check(simulation, run, rows, files):
    by_batch = simulation.trained
    if simulation.empty:
        assert not by_batch and all(simulation.chances.fate(id_) for id_ in range(rows))
        return
    ids = [id_ for batch in by_batch.values() for id_ in batch]
    assert len(ids) == len(set(ids)), "a draw was trained twice"
    trained, dropped = recorded(files)
    assert trained == ids
    gone = [id_ for id_, _ in dropped]
    assert len(gone) == len(set(gone)) and not set(gone) & set(ids)
    assert all(why in ("stale", simulation.chances.fate(id_)) for id_, why in dropped)
    assert [entry.step for entry in read_journal(simulation.folder.metrics)] == sorted(by_batch)
    if rows < 0:
        assert sorted(by_batch) == list(range(1, run["batches"] + 1))
    saved = read_state(simulation.checkpoints()[-1])
    kept, parted = recorded(files, until=saved.batch)  # a run that continues does not sample these again
    known = [*kept, *(id_ for id_, _ in parted), *waiting(simulation)]
    assert len(known) == len(set(known)), "a draw would be trained twice"
    # additionally `gone`: groups that filters dropped after the last batch, when the data ended
    assert {*known, *gone} >= set(range(saved.producer["next"])), "a draw was lost"
    if len(by_batch) < run["batches"]:
        assert sorted(ids + gone) == list(range(rows)), "the data ended, but not every row was trained or dropped"
    if run["max_staleness"] == 0:
        assert sorted(ids + gone) == list(range(len(ids + gone))), "draws were skipped"
