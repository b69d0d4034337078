"""Extras of the distribution ``plasmid`` that provide kinds of components."""

from __future__ import annotations

EXTRAS: dict[str, dict[str, tuple[str, ...]]] = {
    "fsdp": {"trainer": ("fsdp",)},
    "megatron": {"trainer": ("megatron",), "converters": ("megatron-torch", "torch_dist")},
    "hf": {"rollout": ("hf",)},
    "sglang": {"rollout": ("sglang",), "server_apis": ("sglang",)},
    "vllm": {"rollout": ("vllm",)},
    "agents": {"workflow": ("agent", "openenv", "verifiers"), "tools": ("mcp",), "rewards": ("reported",)},
    "rewards": {
        "data": ("reasoning-gym",),
        "filters": (
            "function",
            "length-range",
            "max-duplicates",
            "max-truncated",
            "nonzero-spread",
            "reward-range",
            "staleness",
        ),
        "rewards": (
            *("boxed", "code", "dapo", "deepscaler", "distinct", "exact-match", "f1", "format", "gate", "gpqa"),
            *("ifbench", "ifeval", "isolated", "judge", "length", "math", "number", "part", "product", "random"),
            *("reasoning-gym", "regex", "remote", "sum"),
        ),
    },
}
"""Extra -> slot -> kinds of the components in its package."""


def find_extra(slot: str, kind: str) -> str | None:
    """Return the extra that provides a kind of component, or None."""
    return next((extra for extra, slots in EXTRAS.items() if kind in slots.get(slot, ())), None)
