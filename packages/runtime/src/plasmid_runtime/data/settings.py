"""Settings that several data sources share: files, epochs, and which column of a row is what."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from plasmid.components import DataSource, PromptEncoder
from plasmid.errors import DataError
from plasmid.settings.trust import INERT
from plasmid.types import Prompt
from pydantic import Field, field_validator

from .rows.file_slices import FileSlice
from .rows.prompt_rows import PromptRows, RowReader
from .rows.row_files import RowFile, open_rows
from .stream import IndexedPrompts, RowStream


class Chats(DataSource):
    """How a chat is rendered, and what is done about long ones."""

    limited_by: ClassVar[str]
    """Name of the setting that limits tokens."""
    system: Annotated[str, INERT] = ""
    """System message of chats that do not begin with one; empty for none."""
    template: Annotated[Mapping[str, Any], INERT] = Field(default_factory=dict)
    """Arguments of the chat template: ``template.enable_thinking = false``."""
    too_long: Literal["error", "drop"] = "error"
    """What to do about longer ones: an error, or leave them out and count them."""

    @property
    def limit(self) -> int | None:
        """Longest prompt in tokens."""
        value = getattr(self, self.limited_by)
        return value if isinstance(value, int) else None

    def counts_tokens(self) -> bool:
        return self.limit is not None

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.limit is not None and self.limit < 1:
            yield f"{self.limited_by} must be 'none' or at least 1, got {self.limit}"
        if self.limit is None and self.too_long != "error":
            yield f"too_long = {self.too_long!r} has no effect without {self.limited_by}"


class PromptColumns(Chats):
    """Which column of a row is what."""

    limited_by: ClassVar[str] = "max_prompt_tokens"
    prompt_key: Annotated[str, INERT] = "prompt"
    """Column of the prompt: a string, or a list of chat messages. ``a.b`` reaches into an object."""
    target_key: Annotated[str, INERT] = "target"
    """Column of the ground truth that rewards get; ``none`` if the rows have none."""
    profile_key: Annotated[str, INERT] = "none"
    """Column that names the profile of the row (``[profiles.<name>]``), null for none; ``none`` if no row does."""
    prompt_as: Literal["text", "chat"] = "text"
    """What a prompt that is a string becomes: ``text`` as it is, or the user's message of a ``chat``."""
    max_prompt_tokens: Literal["none"] | int = "none"
    """Longest prompt in tokens. Setting it tokenises all rows of files when the run starts."""

    def without_targets(self, place: str, profile: str = "") -> Iterator[tuple[str, str]]:
        if self.target_key == "none" and self.profile_key == "none":
            yield f"{place}.target_key", profile

    def reader(self) -> RowReader:
        """What makes prompts of rows."""
        return RowReader(
            prompt_key=self.prompt_key,
            target_key=None if self.target_key == "none" else self.target_key,
            chat=self.prompt_as == "chat",
            system=self.system,
            profile_key=None if self.profile_key == "none" else self.profile_key,
        )


class Epochs(DataSource):
    """Rows that have an end are dealt in epochs."""

    shuffle: bool = True
    """Deal the rows anew in every epoch, as the run's seed says. Evaluation sets keep the order of the file."""
    epochs: Literal["endless"] | int = "endless"
    """How often each row comes before the data end; the run then ends, too, and learning-rate schedules are planned for
    that. Evaluation sets are read once."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if isinstance(self.epochs, int) and self.epochs < 1:
            yield f"epochs must be 'endless' or at least 1, got {self.epochs}"

    @abstractmethod
    def rows(self, encode: PromptEncoder) -> IndexedPrompts:
        """Open, check and limit the rows. Raises `DataError`."""

    def stream(self, encode: PromptEncoder, *, seed: int) -> RowStream:
        """Read and check every row; they are tokenised when they are drawn."""
        epochs = None if self.epochs == "endless" else self.epochs
        return RowStream(self.rows(encode), epochs=epochs, seed=seed if self.shuffle else None)

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """Every row once, in the order of the files."""
        if self.epochs not in ("endless", 1):
            raise DataError(f"data.epochs: an evaluation set is read once, got {self.epochs}; remove the setting")
        rows = self.rows(encode)
        return (rows.prompt(index) for index in range(len(rows)))


class Paths(DataSource):
    """Files of rows."""

    path: Annotated[str | tuple[str, ...], INERT]
    """File or files, ``.jsonl`` or ``.parquet``; ``part-*.jsonl`` takes all that are named so, ``file.jsonl@[0:100]`` a
    slice of the rows, as Python would."""

    @field_validator("path")
    @classmethod
    def _slices_parse(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("name at least one file")
        for text in (value,) if isinstance(value, str) else value:
            FileSlice.parse(text)
        return value

    def files(self) -> list[RowFile]:
        """The files, opened. Raises `DataError`."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        return [open_rows(part) for text in paths for part in FileSlice.parse(text).matches()]


def prompt_rows(files: list[RowFile], source: PromptColumns, encode: PromptEncoder) -> PromptRows:
    """The rows of files as prompts, checked and limited. Raises `DataError`."""
    rows = PromptRows(files, source.reader(), encode, source.template)
    rows.check()
    if source.limit is not None:
        rows.limit(source.limit, drop=source.too_long == "drop")
    return rows
