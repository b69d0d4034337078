"""Checks for GPUs and TransformerEngine before ranks are started.

Megatron-Core requires CUDA everywhere. A package for tests may let it run without CUDA; Plasmid has no such package.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from plasmid.errors import ConfigError

ENGINE = "transformer-engine"
GROUP = "plasmid_megatron.cpu"
"""Group of entry points of functions that a rank's process calls, without arguments, before importing megatron."""


def cpu_support() -> tuple[EntryPoint, ...]:
    """Return the installed entry points that make Megatron-Core run without a GPU."""
    return _find_entry_points(GROUP)


@cache
def _find_entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group. Cached, because finding them reads a file of every installed package."""
    return tuple(entry_points(group=group))


def check_device(device: str) -> None:
    """Raise `ConfigError` if the device is a CPU and Megatron-Core cannot run on it."""
    if device == "cpu" and not cpu_support():
        raise ConfigError(
            "trainer.kind: 'megatron' needs GPUs, but the trainer is placed on the CPU; "
            'set trainer.kind = "fsdp", or placement.device = "cuda" on a machine with GPUs'
        )


def check_transformer_engine(device: str) -> None:
    """Raise `ConfigError` on a CPU, or if TransformerEngine is not installed in a version for Megatron-Core."""
    where = "trainer.transformer_engine: "
    if device == "cpu":
        raise ConfigError(f"{where}needs GPUs, but the trainer is placed on the CPU; remove the setting")
    named = [Requirement(line) for line in requires("megatron-core") or ()]
    (wanted,) = {one.specifier for one in named if one.name == ENGINE}
    try:
        found = version(ENGINE)
    except PackageNotFoundError:
        found = None
    if found is None or find_spec("transformer_engine") is None:
        raise ConfigError(f"{where}{ENGINE} is not installed; install {ENGINE}{wanted}, or remove the setting")
    if not wanted.contains(found, prereleases=True):
        raise ConfigError(
            f"{where}megatron-core {version('megatron-core')} needs {ENGINE}{wanted}, but {found} is installed; "
            "install a supported version, or remove the setting"
        )


def prepare_cpu() -> None:
    """Call the functions of `cpu_support`."""
    for entry in cpu_support():
        entry.load()()
