"""Prompts from folders of the package ``datasets``: what ``save_to_disk`` wrote, or its Parquet and Arrow files."""

from __future__ import annotations

from typing import Annotated, Literal

from plasmid.components import PromptEncoder
from plasmid.settings.trust import INERT
from pydantic import Field

from .rows.dataset_splits import open_split
from .rows.prompt_rows import PromptRows
from .settings import Epochs, PromptColumns, prompt_rows


class Datasets(Epochs, PromptColumns):
    """Rows of a folder of the package datasets. They stay on disk until they are drawn."""

    kind: Literal["datasets"] = "datasets"
    path: Annotated[str, INERT] = Field(min_length=1)
    """Folder that ``save_to_disk`` wrote, or one with Parquet or Arrow files named by split."""
    split: Annotated[str, INERT] = "auto"
    """Which part is read: ``train``, ``test``, ...; ``auto`` is the only one there is, or else ``train``."""

    def rows(self, encode: PromptEncoder) -> PromptRows:
        return prompt_rows(open_split(self.path, self.split), self, encode)
