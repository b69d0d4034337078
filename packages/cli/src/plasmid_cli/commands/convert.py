"""`rl convert`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import PluginFiles

if TYPE_CHECKING:
    from plasmid import Converter

    Layouts = Mapping[str, type[Converter]]

Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="Checkpoint to read: a folder or a file.")]
Target = Annotated[
    Path, typer.Argument(metavar="TARGET", help="Folder to write (with --check: checkpoint to compare with).")
]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of the two layouts: from.dtype=float32")
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="KIND", help="Layout of SOURCE, as listed by `rl plugins`; detected if possible."),
]
To = Annotated[str | None, typer.Option("--to", metavar="KIND", help="Layout of TARGET; hf by default.")]
Check = Annotated[bool, typer.Option("--check", help="Compare SOURCE and TARGET tensor by tensor instead of writing.")]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", metavar="N", help="Unpadded vocabulary size of SOURCE."),
]
Sha256 = Annotated[
    str | None,
    typer.Option("--sha256", metavar="HEX", help="Verify the SHA-256 digest of SOURCE, a file, before reading it."),
]

Workers = Annotated[
    int, typer.Option("--workers", metavar="N", min=1, help="Number of processes that read and write files.")
]


def convert(
    source: Source,
    target: Target,
    settings: Settings = None,
    from_: From = None,
    to: To = None,
    check: Check = False,
    vocab_size: VocabSize = None,
    sha256: Sha256 = None,
    workers: Workers = 1,
    plugin: PluginFiles = None,
) -> None:
    """Convert a checkpoint: rl convert runs/sums/checkpoints/batch-000010 models/sums --from torch_dist --to hf

    Converts weights (tensor by tensor), config and tokenizer between any two layouts.
    TARGET is only created when the conversion is complete.
    To continue an interrupted conversion, run the same command again.
    """
    from plasmid_convert.page_cache import start_read_ahead

    start_read_ahead(*((source, target) if check else (source,)))
    from plasmid.plugins.registry import converters, load_plugins
    from plasmid_convert import convert as write
    from plasmid_convert import verify_sha256

    from ..display.conversion import conversion_progress
    from ..output import print_line

    layouts: Layouts = converters(load_plugins(files=plugin or ()))
    given = _settings(settings or ())
    with _raise_damage_errors(source):
        from_kind = from_ or _detect_layout(source, layouts)
    with _raise_damage_errors(target):
        to_kind = to or (_detect_layout(target, layouts) if check else "hf")
    if vocab_size is not None:
        _set_vocab_size(
            vocab_size, given, {"from": from_kind, "to": to_kind} if check else {"from": from_kind}, layouts
        )
    reader = _make("from", from_kind, given, layouts)
    writer = _make("to", to_kind, given, layouts)
    if sha256 is not None:
        verify_sha256(source, sha256)
    if check:
        _compare(source, target, reader, writer)
        return
    with _explain_interrupt(target), conversion_progress() as progress:
        write(source, target, reader=reader, writer=writer, progress=progress, workers=workers, plugins=plugin or ())
    print_line(f"wrote {target}")


@contextmanager
def _explain_interrupt(target: Path) -> Iterator[None]:
    """After Ctrl-C, print which files are kept and how to continue."""
    from ..output import error_console

    try:
        yield
    except KeyboardInterrupt:
        stage = target.with_name(f".{target.name}.partial")
        if stage.exists():
            error_console().print(
                f"finished files are kept in {stage}: repeat the command to continue, or remove the folder",
                soft_wrap=True,
                markup=False,
            )
        raise


def _settings(items: Sequence[str]) -> dict[str, dict[str, object]]:
    from plasmid.config.load import merge, parse_override
    from plasmid.errors import ConfigError

    merged: dict[str, dict[str, object]] = {"from": {}, "to": {}}
    for item in items:
        parsed = parse_override(item)
        if not (set(parsed) <= {"from", "to"} and all(isinstance(value, Mapping) for value in parsed.values())):
            raise ConfigError(
                f"{item!r}: settings of a conversion must start with from. or to., for example from.dtype=float32"
            )
        merged = merge(merged, parsed)
    return merged


def _set_vocab_size(size: int, given: dict[str, dict[str, object]], kinds: Mapping[str, str], layouts: Layouts) -> None:
    """Set the vocabulary size of all source layouts that may pad it."""
    from plasmid.errors import ConfigError

    padded = sorted(kind for kind, cls in layouts.items() if "vocab_size" in cls.model_fields)
    sides = [side for side, kind in kinds.items() if kind in padded]
    if not sides:
        raise ConfigError(
            f"--vocab-size: layout {kinds['from']} does not pad the vocabulary; installed layouts that do: "
            f"{', '.join(padded) or 'none'}"
        )
    for side in sides:
        given[side]["vocab_size"] = size


def _make(side: str, kind: str, given: Mapping[str, Mapping[str, object]], layouts: Layouts) -> Converter:
    from plasmid.config.load import validate
    from plasmid.errors import ConfigError

    if kind not in layouts:
        raise ConfigError(f"--{side}: no layout {kind!r}; installed are {', '.join(sorted(layouts)) or 'none'}")
    return validate(layouts[kind], dict(given[side]), side)


def _detect_layout(path: Path, layouts: Layouts) -> str:
    from plasmid.errors import ConfigError, ModelError

    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    found = sorted(kind for kind, cls in layouts.items() if cls().recognises(path))
    if len(found) == 1:
        return found[0]
    why = "looks like " + " and ".join(found) if found else "has an unknown layout"
    raise ConfigError(f"{path}: {why}; set --from or --to to one of {', '.join(sorted(layouts))}")


@contextmanager
def _raise_damage_errors(path: Path) -> Iterator[None]:
    """Convert errors that a damaged checkpoint of a run causes to `CheckpointError`."""
    from plasmid.errors import PlasmidError
    from plasmid_models.manifest import check_weights

    try:
        yield
    except PlasmidError:
        check_weights(path)
        raise


def _compare(left: Path, right: Path, left_reader: Converter, right_reader: Converter) -> None:
    from plasmid_convert import compare

    from ..output import print_line

    found = compare(left, right, left_reader=left_reader, right_reader=right_reader)
    for line in found.differences:
        print_line(line)
    print_line(f"{found.num_equal} tensors are equal, {len(found.differences)} differ")
    if found.differences:
        raise typer.Exit(1)
