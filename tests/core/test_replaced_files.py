"""Atomic replacement of files: as root, it must not replace a device or a pipe by a file."""

import os
import stat

import pytest
import torch
from plasmid.utils.safe_files import write_text
from plasmid_convert.safetensors_writer import write_safetensors


def test_a_text_does_not_replace_a_pipe(tmp_path):
    pipe = tmp_path / "report.html"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is a device, a pipe or a socket, which is not replaced"):
        write_text(pipe, "text")
    assert stat.S_ISFIFO(pipe.lstat().st_mode) and list(tmp_path.iterdir()) == [pipe]


def test_a_text_replaces_a_file_and_a_link(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("/dev/full")
    for name in ("file", "link"):
        write_text(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new" and not (tmp_path / name).is_symlink()


def test_weights_do_not_replace_a_pipe(tmp_path):
    pipe = tmp_path / "shard-1.safetensors"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is a device, a pipe or a socket, which is not replaced"):
        write_safetensors(tmp_path, [("a", torch.zeros(2))], max_shard_bytes=1 << 20)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
