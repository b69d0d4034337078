"""Megatron-Core asks for CUDA everywhere. A package may make it run without, for tests; none of ours does."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from plasmid.errors import ConfigError

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


def prepare_cpu() -> None:
    """Call what is installed for it."""
    for entry in cpu_support():
        entry.load()()
