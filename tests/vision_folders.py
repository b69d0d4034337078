"""Tiny folders of Gemma 3 and Qwen3.5 with a vision model, in the form in which these models are published."""

import json
import sys
from pathlib import Path

import torch
from plasmid_models.testing import make_tiny_tokenizer
from safetensors.torch import load_file, save_file

FAMILIES = str(Path(__file__).parent / "backend_megatron")
if FAMILIES not in sys.path:
    sys.path.insert(0, FAMILIES)

NAMES = ("gemma3", "qwen3_5", "qwen3_5_moe")
TEXT = {"gemma3": "Gemma 3", "qwen3_5": "Qwen3.5", "qwen3_5_moe": "Qwen3.5-MoE"}
"""Names of the text models among the families."""
OTHERS = ("vision_tower.", "multi_modal_projector.", "model.visual.", "mtp.")
"""Prefixes of weights that are not part of the text model."""
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
VISUAL = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def make_vision_folder(path, name, **overrides):
    """Write a random model of text and images and its tokenizer; the text model is that of `make_family`."""
    from megatron_families import EVERY, perturb_vectors
    from transformers import AutoConfig, AutoModelForImageTextToText

    make_tiny_tokenizer(path)
    made = {**EVERY[TEXT[name]], **overrides}
    made.pop("family")
    text = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": made.pop("num_layers"),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.08,
        "tie_word_embeddings": (tied := made.pop("tied", False)),
        **made,
    }
    images = {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62, "mm_tokens_per_image": 4}
    if name != "gemma3":
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        images = {key: 60 + number for number, key in enumerate(names)}
    vision = SIGLIP if name == "gemma3" else VISUAL
    config = AutoConfig.for_model(name, text_config=text, vision_config=vision, tie_word_embeddings=tied, **images)
    torch.manual_seed(1)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(path)
    if name == "gemma3":  # newer releases of transformers save other names
        change_tensors(path, lambda tensors: {published(name): tensor for name, tensor in tensors.items()})
    else:
        change_tensors(path, lambda tensors: tensors | {"mtp.fc.weight": torch.randn(64, 128)})
        found = json.loads((path / "config.json").read_text())  # published ones have keys that transformers drops
        text, vision = found["text_config"] | {"full_attention_interval": 4}, found["vision_config"]
        change_config(path, text_config=text, vision_config=vision | {"deepstack_visual_indexes": []})
    return perturb_vectors(path)


def published(name):
    """Return the name of a tensor of Gemma 3 on the Hub."""
    tower = "vision_tower.vision_model."
    return name if name.startswith(tower) else name.replace("vision_tower.", tower, 1)


def change_tensors(path, change):
    """Apply a function to the tensors of a folder."""
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return path


def fuse_experts(path):
    """Store all experts of a layer in one tensor, as Qwen3.5 is published."""
    return change_tensors(path, fuse_tensors)


def fuse_tensors(tensors):
    """Return the tensors with all experts of a layer in one tensor."""
    experts = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name}
    fused = {}
    for layer in {name.partition(".experts.")[0] for name in experts}:
        count = sum(name.startswith(layer) and name.endswith(".down_proj.weight") for name in experts)
        parts = {
            kind: torch.stack([experts[f"{layer}.experts.{number}.{kind}_proj.weight"] for number in range(count)])
            for kind in ("gate", "up", "down")
        }
        fused[f"{layer}.experts.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        fused[f"{layer}.experts.down_proj"] = parts["down"]
    return {name: tensor for name, tensor in tensors.items() if name not in experts} | fused


def change_config(path, **changes):
    """Set keys of the folder's config; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def vision_folders(tmp_path_factory):
    """Return a function that creates the folder of a model type on first use."""
    known = {}

    def give(name):
        if name not in known:
            known[name] = make_vision_folder(tmp_path_factory.mktemp("vision") / "model", name)
        return known[name]

    return give


def full_model(path, dtype=torch.float32):
    """Return transformers' model of text and images."""
    from transformers import AutoModelForImageTextToText

    lm = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    return lm.eval()


def others_of(tensors):
    """Return the tensors that are not part of the text model."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(OTHERS)}


def text_of(tensors):
    """Return the tensors of the text model."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(OTHERS)}
