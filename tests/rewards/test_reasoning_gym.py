"""Tasks of reasoning-gym as prompts and as a verifier."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest
from plasmid.errors import CheckpointError, DataError, RewardError
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import ReasoningGym, ReasoningGymSource
from plasmid_rewards.gym import entries, generator
from plasmid_rewards.gym.entries import OURS
from plasmid_rewards.gym.generator import Generator
from plasmid_runtime.data.curriculum import Curriculum
from pydantic import ValidationError

UNSTEADY = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Families that create other entries for the same seed if strings have other hashes."""


def encode(prompt, template):
    text = prompt if isinstance(prompt, str) else "|".join(m["content"] for m in prompt)
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32), text


@pytest.fixture(scope="module")
def one_generator():
    """Keep the process that creates entries from ending between tests."""
    made = Generator()
    yield made
    made.close()


class FakeProcess:
    """A generating process that only counts requests."""

    def __init__(self):
        self.clients, self.requests, self.runs = 0, 0, True

    def request(self, request):
        self.requests += 1
        return {"families": ["a"]}

    def is_running(self):
        return self.runs

    def stop(self):
        self.runs = False


def draw(stream, count):
    return [stream.draw() for _ in range(count)]


def ask(reward, *pairs):
    async def work():
        try:
            return [await reward(prompt, make_sample(text)) for prompt, text in pairs]
        finally:
            await reward.close()

    return asyncio.run(work())


def test_prompts_are_resumed_exactly_and_verified_in_another_process(one_generator, monkeypatch):
    source = ReasoningGymSource(families=("chain_sum", *UNSTEADY), options={"chain_sum": {"max_terms": 3}})
    stream = source.stream(encode, seed=5)
    first = draw(stream, 12)
    state = json.loads(json.dumps(stream.state()))
    then = draw(stream, 12)
    monkeypatch.setattr(generator, "_shared", None)  # in another process, whose strings may have other hashes
    resumed = source.stream(encode, seed=5)
    resumed.restore(state)
    again = draw(resumed, 12)
    assert [(p.id, p.text, p.target, p.metadata) for p in again] == [(p.id, p.text, p.target, p.metadata) for p in then]
    assert len({p.id for p in first + then}) == 24
    assert {p.metadata["reasoning_gym"]["family"] for p in first + then} == {"chain_sum", *UNSTEADY}
    pairs = [(prompt, f"So.</think> <answer> {prompt.target} </answer>") for prompt in first + then]
    wrong = [(first[0], "<answer>no</answer>"), (first[0], f"{first[0].target}"), (first[0], "<answer>")]
    scores = ask(ReasoningGym(workers=1), *pairs, *wrong)
    assert [s.value for s in scores] == [1.0] * 24 + [0.0] * 3
    assert scores[-1].error == "no answer found (answer_in = 'tags')"
    resumed.close()


@pytest.mark.usefixtures("one_generator")
def test_open_sources_share_one_process_until_the_last_is_closed(monkeypatch):
    kept = generator._shared
    monkeypatch.setattr(generator, "_Process", FakeProcess)
    monkeypatch.setattr(generator, "_shared", None)
    first, second = Generator(), Generator()
    process = generator._shared
    assert process is not kept and first.families() == second.families() == ["a"] and process.requests == 2
    first.close()
    first.close()
    assert process.runs and Generator().families() == ["a"], "a client that was freed is closed"
    second.close()
    assert not process.runs and generator._shared is None
    third = Generator()
    assert generator._shared is not process
    generator._shared.runs = False  # it has crashed
    fourth = Generator()
    assert generator._shared.runs and generator._shared.clients == 1
    third.close()
    assert generator._shared.runs
    fourth.close()


@pytest.mark.usefixtures("one_generator")
def test_a_state_of_other_settings_is_refused():
    source = ReasoningGymSource(families=("chain_sum",))
    state = source.stream(encode, seed=5).state()
    with pytest.raises(
        CheckpointError,
        match=r"data.instruction: is 'x', but the checkpoint was saved with 'Give .*; restore",
    ):
        source.model_copy(update={"instruction": "x"}).stream(encode, seed=5).restore(state)


@pytest.mark.usefixtures("one_generator")
def test_a_curriculum_passes_over_families_that_are_solved():
    source = Curriculum(by="family", floor=0.01, source=ReasoningGymSource(families=("chain_sum", "gcd")))
    stream = source.stream(encode, seed=3)
    for prompt in draw(stream, 20):
        stream.learn(prompt, [1.0, 1.0] if prompt.metadata["family"] == "gcd" else [0.0, 1.0])
    assert {prompt.metadata["family"] for prompt in draw(stream, 20)} == {"chain_sum"}
    stream.close()


@pytest.mark.usefixtures("one_generator")
def test_evaluation_sets_end_and_draw_other_tasks_than_training():
    source = ReasoningGymSource(families=("chain_sum",), size=5, system="Be brief.", max_prompt_tokens=200)
    prompts = list(source.prompts(encode))
    assert [p.id for p in prompts] == [f"chain_sum:eval-{i}" for i in range(5)]
    assert prompts[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert prompts[0].text.endswith("Give your final answer between <answer> and </answer>.")
    stream = source.stream(encode, seed=0)
    trained = draw(stream, 5)
    assert stream.draw() is None
    assert not {p.metadata["reasoning_gym"]["seed"] for p in prompts} & {
        p.metadata["reasoning_gym"]["seed"] for p in trained
    }
    with pytest.raises(DataError, match=r"data.size: is required for an evaluation set"):
        source.model_copy(update={"size": "endless"}).prompts(encode)
    with pytest.raises(DataError, match=r"data.max_prompt_tokens: 200 consecutive prompts are longer than 9 tokens"):
        source.model_copy(update={"max_prompt_tokens": 9}).stream(encode, seed=0).draw()


@pytest.mark.usefixtures("one_generator")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"families": ("chain_som",)}, "unknown family 'chain_som'; did you mean 'chain_sum'"),
        ({"families": ("gcd",), "options": {"gcd": {"nope": 1}}}, "gcd with .*nope.*unexpected keyword argument"),
        ({"families": ("gcd",), "options": {"gcd": {"min_numbers": 1}}}, "gcd with .*AssertionError"),
    ],
)
def test_families_and_options_that_do_not_exist_are_refused_when_the_source_is_opened(settings, message):
    with pytest.raises(DataError, match=message):
        ReasoningGymSource(**settings).stream(encode, seed=0)


COIN = {"metadata": {"rational": {"numerator": 15, "denominator": 64}}, "answer": "0.234375"}
RARE = {"metadata": {"rational": {"numerator": 1, "denominator": 32768}}, "answer": "3.051757812e-05"}
VERIFIED = [
    (
        "coin_flip",
        COIN,
        ["0.234375", "15/64", "0.2344", " .234375 "],
        ["0", "0.2", "0.2343750x", "23", "1/0", "nan", "1e999"],
    ),
    ("coin_flip", RARE, ["3.05e-5", "1/32768", "0.0000305"], ["0", "0.0", "0.0001", "3", "-3.05e-5"]),
    ("game_of_life_halting", {"answer": "False"}, ["False", "false", "False."], ["True", "0", "no", "", "the answer"]),
    ("game_of_life_halting", {"answer": "True"}, ["True"], ["False", "1", "x"]),
]


@pytest.mark.parametrize(("family", "entry", "right", "wrong"), VERIFIED)
def test_replaced_verifiers_reject_wrong_answers(family, entry, right, wrong):
    assert [OURS[family](answer, entry) for answer in right] == [1.0] * len(right)
    assert [OURS[family](answer, entry) for answer in wrong] == [0.0] * len(wrong)


def test_settings_without_effect_are_refused():
    with pytest.raises(ValidationError, match=r"options.gcd has no effect, because 'gcd' is not in families"):
        ReasoningGymSource(families=("lcm",), options={"gcd": {}})
    with pytest.raises(ValidationError, match='system has no effect without chat prompts; set prompt_as = "chat"'):
        ReasoningGymSource(prompt_as="text", system="x")


@pytest.mark.parametrize(
    ("where", "text", "answer"),
    [
        ("tags", "<answer>1</answer><answer>2</answer>", "2"),
        ("tags", "<answer>1", None),
        ("box", r"\boxed{3}", "3"),
        ("last-line", "a\nb \n", "b"),
        ("last-number", "it is 1,234.5 m", "1234.5"),
        ("last-number", "none", None),
        ("whole", " a ", "a"),
    ],
)
def test_where_the_answer_stands(where, text, answer):
    assert ReasoningGym(answer_in=where).answer(text) == answer


def test_a_prompt_without_a_task_is_a_user_error():
    with pytest.raises(RewardError, match="reasoning-gym: prompt test:1 has no 'reasoning_gym'"):
        ReasoningGym().prepare(make_prompt())


UNANSWERED = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Families that only verify and do not provide a right answer."""


@pytest.mark.long
def test_all_families_accept_their_answer_and_no_constant():
    generator = Generator()
    families = generator.families()
    generator.close()
    assert len(families) == 105
    stream = ReasoningGymSource(families="all", instruction="").stream(encode, seed=1)
    seen = {}
    while len(seen) < 105:  # all are equally likely: about 550 draws
        prompt = stream.draw()
        seen.setdefault(prompt.metadata["reasoning_gym"]["family"], prompt)
    stream.close()
    known = [prompt for prompt in seen.values() if prompt.target is not None]
    assert set(seen) - {prompt.metadata["reasoning_gym"]["family"] for prompt in known} == set(UNANSWERED)
    pairs = [(prompt, str(prompt.target)) for prompt in known]
    scores = ask(ReasoningGym(answer_in="whole", workers=1, call_timeout_s=60), *pairs)
    assert [(p.id, s.value, s.error) for p, s in zip(known, scores, strict=True) if s.value < 1] == []
    constants = ask(
        ReasoningGym(answer_in="whole", workers=1), *((p, text) for p in seen.values() for text in ("the answer", "[]"))
    )
    assert sum(s.value for s in constants) == 0


def carry(state):
    """Return a plan for boxnet: one box after another is moved to its target, square by square."""
    plan = []
    for place, items in state.items():
        for box in (item for item in items if item.startswith("box_")):
            target = box.replace("box_", "target_")
            row, column = map(float, place.split("_"))
            end_row, end_column = next(map(float, k.split("_")) for k, v in state.items() if target in v)
            while (row, column) != (end_row, end_column):
                next_row = row + (end_row > row) - (end_row < row)
                step = (next_row, column) if next_row != row else (row, column + (1 if end_column > column else -1))
                plan.append({f"Agent[{row}, {column}]": f"move({box}, square[{step[0]}, {step[1]}])"})
                row, column = step
            plan.append({f"Agent[{row}, {column}]": f"move({box}, {target})"})
    return json.dumps(plan)


def solutions(family, metadata):
    """Return texts of which one is right."""
    if family == "boxnet":
        return [carry(metadata["initial_state"])]
    if family == "rush_hour":  # the board is chosen so that two moves solve it
        moves = [f"{car}{way}{count}" for car in "ABCDEFGHIJKLM" for way in "+-" for count in range(1, 5)]
        return [f"{first} A+{count}" for first in moves for count in range(1, 5)]
    key = {"graph_color": "possible_answer", "propositional_logic": "example_answer"}
    found = metadata[key.get(family, "example_correct_answer")]
    return [found if isinstance(found, str) else json.dumps(found)]


@pytest.mark.long
@pytest.mark.parametrize("family", UNANSWERED)
def test_families_that_only_verify_accept_a_solution(family):
    options = {"max_moves": 2} if family == "rush_hour" else {}
    _, entry = entries._make_entry(family, 1, json.dumps(options))
    assert max(entries.score(family, 1, options, text) for text in solutions(family, entry["metadata"])) == 1.0
    assert entries.score(family, 1, options, "the answer") < 0.99


def test_importing_the_package_does_not_import_reasoning_gym():
    code = "import plasmid_rewards, sys; assert not {'reasoning_gym', 'sympy', 'httpx', 'nltk'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


SMALL = {"chain_sum": {"max_terms": 2, "max_digits": 1, "min_digits": 1}, "gcd": {"max_value": 6, "max_numbers": 2}}
"""Families with a few hundred different tasks, of which two streams of seeds repeatedly draw the same."""


@pytest.mark.usefixtures("one_generator")
def test_no_task_of_an_evaluation_set_is_drawn_in_training(caplog):
    source = ReasoningGymSource(families=tuple(SMALL), options=SMALL)
    stream = source.stream(encode, seed=0)
    trained = draw(stream, 400)
    metrics = stream.metrics()
    state = json.loads(json.dumps(stream.state()))
    stream.close()
    for seed in (0, 7):
        held_out = list(source.model_copy(update={"size": 60, "seed": seed}).prompts(encode))
        assert len(held_out) == 60
        assert not {prompt.text for prompt in trained} & {prompt.text for prompt in held_out}
        assert {prompt.metadata["family"] for prompt in held_out} == set(SMALL)
    assert 60 < metrics["data/held_out"] < 240  # a quarter of the entries that the seeds gave
    first, second = (record for record in caplog.messages if record.startswith("reasoning-gym: 60 tasks"))
    assert first.endswith(" others are excluded, because training may draw them") and first != second
    resumed = source.stream(encode, seed=0)
    resumed.restore(state)
    assert resumed.metrics() == metrics
    assert resumed.prompt(trained[-1].id).text == trained[-1].text
    resumed.close()


@pytest.mark.usefixtures("one_generator")
def test_families_with_too_few_tasks_to_hold_some_out_are_named():
    source = ReasoningGymSource(families=("count_bits",), options={"count_bits": {"min_n": 3, "max_n": 3}}, size=1)
    failures = []
    for stream in (source.prompts(encode), iter(source.stream(encode, seed=0).draw, None)):
        try:
            list(stream)
        except DataError as error:
            failures.append(str(error))
    (failure,) = failures  # its one question is either for training or for evaluation
    assert failure.startswith("data.families: 10 consecutive draws gave only tasks for ")


def test_a_process_that_is_taken_while_its_last_client_is_freed_goes_on(monkeypatch):
    """Garbage collection may free a client at any time, also while another one takes the process."""

    class Process:
        clients, is_stopped, freed = 0, False, ()

        def is_running(self):
            for process in self.freed:
                generator._release(process)
            return not self.is_stopped

        def stop(self):
            self.is_stopped = True

    monkeypatch.setattr(generator, "_Process", Process)
    monkeypatch.setattr(generator, "_shared", None)
    process = generator._acquire()
    process.freed = [process]
    assert generator._acquire() is process
    assert process.clients == 1 and not process.is_stopped
