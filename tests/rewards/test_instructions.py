"""Checkers of IFEval and IFBench, run without network access."""

import asyncio

import pytest
from plasmid.errors import RewardError
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import IFBench, IFEval

pytestmark = pytest.mark.usefixtures("forked_workers")


def rows(ids, kwargs, text, value, followed):
    return {"instruction_id_list": ids, "kwargs": kwargs}, text, value, followed


WORDS = {"num_words": 3, "relation": "at least", "unused": None}
IFEVAL = [
    rows(["punctuation:no_comma"], [{}], "a b", 1, 1.0),
    rows(["punctuation:no_comma"], [{}], "a, b", 0, 0.0),
    rows(["length_constraints:number_words", "punctuation:no_comma"], [WORDS, None], "one two three", 1, 1.0),
    rows(["length_constraints:number_words", "punctuation:no_comma"], [WORDS, {}], "one two", 0, 0.5),
    rows(["keywords:existence"], [{"keywords": ["cell"]}], "<think>cell</think> no", 0, 0.0),
    rows(["language:response_language"], [{"language": "de"}], "Das ist ein ganz gewoehnlicher Satz.", 1, 1.0),
    rows(["detectable_format:json_format"], [{}], "```json\n{}\n```", 1, 1.0),
]
MISTAKES = [
    ({}, "has no list 'instruction_id_list' of checks"),
    ({"instruction_id_list": ["a"], "kwargs": []}, "has no list 'kwargs'"),
    ({"instruction_id_list": ["a"], "kwargs": [{}, {}]}, "has 1 instructions, but 2 tables in 'kwargs'"),
    ({"instruction_id_list": ["nope"], "kwargs": [{}]}, "has an instruction without a checker: 'nope'"),
]


def test_ifeval_counts_all_instructions_or_their_fraction_and_refuses_rows_that_say_none():
    async def work():
        reward = IFEval(workers=1)
        try:
            scores = [await reward(make_prompt(metadata=row), make_sample(text)) for row, text, _, _ in IFEVAL]
            empty = await reward(make_prompt(metadata=IFEVAL[0][0]), make_sample(""))
            for row, message in MISTAKES:
                with pytest.raises(RewardError, match=f"ifeval: prompt test:1 {message}"):
                    await reward(make_prompt(metadata=row), make_sample("x"))
            return scores, empty
        finally:
            await reward.close()

    scores, empty = asyncio.run(work())
    assert [(s.value, s.components["followed"]) for s in scores] == [(value, part) for _, _, value, part in IFEVAL]
    assert (empty.value, empty.error) == (0.0, "the text is empty")


RAISING = {"instruction_id_list": ["format:quote_unquote"], "kwargs": [{}]}
RAISED = ("(123)", "plain", '"no"')
"""The checker reads the last letter of a text, and the first text has none."""


@pytest.fixture(scope="module")
def ifbench(tmp_path_factory):
    """A reward whose worker imports the checkers once, the loop that it runs on, and its home folder."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("NLTK_DATA", str(home))  # a missing folder, into which nothing is downloaded
        patch.setenv("HOME", str(home))
        reward = IFBench(workers=1, score="fraction")
        yield reward, runner, home
        runner.run(reward.close())


def test_arguments_that_a_checker_cannot_use_are_an_error_of_the_row_and_texts_get_the_failure_value(ifbench):
    reward, runner, _ = ifbench
    rows = {
        "ratio:overlap": {},  # raises for every text
        "count:numbers": {"unknown": 1},  # raises before any text
    }

    async def refuse(name, arguments):
        row = {"instruction_id_list": [name], "kwargs": [arguments]}
        with pytest.raises(RewardError) as error:
            await reward(make_prompt(metadata=row), make_sample("x"))
        message = str(error.value)
        assert message.startswith(f"ifbench: prompt test:1: the checker of {name!r} cannot use its table in 'kwargs': ")
        assert message.endswith("; fix or remove the row") and "TypeError" in message

    async def work():
        for name, arguments in rows.items():
            await refuse(name, arguments)
        scores = [await reward(make_prompt(metadata=RAISING), make_sample(text)) for text in RAISED]
        assert [score.value for score in scores] == [0.0, 1.0, 0.0]
        assert scores[0].error == "the checker format:quote_unquote raised IndexError: string index out of range"
        assert not scores[1].error and not scores[2].error

    runner.run(work())


def test_ifbench_runs_its_checkers_and_names_data_that_are_missing(ifbench):
    reward, runner, home = ifbench

    async def work():
        row = {"instruction_id_list": ["count:numbers", "format:emoji"], "kwargs": [{"N": 3}, {}]}
        given = await reward(make_prompt(metadata=row), make_sample("1 2 3"))
        needs = {"instruction_id_list": ["format:title_case"], "kwargs": [{}]}
        with pytest.raises(RewardError) as error:
            await reward(make_prompt(metadata=needs), make_sample("This Is A Title"))
        return given, str(error.value)

    given, message = runner.run(work())
    assert given.value == 0.5
    assert message == (
        "ifbench: prompt test:1 needs the NLTK data 'punkt_tab', which is not installed; "
        "python -m nltk.downloader punkt_tab, or remove the row"
    )
    assert not list(home.rglob("*.zip"))
