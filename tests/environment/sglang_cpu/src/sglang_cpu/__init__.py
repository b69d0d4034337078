"""SGLang without a GPU, through its own entry point for platforms. For tests; not part of Plasmid."""

from __future__ import annotations


def activate() -> str | None:
    """Return the name of the platform class if there is no GPU."""
    import torch

    return None if torch.cuda.is_available() else "sglang_cpu.platform.PlainCpu"
