"""Full-text search over local documents: SQLite's FTS5, ranked by BM25, held in memory."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from plasmid.errors import DataError
from plasmid.utils.json_text import parse_json

WORD = re.compile(r"\w+")
MAX_QUERY_WORDS = 64
"""Maximum number of words in a query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A document that matches a query."""

    title: str
    text: str


class Corpus:
    """Documents and their index. Reading is safe from several threads, and in forks."""

    def __init__(self, path: Path) -> None:
        """Read ``.jsonl`` (``text``, and optionally ``title``) or text in paragraphs. Raises `DataError`."""
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = 'porter unicode61')")
        self._index.executemany("INSERT INTO documents VALUES (?, ?)", _documents(path))
        (self.size,) = self._index.execute("SELECT count(*) FROM documents").fetchone()
        if not self.size:
            raise DataError(f"{path}: contains no documents")

    def search(self, query: str, *, limit: int) -> list[Hit]:
        """Return the best documents that contain any of the query's words."""
        words = WORD.findall(query)[:MAX_QUERY_WORDS]
        if not words:
            return []
        wanted = " OR ".join(f'"{word}"' for word in words)
        found = self._index.execute(
            "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?", (wanted, limit)
        )
        return [Hit(title=title, text=text) for title, text in found.fetchall()]


@lru_cache(maxsize=8)
def open_corpus(path: str) -> Corpus:
    """Open the corpus of a file, read once per process. Raises `DataError`."""
    return Corpus(Path(path))


def _documents(path: Path) -> Iterator[tuple[str, str]]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the corpus: {str(error).lower()}") from None
    if path.suffix != ".jsonl":
        yield from (("", paragraph.strip()) for paragraph in re.split(r"\n\s*\n", content) if paragraph.strip())
        return
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            yield str(row.get("title", "")), str(row["text"])
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DataError(
                f'{path}:{number}: a document must be an object with "text" and, optionally, "title"'
            ) from None
