"""Batches with recorded experts, and transformers models whose routers choose given experts."""

from dataclasses import replace

import numpy as np
from plasmid.types.shared_groups import LocalRef


def with_experts(batch, *, layers=2, choices=2, experts=4, shared=0):
    """Return the batch with random experts; unknown for the last token of each sample and some others.

    The first ``shared`` tokens of all samples of a group have the same experts.
    """
    draw = np.random.default_rng(7)
    groups = []
    for group in batch.groups:
        rows = group.rows.get()
        ids = draw.random((len(rows.token_ids), layers, experts)).argsort(-1)[..., :choices].astype(np.uint8)
        ids[rows.offsets[1:] - 1] = 255
        ids[draw.random(len(ids)) < 0.1] = 255
        for start in rows.offsets[1:-1]:
            ids[start : start + shared] = ids[:shared]
        groups.append(replace(group, rows=LocalRef(replace(rows, experts=ids))))
    return replace(batch, groups=tuple(groups))


def force_experts(lm, experts):
    """Make the routers of a Qwen3-MoE or gpt-oss choose the experts [n, layers, choices] in the next forward passes."""
    import torch

    for index, layer in enumerate(lm.model.layers):
        router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate

        def forward(hidden, gate=router, index=index):
            given = torch.from_numpy(experts[:, index].astype(np.int64))
            logits = torch.nn.functional.linear(hidden, gate.weight, getattr(gate, "bias", None))
            own = logits.topk(gate.top_k).indices
            chosen = torch.where(given == 255, own, given)
            probs = logits.softmax(-1)
            weights = torch.stack([row[ids] / row[ids].sum() for row, ids in zip(probs, chosen, strict=True)])
            return logits, weights, chosen

        router.forward = forward
