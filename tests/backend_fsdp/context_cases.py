"""One rank of a context-parallel group, in fp64: a number for each predicted token, and its gradients."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from plasmid_fsdp.model.decoder_input import PACKED, decoder_input
from transformers import AutoModelForCausalLM


def token_numbers(rank, size, store, path, microbatches, options):
    """Return, for each microbatch, the tokens that this rank computes, a number [P] per predicted token, and its
    gradients."""
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=PACKED, dtype=torch.float64, trust_remote_code=False, **options
    )
    # transformers computes norms and routers in fp32 even here, which rounds a sum otherwise than its parts
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        if size == 1:
            return [_compute(model, microbatch, None) for microbatch in microbatches]
        dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
        try:
            return [_compute(model, microbatch, dist.group.WORLD) for microbatch in microbatches]
        finally:
            dist.destroy_process_group()


def _compute(model, microbatch, group):
    rows = decoder_input(microbatch, PACKED, torch.float64, group)
    hidden = model.model(**rows.arguments, use_cache=False).last_hidden_state.flatten(0, 1)[rows.source]
    torch.manual_seed(0)
    numbers = (hidden * torch.randn(hidden.shape[1], dtype=torch.float64)).sum(-1)
    if rows.own is not None:
        numbers = rows.own.gather(numbers)
    total = (numbers * torch.randn(len(numbers), dtype=torch.float64)).sum()
    grads = torch.autograd.grad(total, list(model.model.parameters()), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(model.model.parameters(), grads, strict=True)]
    if group is not None:
        for grad in grads:
            dist.all_reduce(grad, group=group)
    return rows.arguments["input_ids"].numel(), numbers.detach(), grads
