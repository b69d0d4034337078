"""``[trainer.lora]``: train a low-rank adapter in place of the policy's weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from plasmid.components import AdapterSpec, RecipeView, Settings
from plasmid.settings.resume import MAY_CHANGE
from plasmid.settings.trust import INERT
from plasmid_models.folder import is_torch_dist, open_weights, read_text_config
from plasmid_models.lora.peft_folder import check_adapter
from plasmid_models.lora.targets import match_targets
from plasmid_models.text_model import HEAD, VALUE_HEAD
from pydantic import Field, field_validator

from .learning_settings import RankedTrainerConfig, check_frozen, check_patterns


class LoRASettings(Settings):
    """A low-rank adapter of the policy (LoRA): only the adapter's matrices are trained; the base model is frozen.

    The adapter and its optimizer state are kept in fp32, the base model in `dtype`. There is no dropout, because the
    engine samples without it.
    """

    rank: int = Field(16, ge=1)
    """Rank of the adapter: number of columns of B and of rows of A in each adapted layer."""
    alpha: float = Field(32.0, gt=0, allow_inf_nan=False)
    """Scale of the adapter: the product B A is multiplied by ``alpha / rank``."""
    targets: Annotated[tuple[str, ...], INERT] = ()
    """Regular expressions; linear layers whose name matches one of them (`re.search`) are adapted. By default, all
    linear layers of the decoder except routed experts."""
    start_from: Annotated[str, INERT, MAY_CHANGE] = "none"
    """Folder of an adapter to start from, in the format of the `peft` package; ``none`` starts with B = 0."""

    @field_validator("targets")
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_patterns(value)

    def spec(self) -> AdapterSpec:
        """Return the description of the adapter for engines and model folders."""
        return AdapterSpec(rank=self.rank, alpha=self.alpha, targets=self.targets)


class LoRATrainerConfig(RankedTrainerConfig):
    """Settings of trainers that can train an adapter."""

    lora: LoRASettings | None = None
    """Low-rank adapter (LoRA) to train instead of the policy's weights; by default the weights are trained."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.lora is not None and self.freeze:
            yield "freeze has no effect with lora, which trains only the adapter; remove it, or set lora.targets"

    def adapter(self) -> AdapterSpec | None:
        return None if self.lora is None else self.lora.spec()

    def unread_settings(self) -> Iterator[str]:
        if self.lora is not None and self.lora.start_from != "none":
            yield (
                "lora.start_from: has no effect without a trainer; export the run and set model.path to the merged "
                "folder"
            )

    def check_start(self, recipe: RecipeView) -> None:
        """Raise `ModelError` if the folder `lora.start_from` does not fit, or a pattern for names cannot be used.

        Reads only the headers of the weight files.
        """
        if self.lora is not None and self.lora.start_from != "none":
            check_adapter(Path(self.lora.start_from), self.lora.spec())
        models = recipe.needed_models
        if self.freeze and (named := _read_dimensions("model", models["model"])):
            check_frozen(named, self.freeze, "trainer.freeze")
        if self.critic.freeze and recipe.needs.critic:
            where = "critic" if "critic" in models else "model"
            if names := {name for name in _read_dimensions(where, models[where]) if not name.startswith(HEAD)}:
                names |= {f"{VALUE_HEAD}weight", f"{VALUE_HEAD}bias"}
                check_frozen(sorted(names), self.critic.freeze, "trainer.critic.freeze")
        if self.lora is not None and self.lora.targets:
            _check_targets(_read_dimensions("model", models["model"]), self.lora.targets)


def _check_targets(names: Mapping[str, int], patterns: Sequence[str]) -> None:
    """Raise `ModelError` for patterns that match no layer of a dense model.

    A folder does not tell which of its matrices are linear layers, so this accepts more than trainers do. Models with
    experts are not checked, because trainers may name their layers differently.
    """
    if any(".experts." in name for name in names):
        return
    fixed = (f"{HEAD}weight", "embed_tokens.weight")
    weights = [name for name, dimensions in names.items() if dimensions == 2 and name.endswith(".weight")]
    layers = [name.removesuffix(".weight") for name in weights if not name.endswith(fixed)]
    owned = {f"{layer}.{tensor}" for layer in layers for tensor in ("weight", "bias")}
    if layers:
        match_targets(patterns, layers=layers, others=[name for name in names if name not in owned])


def _read_dimensions(where: str, path: str) -> dict[str, int]:
    """Return the number of dimensions of each tensor of a model folder by name; empty for other formats.

    Leaves out a head that shares its weights with the embeddings.
    """
    folder = Path(path)
    if is_torch_dist(folder):
        return {}
    with open_weights(where, folder, framework="numpy") as found:
        names = {name: len(tensor.get_shape()) for name, tensor in sorted(found.items())}
    if read_text_config(where, folder).get("tie_word_embeddings"):
        names.pop(f"{HEAD}weight", None)
    return names
