"""The critic's network: the backbone of a language model with a linear value head, sharded with FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from plasmid.errors import ModelError
from plasmid_models.source import Source
from plasmid_training.batches.collate import Microbatch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..settings import FSDP
from ..weights.folder_layout import FolderLayout
from ..weights.loading import load_weights
from ..weights.shards import Shard, find_aliases, local, named_weights
from .building import build_on_meta, freeze, materialize, prepare_training, shard_module
from .decoder_input import decoder_input
from .linear_attention import gated_delta_nets

HEAD = "score"
"""Name of the head in transformers' token classifiers, the format of a critic's folder."""


class ValueModel(nn.Module):
    """Value model: the expected return given the text before each token."""

    adapter: None = None

    def __init__(
        self,
        lm: PreTrainedModel,
        layout: FolderLayout,
        *,
        dtype: torch.dtype,
        context: dist.ProcessGroup | None = None,
    ) -> None:
        """Use the backbone of ``lm``, which is on the meta device; ``dtype`` is its compute dtype.

        ``layout`` is that of its folder. The ranks of ``context`` split the tokens of every microbatch.
        """
        super().__init__()
        self.layout, self.compute_dtype, self._context = layout, dtype, context
        self._is_linear = bool(gated_delta_nets(lm))
        backbone = lm.base_model
        assert isinstance(backbone, PreTrainedModel)
        self.backbone = backbone
        self._prefix = f"{lm.base_model_prefix}."
        head = lm.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.score = nn.Linear(head.in_features, 1, device="meta", dtype=torch.float32)
        every = {name for name, _ in lm.named_parameters(remove_duplicate=False)}
        self._ignored = every - self.named_tensors().keys()
        """Names in a folder that are not part of this model: the head, and parameters tied to others."""

    def forward(self, batch: Microbatch) -> Tensor:
        """Return [P] values of the predicted tokens, always in fp32."""
        attention = self.backbone.config._attn_implementation
        rows = decoder_input(batch, attention, self.compute_dtype, self._context, linear=self._is_linear)
        hidden = self.backbone(**rows.arguments, use_cache=False).last_hidden_state.flatten(0, 1)
        values: Tensor = self.score(hidden[rows.source].float())[:, 0]
        return values.clone() if rows.own is None else rows.own.gather(values)  # FSDP warns if an output is a view

    @property
    def exact_modules(self) -> tuple[nn.Module, ...]:
        """Modules that always compute in fp32."""
        return (self.score,)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return all weights by their names in a token classifier of transformers."""
        backbone = {self._prefix + name: tensor for name, tensor in named_weights(self.backbone).items()}
        return backbone | {f"{HEAD}.{name}": tensor for name, tensor in self.score.named_parameters()}

    def load(self, source: Source, shard: Shard) -> set[str]:
        """Load the weights from a folder of this architecture; return the names it lacks. Raises `ModelError`."""
        return load_weights(
            self.named_tensors(),
            source.path,
            where=source.where,
            shard=shard,
            layout=self.layout.of_folder(source),
            ignored=self._ignored | {self._prefix + name for name in find_aliases(self.backbone)},
            optional=(f"{HEAD}.weight", f"{HEAD}.bias"),
        )


def build_value_model(
    settings: FSDP,
    source: Source,
    *,
    device: torch.device,
    shard: Shard,
    context: dist.ProcessGroup | None = None,
    seed: int,
) -> ValueModel:
    """Load the backbone of a model folder in fp32, sharded over all ranks, and its value head if it has one.

    Otherwise the head's weights are sampled from a normal distribution, the same for any number of ranks, and its bias
    is 0. Raises `ModelError`.
    """
    lm = build_on_meta(source, settings)
    if lm.base_model is lm:
        raise ModelError(f"{source.where}.path: {source.path} has no backbone without the head")
    layout = FolderLayout.of(lm, source)
    model = ValueModel(lm, layout, dtype=getattr(torch, settings.dtype), context=context)
    parameters = {name: p for name, p in model.named_tensors().items() if isinstance(p, nn.Parameter)}
    freeze(parameters, layout, settings.critic.freeze, "trainer.critic.freeze")
    prepare_training(model.backbone, settings)
    shard_module(model, model.backbone, settings, device=device, shard=shard, exact=model.exact_modules)
    materialize(model, model.backbone, settings, device=device, source=source)
    _draw_head(model, model.load(source, shard), shard=shard, std=settings.critic.head_std, seed=seed)
    return model


@torch.no_grad()
def _draw_head(model: ValueModel, absent: set[str], *, shard: Shard, std: float, seed: int) -> None:
    for name, parameter in model.score.named_parameters():
        if f"{HEAD}.{name}" in absent:
            whole = torch.zeros(parameter.shape)
            if parameter.ndim > 1:
                whole.normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
            local(parameter).copy_(whole[shard.rows(len(whole))])
