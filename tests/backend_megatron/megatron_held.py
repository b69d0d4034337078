"""Holds back the files that a rank writes of a checkpoint, until a test lets them go."""

import sys
import time
from pathlib import Path


def hold(folder):
    """In this process, nothing opens files of tensors below ``folder`` before ``folder/go`` is there."""
    folder = Path(folder)

    def wait(event, arguments):
        if event == "open" and str(arguments[0]).startswith(f"{folder}/") and str(arguments[0]).endswith(".distcp"):
            (folder / "held").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)

    sys.addaudithook(wait)
