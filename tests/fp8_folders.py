"""Model folders in fp8 with a scale per block, and the same weights decoded bit by bit in fp64."""

import json
import math
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file

QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCK = (16, 24)
"""Block size that divides neither 64 nor 32 columns, so that the last blocks of a row are smaller."""


def make_fp8_folder(model, path, *, block=BLOCK, shards=1):
    """Write ``model`` with quantized projections, as DeepSeek does; every n-th tensor goes into another file."""
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[name + "_scale_inv"] = quantize(tensor, block)
        else:
            tensors[name] = tensor
    shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION | {"weight_block_size": list(block)}
    (path / "config.json").write_text(json.dumps(config))
    files = {f"part-{i}.safetensors": list(tensors)[i::shards] for i in range(shards)} if shards > 1 else {}
    for file, names in (files or {"model.safetensors": list(tensors)}).items():
        save_file({name: tensors[name] for name in names}, path / file, metadata={"format": "pt"})
    if files:
        weight_map = {name: file for file, names in files.items() for name in names}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def quantize(tensor, block):
    """Return the elements in fp8 and the scale of each block, whose largest element becomes 448."""
    rows, columns = (math.ceil(size / of_block) for size, of_block in zip(tensor.shape, block, strict=True))
    scale, found = torch.empty(rows, columns), torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = tensor[place].float().abs().max() / 448
            found[place] = (tensor[place].float() / scale[i, j]).to(torch.float8_e4m3fn)
    return found, scale


def decoded(path, *, block=BLOCK):
    """Return the plain weights of such a folder, each matrix in fp64 from its bytes, element by element."""
    tensors = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scale = tensors.get(name + "_scale_inv")
        plain[name] = tensor if scale is None else torch.from_numpy(_decode(tensor, scale.double().numpy(), block))
    return plain


def make_plain_folder(path, target, *, dtype=torch.float32):
    """Write the folder ``path`` without quantization."""
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    tensors = {name: t.to(dtype) if t.dtype == torch.float64 else t for name, t in decoded(path).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _decode(tensor, scale, block):
    data = tensor.view(torch.uint8).numpy()
    found = np.empty(data.shape)
    for (i, j), byte in np.ndenumerate(data):
        found[i, j] = _number(int(byte)) * scale[i // block[0], j // block[1]]
    return found


def _number(byte):
    """Decode one sign bit, four exponent bits and three fraction bits; 0x7f and 0xff are NaN."""
    sign, exponent, fraction = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, (byte & 7) / 8
    assert byte & 0x7F != 0x7F
    return sign * (fraction * 2.0**-6 if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - 7))
