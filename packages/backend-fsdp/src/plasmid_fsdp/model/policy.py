"""The policy: a Hugging Face causal language model that gives log-probabilities, sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from plasmid.errors import ModelError
from plasmid.types.top_tokens import TopChoice
from plasmid_models.source import Source
from plasmid_training.batches.collate import Microbatch
from plasmid_training.head.linear_head import ChunkSize
from plasmid_training.head.logprobs import TokenScores, token_logprobs
from plasmid_training.head.token_loss import ChunkLoss, LossAndScores, linear_token_loss
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..settings import FSDP
from ..weights.folder_layout import FolderLayout
from ..weights.loading import load_weights
from ..weights.shards import Shard, find_aliases, named_weights
from .adapter import ShardedAdapter
from .building import build_on_meta, freeze, materialize, prepare_training, shard_module
from .decoder_input import decoder_input
from .invariant_attention import INVARIANT
from .linear_attention import gated_delta_nets
from .routing_replay import RoutingReplay

CHANGES_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Config keys of some families that transform the logits after the head, and their neutral values."""


class Policy(nn.Module):
    """Language model that returns log-probabilities of given tokens, without materializing all logits."""

    exact_modules: tuple[nn.Module, ...] = ()
    """Modules that always compute in fp32."""

    def __init__(
        self,
        lm: PreTrainedModel,
        layout: FolderLayout,
        *,
        dtype: torch.dtype,
        chunk_size: ChunkSize,
        adapter: ShardedAdapter | None = None,
        replay: RoutingReplay | None = None,
        context: dist.ProcessGroup | None = None,
    ) -> None:
        """``layout`` is that of the model's folder, ``adapter`` the one inserted in ``lm``.

        ``dtype`` is the compute dtype. The ranks of ``context`` split the tokens of every microbatch.
        """
        super().__init__()
        self.lm = lm
        self.layout, self.adapter = layout, adapter
        self.compute_dtype, self._chunk_size, self._replay, self._context = dtype, chunk_size, replay, context
        self._is_linear = bool(gated_delta_nets(lm))

    def forward(
        self,
        batch: Microbatch,
        *,
        token_loss: Callable[[Microbatch], ChunkLoss] | None = None,
        with_entropy: bool = False,
        entropy_grad: bool = False,
        top: TopChoice | None = None,
    ) -> TokenScores | LossAndScores:
        """Return [P] log-probabilities and entropies of the predicted tokens, fp32, at each sample's temperature.

        Log-probabilities of tokens with a kept set are normalized over it. With ``token_loss``, also computes the loss
        and its gradient. ``top`` selects top tokens at each position; given top tokens of the microbatch are scored.
        """
        attention = self.lm.config._attn_implementation
        rows = decoder_input(batch, attention, self.compute_dtype, self._context, linear=self._is_linear)
        if self._replay is not None:
            self._replay.experts = rows.place(batch.experts)
        hidden = self.lm.base_model(**rows.arguments, use_cache=False).last_hidden_state.flatten(0, 1)
        head = self.lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        score: Callable[..., Any] = token_logprobs
        if token_loss is not None:
            loss = token_loss(batch)
            score = partial(linear_token_loss, loss=loss if rows.own is None else rows.own.loss_at(loss))
        targets = rows.targets(batch)
        scored: TokenScores | LossAndScores = score(
            hidden[rows.source],
            head.weight,
            targets.ids,
            targets.temperatures,
            bias=head.bias,
            kept=targets.kept,
            top_ids=targets.top_ids,
            top=top,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            chunk_size=self._chunk_size,
            invariant=attention == INVARIANT,
        )
        return scored if rows.own is None else rows.own.gather_scores(scored)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return the weights by transformers' name, without those of an adapter."""
        own = self.adapter.named_tensors() if self.adapter is not None else {}
        return {name: tensor for name, tensor in named_weights(self.lm).items() if name not in own}

    def load(self, source: Source, shard: Shard) -> None:
        """Load the weights from a folder of this architecture. Raises `ModelError`."""
        layout = self.layout.of_folder(source)
        load_weights(
            self.named_tensors(),
            source.path,
            where=source.where,
            shard=shard,
            layout=layout,
            ignored=find_aliases(self.lm),
        )


def build_policy(
    settings: FSDP,
    source: Source,
    *,
    device: torch.device,
    shard: Shard,
    context: dist.ProcessGroup | None = None,
    trained: bool,
    seed: int = 0,
    invariant: bool = False,
) -> Policy:
    """Load a model folder, sharded over all ranks; no rank ever holds the whole model. Raises `ModelError`.

    Weights are kept in fp32; those of a frozen model and of an adapter's base in the compute dtype. ``context`` is the
    context-parallel group, if there is one. ``seed`` initializes a new adapter; ``invariant`` makes the
    model batch-invariant.
    """
    dtype = getattr(torch, settings.dtype)
    adapted = trained and settings.lora is not None
    full = trained and not adapted
    lm = build_on_meta(source, settings, dtype=dtype if adapted else torch.float32, invariant=invariant)
    if not trained:  # cast parameters only: buffers must have the same dtype as those of a trained policy
        for parameter in lm.parameters():
            parameter.data = parameter.data.to(dtype)
    _check_logits(lm, source)
    layout = FolderLayout.of(lm, source)
    adapter = ShardedAdapter(lm, settings.lora, source) if adapted and settings.lora is not None else None
    if full:
        freeze(dict(lm.named_parameters()), layout, settings.freeze, "trainer.freeze")
    elif adapter is None:
        lm.requires_grad_(False)
    if trained:
        prepare_training(lm, settings)
    else:
        lm.eval()  # type: ignore[no-untyped-call]
    replay = RoutingReplay(lm) if trained and settings.routing_replay else None
    policy = Policy(
        lm,
        layout,
        dtype=dtype,
        chunk_size=settings.logprob_chunk,
        adapter=adapter,
        replay=replay,
        context=context,
    )
    shard_module(policy, lm, settings, device=device, shard=shard)
    materialize(policy, lm, settings, device=device, source=source)
    policy.load(source, shard)
    if adapter is not None:
        adapter.fill(shard, seed=seed)
    return policy


def _check_logits(lm: PreTrainedModel, source: Source) -> None:
    for name, neutral in CHANGES_LOGITS.items():
        value = getattr(lm.config, name, neutral)
        if value not in (None, neutral):
            raise ModelError(
                f"{source.where}.path: {source.path} sets {name} = {value}, which trainer 'fsdp' does not support"
            )
