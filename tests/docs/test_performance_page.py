"""The tables of the page about performance match the result files."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
spec = importlib.util.spec_from_file_location("performance_page", ROOT / "scripts" / "performance_page.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_the_page_is_up_to_date():
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run `python scripts/performance_page.py`"


def test_every_table_of_the_page_is_written_from_results():
    text = script.PAGE.read_text()
    assert re.findall(r"<!-- table ([a-z0-9-]+): ", text) == list(script.TABLES)
    assert not re.findall(r"(?m)^\|.*", script.TABLE.sub("", text))


def test_a_ceiling_of_the_same_call_is_preferred():
    def row(name, run, speed):
        return {"name": name, "run": run, "device": "X", "rows": "8k", "recompute": False, "tokens_per_s": speed}

    rows = [row("packed, compiled, a", "A", 9), row("packed, compiled, b", "B", 5), row("rl train, fsdp", "B", 4)]
    assert script.ceiling_of(rows[2], rows)["tokens_per_s"] == 5
    assert script.ceiling_of({**rows[2], "run": "C"}, rows)["tokens_per_s"] == 9
    assert script.ceiling_of({**rows[2], "recompute": True}, rows) is None
