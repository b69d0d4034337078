"""Holds back the files that a rank writes of a checkpoint, until a test lets them go; reads what was written."""

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


def numbers(folder):
    """The bytes of everything that a checkpoint holds, by name; files are filled in another order each time."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(folder).read_metadata()
    found = {}
    for index, place in metadata.storage_data.items():
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            found[index.fqn, tuple(index.offset or ())] = file.read(place.length)
    return found
