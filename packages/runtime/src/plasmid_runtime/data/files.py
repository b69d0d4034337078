"""Prompts from JSONL and Parquet files."""

from __future__ import annotations

from typing import Literal

from plasmid.components import PromptEncoder

from .rows.prompt_rows import PromptRows
from .settings import Epochs, Paths, PromptColumns, prompt_rows


class Files(Epochs, PromptColumns, Paths):
    """Rows of JSONL and Parquet files."""

    kind: Literal["files"] = "files"

    def rows(self, encode: PromptEncoder) -> PromptRows:
        return prompt_rows(self.files(), self, encode)
