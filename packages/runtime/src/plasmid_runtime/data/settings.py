"""Settings that several data sources share: files, epochs, and columns."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from plasmid.components import DataSource, PromptEncoder, RecipeView
from plasmid.errors import DataError
from plasmid.plugins.functions import FunctionName
from plasmid.settings.trust import INERT
from plasmid.types import Prompt
from plasmid_models.hub import download_dataset_file
from pydantic import Field, field_validator

from .rows.file_slices import FileSlice
from .rows.mapped_rows import MappedRows, RowMapping
from .rows.prompt_rows import PromptRows, RowReader
from .rows.row_files import RowFile, open_rows
from .rows.row_formats import PROMPTS, FormatName, RowFormat, find_format, has_column
from .stream import IndexedPrompts, RowStream

log = logging.getLogger(__name__)


class Chats(DataSource):
    """Chat templates, and the limit on length."""

    limited_by: ClassVar[str]
    """Name of the setting that limits the number of tokens."""
    system: Annotated[str, INERT] = ""
    """System message to prepend to chats that do not start with one; empty for none."""
    template: Annotated[Mapping[str, Any], INERT] = Field(default_factory=dict)
    """Arguments of the chat template: ``template.enable_thinking = false``."""
    too_long: Literal["error", "drop"] = "error"
    """Treatment of prompts above max_prompt_tokens: ``error``, or ``drop`` and count them."""

    @property
    def limit(self) -> int | None:
        """Maximum length, in tokens; None for no limit."""
        value = getattr(self, self.limited_by)
        return value if isinstance(value, int) else None

    def counts_tokens(self) -> bool:
        return self.limit is not None

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.limit is not None and self.limit < 1:
            yield f"{self.limited_by} must be 'none' or at least 1, got {self.limit}"
        if self.limit is None and self.too_long != "error":
            yield f"too_long = {self.too_long!r} has no effect without {self.limited_by}"


class PromptColumns(Chats):
    """Columns of prompt, target and profile."""

    limited_by: ClassVar[str] = "max_prompt_tokens"
    prompt_key: Annotated[str, INERT] = "prompt"
    """Column of the prompt: a string, or a list of chat messages. ``a.b`` addresses a field of an object."""
    target_key: Annotated[str, INERT] = "target"
    """Column of the ground truth for rewards; ``none`` if rows have none."""
    profile_key: Annotated[str, INERT] = "none"
    """Column with the profile of the row (``[profiles.<name>]``), where null selects no profile; ``none`` for no such
    column."""
    prompt_as: Literal["text", "chat"] = "text"
    """Interpretation of a string prompt: ``text`` uses it unchanged, ``chat`` wraps it in a user message."""
    last_answer: Literal["error", "drop"] = "error"
    """Treatment of chats that end with assistant messages: ``error``, or ``drop`` these messages."""
    max_prompt_tokens: Literal["none"] | int = "none"
    """Maximum length of a prompt, in tokens. If set, all rows of files are tokenized when the run starts."""

    def without_targets(self, key: str, profile: str = "") -> Iterator[tuple[str, str]]:
        if self.target_key == "none" and self.profile_key == "none":
            yield f"{key}.target_key", profile

    def reader(self, found: RowFormat | None = None) -> RowReader:
        """Create a reader for rows of these columns, or of the format of another framework."""
        prompt, target = (found.prompt, found.target) if found else (self.prompt_key, self.target_key)
        return RowReader(
            prompt_key=prompt,
            target_key=None if target == "none" else target,
            chat=self.prompt_as == "chat",
            system=self.system,
            profile_key=None if self.profile_key == "none" else self.profile_key,
            last_answer=self.last_answer,
        )


class RowSource(DataSource):
    """Rows that may have the format of another framework, and that the recipe may transform."""

    format: FormatName = "auto"
    """Format of the rows: ``verl``, ``slime``, ``trl`` or ``openai``. ``auto`` detects it from the first row if that
    lacks the columns of prompt and target; ``none`` disables detection. Columns set in the recipe take precedence."""
    columns: Annotated[Mapping[str, str], INERT] = Field(default_factory=dict)
    """Columns to add to each row. A value is a key of the row (``a.b`` for a field of an object, ``a.0`` for an item of
    a list) or a Jinja template: ``columns.target = "{{ answer.split('####')[-1].strip() }}"``."""
    apply: str = "none"
    """Function that transforms each row, as ``module:function`` or ``file.py:function``. It receives a dict and returns
    the new row, or None to drop it; ``columns`` are added afterwards. ``none`` for no function."""

    @field_validator("apply")
    @classmethod
    def _apply_is_a_name(cls, value: str) -> str:
        if value != "none":
            FunctionName.parse(value)
        return value

    def map_files(self, files: Sequence[RowFile]) -> list[RowFile]:
        """Apply ``apply`` and ``columns`` to the rows of files. Raises `DataError`."""
        mapping = RowMapping(columns=self.columns, apply=self.apply)
        return [MappedRows(file, mapping) for file in files] if mapping else list(files)

    def detect_format(
        self, files: Sequence[RowFile], formats: tuple[RowFormat, ...], prompt_key: str, target_key: str
    ) -> RowFormat | None:
        """Detect the format of the first row; None if it has the recipe's columns. Raises `DataError`."""
        if self.format == "none":
            return None
        first, fields = files[0].row(0), type(self).model_fields
        own = {
            name: None if value == fields[name].default and not has_column(first, value) else value
            for name, value in ((prompt_key, getattr(self, prompt_key)), (target_key, getattr(self, target_key)))
        }
        if None not in own.values():
            return None
        wanted: dict[str, Any] = {"wanted": self.format, "prompt": own[prompt_key]}
        found = find_format(first, formats, **wanted, target=own[target_key])
        if found is None and own[target_key] is None and find_format(first, formats, **wanted, target="none"):
            raise DataError(
                f"{files[0].path}:{files[0].number(0)}: no known column of ground truth besides the chat; the row has: "
                f'{", ".join(first)}; to sample answers, set data.{target_key} ("none" if the rows have none); to '
                'train on the answers in the chats, set data.kind = "demonstrations" and algorithm.kind = "sft"'
            )
        if found is not None:
            log.info("data: rows have the format of %s: prompt %r, target %r", found.name, found.prompt, found.target)
        return found


class Epochs(DataSource):
    """A finite number of rows, repeated in epochs."""

    shuffle: bool = True
    """Shuffle the rows in every epoch, seeded by the run's seed. Evaluation sets keep the order of the file."""
    epochs: Literal["endless"] | int = "endless"
    """Number of passes over the rows. The run ends after the last one, which learning-rate schedules take into account.
    Evaluation sets are always read once."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if isinstance(self.epochs, int) and self.epochs < 1:
            yield f"epochs must be 'endless' or at least 1, got {self.epochs}"

    @abstractmethod
    def rows(self, encode: PromptEncoder) -> IndexedPrompts:
        """Open and check the rows, and apply the limit on length. Raises `DataError`."""

    def stream(self, encode: PromptEncoder, *, seed: int) -> RowStream:
        """Read and check every row. Rows are tokenized as they are drawn."""
        epochs = None if self.epochs == "endless" else self.epochs
        return RowStream(self.rows(encode), epochs=epochs, seed=seed if self.shuffle else None)

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """Iterate over all rows once, in the order of the files."""
        if self.epochs not in ("endless", 1):
            raise DataError(f"data.epochs: an evaluation set is read once, got {self.epochs}; remove the setting")
        rows = self.rows(encode)
        return (rows.prompt(index) for index in range(len(rows)))


class Paths(DataSource):
    """Files of rows."""

    path: Annotated[str | tuple[str, ...], INERT]
    """One or more ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` files. Supports patterns (``part-*.jsonl``), Python
    slices of rows (``file.jsonl@[0:100]``) and files on the Hugging Face Hub (``hf://datasets/org/name/file``)."""

    @field_validator("path")
    @classmethod
    def _slices_parse(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("must have at least one file")
        for text in (value,) if isinstance(value, str) else value:
            FileSlice.parse(text)
        return value

    def files(self) -> list[RowFile]:
        """Open the files. Raises `DataError`."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        return [open_rows(part) for text in paths for part in FileSlice.parse(download_dataset_file(text)).matches()]


class PromptFiles(PromptColumns, RowSource):
    """Prompts from rows of files."""

    def prompt_rows(self, files: Sequence[RowFile], encode: PromptEncoder) -> PromptRows:
        """Convert rows to prompts, and apply checks and the limit on length. Raises `DataError`."""
        files = self.map_files(files)
        found = self.detect_format(files, PROMPTS, "prompt_key", "target_key")
        rows = PromptRows(files, self.reader(found), encode, self.template, format=found.name if found else "")
        rows.check()
        if self.limit is not None:
            rows.limit(self.limit, drop=self.too_long == "drop")
        return rows
