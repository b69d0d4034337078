"""SGLang without a GPU, through its own entry point for platforms. For tests; not part of Plasmid."""

from __future__ import annotations


def activate() -> str | None:
    """Name of the platform class, where there is no GPU."""
    import torch

    return None if torch.cuda.is_available() else "sglang_cpu.platform.PlainCpu"
