"""Files of a run besides checkpoints: journals, which each checkpoint copies, and sample files, which it lists."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from plasmid.errors import CheckpointError, one_line
from plasmid.utils.safe_files import check_readable, replace_file
from plasmid_models.manifest import SAMPLES, Entry, dump_entries, find_damage, hash_files, read_entries

from ..observe.journal import count_valid_bytes
from .run_folder import RunFolder

log = logging.getLogger(__name__)
MAX_WARNINGS = 5
"""Maximum number of damaged sample files to name; the others are only counted."""


@dataclass(slots=True, eq=False)
class RunFiles:
    """Copies journals and lists sample files into checkpoints."""

    folder: RunFolder
    _known: dict[str, tuple[tuple[int, int], Entry]] = field(init=False, default_factory=dict)
    """Size, modification time and hash entry of each sample file, so that unchanged files are hashed only once."""

    def copy_journals(self, checkpoint: Path) -> None:
        """Copy the current journals. Raises `OSError`."""
        for journal in (self.folder.metrics, self.folder.evaluations):
            if journal.exists():
                shutil.copyfile(journal, checkpoint / journal.name)

    def list_samples(self, checkpoint: Path, *, unfinished: Iterable[str]) -> None:
        """List the sample files, without those ``unfinished`` ones that may be written again. Raises `OSError`."""
        left_out = set(unfinished)
        files = [file for file in sorted(self.folder.samples.glob("*.parquet")) if file.name not in left_out]
        marks = {file.name: (found.st_size, found.st_mtime_ns) for file in files for found in (file.stat(),)}
        new = [file for file in files if self._known.get(file.name, (None,))[0] != marks[file.name]]
        for file, entry in zip(new, hash_files(new), strict=True):
            self._known[file.name] = marks[file.name], entry
        entries = {file.name: self._known[file.name][1] for file in files}
        (checkpoint / SAMPLES).write_text(dump_entries(entries), encoding="utf-8")


def restore_run_files(checkpoint: Path, batch: int, folder: RunFolder) -> None:
    """Repair the journals from their copies in an intact checkpoint, and report sample files that are damaged.

    Lines that were written after the checkpoint stay, up to the first one that is damaged. Raises `CheckpointError`.
    """
    for journal in (folder.metrics, folder.evaluations):
        if (checkpoint / journal.name).exists():
            after = batch if journal == folder.metrics else None  # an evaluation may end after later batches
            _restore_journal(journal, checkpoint / journal.name, after)
    try:
        damaged = find_damage(folder.samples, read_entries(checkpoint / SAMPLES))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / SAMPLES}: cannot be read: {one_line(error)}") from error
    for line in damaged[:MAX_WARNINGS]:
        log.warning(
            "%s: %s; the run continues, but its views, reports and replays lack these samples", folder.samples, line
        )
    if damaged[MAX_WARNINGS:]:
        log.warning("%s: %d more sample files are damaged", folder.samples, len(damaged) - MAX_WARNINGS)


def _restore_journal(journal: Path, copy: Path, after: int | None) -> None:
    try:
        check_readable(journal)
        saved = copy.read_bytes()
        found = journal.read_bytes() if journal.exists() else None
        if found is not None and found.startswith(saved):
            end = len(saved) + count_valid_bytes(found[len(saved) :], after=after)
            if end < len(found):
                log.warning(
                    "%s: a line after %s is damaged or repeated; this and later lines are written again",
                    journal,
                    copy.parent.name,
                )
                os.truncate(journal, end)
            return
        log.warning("%s: %s; restored from %s", journal, "is missing" if found is None else "is damaged", copy)
        with replace_file(journal, durable=True) as file:
            file.write(saved)
    except OSError as error:
        reason = error.strerror.lower() if error.strerror else one_line(error)
        raise CheckpointError(f"{journal}: cannot be repaired from {copy}: {reason}; remove it") from error
