"""Code shared by all builders of transformers models."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from .quantized.formats import forget_quantization
from .text_model import WITH_VISION

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

BUILD_LOCK = threading.RLock()
"""Lock to hold while a transformers model is created, loaded, or its weights are tied. Without it, two threads can
overwrite each other's default dtype, device and weight tying, and one of the models lacks `lm_head.weight`."""
GROUPED_ALIGNMENT = 16
"""Length in bytes that every row of a grouped matrix product must be a multiple of."""


def text_model_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Return transformers' configuration of a folder's text model without quantization.

    Raises the errors of transformers.
    """
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    forget_quantization(config)
    if config.model_type not in WITH_VISION:
        return config
    text = config.get_text_config()
    text.tie_word_embeddings = config.tie_word_embeddings  # transformers reads only the outer one
    return text


def choose_expert_products(lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Compute experts one after another if torch's grouped matrix product refuses their sizes in this dtype.

    Otherwise transformers multiplies all experts of a layer at once, wherever its family can.
    """
    sizes = [size for weight in lm.parameters() if weight.ndim == 3 for size in weight.shape[1:]]
    refused = any(size * dtype.itemsize % GROUPED_ALIGNMENT for size in sizes)
    if refused and lm.config._experts_implementation == "grouped_mm":
        lm.set_experts_implementation("eager")
