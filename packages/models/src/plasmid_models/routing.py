"""Routing of a mixture of experts: read from the config of its folder, and recorded from a transformers model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from plasmid.types.routing import Routing

from .estimates.shape import num_experts
from .folder import read_text_config

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

EXPERTS = re.compile(r"(?P<block>(?:.*\.)?layers\.(?P<layer>\d+)\.(?:\w+\.)*?\w+)\.experts")
"""Name of the module that computes the experts of a layer from tokens, their experts and the experts' weights."""


def read_routing(path: Path | str) -> Routing | None:
    """Return how the model of a folder routes its tokens; None for a model without experts. Raises `ModelError`."""
    config = read_text_config("model", Path(path))
    experts, choices = num_experts(config), int(config.get("num_experts_per_tok") or 0)
    if not experts or not choices:
        return None
    return Routing(layers=int(config["num_hidden_layers"]), choices=choices, experts=experts)


def expert_blocks(lm: PreTrainedModel) -> dict[int, tuple[nn.Module, nn.Module]]:
    """Return, by decoder layer, the module that routes tokens and the one of its experts."""
    found = {}
    for name, module in lm.named_modules():
        if (match := EXPERTS.fullmatch(name)) is not None:
            found[int(match["layer"])] = lm.get_submodule(match["block"]), module
    return found
