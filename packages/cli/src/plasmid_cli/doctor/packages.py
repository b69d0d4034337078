"""Checks of installed packages: versions, libraries, bytecode and plugins."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from .host import Finding

BACKENDS = ("torch", "transformers", "ray", "sglang", "sglang-kernel", "vllm", "megatron-core", "mbridge", "triton")
"""Packages whose versions must be compatible."""
LARGE = ("torch", "sympy", "transformers", "ray", "sglang", "vllm", "mbridge")
"""Large packages that the processes of a run import at start-up (sympy through torch)."""
PROBE = """
import json, sys
found = {}
try:
    import torch
    found = {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count() if torch.version.cuda else 0}
    if found["gpus"]:
        found["names"] = sorted({torch.cuda.get_device_name(i) for i in range(found["gpus"])})
        torch.zeros(1, device="cuda").add_(1).item()
except BaseException as error:
    found["error"] = f"torch: {type(error).__name__}: {error}".splitlines()[0]
if found.get("gpus") and "sgl" in sys.argv:
    try:
        import sgl_kernel
    except BaseException as error:
        found["error"] = f"sglang-kernel: {type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(found))
"""
"""Runs in a separate process, which a library with an incompatible ABI may crash."""
PROBE_TIMEOUT_S = 180.0


def check_versions() -> Iterator[Finding]:
    """Check the versions of Plasmid's packages and of the backends."""
    ours = {
        dist.name: dist.version
        for dist in importlib.metadata.distributions()
        if dist.name == "plasmid" or dist.name.startswith("plasmid-")
    }
    text = f"{len(ours)} packages, {', '.join(sorted(set(ours.values())))}"
    same = len(set(ours.values())) == 1
    yield Finding("ok" if same else "error", "plasmid", text, "" if same else "install the same version of all")
    found = {name: version for name in BACKENDS if (version := _version(name))}
    yield Finding("ok", "versions", ", ".join(f"{name} {version}" for name, version in found.items()))
    yield from conflicts(found)


def conflicts(found: dict[str, str]) -> Iterator[Finding]:
    """Yield unmet requirements between installed backends."""
    for name in found:
        for requirement in _requirements(name):
            other = canonicalize_name(requirement.name)
            if other not in found or (
                requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
            ):
                continue
            if not requirement.specifier.contains(found[other].partition("+")[0], prereleases=True):
                yield Finding(
                    "warning",
                    "versions",
                    f"{name} {found[name]} requires {other}{requirement.specifier}, but {found[other]} is installed",
                    f"pip install '{other}{requirement.specifier}', or install all packages in the versions of a lock",
                )


def _requirements(name: str) -> Iterator[Requirement]:
    """Yield the requirements of an installed package, except malformed ones, which pip cannot use either."""
    for text in importlib.metadata.requires(name) or ():
        with contextlib.suppress(InvalidRequirement):
            yield Requirement(text)


def probe() -> dict[str, Any]:
    """Query torch for its CUDA version and GPUs."""
    kernels = ["sgl"] if _version("sglang-kernel") else []
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, *kernels], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"torch: did not load within {PROBE_TIMEOUT_S:g} s"}
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": f"torch: its process ended with code {done.returncode}"}
    return found if isinstance(found, dict) else {}


def check_libraries(found: dict[str, Any]) -> Iterator[Finding]:
    """Check that compiled libraries load together."""
    if "error" in found:
        fix = "it may be built for another torch: install all packages in the versions of a lock, as `make gpu` does"
        yield Finding("error", "libraries", str(found["error"]), fix)
    else:
        yield Finding("ok", "libraries", "torch loads" + ("" if not found.get("names") else f", {found['names'][0]}"))


def check_bytecode() -> Iterator[Finding]:
    """Check that large packages have bytecode; otherwise each process compiles them when it starts."""
    missing: dict[str, Path] = {}
    for name in LARGE:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            file = Path(cache_from_source(spec.origin))
            if not (file.exists() or (_is_writable(file.parent) and not sys.dont_write_bytecode)):
                missing[name] = Path(spec.origin).parents[1]
    if not missing:
        yield Finding("ok", "bytecode", "exists for all large packages, or is written when they are first imported")
        return
    fix = f"run python -m compileall -q {shlex.join(sorted({str(folder) for folder in missing.values()}))}"
    if not all(_is_writable(folder) for folder in missing.values()):
        fix += " as the owner, or set PYTHONPYCACHEPREFIX to a writable folder"
    if sys.dont_write_bytecode:
        fix += "; unset PYTHONDONTWRITEBYTECODE"
    text = f"missing for {', '.join(missing)}: each process compiles them again, which can double a run's start-up time"
    yield Finding("warning", "bytecode", text, fix)


def _is_writable(folder: Path) -> bool:
    """Return True if the folder, or its nearest existing parent, is writable."""
    return os.access(next(one for one in (folder, *folder.parents) if one.is_dir()), os.W_OK)


def check_plugins() -> Iterator[Finding]:
    """Check each plugin separately: it must load, and its components must be valid."""
    from plasmid.errors import PluginError
    from plasmid.plugins.registry import find_components, load_plugins

    for entry_point in sorted(importlib.metadata.entry_points(group="plasmid"), key=lambda one: one.name):
        try:
            plugin = entry_point.load()
            slots = find_components(load_plugins(plugin, installed=False))
        except PluginError as error:
            yield Finding("error", "plugins", f"{entry_point.name}: {error}", f"fix or uninstall {entry_point.value}")
        except (Exception, SystemExit) as error:  # noqa: BLE001  boundary: a third-party package
            text = f"{entry_point.name}: {type(error).__name__}: {error}".splitlines()[0]
            fix = f"uninstall it, or set PLASMID_DISABLE_PLUGINS={entry_point.name}"
            yield Finding("error", "plugins", text, fix)
        else:
            count = sum(len(classes) for classes in slots.values())
            yield Finding("ok", "plugins", f"{entry_point.name}: {count} components")
    try:
        find_components(load_plugins())
    except PluginError as error:
        yield Finding("error", "plugins", str(error), "rename or uninstall one of the two")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
