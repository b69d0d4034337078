"""Write or check the lock files for GPUs. Resolves versions from the metadata of the index, without downloads.

python scripts/gpu_lock.py            writes requirements/gpu.txt and requirements/gpu-newest.txt
python scripts/gpu_lock.py --check    fails if a lock does not satisfy the packages' requirements; without a
                                      network it prints a warning and succeeds
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from pins import ROOT, requirements

PLATFORM = "x86_64-manylinux_2_34"
"""SGLang's kernels have wheels for glibc 2.34 and newer."""
PYTHON = "3.12"
LOCKS = {
    "gpu.txt": ("torch==2.11.0", "sglang==0.5.17"),
    "gpu-newest.txt": ("torch==2.14.1", "sglang==0.5.23"),
}
"""Versions that each lock file pins, in addition to the packages' requirements."""
HEADS = {
    "gpu.txt": "The versions of the measurements in docs/performance.md",
    "gpu-newest.txt": "The newest versions that the packages allow; not tested on a GPU",
}
LEFT_OUT = ("vllm", "mlflow", "trackio")


def resolve(constraints: list[str], output: Path) -> None:
    """Resolve the requirements of the packages and their extras. Exits if there is no solution.

    Excludes what the extra `all` excludes: vLLM, which pins another torch than SGLang, and trackers with web servers.
    """
    asked = sorted(
        {str(one) for one in requirements(dev=False) if one.name.partition("-")[0] not in {"plasmid", *LEFT_OUT}}
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "asked.txt").write_text("\n".join(asked))
        (Path(folder) / "constraints.txt").write_text("\n".join(constraints))
        options = ["--python-version", PYTHON, "--python-platform", PLATFORM, "--no-header", "--no-annotate", "--quiet"]
        command = [sys.executable, "-m", "uv", "pip", "compile", "asked.txt", "--constraints", "constraints.txt"]
        done = subprocess.run(
            [*command, "--output-file", str(output), *options], cwd=folder, capture_output=True, text=True
        )
    if done.returncode and "Failed to fetch" in done.stderr:
        raise ConnectionError(done.stderr.strip())
    if done.returncode:
        sys.exit(f"{output.name}: {done.stderr.strip()}")


def pins(lock: Path) -> list[str]:
    """Return the lines of a lock file without comments."""
    return [line for line in lock.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def main() -> None:
    check = "--check" in sys.argv[1:]
    for name, chosen in LOCKS.items():
        lock = ROOT / "requirements" / name
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / name
            try:
                resolve(pins(lock) if check else list(chosen), output)
            except ConnectionError as error:
                print(f"{name}: NOT checked: cannot reach the package index: {error}", file=sys.stderr)
                sys.exit(0 if check else 1)
            found = pins(output)
        if check:
            if missing := sorted(set(found) - set(pins(lock))):
                sys.exit(f"{name}: {', '.join(missing)} missing; run python scripts/gpu_lock.py")
            print(f"{name}: up to date")
            continue
        head = (
            f"# {HEADS[name]}.\n"
            f"# A constraints file for Python {PYTHON} on Linux (x86_64, glibc 2.34), written by scripts/gpu_lock.py.\n"
        )
        lock.write_text(head + "\n".join(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
