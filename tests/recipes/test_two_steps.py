"""The two-step arithmetic of benchmarks/gpu/smollm2-two-steps-megatron-4gpus.toml."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "recipes" / "data"


def rows(name):
    return [json.loads(line) for line in (DATA / f"two-steps-{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_two_steps", DATA / "make_two_steps.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_writes_the_files_that_are_checked_in(script, tmp_path):
    pytest.importorskip("reasoning_gym")
    script.main(tmp_path)
    for name in ("two-steps-train.jsonl", "two-steps-test.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_train_and_test_share_no_terms_in_any_order(script):
    def terms_of(name):
        return [tuple(sorted(script.terms(row["expression"]))) for row in rows(name)]

    groups = {name: terms_of(name) for name in ("train", "test")}
    assert not set(groups["train"]) & set(groups["test"])
    shown = [tuple(sorted(script.terms(expression))) for expression in script.SHOWN]
    assert not set(shown) & {*groups["train"], *groups["test"]}
    assert len(groups["train"]) == 768 and len(set(groups["test"])) == len(groups["test"]) == 96


def test_every_expression_needs_two_steps_and_no_negative_number():
    expressions = [row["expression"] for name in ("train", "test") for row in rows(name)]
    assert len(set(expressions)) == len(expressions)
    for expression in expressions:
        assert len(expression) == 5 and "0" not in expression
        a, first, b, second, c = expression
        partial = int(a) + int(f"{first}{b}")
        assert partial >= 0 and partial + int(f"{second}{c}") >= 0


def test_prompts_ask_for_their_target():
    def value(node):
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            return left + right if isinstance(node.op, ast.Add) else left - right
        return node.value

    for row in rows("train") + rows("test"):
        *solved, asked = row["prompt"].split("\n")
        assert solved == ["2+3-1=5-1=4", "8-4+3=4+3=7"] and asked == f"{row['expression']}="
        assert value(ast.parse(row["expression"], mode="eval").body) == row["target"]
