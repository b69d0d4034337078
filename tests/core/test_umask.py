"""Exported files follow the umask, although the library that writes weights makes them private."""

import os

import pytest
import torch
from plasmid_convert.safetensors_writer import write_safetensors
from plasmid_models.folder_writer import FolderWriter
from plasmid_models.lora.peft_folder import write_adapter

from tests.security.model_files import make_hollow_model


def write_converted(folder, source):
    folder.mkdir()
    write_safetensors(folder, [("a", torch.zeros(3))], max_shard_bytes=1 << 20)


def write_exported(folder, source):
    FolderWriter(folder, source=source, tokenizer=source).write(iter([("a", torch.zeros(3))]), sizes={"a": 12})


def write_peft(folder, source):
    write_adapter(folder, {}, [("a", torch.zeros(3))])


@pytest.mark.parametrize("write", [write_converted, write_exported, write_peft])
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_exported_files_follow_the_umask(tmp_path, write, umask, mode):
    source = make_hollow_model(tmp_path / "source")
    before = os.umask(umask)
    try:
        write(tmp_path / "made", source)
    finally:
        os.umask(before)
    files = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "made").iterdir() if file.is_file()}
    assert any(name.endswith(".safetensors") for name in files)
    assert set(files.values()) == {mode}, files
