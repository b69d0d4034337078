"""Megatron's language model, ending in log-probabilities or values. P tokens of a microbatch are predicted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import MegatronModule
from plasmid_models.source import Source
from plasmid_training.head.linear_head import ChunkSize
from plasmid_training.head.logprobs import TokenScores, token_logprobs
from plasmid_training.head.vocab_shard import VocabShard
from torch import Tensor, nn

from ..weights.bridge import Architecture, inverse_frequencies
from ..weights.families import has_output_norms
from .packing import Packed
from .spec import block_spec


class Backbone(GPTModel):  # type: ignore[misc]
    """The part of a model that a pipeline rank has, without its head: hidden states in, hidden states out."""

    def __init__(self, source: Source, architecture: Architecture, *, chunk: int | None) -> None:
        config = architecture.config
        stage: dict[str, Any] = {} if chunk is None else {"vp_stage": chunk}
        arguments = architecture.bridge._get_gptmodel_args()
        arguments.pop("seq_len_interpolation_factor", None)  # rotary positions are scaled below
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config, chunk=chunk, output_norms=has_output_norms(architecture.hf)),
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, **stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, **stage),
            share_embeddings_and_output_weights=self.shares_embedding and architecture.tied,
            **(arguments | stage | {"vocab_size": architecture.bridge.padded_vocab_size}),
        )
        if self.position_embedding_type == "rope" and not config.multi_latent_attention:
            rotary = self.rotary_pos_emb
            with torch.device("cpu"):  # also where all else is made without memory
                rotary.inv_freq = inverse_frequencies(source, architecture.hf, rotary.inv_freq.device)
        padding = getattr(architecture.hf, "pad_token_id", None)
        if self.pre_process and padding is not None:
            keep_embedding(self.embedding.word_embeddings, padding % architecture.vocab_size)

    shares_embedding = True

    def hidden(self, packed: Packed) -> Tensor:
        """What the layers of this rank make of the microbatch: [T', 1, H], for the next rank or the head."""
        hidden: Tensor = super().forward(
            packed.input_ids, packed.position_ids, None, packed_seq_params=packed.sequences
        )
        return hidden

    def predicting(self, packed: Packed) -> Tensor:
        """[p, H] hidden states, on the last rank, of this rank's tokens that predict something."""
        hidden = self.hidden(packed)
        if self.config.sequence_parallel:
            # the head's gradient is whole on every rank already
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[:, 0][packed.source]

    def _postprocess(self, hidden_states: Tensor, *unused: Any, **options: Any) -> Tensor:
        """Megatron would compute the logits of all tokens here."""
        return hidden_states


def keep_embedding(embeddings: nn.Module, token: int) -> None:
    """Let no gradient reach the embedding of one token.

    transformers has the padding's embedding untrained, also where a policy draws the token in the middle of a text.
    """

    def without_gradient(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        found = inputs[0] == token  # [1, T]
        if module.reduce_scatter_embeddings:  # [T / ranks, 1, H]
            found = found.T.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
        return torch.where(found[..., None], output.detach(), output)

    embeddings.register_forward_hook(without_gradient)


class LanguageModel(Backbone):
    """A policy: log-probabilities of chosen tokens; the logits of a whole microbatch never exist."""

    def __init__(self, source: Source, architecture: Architecture, *, chunk: int | None, chunk_size: ChunkSize) -> None:
        super().__init__(source, architecture, chunk=chunk)
        self._chunk_size = chunk_size
        self._num_tokens = architecture.vocab_size

    def forward(
        self, packed: Packed, *, with_entropy: bool = False, entropy_grad: bool = False
    ) -> Tensor | TokenScores:
        """[P] log-probabilities and entropies, fp32, at each sample's temperature; hidden states on earlier ranks."""
        if not self.post_process:
            return self.hidden(packed)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        first = mpu.get_tensor_model_parallel_rank() * len(weight)
        scores = token_logprobs(
            self.predicting(packed),
            weight[: max(0, self._num_tokens - first)],  # without the rows that fill the vocabulary up
            packed.batch.targets[packed.places],
            packed.batch.temperatures[packed.places],
            kept=packed.kept,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            chunk_size=self._chunk_size,
            shard=_vocab_shard(first),
        )
        entropy = None if scores.entropy is None else everywhere(scores.entropy, packed)
        return TokenScores(everywhere(scores.logprobs, packed), entropy)


class ValueModel(Backbone):
    """A critic: the value of the text before each token, what it is worth on average to go on from there."""

    shares_embedding = False

    def __init__(self, source: Source, architecture: Architecture, *, chunk: int | None) -> None:
        super().__init__(source, architecture, chunk=chunk)
        if self.post_process:
            del self.output_layer
            device = torch.cuda.current_device()
            self.score = nn.Linear(self.config.hidden_size, 1, device=device, dtype=torch.float32)
            for parameter in self.score.parameters():
                set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)

    def forward(self, packed: Packed) -> Tensor:
        """[P] values of the predicted tokens, fp32; hidden states on earlier ranks."""
        if not self.post_process:
            return self.hidden(packed)
        values: Tensor = self.score(self.predicting(packed).float())
        return everywhere(values[:, 0], packed)

    def sharded_state_dict(self, *args: Any, **options: Any) -> Any:
        """As of any module: that of Megatron's language models looks for a head over the vocabulary."""
        return MegatronModule.sharded_state_dict(self, *args, **options)


def everywhere(values: Tensor, packed: Packed) -> Tensor:
    """[P] on every context-parallel rank, from what each has of its own tokens [p]."""
    if packed.sequences.order is None:
        return values
    whole = values.new_zeros(packed.batch.num_predicted).index_copy(0, packed.places, values)
    summed: Tensor = _Sum.apply(whole, mpu.get_context_parallel_group())  # type: ignore[no-untyped-call]
    return summed


class _Sum(torch.autograd.Function):
    """Every rank computes the same loss from the sum, so each takes the gradient of its own part as it is."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _vocab_shard(first: int) -> VocabShard | None:
    if mpu.get_tensor_model_parallel_world_size() == 1:
        return None
    return VocabShard(group=mpu.get_tensor_model_parallel_group(), first=first)
