"""Mixtures: how often each source is drawn from, what happens when one ends, and exact resume."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.components import DataSource, PromptStream
from plasmid.config.load import validate
from plasmid.errors import CheckpointError, ConfigError, DataError
from plasmid.testing.rewards import make_prompt
from plasmid_runtime.data.files import Files
from plasmid_runtime.data.mixture import Mixture


def fake_encode(prompt, template):
    """Encode one token per character; streams do not depend on the tokenizer."""
    return np.array([ord(c) for c in prompt], np.int32), prompt


class Told(PromptStream):
    """Counts up, and records the feedback that it receives."""

    def __init__(self, end):
        self.next, self.end, self.told = 0, end, []

    def draw(self):
        if self.next == self.end:
            return None
        self.next += 1
        return self.prompt(f"row:{self.next}")

    def prompt(self, id):
        return make_prompt(id=id)

    def learn(self, prompt, rewards):
        self.told.append((prompt.id, prompt.source, list(rewards)))

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


class Counted(DataSource):
    end: int = -1

    def stream(self, encode, *, seed):
        return Told(self.end)

    def prompts(self, encode):
        return iter(Told(self.end).draw, None)


def mixed(ends, *, seed=0, **options):
    sources = {name: Counted(end=end) for name, end in ends.items()}
    return Mixture(sources=sources, **options).stream(fake_encode, seed=seed)


def sources_of(stream, count):
    return [prompt and prompt.source for prompt in (stream.draw() for _ in range(count))]


def test_sources_are_drawn_from_by_their_weights_and_prompts_know_theirs():
    stream = mixed({"a": -1, "b": -1}, weights={"a": 3})
    drawn = [stream.draw() for _ in range(2000)]
    counts = Counter(prompt.source for prompt in drawn)
    assert abs(counts["a"] / 2000 - 0.75) < 0.03
    assert [p.id for p in drawn if p.source == "b"][:3] == ["b/row:1", "b/row:2", "b/row:3"]
    assert len({prompt.id for prompt in drawn}) == 2000
    assert stream.metrics() == {"data/a/drawn": counts["a"], "data/b/drawn": counts["b"]}


def test_the_order_follows_from_the_seed_and_no_other_generator():
    np.random.seed(1)
    first = sources_of(mixed({"a": -1, "b": -1}), 50)
    np.random.seed(2)
    assert sources_of(mixed({"a": -1, "b": -1}), 50) == first
    assert sources_of(mixed({"a": -1, "b": -1}, seed=1), 50) != first


def test_a_source_keeps_its_order_when_another_is_added(write_jsonl):
    rows = write_jsonl(*({"prompt": f"p{i}", "target": i} for i in range(20)))

    def order(**more):
        stream = Mixture(sources={"a": Files(path=str(rows)), **more}).stream(fake_encode, seed=3)
        return [prompt.id for prompt in (stream.draw() for _ in range(60)) if prompt.source == "a"][:20]

    assert order() == order(b=Counted())


def test_the_others_go_on_when_a_source_ends_and_all_ends_are_the_end():
    drawn = sources_of(mixed({"a": 3, "b": 40}), 50)
    assert Counter(drawn) == {"a": 3, "b": 40, None: 7}
    assert drawn[-7:] == [None] * 7


def test_the_first_exhausted_source_ends_the_data_if_configured():
    drawn = sources_of(mixed({"a": 3, "b": -1}, exhausted="end"), 60)
    end = drawn.index(None)
    assert drawn[:end].count("a") == 3 and set(drawn[end:]) == {None}


def test_mixtures_of_mixtures_name_the_whole_way_and_pass_rewards_down():
    inner = Mixture(sources={"x": Counted(), "y": Counted()})
    stream = Mixture(sources={"a": inner, "b": Counted()}).stream(fake_encode, seed=0)
    drawn = [stream.draw() for _ in range(40)]
    assert {prompt.source for prompt in drawn} == {"a/x", "a/y", "b"}
    for prompt in drawn:
        stream.learn(prompt, [1.0])
        assert (stream.prompt(prompt.id).id, stream.prompt(prompt.id).source) == (prompt.id, prompt.source)
    told = stream._streams["a"]._streams["x"].told
    assert told and all(id_.startswith("row:") and source == "" for id_, source, _ in told)


def test_a_profile_of_a_prompt_overrides_the_profile_of_the_source(write_jsonl):
    path = write_jsonl({"prompt": "a", "target": 1, "kind": None}, {"prompt": "b", "target": 1, "kind": "own"})
    source = Files(path=str(path), profile_key="kind", shuffle=False)
    stream = Mixture(sources={"s": source}, profiles={"s": "of-source"}).stream(fake_encode, seed=0)
    assert [stream.draw().profile for _ in range(2)] == ["of-source", "own"]
    assert stream.facts().profiles == {"own": f"{path}:2", "of-source": "data.profiles.s"}


@settings(max_examples=60, deadline=None)
@given(
    ends=st.dictionaries(st.sampled_from("abc"), st.integers(-1, 6), min_size=1),
    before=st.integers(0, 25),
    lost=st.integers(0, 9),
    seed=st.integers(0, 2**32),
    exhausted=st.sampled_from(["go-on", "end"]),
)
def test_a_restored_mixture_draws_what_the_first_one_would_have_drawn(ends, before, lost, seed, exhausted):
    options = {"seed": seed, "exhausted": exhausted, "weights": {next(iter(ends)): 2.5}}
    stream = mixed(ends, **options)
    sources_of(stream, before)
    state = json.loads(json.dumps(stream.state()))
    expected = [prompt and prompt.id for prompt in (stream.draw() for _ in range(25))]
    other = mixed(ends, **options)
    sources_of(other, lost)
    other.restore(state)
    assert [prompt and prompt.id for prompt in (other.draw() for _ in range(25))] == expected


def test_other_sources_or_other_rows_are_refused_by_name(write_jsonl):
    rows = write_jsonl({"prompt": "a", "target": 1})

    def opened(**sources):
        return Mixture(sources=sources).stream(fake_encode, seed=0)

    state = opened(a=Files(path=str(rows)), b=Counted()).state()
    with pytest.raises(CheckpointError) as caught:
        opened(a=Files(path=str(rows)), c=Counted()).restore(state)
    assert str(caught.value) == ("data.sources: must be the sources of the checkpoint, a, b, got a, c")
    rows.write_text('{"prompt": "b", "target": 1}\n')
    with pytest.raises(CheckpointError, match=r"^data\.sources\.a\.path: train\.jsonl or its slice has changed"):
        opened(a=Files(path=str(rows)), b=Counted()).restore(state)


def test_an_evaluation_set_reads_every_source_once_in_order():
    mixture = Mixture(sources={"a": Counted(end=2), "b": Counted(end=1)})
    assert [prompt.id for prompt in mixture.prompts(fake_encode)] == ["a/row:1", "a/row:2", "b/row:1"]
    weighted = Mixture(sources={"a": Counted(end=2)}, weights={"a": 2})
    with pytest.raises(DataError, match=r"^data\.weights: an evaluation set reads every source once; remove the"):
        list(weighted.prompts(fake_encode))


def test_errors_of_a_source_name_the_table_of_the_source(tmp_path):
    source = Files(path=str(tmp_path / "none.jsonl"))
    nested = Mixture(sources={"all": Mixture(sources={"math": source})})
    with pytest.raises(DataError, match=r"^data\.sources\.all\.sources\.math\.path: no such file: "):
        nested.stream(fake_encode, seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": {"b": 1.0}}, "data: weights.b: no such source; sources are a"),
        ({"profiles": {"b": "x"}}, "data: profiles.b: no such source; sources are a"),
        ({"weights": {"a": 0.0}}, "data.weights.a: must be more than 0, got 0.0"),
        ({"exhausted": "stop"}, "data.exhausted: must be 'go-on' or 'end', got 'stop'"),
    ],
)
def test_settings_that_cannot_be_meant_are_errors(settings, message):
    with pytest.raises(ConfigError) as caught:
        validate(Mixture, {"sources": {"a": Counted()}, **settings}, "data")
    assert str(caught.value) == message
