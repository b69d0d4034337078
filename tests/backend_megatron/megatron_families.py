"""A tiny random model of every family, and the logits that each rank computes."""

import json

from plasmid_models.testing import make_tiny_model

EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
"""Rotary positions with a factor (1.21) on cosines and sines."""
FAMILIES = {
    "Qwen2": {"family": "qwen2"},
    "Qwen2, tied": {"family": "qwen2", "tied": True},
    "Qwen3": {"family": "qwen3"},
    "Qwen3-MoE": {
        "family": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "Llama 3": {
        "family": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "GLM-4": {"family": "glm4", "attention_bias": True},
    "GLM-4.5": {"family": "glm4_moe", "attention_bias": True, "use_qk_norm": True, **EXPERTS},
    "GLM-4.5-Air": {
        "family": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": False,
        **EXPERTS,
        "n_group": 1,
        "topk_group": 1,
    },
    "GLM-4.7-Flash": {
        "family": "glm4_moe_lite",
        **LATENT,
        **{key: value for key, value in EXPERTS.items() if key != "first_k_dense_replace"},
        "n_group": 1,
        "topk_group": 1,
    },
    "Moonlight": {
        "family": "deepseek_v3",
        **LATENT,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        **EXPERTS,
        "n_group": 1,
        "topk_group": 1,
    },
    "Gemma 3": {
        "family": "gemma3_text",
        "num_layers": 4,
        "tied": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
        },
    },
    "gpt-oss": {
        "family": "gpt_oss",
        "sliding_window": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
        "rope_parameters": YARN,
    },
    "DeepSeek-V3": {
        "family": "deepseek_v3",
        **LATENT,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 4,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 8,
        },
        **EXPERTS,
    },
}

DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_layers": 4,
}
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
WINDOWS = {
    "Gemma 3": FAMILIES["Gemma 3"],
    "gpt-oss": FAMILIES["gpt-oss"],
}
"""Families with a sliding window in some layers."""
LINEAR = {
    "Qwen3-Next": {"family": "qwen3_next", **DELTA_NET, **SHARED_EXPERT},
    "Qwen3.5": {"family": "qwen3_5_text", **DELTA_NET},
    "Qwen3.5-MoE": {"family": "qwen3_5_moe_text", **DELTA_NET, **SHARED_EXPERT},
}
"""Families with linear attention."""
EVERY = FAMILIES | WINDOWS | LINEAR


def tensor_parallel(family):
    """Return the settings of two tensor-parallel ranks. Experts with biases cannot be split."""
    return {"tensor_parallel": 2} | ({"expert_tensor_parallel": 1} if family == "gpt-oss" else {})


def make_family(path, name, **overrides):
    """Create the model folder. Biases, norms and expert corrections are random too; in a new model they are
    constants."""
    make_tiny_model(path, **(EVERY[name] | overrides))
    return perturb_vectors(path)


def perturb_vectors(path):
    """Make the biases, norms and corrections of a folder random."""
    import torch
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or name.endswith("_bias"):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def folders_of_families(tmp_path_factory, overrides=None):
    """Return a function that creates the model folder of a family on first use; ``overrides`` are by family."""
    known = {}

    def give(name):
        if name not in known:
            path = tmp_path_factory.mktemp("families") / "model"
            known[name] = make_family(path, name, **(overrides or {}).get(name, {}))
        return known[name]

    return give


def assert_identical(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == theirs[name].dtype and ours[name].equal(theirs[name]) for name in ours)


def in_bfloat16_with_a_draft_layer(model):
    """Change the folder to what published ones contain: bfloat16 weights, float32 corrections, and a draft layer."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors = {k: t if k.endswith("e_score_correction_bias") else t.bfloat16() for k, t in tensors.items()}
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(64, 128).bfloat16()
    tensors["model.layers.2.enorm.weight"] = torch.randn(64).bfloat16()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "num_nextn_predict_layers": 1}))
    return model


async def network_logits(ranks, model, rows, *, num_ranks=1, trainer=None, folder, **options):
    """Return logits [T, V] by Megatron, at the position before each token. Exports the weights to ``folder``."""
    import asyncio

    started, _ = await ranks.start(model=model, num_ranks=num_ranks, trainer=trainer, **options)
    await started.export(folder)
    found = await asyncio.gather(*(ranks.processes.run(rank, _rank_logits, rows) for rank in range(num_ranks)))
    return found[0]


def plain_logits(model, rows):
    """The same by transformers, one sample at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parts = []
    for start, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        with torch.no_grad():
            logits = lm(input_ids=torch.from_numpy(rows.token_ids[start:end]).long()[None]).logits[0]
        parts += [logits.new_zeros(1, logits.shape[1]), logits[:-1]]
    return torch.cat(parts).numpy()


def _rank_logits(rows):
    """Run in the process of a rank, which has a part of the network."""
    import torch
    from fsdp_processes import _held
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from plasmid_megatron.model.packing import pack
    from plasmid_training.batches.collate import collate

    policy = _held["object"]._learner.policy.model
    (model,) = policy.bare
    divisor = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
    batch = collate(rows, range(rows.num_samples), table_index=range(rows.num_samples), only_masked=False)
    packed = pack(batch, device=torch.device("cpu"), divisor=divisor)
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    with torch.no_grad():
        logits = gather_from_tensor_model_parallel_region(model.select_predicting(packed) @ weight.T)
    found = torch.zeros(len(rows.token_ids), policy.architecture.vocab_size)
    found[packed.batch.token_index] = logits[:, : policy.architecture.vocab_size]
    return found.numpy()
