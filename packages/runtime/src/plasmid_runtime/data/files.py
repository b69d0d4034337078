"""Prompts from JSONL, JSON, CSV and Parquet files, and from folders in the format of Hugging Face ``datasets``."""

from __future__ import annotations

from typing import Annotated, Literal

from plasmid.components import PromptEncoder
from plasmid.settings.trust import INERT
from plasmid_models.hub import download_dataset_file
from pydantic import Field

from .rows.dataset_splits import open_split
from .rows.prompt_rows import PromptRows
from .settings import Epochs, Paths, PromptFiles


class Files(Epochs, PromptFiles, Paths):
    """Rows of JSONL, JSON, CSV and Parquet files."""

    kind: Literal["files"] = "files"

    def rows(self, encode: PromptEncoder) -> PromptRows:
        return self.prompt_rows(self.files(), encode)


class Datasets(Epochs, PromptFiles):
    """Rows of a Hugging Face ``datasets`` folder, read from disk as they are drawn."""

    kind: Literal["datasets"] = "datasets"
    path: Annotated[str, INERT] = Field(min_length=1)
    """Folder written by ``save_to_disk``, or with Parquet or Arrow files named by split; also a folder on the Hugging
    Face Hub: ``hf://datasets/org/name`` or ``hf://datasets/org/name/folder``."""
    split: Annotated[str, INERT] = "auto"
    """Split to read: ``train``, ``test``, ...; ``auto`` uses the only split, or ``train`` if there are several."""

    def rows(self, encode: PromptEncoder) -> PromptRows:
        return self.prompt_rows(
            open_split(download_dataset_file(self.path, folder=True, split=self.split), self.split), encode
        )
