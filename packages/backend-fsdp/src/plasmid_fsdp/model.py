"""The policy: a Hugging Face causal language model that gives log-probabilities, sharded by FSDP2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import ModelError
from plasmid.training.collate import Microbatch
from plasmid.training.logprobs import TokenScores, token_logprobs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .launch import Shard
from .settings import FSDP
from .weights import aliases, load_weights, named_weights

CHANGES_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Settings of some families that transform the logits after the head, and the value that does nothing."""


class Policy(nn.Module):
    """Log-probabilities of chosen tokens; the logits of a whole microbatch never exist."""

    def __init__(self, lm: PreTrainedModel, *, chunk_size: int) -> None:
        super().__init__()
        self.lm = lm
        self._chunk_size = chunk_size

    def forward(self, batch: Microbatch, *, with_entropy: bool = False, entropy_grad: bool = False) -> TokenScores:
        """[P] log-probabilities and entropies of the predicted tokens, fp32, at each sample's temperature."""
        hidden = self.lm.base_model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)
        head = self.lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        return token_logprobs(
            hidden[batch.source],
            head.weight,
            batch.targets,
            batch.temperatures,
            bias=head.bias,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            chunk_size=self._chunk_size,
        )


def build_policy(settings: FSDP, path: Path, *, trust_remote_code: bool, device: torch.device, shard: Shard) -> Policy:
    """Load a model folder in fp32, sharded over all ranks; no rank ever holds the whole model. Raises `ModelError`."""
    lm = _on_meta(path, settings.attention, trust_remote_code)
    _freeze(lm, settings.freeze)
    if settings.activation_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        lm.train()
    else:
        lm.eval()  # type: ignore[no-untyped-call]
    policy = Policy(lm, chunk_size=settings.logprob_chunk)
    _shard(policy, settings, device, shard.num_ranks)
    policy.to_empty(device="cpu" if settings.cpu_offload else device)
    for buffer_owner in lm.modules():
        _move_buffers(buffer_owner, device)
    _compute_buffers(lm, path)
    load_weights(named_weights(lm), path, where="model", shard=shard, ignored=aliases(lm))
    return policy


def reshard(policy: nn.Module) -> None:
    """Forget gathered weights. Needed after a forward pass without backward: the sharded ones may change next."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _on_meta(path: Path, attention: str, trust_remote_code: bool) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _without_dropout(config)
        with torch.device("meta"):
            lm: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except (ValueError, KeyError, ImportError, OSError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(f"model.path: {path} is no causal language model that loads: {first}") from None
    for name, neutral in CHANGES_LOGITS.items():
        value = getattr(config, name, neutral)
        if value not in (None, neutral):
            raise ModelError(f"model.path: {path} sets {name} = {value}, which trainer 'fsdp' does not compute")
    if not isinstance(lm.get_output_embeddings(), nn.Linear):  # type: ignore[no-untyped-call]
        raise ModelError(f"model.path: {path} has no plain linear head, which trainer 'fsdp' needs")
    return lm


def _without_dropout(config: PreTrainedConfig) -> None:
    """The engine samples without dropout, so the policy that is trained has none."""
    for name, value in config.to_dict().items():
        if isinstance(value, float) and (name.endswith(("dropout", "_pdrop")) or name == "dropout"):
            setattr(config, name, 0.0)


def _freeze(lm: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in lm.named_parameters()]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ModelError(f"trainer.freeze: {pattern!r} is found in no parameter, for example not in {names[0]}")
    for name, parameter in lm.named_parameters():
        if any(re.search(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in lm.parameters()):
        raise ModelError(f"trainer.freeze: {list(patterns)} freezes every parameter; nothing is left to train")


def _shard(policy: Policy, settings: FSDP, device: torch.device, num_ranks: int) -> None:
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, settings.dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("ranks",)),
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy(),
    }
    layers = set(policy.lm._no_split_modules or ())
    for module in policy.lm.modules():
        if type(module).__name__ in layers:
            fully_shard(module, **options)
    fully_shard(policy, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule) and num_ranks > 1:
            # loss weights already make the sum over ranks right; plain sums are what gloo can do
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """With CPU offload parameters stay on the host, but buffers are used where the layers compute."""
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)


@torch.no_grad()
def _compute_buffers(lm: PreTrainedModel, path: Path) -> None:
    """Fill what is in no checkpoint (rotary frequencies), as transformers does when it loads on the meta device."""
    saved = lm.state_dict().keys()
    owners = {name.rpartition(".")[0] for name, _ in lm.named_buffers() if name not in saved}
    for owner in sorted(owners):
        module = lm.get_submodule(owner)
        for buffer in module.buffers(recurse=False):
            buffer.fill_(torch.nan if buffer.is_floating_point() else 0)
        lm._init_weights(module)  # type: ignore[no-untyped-call]
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and bool(buffer.isnan().any()):
                raise ModelError(f"model.path: {path}: transformers cannot compute the buffer {owner}.{name} by itself")
