"""Download models and data from the Hugging Face Hub into its cache, or find them there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plasmid.errors import DataError, ModelError, PlasmidError
from plasmid.settings.trust import HUB_DATA, HUB_MODEL

DATASET = re.compile(
    r"hf://datasets/(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w.-]+))?(/(?P<file>[^@]*?))?/?(?P<slice>@\[.*\])?",
    re.ASCII,
)
SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Patterns of the files other than weights."""
WEIGHTS = "*.safetensors"
COMMIT = re.compile("[0-9a-f]{40}")
IN_FOLDERS = "*/*"
"""Pattern of files in subfolders, where some models have copies of the weights in other formats."""


def download_model(key: str, name: str, *, weights: bool = True) -> Path:
    """Return the cache folder of a Hub model, downloading it if necessary; ``key`` is the setting that names it.

    Without ``weights``, only the other files are downloaded. Raises `ModelError`.
    """
    match = HUB_MODEL.fullmatch(name)
    assert match is not None
    repo, revision = match["name"], match["revision"]
    command = ["hf", "download", repo, *(() if revision is None else ("--revision", revision))]

    def missing(where: str, fix: str) -> ModelError:
        return ModelError(f"{key}: no such folder: {name}, and {where} has no such model; {fix}")

    allow = [*SMALL, WEIGHTS] if weights else [*SMALL]
    return _snapshot(repo, "model", revision, allow, [IN_FOLDERS], command, missing)


def download_dataset_file(path: str, *, folder: bool = False, split: str = "auto") -> str:
    """Return the local path of ``hf://datasets/org/name[@revision]/file``, downloading it if necessary.

    Other paths are returned unchanged. With ``folder``, downloads the Parquet and Arrow files of the folder, only those
    of ``split`` unless it is ``auto``. Otherwise the file may be a pattern with ``*``, followed by a slice, which is
    kept. Raises `DataError`.
    """
    if not path.startswith(HUB_DATA):
        return path
    match = DATASET.fullmatch(path)
    if match is None:
        raise DataError(f"data.path: {path} must look like hf://datasets/org/name/file.parquet")
    repo, revision, file = match["name"], match["revision"], match["file"] or ""
    if not (folder or file):
        raise DataError(
            f"data.path: {path} has no file name; add one, for example {path}/train.jsonl, or set "
            'data.kind = "datasets"'
        )
    if folder:
        part = f"{file}/*" if file else "*"
        part += "" if split == "auto" else f"{split}*"
        allow = [f"{part}.parquet", f"{part}.arrow"]
    else:
        allow = [file]
    command = ["hf", "download", "--repo-type", "dataset", repo, "--include", *allow]
    command += [] if revision is None else ["--revision", revision]

    def missing(where: str, fix: str) -> DataError:
        return DataError(f"data.path: {where} has no {path}; {fix}")

    root = _snapshot(repo, "dataset", revision, allow, None, command, missing)
    return f"{root / file if file else root}{match['slice'] or ''}"


def _snapshot(
    repo: str,
    kind: str,
    revision: str | None,
    allow: list[str],
    ignore: list[str] | None,
    command: list[str],
    missing: Callable[[str, str], PlasmidError],
) -> Path:
    """Return the cache folder of a revision. Raises ``missing(place, fix)`` if it cannot be found or downloaded."""
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    fix = f"download it: {shlex.join(command)}"
    options: dict[str, Any] = {
        "repo_type": kind,
        "revision": revision,
        "allow_patterns": allow,
        "ignore_patterns": ignore,
    }
    try:
        try:
            found = snapshot_download(repo, **options)
        except (httpx.HTTPError, OSError) as error:
            if COMMIT.fullmatch(revision or "") is None:
                raise
            # a commit cannot change, but its file listing is requested even if all of its files are cached
            try:
                found = snapshot_download(repo, **options, local_files_only=True)
            except LocalEntryNotFoundError:
                raise error from None
    except LocalEntryNotFoundError:
        raise missing("the Hugging Face cache", fix) from None
    except HFValidationError as error:
        raise missing("the Hub", str(error).splitlines()[0]) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        rights = "correct the name, or log in if it is private or gated: hf auth login"
        raise missing(
            constants.ENDPOINT, rights if status in (401, 403, 404) else f"it responded with status {status}"
        ) from None
    except (httpx.HTTPError, OSError) as error:
        raise missing("the Hugging Face cache", f"the download failed ({error}); {fix}") from None
    assert isinstance(found, str)
    folder = Path(found)
    if not folder.is_dir():  # no file matches the patterns
        raise missing(constants.ENDPOINT, "correct the file name")
    return folder
