"""``[trainer.lora]``: train a low-rank adapter in place of the policy's weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from plasmid.components import AdapterSpec, RecipeView, Settings
from plasmid.settings.resume import MAY_CHANGE
from plasmid.settings.trust import INERT
from plasmid_models.lora.peft_folder import check_adapter
from pydantic import Field, field_validator

from .learning_settings import RankedTrainerConfig, check_patterns


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

    def check_start(self) -> None:
        """Raise `ModelError` if `lora.start_from` is not a folder of an adapter with these settings."""
        if self.lora is not None and self.lora.start_from != "none":
            check_adapter(Path(self.lora.start_from), self.lora.spec())
