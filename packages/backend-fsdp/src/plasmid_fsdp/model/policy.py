"""The policy: a Hugging Face causal language model that gives log-probabilities, sharded by FSDP2."""

from __future__ import annotations

import torch
from plasmid.errors import ModelError
from plasmid_models.source import Source
from plasmid_training.batches.collate import Microbatch
from plasmid_training.head.linear_head import ChunkSize
from plasmid_training.head.logprobs import TokenScores, token_logprobs
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..settings import FSDP
from ..weights.folder_layout import FolderLayout
from ..weights.loading import load_weights
from ..weights.shards import Shard, aliases, named_weights
from .building import freeze, materialize, on_meta, prepare_training, shard_module
from .decoder_input import decoder_input

CHANGES_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Settings of some families that transform the logits after the head, and the value that does nothing."""


class Policy(nn.Module):
    """Log-probabilities of chosen tokens; the logits of a whole microbatch never exist."""

    def __init__(self, lm: PreTrainedModel, layout: FolderLayout, *, chunk_size: ChunkSize) -> None:
        """``layout`` is that of the folder that the model is loaded from."""
        super().__init__()
        self.lm = lm
        self.layout = layout
        self._chunk_size = chunk_size

    def forward(self, batch: Microbatch, *, with_entropy: bool = False, entropy_grad: bool = False) -> TokenScores:
        """[P] log-probabilities and entropies of the predicted tokens, fp32, at each sample's temperature.

        Log-probabilities are taken within the kept set of a token that has one.
        """
        rows = decoder_input(batch, self.lm.config._attn_implementation)
        hidden = self.lm.base_model(**rows.arguments, use_cache=False).last_hidden_state.flatten(0, 1)
        head = self.lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        return token_logprobs(
            hidden[rows.source],
            head.weight,
            batch.targets,
            batch.temperatures,
            bias=head.bias,
            kept=batch.kept,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            chunk_size=self._chunk_size,
        )

    def named(self) -> dict[str, Tensor]:
        """Every weight by transformers' name."""
        return named_weights(self.lm)

    def load(self, source: Source, shard: Shard) -> None:
        """Fill the weights from a folder of this architecture. Raises `ModelError`."""
        layout = self.layout.of_folder(source)
        load_weights(
            self.named(), source.path, where=source.where, shard=shard, layout=layout, ignored=aliases(self.lm)
        )


def build_policy(settings: FSDP, source: Source, *, device: torch.device, shard: Shard, trained: bool) -> Policy:
    """Load a model folder, sharded over all ranks; no rank ever holds the whole model. Raises `ModelError`.

    Weights are kept in fp32, those of a model that is not ``trained`` in what it computes in.
    """
    lm = on_meta(source, settings, dtype=torch.float32 if trained else getattr(torch, settings.dtype))
    _check_logits(lm, source)
    layout = FolderLayout.of(lm, source)
    if trained:
        freeze(dict(lm.named_parameters()), layout, settings.freeze, "trainer.freeze")
        prepare_training(lm, settings)
    else:
        lm.requires_grad_(False)
        lm.eval()  # type: ignore[no-untyped-call]
    policy = Policy(lm, layout, chunk_size=settings.logprob_chunk)
    shard_module(policy, lm, settings, device=device, num_ranks=shard.num_ranks)
    materialize(policy, lm, settings, device=device, source=source)
    policy.load(source, shard)
    return policy


def _check_logits(lm: PreTrainedModel, source: Source) -> None:
    for name, neutral in CHANGES_LOGITS.items():
        value = getattr(lm.config, name, neutral)
        if value not in (None, neutral):
            raise ModelError(
                f"{source.where}.path: {source.path} sets {name} = {value}, which trainer 'fsdp' does not compute"
            )
