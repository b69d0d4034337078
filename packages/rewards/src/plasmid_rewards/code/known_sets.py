"""Converters for rows of known programming datasets, for ``data.apply``."""

from __future__ import annotations

from typing import Any

from .cases import is_case


def mbpp(row: dict[str, Any]) -> dict[str, Any] | None:
    """Convert a row of MBPP (google-research-datasets/mbpp, ``full``) to a prompt and a target.

    Tests that do not compare a plain call with ``==`` are left out. Rows without any remaining test return None.
    """
    tests = [test for test in row["test_list"] if is_case(test)]
    if not tests or row.get("test_setup_code"):
        return None
    prompt = f"{row['text']}\nWrite it as a Python function in one code block. It must satisfy:\n{tests[0]}"
    return {"prompt": prompt, "target": tests, "task_id": row["task_id"]}
