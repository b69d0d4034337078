"""The task of the recipe with tools."""

import json
import subprocess
import sys
from pathlib import Path

from plasmid_workflows.tools.builtin.arithmetic import evaluate
from plasmid_workflows.tools.tool_calls import PARSERS

DATA = Path(__file__).parents[2] / "recipes" / "data"
NAMES = ("products-train.jsonl", "products-test.jsonl")


def test_the_script_writes_the_files_that_are_checked_in(tmp_path):
    subprocess.run([sys.executable, DATA / "make_products.py", tmp_path], check=True)
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_chats_show_calls_that_are_right_and_ask_for_their_target():
    for name in NAMES:
        for row in map(json.loads, (DATA / name).read_text().splitlines()):
            *solved, asked = row["prompt"]
            for message, result in zip(solved[1::4], solved[2::4], strict=True):
                (call,) = PARSERS["python"](message["content"]).calls
                assert str(evaluate(call.arguments["expression"])) == result["content"]
            a, b = (int(word.strip("?")) for word in asked["content"].split() if word.strip("?").isdigit())
            assert row["target"] == a * b
