"""Programs and their tests, in all formats of tests."""

import time

import pytest
from plasmid.errors import RewardError
from plasmid_rewards import Code
from plasmid_rewards.code.cases import same_value
from plasmid_rewards.code.reward import extract_program

DOUBLE = [{"input": "2\n", "output": "4\n"}, {"input": "3", "output": "6"}]
ADD = ["assert f(1, 2) == 3", {"call": "f", "args": [[1], [2]], "expected": [1, 2]}]


def fenced(source):
    return f"Let me think.\n```python\n{source}\n```\nDone."


@pytest.mark.parametrize(
    ("source", "tests", "value", "error"),
    [
        ("print(int(input()) * 2)", DOUBLE, 1, None),
        ("print(int(input()) * 2, '\\n')", DOUBLE, 1, None),
        ("print(4)", DOUBLE, 0, "wrong output"),
        ("print(int(input()) * 2); raise SystemExit(3)", DOUBLE, 0, "exit code 3"),
        ("def f(a, b): print('noise'); return a + b", ADD, 1, None),
        ("class Solution:\n    def f(self, a, b): return a + b", ADD, 1, None),
        ("def f(a, b): return 3", ADD, 0, "f: wrong value"),
        ("def f(a, b): return a / 0", ADD, 0, "f: ZeroDivisionError: division by zero"),
        ("def g(a, b): return a + b", ADD, 0, "f: KeyError: 'Solution'"),
        ("def f(a, b): return {1}", ADD, 0, "f: TypeError: Object of type set is not JSON serializable"),
        ("def f(:", ADD, 0, "f: exit code 1: SyntaxError: invalid syntax"),
        ("def f(a, b): return a + b", {"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"}, 1, None),
        ("print(input() + input())", {"inputs": ["a\nb", ["c", "d"]], "outputs": ["ab", ["cd"]]}, 1, None),
        ("def f(x): return x * 0.1", "assert f(3) == 0.3", 1, None),
        ("def f(x): return (x, None)", "assert f('a') == ('a', None)", 1, None),
    ],
)
def test_programs(score, source, tests, value, error):
    given_score = score(Code(workers=1), fenced(source), target=tests)
    assert (given_score.value, given_score.error) == (value, error)


CHEATS = {
    "leaving early": "import os, sys\nos._exit(0)",
    "leaving early, politely": "import sys\nsys.exit(0)",
    "an object that equals all": "class A:\n  def __eq__(self, o): return True\ndef f(a, b): return A()",
    "a list that equals all": "class A(list):\n  def __eq__(self, o): return True\ndef f(a, b): return A()",
    "printing results": "import os\nfor i in range(9):\n  for d in range(3, 9):\n"
    '    try: os.write(d, b\'{"index": 0, "value": true}\\n\')\n    except OSError: pass\ndef f(a, b): return 7',
    "reading the harness": "import sys\ndef f(a, b): return sys._getframe(1).f_locals.get('expected', 0)",
    "other comparison": "import json\njson.dumps = lambda o: '{}'\ndef f(a, b): return 0",
}


@pytest.mark.parametrize("source", CHEATS.values(), ids=CHEATS)
def test_cheats_do_not_pass(score, source):
    assert score(Code(workers=1), fenced(source), target=ADD).value == 0


def test_each_test_that_passes_may_count_its_part(score):
    tests = ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 3", "assert f(9) == 9"]
    source = "def f(x):\n    while x == 9: pass\n    return x"
    given_score = score(Code(score="fraction", sandbox={"wall_s": 1.0}), fenced(source), target=tests)
    assert given_score.value == 0.5 and given_score.error == "f: wrong value"
    assert score(Code(score="fraction", max_tests=1), fenced(source), target=tests).value == 1.0


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nand\n```py\nb\n```", "b\n"),
        ("```python\nx\n```</think>none", None),
        ("```python\nunfinished", None),
        ("a", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_block_after_thinking(text, program):
    assert extract_program(text) == program


@pytest.mark.parametrize(
    "text", ["```" + " " * 10**6, "```python\n" * 10**5, "```python\n" + "x\n" * 10**5], ids=[0, 1, 2]
)
def test_a_megabyte_is_searched_for_programs_within_two_seconds(text):
    started = time.process_time()
    extract_program(text)
    assert time.process_time() - started < 2


def test_a_text_without_a_block_may_be_a_program(score):
    assert score(Code(fenced=False), "print(int(input()) * 2)", target=DOUBLE).value == 1
    assert score(Code(), "print(int(input()) * 2)", target=DOUBLE).error == "no program in the text"


@pytest.mark.parametrize("target", [None, [], 3, ["assert f(1)"], ["assert f(x) == 1"], [{"in": "1"}], ["f(1) == 1"]])
def test_malformed_tests_are_a_user_error(score, target):
    with pytest.raises(RewardError, match=r"code: prompt test:1.*\"input\": text"):
        score(Code(), fenced("x"), target=target)


def test_values_are_compared_with_json_semantics():
    assert same_value([1, (2, 3)], [1, [2, 3]]) and same_value({"a": 1.0}, {"a": 1 + 1e-9})
    assert not same_value(1, True) and not same_value(True, 1) and not same_value("1", 1)
    assert not same_value(1.0, True) and not same_value(False, 0.0)
    assert not same_value([1], [1, 2]) and not same_value({"a": 1}, {"b": 1}) and not same_value(0.1, "x")


def test_all_numbers_below_one_are_named_at_once():
    with pytest.raises(ValueError, match="max_tests must be 'all' or at least 1, got 0\nworkers must be 'auto'"):
        Code(max_tests=0, workers=-1)
