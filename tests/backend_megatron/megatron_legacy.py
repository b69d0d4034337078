"""Write checkpoints in the format of Megatron's older scripts from Hugging Face folders: one pickle per rank."""

import argparse
import re
import shutil

import numpy as np
import torch
from plasmid_convert import HF

ENGINE = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
"""Names of norms that TransformerEngine fuses with the following matrix; norms before experts are not fused."""


def write_legacy(model, folder, *, tensor=1, pipeline=1, expert=1, chunks=1, padded=57, engine=False):
    """Write ``chunks`` groups of layers per pipeline rank; the vocabulary is padded to ``padded`` rows with noise."""
    from megatron.core.transformer.enums import AttnBackend  # takes seconds, which test collection should not spend

    iteration = folder / "iter_0000007"
    iteration.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    whole, num_layers = _megatron_names(dict(HF().read(model)), padded)
    per_chunk = num_layers // (pipeline * chunks)
    for t in range(tensor):
        for p in range(pipeline):
            for e in range(expert):
                name = f"mp_rank_{t:02}" + (f"_{p:03}" if pipeline > 1 else "") + (f"_{e:03}" if expert > 1 else "")
                if expert > 1 and pipeline == 1:
                    name = f"mp_rank_{t:02}_000_{e:03}"
                state = {"args": argparse.Namespace(attention_backend=AttnBackend.auto), "iteration": 7}
                state["rng_state"] = [{"np_rng_state": np.random.default_rng(0).integers(9, size=4)}]
                for c in range(chunks):
                    stage = c * pipeline + p
                    part = _of_stage(whole, stage, per_chunk, last=stage == pipeline * chunks - 1)
                    part = _of_rank(part, t, tensor, e, expert)
                    named = {_engine(key, part) if engine else key: value.clone() for key, value in part.items()}
                    state["model" if chunks == 1 else f"model{c}"] = named
                (iteration / name).mkdir()
                torch.save(state, iteration / name / "model_optim_rng.pt")


def _megatron_names(hf, padded):
    noise = torch.Generator().manual_seed(9)

    def fill(rows):
        return torch.cat([rows, torch.randn(padded - len(rows), rows.shape[1], generator=noise)])

    found = {"embedding.word_embeddings.weight": fill(hf["model.embed_tokens.weight"])}
    layers = 1 + max(int(m[1]) for name in hf if (m := re.match(r"model\.layers\.(\d+)\.", name)))
    for number in range(layers):
        ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
        attention = f"{theirs}.self_attn"
        q, k, v = (hf[f"{attention}.{part}_proj.weight"].reshape(2, -1, 64) for part in "qkv")  # 2 key heads
        found[f"{ours}.self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, 64)
        found[f"{ours}.self_attention.linear_proj.weight"] = hf[f"{attention}.o_proj.weight"]
        for part in "qk":
            found[f"{ours}.self_attention.{part}_layernorm.weight"] = hf[f"{attention}.{part}_norm.weight"]
        found[f"{ours}.input_layernorm.weight"] = hf[f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.pre_mlp_layernorm.weight"] = hf[f"{theirs}.post_attention_layernorm.weight"]
        if f"{theirs}.mlp.gate.weight" in hf:
            found[f"{ours}.mlp.router.weight"] = hf[f"{theirs}.mlp.gate.weight"]
            for expert in range(4):
                _mlp(found, f"{ours}.mlp.experts.local_experts.{expert}", hf, f"{theirs}.mlp.experts.{expert}")
        else:
            _mlp(found, f"{ours}.mlp", hf, f"{theirs}.mlp")
    found["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    if "lm_head.weight" in hf:
        found["output_layer.weight"] = fill(hf["lm_head.weight"])
    return found, layers


def _mlp(found, ours, hf, theirs):
    found[f"{ours}.linear_fc1.weight"] = torch.cat([hf[f"{theirs}.{part}_proj.weight"] for part in ("gate", "up")])
    found[f"{ours}.linear_fc2.weight"] = hf[f"{theirs}.down_proj.weight"]


def _of_stage(whole, stage, per_chunk, *, last):
    part = {}
    for name, tensor in whole.items():
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        if layer:
            number = int(layer[1]) - stage * per_chunk
            if 0 <= number < per_chunk:
                part[f"decoder.layers.{number}.{name[layer.end() :]}"] = tensor
        elif last if name.startswith(("decoder.final", "output")) else stage == 0:
            part[name] = tensor
    return part


def _of_rank(part, t, tensor, e, expert):
    own = {}
    for name, value in part.items():
        local = re.search(r"local_experts\.(\d+)\.", name)
        if local:
            number, first = int(local[1]), e * 4 // expert
            if not first <= number < first + 4 // expert:
                continue
            name = name.replace(local[0], f"local_experts.{number - first}.")
        own[name] = _split(name, value, t, tensor)
    return own


def _split(name, value, t, tensor):
    if "linear_fc1.weight" in name:
        return torch.cat([half.chunk(tensor)[t] for half in value.chunk(2)])
    if "linear_qkv.weight" in name or "embedding" in name or "output_layer" in name:
        return value.chunk(tensor)[t]
    if "linear_proj" in name or "linear_fc2" in name:
        return value.chunk(tensor, 1)[t]
    return value


def _engine(name, part):
    """Return TransformerEngine's name of a weight: norms belong to matrices, and expert numbers come last."""
    grouped = re.search(r"local_experts\.(\d+)\.(linear_fc\d)\.weight$", name)
    if grouped:
        return f"{name[: grouped.start()]}{grouped[2]}.weight{grouped[1]}"
    for plain, fused in ENGINE.items():
        layer = name.removesuffix(plain)
        if layer != name and not (plain.startswith(".pre_mlp") and f"{layer}.mlp.router.weight" in part):
            return layer + fused
    return name
