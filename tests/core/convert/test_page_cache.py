"""Files of a conversion are read into the page cache while it starts."""

import os

import pytest
from plasmid.errors import ModelError
from plasmid.plugins import registry
from plasmid.plugins.registry import load_plugins
from plasmid_cli.commands.convert import convert
from plasmid_convert import page_cache
from plasmid_convert.page_cache import PIECE_BYTES, start_read_ahead, weight_files


def write(folder, **sizes):
    folder.mkdir(exist_ok=True)
    for name, size in sizes.items():
        with (folder / name.replace("_distcp", ".distcp").replace("_safetensors", ".safetensors")).open("wb") as file:
            file.truncate(size)
    return folder


@pytest.fixture
def requested(monkeypatch):
    """Record the ranges that the system is asked to read, by name of the file."""
    found = {}

    def advise(handle, start, length, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        found.setdefault(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")), []).append((start, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


def test_all_weights_are_read_in_order_and_without_gaps(requested, tmp_path):
    folder = write(tmp_path / "model", a_safetensors=2 * PIECE_BYTES + 5, b_safetensors=7, config=3)
    start_read_ahead(folder).join()
    assert list(requested) == ["a.safetensors", "b.safetensors"]
    assert requested["a.safetensors"] == [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES), (2 * PIECE_BYTES, 5)]
    assert requested["b.safetensors"] == [(0, 7)]


def test_no_more_is_read_than_a_share_of_the_memory(requested, monkeypatch, tmp_path):
    monkeypatch.setattr(page_cache, "available_bytes", lambda: 400)
    folder = write(tmp_path / "model", a_safetensors=60, b_safetensors=60, c_safetensors=60)
    start_read_ahead(folder).join()
    assert requested == {"a.safetensors": [(0, 60)], "b.safetensors": [(0, 40)]}


def test_the_available_memory_is_less_than_all_of_it():
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert pages / 1000 < page_cache.available_bytes() < pages


def test_checkpoints_with_an_optimizer_are_left_out(tmp_path):
    folder = write(tmp_path / "there", __0_0_distcp=5, __1_0_distcp=5)
    assert weight_files(folder) == []
    (folder / ".metadata").write_bytes(b"decoder.layers.mlp.linear_fc1.weight")
    assert [file.name for file in weight_files(folder)] == ["__0_0.distcp", "__1_0.distcp"]
    (folder / ".metadata").write_bytes(b"decoder.layers.mlp.linear_fc1.weight optimizer.state.exp_avg")
    assert weight_files(folder) == []
    file = folder / "__0_0.distcp"
    assert weight_files(file) == [file] and weight_files(tmp_path / "missing") == []


@pytest.mark.parametrize(("check", "count"), [(False, 1), (True, 2)])
def test_the_command_reads_ahead_before_it_loads_any_layout(check, count, monkeypatch, tmp_path):
    events = []
    monkeypatch.setattr(page_cache, "start_read_ahead", lambda *paths: events.append(paths))
    monkeypatch.setattr(registry, "load_plugins", lambda files: events.append("plugins") or load_plugins(files=files))
    source, target = tmp_path / "missing", tmp_path / "target"
    with pytest.raises(ModelError):
        convert(source, target, check=check)
    assert events == [(source, target)[:count], "plugins"]
