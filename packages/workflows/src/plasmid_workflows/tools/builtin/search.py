"""Search as a tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from plasmid.components.interaction import Tool
from plasmid.settings.trust import INERT
from pydantic import Field, field_validator

from .corpus import Hit, open_corpus


def is_file(path: str) -> str:
    """The path, if it is one of a file. Raises `ValueError`."""
    if not Path(path).is_file():
        raise ValueError(f"no such file: {path}")
    return path


def format_hits(hits: list[Hit]) -> str:
    """Documents as a policy reads them."""
    found = [
        f"{number}. {hit.title}: {hit.text}" if hit.title else f"{number}. {hit.text}"
        for number, hit in enumerate(hits, 1)
    ]
    return "\n".join(found) or "nothing was found"


class SearchTool(Tool):
    """Finds documents of a local corpus by their words (BM25)."""

    kind: Literal["search"] = "search"
    corpus: Annotated[str, INERT]
    """File of documents: ``.jsonl`` with ``text`` (and ``title``), or text in paragraphs."""
    limit: int = Field(3, ge=1)
    """Documents to show."""

    _is_file = field_validator("corpus")(is_file)

    def warm(self) -> None:
        open_corpus(self.corpus)

    def implementation(self) -> Callable[..., Any]:
        return self.search

    def search(self, query: str) -> str:
        """Find documents.

        Args:
            query: words that they should have
        """
        return format_hits(open_corpus(self.corpus).search(query, limit=self.limit))
