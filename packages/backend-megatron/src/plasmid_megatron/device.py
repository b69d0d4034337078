"""What must be there before ranks are started: GPUs, and TransformerEngine where it is asked for.

Megatron-Core asks for CUDA everywhere. A package may make it run without, for tests; none of ours does.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement
from plasmid.errors import ConfigError

ENGINE = "transformer-engine"
GROUP = "plasmid_megatron.cpu"
"""Entry points of functions without arguments that are called in a rank's process before megatron is imported."""


def cpu_support() -> tuple[EntryPoint, ...]:
    """What is installed that makes Megatron-Core run without a GPU."""
    return tuple(entry_points(group=GROUP))


def check_device(device: str) -> None:
    """Raises `ConfigError` for a CPU that nothing makes Megatron-Core run on."""
    if device == "cpu" and not cpu_support():
        raise ConfigError(
            "trainer.kind: 'megatron' needs GPUs, but the trainer is placed on the cpu; "
            'take kind = "fsdp", or set placement.device = "cuda" where there are GPUs'
        )


def check_transformer_engine(device: str) -> None:
    """Raises `ConfigError` where layers cannot be made of it: on a CPU, and without a release for Megatron-Core."""
    where = "trainer.transformer_engine: "
    if device == "cpu":
        raise ConfigError(f"{where}it needs GPUs, but the trainer is placed on the cpu; remove the setting")
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
            f"{where}megatron-core {version('megatron-core')} takes {ENGINE}{wanted}, but {found} is installed; "
            "install another one, or remove the setting"
        )


def prepare_cpu() -> None:
    """Call what is installed for it."""
    for entry in cpu_support():
        entry.load()()
