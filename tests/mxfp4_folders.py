"""Folders of gpt-oss in mxfp4, and the same weights decoded number by number in fp64."""

import json
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file

QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS = ("gate_up_proj", "down_proj")


def make_mxfp4_folder(model, path, *, dtype=torch.bfloat16):
    """Write ``model`` with its experts in mxfp4, as OpenAI publishes it; everything else in ``dtype``."""
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith(EXPERTS):
            tensors[name + "_blocks"], tensors[name + "_scales"] = quantize(tensor)
        else:
            tensors[name] = tensor.to(dtype)
    shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors"))
    write_config(path, dtype=str(dtype).removeprefix("torch."), quantization_config=QUANTIZATION)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_config(path, **changes):
    """Set keys of the folder's config; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))


def quantize(tensor):
    """Return blocks and scales of [experts, in, out]; the largest number of a block becomes 4 to 6."""
    groups = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).clamp(min=1e-20).log2().floor() - 2
    levels = torch.tensor([_number(code) for code in range(16)])
    codes = (groups[..., None] / 2 ** exponent[..., None] - levels).abs().argmin(-1).to(torch.uint8)
    low, high = codes.unflatten(-1, (16, 2)).unbind(-1)
    return low | high << 4, (exponent[..., 0] + 127).to(torch.uint8).contiguous()


def decoded(path):
    """Return the plain weights of such a folder, experts in fp64."""
    tensors = load_file(path / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in tensors:
        if name.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            plain[whole] = torch.from_numpy(_decode(tensors[name].numpy(), tensors[whole + "_scales"].numpy()))
    return plain


def make_plain_folder(path, target, *, dtype=torch.float32):
    """Write the folder ``path`` without quantization."""
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    write_config(target, quantization_config=None)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in decoded(path).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _decode(blocks, scales):
    experts, rows, groups, size = blocks.shape
    found = np.empty((experts, groups * 2 * size, rows))
    for (expert, row, group, byte), pair in np.ndenumerate(blocks):
        for half, code in enumerate((int(pair) & 15, int(pair) >> 4)):
            column = group * 2 * size + 2 * byte + half
            found[expert, column, row] = _number(code) * 2.0 ** (int(scales[expert, row, group]) - 127)
    return found


def _number(code):
    """Decode one sign bit, two exponent bits and one fraction bit."""
    sign, exponent, fraction = -1.0 if code & 8 else 1.0, code >> 1 & 3, (code & 1) / 2
    return sign * (fraction if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - 1))
