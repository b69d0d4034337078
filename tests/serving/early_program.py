"""Tasks of processes that start early. The import of this module is recorded in a file."""

import os
import time
from pathlib import Path

AT_IMPORT = dict(os.environ)
if "EARLY_IMPORTS" in os.environ:
    with Path(os.environ["EARLY_IMPORTS"]).open("a") as opened:
        opened.write(f"{os.getpid()}\n")
if "EARLY_FAILURE" in os.environ:
    raise ImportError(os.environ["EARLY_FAILURE"])


def report(name, writers):
    """Send the value that a variable had at the import and has now through the last pipe, and close all."""
    writers[-1].send((AT_IMPORT.get(name), os.environ.get(name)))
    for writer in writers:
        writer.close()


def fail():
    """Exit with a code."""
    raise SystemExit(7)


def hang():
    """Run until killed."""
    time.sleep(1000)
