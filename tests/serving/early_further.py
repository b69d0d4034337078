"""A module that early processes import after that of their target. The import is recorded in a file."""

import os
from pathlib import Path

with Path(os.environ["EARLY_FURTHER"]).open("a") as opened:
    opened.write(f"{os.getpid()}\n")
if "EARLY_FURTHER_FAILURE" in os.environ:
    os.environ["SET_BY_IMPORT"] = "value"
    raise RuntimeError(os.environ["EARLY_FURTHER_FAILURE"])
