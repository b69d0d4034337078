"""Megatron's language model with log-probabilities or values as output. P predicted tokens of a microbatch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import MegatronModule
from plasmid.errors import ModelError
from plasmid.types.top_tokens import TopChoice
from plasmid_models.source import Source
from plasmid_training.batches.collate import Microbatch
from plasmid_training.batches.context_parallel import ContextTokens
from plasmid_training.head.linear_head import ChunkSize
from plasmid_training.head.logprobs import TokenScores, token_logprobs
from plasmid_training.head.token_loss import ChunkLoss, LossAndScores, linear_token_loss
from plasmid_training.head.vocab_shard import VocabShard
from torch import Tensor, nn

from ..model.packing import Packed
from ..model.transformer_engine import IMPL
from ..weights import families
from ..weights.bridge import Architecture, inverse_frequencies
from .spec import block_spec


class Backbone(GPTModel):  # type: ignore[misc]
    """A pipeline rank's part of a model, without the head: maps hidden states to hidden states."""

    position_embedding_type: str

    def __init__(self, source: Source, architecture: Architecture, *, chunk: int | None) -> None:
        config = architecture.config
        stage: dict[str, Any] = {} if chunk is None else {"vp_stage": chunk}
        arguments = architecture.bridge._get_gptmodel_args()
        arguments.pop("seq_len_interpolation_factor", None)  # rotary positions are scaled below
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(architecture, chunk=chunk),
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, **stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, **stage),
            share_embeddings_and_output_weights=self.shares_embedding and architecture.is_tied,
            **(arguments | stage | {"vocab_size": architecture.bridge.padded_vocab_size}),
        )
        if self.position_embedding_type == "rope" and not config.multi_latent_attention:
            with torch.device("cpu"):  # even if the model is built on the meta device
                scale_rotary(architecture, self.rotary_pos_emb)
                self._local_rotary = local_rotary(architecture, self.rotary_pos_emb)
            if config.transformer_impl != IMPL:
                self.position_embedding_type = "none"  # `PackedAttention` rotates queries and keys
            elif self.rotary_pos_emb.factor != 1.0:
                raise ModelError(
                    f"trainer.transformer_engine: would ignore the attention factor of {source.where}.path: "
                    f"{source.path}, {self.rotary_pos_emb.factor:g} (rope_parameters); remove the setting"
                )
        scale = architecture.family.embedding_scale(architecture.hf)
        if self.pre_process and scale != 1.0:
            self.embedding.register_forward_hook(partial(_scale, scale))
        padding = getattr(architecture.hf, "pad_token_id", None)
        if self.pre_process and padding is not None:
            keep_embedding(self.embedding.word_embeddings, padding % architecture.vocab_size)

    shares_embedding = True

    def hidden_states(self, packed: Packed) -> Tensor:
        """Run this rank's layers; return hidden states [T', 1, H] for the next rank or the head."""
        sequences = packed.sequences
        if self.position_embedding_type == "none":
            local = None if self._local_rotary is None else self._angles(packed, self._local_rotary)
            sequences = replace(sequences, rotary=self._angles(packed, self.rotary_pos_emb), local_rotary=local)
        hidden: Tensor = super().forward(packed.input_ids, packed.position_ids, None, packed_seq_params=sequences)
        return hidden

    def _angles(self, packed: Packed, rotary: RotaryEmbedding) -> Tensor:
        """Return `Sequences.rotary` of this rank's tokens."""
        angles = rotary.get_emb(packed.sequences.max_seqlen_q)[:, 0, 0]
        table = (torch.stack((angles.cos(), angles.sin())) * rotary.factor).to(self.config.params_dtype)
        chosen: Tensor = table[:, packed.position_ids[0], None]
        return chosen

    def select_predicting(self, packed: Packed) -> Tensor:
        """Return [p, H] hidden states of this rank's tokens that predict a token; on the last pipeline rank only."""
        hidden = self.hidden_states(packed)
        if self.config.sequence_parallel:
            # the head's gradient is already complete on every rank
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[:, 0][packed.source]

    def _postprocess(self, hidden_states: Tensor, *unused: Any, **options: Any) -> Tensor:
        """Return the hidden states; Megatron would compute the logits of all tokens here."""
        return hidden_states


def scale_rotary(architecture: Architecture, rotary: RotaryEmbedding, **layers: str) -> None:
    """Give rotary positions the frequencies of the model, and the factor of cosines and sines, such as YaRN's."""
    device = rotary.inv_freq.device
    rotary.inv_freq, rotary.factor = inverse_frequencies(architecture.hf, device, **layers)


def local_rotary(architecture: Architecture, rotary: RotaryEmbedding) -> RotaryEmbedding | None:
    """Return the rotary positions of layers with a sliding window; None if all layers have the same."""
    if families.SLIDING not in (architecture.hf.rope_parameters or {}):
        return None
    local = copy.copy(rotary)
    scale_rotary(architecture, local, layers=families.SLIDING)
    return local


def _scale(factor: float, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Multiply embeddings by a factor in their dtype, as transformers does."""
    return output * torch.tensor(factor, dtype=output.dtype, device=output.device)


def keep_embedding(embeddings: nn.Module, token: int) -> None:
    """Exclude the embedding of one token from training.

    transformers does not train the padding token's embedding, even if a policy samples the token within a text.
    """

    def without_gradient(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        found = inputs[0] == token  # [1, T]
        if module.reduce_scatter_embeddings:  # [T / ranks, 1, H]
            found = found.T.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
        return torch.where(found[..., None], output.detach(), output)

    embeddings.register_forward_hook(without_gradient)


class LanguageModel(Backbone):
    """Policy that returns log-probabilities of given tokens, without materializing all logits."""

    def __init__(self, source: Source, architecture: Architecture, *, chunk: int | None, chunk_size: ChunkSize) -> None:
        super().__init__(source, architecture, chunk=chunk)
        self._chunk_size = chunk_size
        self._num_tokens = architecture.vocab_size

    def forward(
        self,
        packed: Packed,
        *,
        token_loss: Callable[[Microbatch], ChunkLoss] | None = None,
        with_entropy: bool = False,
        entropy_grad: bool = False,
        top: TopChoice | None = None,
    ) -> Tensor | TokenScores | LossAndScores:
        """Return [P] fp32 log-probabilities and entropies at the sample temperatures; earlier ranks: hidden states.

        With ``token_loss``, also computes the loss and its gradient. ``top`` chooses top tokens; those that the
        microbatch has are scored.
        """
        if not self.post_process:
            return self.hidden_states(packed)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        first = mpu.get_tensor_model_parallel_rank() * len(weight)
        own = max(0, self._num_tokens - first)
        score: Callable[..., Any] = token_logprobs
        top_ids = packed.batch.teacher_top_ids
        context = _context_tokens(packed)
        if token_loss is not None:
            loss = token_loss(packed.batch)
            score = partial(linear_token_loss, loss=loss if context is None else context.loss_at(loss))
        found: TokenScores | LossAndScores = score(
            self.select_predicting(packed),
            weight[:own] if own < len(weight) else weight,  # without the padding of the vocabulary
            packed.batch.targets[packed.places],
            packed.batch.temperatures[packed.places],
            kept=packed.kept,
            top_ids=None if top_ids is None else top_ids[packed.places],
            top=top,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            chunk_size=self._chunk_size,
            shard=_vocab_shard(first),
        )
        return found if context is None else context.gather_scores(found)


class ValueModel(Backbone):
    """Critic: the expected return given the text before each token."""

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
        """Return [P] fp32 values of the predicted tokens; hidden states on earlier ranks."""
        if not self.post_process:
            return self.hidden_states(packed)
        values: Tensor = self.score(self.select_predicting(packed).float())[:, 0]
        context = _context_tokens(packed)
        return values if context is None else context.gather(values)

    def sharded_state_dict(self, *args: Any, **options: Any) -> Any:
        """Use the generic implementation: Megatron's for language models expects a head over the vocabulary."""
        return MegatronModule.sharded_state_dict(self, *args, **options)


def _context_tokens(packed: Packed) -> ContextTokens | None:
    """Return the predicted tokens of this context-parallel rank; None if it has all."""
    if packed.sequences.order is None:
        return None
    group = mpu.get_context_parallel_group()
    return ContextTokens(places=packed.places, num_predicted=packed.batch.num_predicted, group=group)


def _vocab_shard(first: int) -> VocabShard | None:
    if mpu.get_tensor_model_parallel_world_size() == 1:
        return None
    return VocabShard(group=mpu.get_tensor_model_parallel_group(), first=first)
