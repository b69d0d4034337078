"""Delay the checkpoint files that a rank writes until a test releases them, and read the written tensors."""

import sys
import time
from pathlib import Path


def hold(folder):
    """In this process, block opening files of tensors in ``folder`` until ``folder/go`` exists."""
    folder = Path(folder)

    def wait(event, arguments):
        if event == "open" and str(arguments[0]).startswith(f"{folder}/") and str(arguments[0]).endswith(".distcp"):
            (folder / "held").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)

    sys.addaudithook(wait)


def numbers(folder):
    """Return the bytes of all tensors of a checkpoint by name; their order in the files differs each time."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(folder).read_metadata()
    found = {}
    for index, place in metadata.storage_data.items():
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            found[index.fqn, tuple(index.offset or ())] = file.read(place.length)
    return found
