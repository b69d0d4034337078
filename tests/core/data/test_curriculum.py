"""Curricula: which prompts they skip, what they learn from rewards, and exact resume."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.errors import DataError
from plasmid_runtime.data.curriculum import Curriculum
from plasmid_runtime.data.files import Files
from plasmid_runtime.data.mixture import Mixture


def fake_encode(prompt, template):
    """Encode one token per character; streams do not depend on the tokenizer."""
    return np.array([ord(c) for c in prompt], np.int32), prompt


@pytest.fixture(scope="module")
def levels(tmp_path_factory):
    path = tmp_path_factory.mktemp("levels") / "levels.jsonl"
    rows = ({"prompt": f"p{i}", "target": i, "level": i % 3} for i in range(9))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path, *, seed=0, **options):
    source = Files(path=str(path))
    return Curriculum(source=source, **options).stream(fake_encode, seed=seed)


def taught(stream, count, passes):
    """Draw and report rewards: the fraction of four samples that passes depends on the prompt."""
    drawn = []
    for _ in range(count):
        prompt = stream.draw()
        right = round(4 * passes(prompt))
        stream.learn(prompt, [1.0] * right + [0.0] * (4 - right))
        drawn.append(prompt)
    return drawn


def easy_middle_hard(prompt):
    return (1.0, 0.5, 0.0)[prompt.metadata["level"]]


def test_prompts_of_medium_pass_rate_are_drawn_with_the_documented_weight(levels):
    stream = opened(levels, floor=0.1)
    drawn = taught(stream, 3000, easy_middle_hard)
    counts = Counter(prompt.metadata["level"] for prompt in drawn)
    assert abs(counts[0] / counts[1] - 0.1) < 0.03
    assert abs(counts[2] / counts[1] - 0.1) < 0.03
    assert stream.metrics()["data/known"] == 9
    assert stream.metrics()["data/pass_rate"] == pytest.approx(0.5)
    assert 0.5 < stream.metrics()["data/passed_over"] < 0.7


def test_another_target_likes_other_prompts(levels):
    drawn = taught(opened(levels, target=1.0, floor=0.01), 600, easy_middle_hard)
    counts = Counter(prompt.metadata["level"] for prompt in drawn)
    assert counts[0] > 1.6 * counts[1] > 10 * counts[2]


def test_without_rewards_every_prompt_is_drawn_once_an_epoch(levels):
    stream = opened(levels)
    drawn = [stream.draw().id for _ in range(18)]
    assert set(Counter(drawn).values()) == {2}


def test_old_observations_fade(levels):
    stream = opened(levels, keep=0.5)
    prompt = stream.draw()
    for rewards in ([1.0, 1.0], [0.0, 0.0], [0.0, 0.0]):
        stream.learn(prompt, rewards)
    assert stream.state()["rates"] == {prompt.id: 0.25}
    assert opened(levels, pass_threshold=0.5).state()["rates"] == {}


def test_prompts_of_one_level_share_their_rate(levels):
    stream = opened(levels, by="level", keep=0.0)
    for _ in range(9):
        prompt = stream.draw()
        stream.learn(prompt, [easy_middle_hard(prompt)])
    assert stream.state()["rates"] == {"0": 1.0, "1": 0.0, "2": 0.0}


def test_a_column_that_is_not_there_is_named(levels):
    stream = opened(levels, by="levle")
    with pytest.raises(DataError) as caught:
        stream.draw()
        stream.learn(stream.draw(), [1.0])
    assert str(caught.value).endswith("no key 'levle'; besides prompt and target the row has: level; set data.by")


@settings(max_examples=40, deadline=None)
@given(
    before=st.integers(0, 40),
    after=st.integers(1, 30),
    lost=st.integers(0, 20),
    seed=st.integers(0, 2**32),
    nested=st.booleans(),
)
def test_a_restored_curriculum_draws_what_the_first_one_would_have_drawn(levels, before, after, lost, seed, nested):
    def made():
        curriculum = Curriculum(source=Files(path=str(levels)), floor=0.01)
        mixture = Mixture(sources={"a": curriculum, "b": Files(path=str(levels))}, weights={"a": 2})
        return (mixture if nested else curriculum).stream(fake_encode, seed=seed)

    stream = made()
    taught(stream, before, easy_middle_hard)
    state = json.loads(json.dumps(stream.state()))
    expected = [prompt.id for prompt in taught(stream, after, easy_middle_hard)]
    other = made()
    taught(other, lost, lambda prompt: 1.0)
    other.restore(state)
    assert [prompt.id for prompt in taught(other, after, easy_middle_hard)] == expected


def test_a_curriculum_is_refused_as_an_evaluation_set(levels):
    with pytest.raises(DataError, match=r"^data\.kind: an evaluation set cannot be a curriculum; use its"):
        Curriculum(source=Files(path=str(levels))).prompts(fake_encode)


def test_errors_of_the_source_name_its_table(tmp_path):
    with pytest.raises(DataError, match=r"^data\.source\.path: no such file: "):
        opened(tmp_path / "none.jsonl")
