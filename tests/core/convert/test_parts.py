"""Conversion in parts: several processes, interruptions, and bounded memory."""

import ctypes
import importlib.util
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from plasmid.errors import ClusterError, ModelError
from plasmid_convert import DCP, GGUF, HF, compare, convert, parts, workers
from plasmid_models import manifest
from safetensors.torch import load_file, save_file

from tests.forked_processes import forked_processes
from tests.forked_rl import run_rl, start_rl

MB = 1 << 20
FULL = 100_000
"""Largest file that fits a full disk, in bytes."""
M_MMAP_THRESHOLD = -3
"""Parameter of `mallopt`, from glibc's malloc.h."""
work = workers._work
SMALL = {"hf": HF(max_shard_gb=3e-5), "dcp": DCP(max_file_gb=3e-5)}
"""Writers that need several parts for the tiny model."""


class Stop:
    """Progress that interrupts the conversion before a tensor, like Ctrl-C."""

    def __init__(self, at=None):
        self.at, self.names, self.started = at, [], None

    def start(self, num_bytes, kept):
        self.started = num_bytes, kept

    def advance(self, name, num_bytes):
        self.names.append(name)
        if len(self.names) == self.at:
            raise KeyboardInterrupt


def get_context(method):
    """Fork the processes of a conversion from the server of the tests, which has imported torch."""
    assert method == "forkserver"
    context = forked_processes()
    return SimpleNamespace(Pipe=context.Pipe, Process=context.Process, set_forkserver_preload=lambda names: None)


@pytest.fixture
def forked_workers(monkeypatch):
    forked = SimpleNamespace(get_context=get_context, parent_process=multiprocessing.parent_process)
    monkeypatch.setattr(workers, "multiprocessing", forked)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def interrupt(model, target, writer, at=20):
    with pytest.raises(KeyboardInterrupt):
        convert(model, target, reader=HF(), writer=writer, progress=Stop(at))
    return target.with_name(f".{target.name}.partial")


@pytest.mark.parametrize("kind", SMALL)
def test_an_interrupted_conversion_continues_with_what_is_intact(tiny_model, tmp_path, kind):
    writer, whole, target = SMALL[kind], tmp_path / "whole", tmp_path / "out"
    convert(tiny_model, whole, reader=HF(), writer=writer)
    stage = interrupt(tiny_model, target, writer)
    assert not target.exists()
    records = [json.loads(path.read_text()) for path in sorted((stage / "conversion").glob("part-*"))]
    assert len(records) >= 3
    cut, flipped, *intact = (stage / name for record in records for name in record["files"])
    cut.write_bytes(cut.read_bytes()[:-1])
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    kept = {path.name: path.stat().st_ino for path in intact}
    (stage / "model-00009-of-00099.safetensors").write_bytes(b"junk")
    progress = Stop()
    convert(tiny_model, target, reader=HF(), writer=writer, progress=progress)
    assert progress.started[0] > progress.started[1] > 0
    assert contents(target).keys() == contents(whole).keys()
    assert {name: (target / name).stat().st_ino for name in kept} == kept
    found = compare(whole, target, left_reader=type(writer)(), right_reader=type(writer)())
    assert found.num_equal > 10 and not found.differences
    assert not stage.exists()


def test_an_unfinished_conversion_is_not_mistaken_for_a_model(tiny_model, tmp_path):
    from plasmid_models.folder import weight_files

    stage = interrupt(tiny_model, tmp_path / "out", SMALL["hf"])
    with pytest.raises(ModelError, match="is an unfinished conversion; repeat the `rl convert` command that began it"):
        convert(stage, tmp_path / "other", reader=HF(), writer=HF())
    with pytest.raises(ModelError, match=r"has no weights: model\.safetensors is missing; the folder is incomplete"):
        weight_files("model", stage)
    assert not DCP().recognises(interrupt(tiny_model, tmp_path / "dcp", SMALL["dcp"]))


@pytest.mark.parametrize("change", ["source", "settings"])
def test_parts_of_another_conversion_are_not_kept(tiny_model, tmp_path, change):
    import shutil

    shutil.copytree(tiny_model, tmp_path / "model")
    interrupt(tmp_path / "model", tmp_path / "out", SMALL["hf"])
    reader, progress = HF(), Stop()
    if change == "source":
        os.utime(tmp_path / "model/model.safetensors", ns=(1, 1))
    else:
        reader = HF(dtype="bfloat16")
    convert(tmp_path / "model", tmp_path / "out", reader=reader, writer=SMALL["hf"], progress=progress)
    assert progress.started[1] == 0
    assert {info.dtype for info in HF().open_tensors(tmp_path / "out").tensors} == {
        "bfloat16" if change == "settings" else "float32"
    }


def test_a_target_that_another_process_writes_is_refused_and_not_touched(tiny_model, tmp_path):
    class Second(Stop):
        def advance(self, name, num_bytes):
            with pytest.raises(ModelError, match="another process is writing this conversion; wait until it ends"):
                convert(tiny_model, tmp_path / "out", reader=HF(), writer=SMALL["hf"])

    convert(tiny_model, tmp_path / "out", reader=HF(), writer=SMALL["hf"], progress=Second())
    assert not compare(tiny_model, tmp_path / "out", left_reader=HF(), right_reader=HF()).differences


@pytest.mark.parametrize("kind", ["hf", pytest.param("dcp", marks=pytest.mark.long)])
def test_several_processes_write_the_same_files_as_one(tiny_model, tmp_path, kind, forked_workers):
    for name, count in (("one", 1), ("two", 2)):
        convert(tiny_model, tmp_path / name, reader=HF(), writer=SMALL[kind], workers=count)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert len(one) > 5
    assert {name for name in one if one[name] != two[name]} == set()


def write_on_full_disk(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL))  # the process that forks this one has no limit
    work(*arguments)


def test_an_error_in_a_process_is_raised_here(tiny_model, tmp_path, full_disk, forked_workers, monkeypatch):
    full_disk(FULL)
    monkeypatch.setattr(workers, "_work", write_on_full_disk)
    with pytest.raises(ModelError, match="out: cannot write: file too large; the partial output was removed"):
        convert(tiny_model, tmp_path / "out", reader=HF(), writer=HF(max_shard_gb=2e-4), workers=2)
    assert list(tmp_path.iterdir()) == []


def test_processes_end_before_the_unfinished_folder_is_removed(
    tiny_model, tmp_path, full_disk, forked_workers, monkeypatch
):
    def kill_and_record(processes):
        kill(processes)
        alive.append(sum(process.is_alive() for process in processes))

    def remove_and_record(path, **options):
        if Path(path).name == ".out.partial":
            removed.append(len(alive))
        remove(path, **options)

    alive, removed, kill, remove = [], [], workers._kill, shutil.rmtree
    full_disk(FULL)
    monkeypatch.setattr(workers, "_work", write_on_full_disk)
    monkeypatch.setattr(workers, "_kill", kill_and_record)
    monkeypatch.setattr(shutil, "rmtree", remove_and_record)
    with pytest.raises(ModelError, match="file too large"):
        convert(tiny_model, tmp_path / "out", reader=HF(), writer=HF(max_shard_gb=2e-4), workers=2)
    assert alive[0] == 0 and removed == [1], "the processes were killed once before"


def open_and_tell(*arguments):
    def tell(writer, path):
        path.with_name("opened").touch()
        return own(writer, path)

    own, HF.open_parts = HF.open_parts, tell  # in this process only
    work(*arguments)


def test_all_processes_open_the_target_at_the_same_time(tiny_model, tmp_path, forked_workers, monkeypatch):
    def wait(writer, path):
        limit = time.monotonic() + 60
        while not path.with_name("opened").exists():
            assert time.monotonic() < limit, "the processes wait for this one"
            time.sleep(0.01)
        return own(writer, path)

    own = HF.open_parts
    monkeypatch.setattr(HF, "open_parts", wait)
    monkeypatch.setattr(workers, "_work", open_and_tell)
    convert(tiny_model, tmp_path / "out", reader=HF(), writer=SMALL["hf"], workers=2)
    assert not compare(tiny_model, tmp_path / "out", left_reader=HF(), right_reader=HF()).differences


def test_a_source_that_cannot_be_opened_is_one_error_and_leaves_no_process(tiny_model, tmp_path, forked_workers):
    others = set(multiprocessing.active_children())
    source = tmp_path / "source"
    shutil.copytree(tiny_model, source)
    (source / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ModelError, match="is not a complete safetensors file"):
        convert(source, tmp_path / "out", reader=HF(), writer=SMALL["hf"], workers=2)
    assert set(multiprocessing.active_children()) <= others
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_killed_process_ends_the_conversion_and_finished_parts_are_kept(tiny_model, tmp_path, forked_workers):
    others = set(multiprocessing.active_children())

    class Kill(Stop):
        def advance(self, name, num_bytes):
            if any((tmp_path / ".out.partial/conversion").glob("part-*")):
                for process in set(multiprocessing.active_children()) - others:
                    process.kill()

    with pytest.raises(
        ClusterError, match="--workers: a process was killed by SIGKILL, perhaps because memory ran out"
    ):
        convert(tiny_model, tmp_path / "out", reader=HF(), writer=SMALL["hf"], workers=2, progress=Kill())
    progress = Stop()
    convert(tiny_model, tmp_path / "out", reader=HF(), writer=SMALL["hf"], progress=progress)
    assert progress.started[1] > 0
    assert not compare(tiny_model, tmp_path / "out", left_reader=HF(), right_reader=HF()).differences


def work_forever(conversion, connection):
    """Send the id of this process, and do not look at the connection again."""
    connection.send(("bytes", str(os.getpid()), 0))
    workers.PartFiles = lambda *_, **__: threading.Event().wait()
    work(conversion, connection)


class Send(Stop):
    """Progress that sends the names of tensors to another process."""

    def __init__(self, connection):
        super().__init__()
        self.connection = connection

    def advance(self, name, num_bytes):
        self.connection.send(name)


def convert_forever(connection, model, out):
    workers.multiprocessing, workers._work = SimpleNamespace(get_context=get_context), work_forever
    convert(model, out, reader=HF(), writer=SMALL["hf"], workers=2, progress=Send(connection))


def test_the_processes_of_a_killed_conversion_end(tiny_model, tmp_path):
    context = forked_processes()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=convert_forever, args=(theirs, tiny_model, tmp_path / "out"))
    process.start()
    theirs.close()
    found = [psutil.Process(int(ours.recv())) for _ in range(2)]
    process.kill()
    process.join()
    assert not psutil.wait_procs(found, timeout=30)[1]


def test_a_server_of_forks_that_ends_is_one_error(tiny_model, tmp_path, forked_workers, monkeypatch):
    def start(process):
        raise EOFError  # as multiprocessing does when its server has ended

    monkeypatch.setattr(forked_processes().Process, "start", start)
    with pytest.raises(
        ClusterError, match=r"^--workers: a process could not be started, perhaps because memory ran out"
    ):
        convert(tiny_model, tmp_path / "out", reader=HF(), writer=SMALL["hf"], workers=2)
    assert list(tmp_path.iterdir()) == []


START = """
import os, signal, time
from contextlib import suppress
from pathlib import Path
from plasmid_convert import HF
from plasmid_convert.workers import Conversion, start_workers

if __name__ == "__main__":
    conversion = Conversion.of(Path(), HF(), HF(), (), 2)
    began = time.monotonic()
    with suppress(KeyboardInterrupt), start_workers(conversion, 2, ["waiting"]):
        while not Path("begun").exists():  # the server is importing the module
            assert time.monotonic() < began + 60
            time.sleep(0.01)
        os.killpg(0, signal.SIGINT)  # as a terminal does
        time.sleep(60)
    assert time.monotonic() < began + 60
"""
WAITING = """
import time
from pathlib import Path

Path("begun").touch()
limit = time.monotonic() + 120
while not Path("go").exists() and time.monotonic() < limit:
    time.sleep(0.01)
"""


def test_processes_start_while_the_command_goes_on_and_a_signal_ends_it_before_they_run(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "start.py").write_text(START)
    with (tmp_path / "out").open("w") as out:
        command, places = [sys.executable, "start.py"], os.environ | {"PYTHONPATH": str(tmp_path)}
        started = subprocess.Popen(command, cwd=tmp_path, env=places, stdout=out, stderr=out, start_new_session=True)
        code = started.wait(100)
    (tmp_path / "go").touch()
    assert (code, (tmp_path / "out").read_text()) == (0, "")


def test_workers_are_refused_for_a_layout_that_is_read_as_a_whole(make_gguf, tmp_path, forked_workers):
    with pytest.raises(
        ModelError, match=r"^--workers: must be 1 for layout gguf, which cannot be processed in parts, got 2$"
    ):
        convert(make_gguf(), tmp_path / "out", reader=GGUF(), writer=HF(), workers=2)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder with 96 MB of random weights in 4 files; each tensor has 8 MB."""
    folder = tmp_path_factory.mktemp("large")
    draw = torch.manual_seed(0)
    weight_map = {}
    for file in range(4):
        tensors = {f"t{file}.{i}": torch.randn(8 * MB // 4, generator=draw) for i in range(3)}
        save_file(tensors, folder / f"model-{file}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"model-{file}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return folder


def test_memory_of_tensors_that_are_no_longer_used_is_used_again(large):
    opened = HF().open_tensors(large)
    names = [info.name for info in opened.tensors]
    assert len({tensor.data_ptr() for _, tensor in opened.read(names)}) <= 2
    expected = {name: tensor for file in large.glob("*.safetensors") for name, tensor in load_file(file).items()}
    read = dict(opened.read(names[:3]))
    view, others = read.pop(names[0])[5:9], dict(opened.read(names[1:]))
    assert torch.equal(view, expected[names[0]][5:9])  # part of a tensor keeps its memory
    for name, tensor in (*read.items(), *others.items()):
        assert torch.equal(tensor, expected[name])


def test_the_next_part_is_written_while_one_is_hashed(tiny_model, tmp_path, monkeypatch):
    begun, hashed = threading.Event(), []

    def hash_files(files):
        if not hashed:
            assert begun.wait(30)  # until a tensor of the second part was written
        hashed.append(files)
        return manifest.hash_files(files)

    class Second(Stop):
        def advance(self, name, num_bytes):
            super().advance(name, num_bytes)
            if len(self.names) > in_first:
                begun.set()

    writer = SMALL["hf"]
    in_first = len(writer.open_parts(tmp_path).plan(HF().open_tensors(tiny_model).tensors)[0])
    monkeypatch.setattr(parts, "hash_files", hash_files)
    convert(tiny_model, tmp_path / "out", reader=HF(), writer=writer, progress=Second())
    assert len(hashed) > 2 and begun.is_set()


@pytest.mark.parametrize("kind", SMALL)
def test_files_of_a_part_are_synced_before_its_record_exists(kind, tiny_model, tmp_path, monkeypatch):
    synced, recorded = set(), []
    sync, write_text = os.fsync, parts.write_text

    def fsync(handle):
        sync(handle)
        found = os.fstat(handle)
        synced.add((found.st_ino, found.st_size))

    def write(path, text, **options):
        for name in json.loads(text).get("hashes", []):
            found = (path.parent.parent / name).stat()
            assert (found.st_ino, found.st_size) in synced
            recorded.append(name)
        write_text(path, text, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(parts, "write_text", write)
    convert(tiny_model, tmp_path / "out", reader=HF(), writer=SMALL[kind])
    assert len(recorded) > 2


def test_reading_ahead_stops_with_the_conversion_and_raises_its_errors():
    read = []

    def tensors(count):
        for number in range(count):
            read.append(number)
            yield str(number), torch.tensor(number)
        raise ModelError("the file is damaged")

    before, found = threading.active_count(), []
    with pytest.raises(ModelError, match="the file is damaged"):
        found.extend(int(tensor) for _, tensor in parts.read_ahead(tensors(9)))
    assert found == [*range(9)]
    read.clear()
    with pytest.raises(KeyboardInterrupt), closing(parts.read_ahead(tensors(100))) as items:
        next(items)
        raise KeyboardInterrupt
    assert read == [0, 1] and threading.active_count() == before


LONG = [(signal.SIGKILL, 2), (signal.SIGINT, 2), (signal.SIGTERM, 1)]


def send_peaks(connection, folder, commands):
    """Run conversions in a forked process, and send its highest use of memory after each."""
    from plasmid_cli.main import app

    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MB)  # freed tensors are returned to the system immediately
    os.chdir(folder)
    for command in commands:
        with redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
            app(["convert", *command.split()])
        assert not end.value.code
        status = Path("/proc/self/status").read_text().splitlines()
        connection.send(next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")))


def test_memory_is_bounded_by_the_largest_tensor_and_not_by_the_model(large, tiny_model, tmp_path):
    commands = [f"{tiny_model} tiny --to dcp", "tiny tiny-again", f"{large} there --to dcp", "there again"]
    context = forked_processes()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=send_peaks, args=(theirs, tmp_path, commands))
    process.start()
    theirs.close()
    peaks = [ours.recv() for _ in commands]
    process.join()
    assert process.exitcode == 0
    assert peaks[3] - peaks[1] < 6 * 8 * MB


@pytest.mark.parametrize(
    ("number", "workers"),
    [(signal.SIGINT, 1), *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)],
)
def test_the_command_continues_after_a_signal(large, tmp_path, number, workers):
    arguments = (large, "out", "to.max_shard_gb=0.0085", "--workers", workers)
    output, records = tmp_path / "output", tmp_path / ".out.partial/conversion"
    with output.open("w") as file:
        process = start_rl("convert", *arguments, cwd=tmp_path, stdout=file, stderr=file)
    while not any(records.glob("part-*")):
        assert process.poll() is None
        time.sleep(0.005)
    children = psutil.Process(process.pid).children(recursive=True)
    # processes of a conversion are forked from one that has imported torch
    assert workers == 1 or len({child.ppid() for child in children} - {process.pid}) == 1
    os.kill(process.pid, number)
    assert process.wait(200) == (130 if number == signal.SIGINT else -number)
    out = output.read_text()
    output.unlink()
    if number == signal.SIGINT:
        kept = "finished files are kept in .out.partial: repeat the command to continue, or remove the folder"
        assert kept in out.splitlines()
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert not (tmp_path / "out").exists()
    done = run_rl("convert", *arguments[:3], cwd=tmp_path, timeout=400)  # one process, because starting others is slow
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("continuing an interrupted conversion: 0.") and done.stdout == "wrote out\n"
    assert not compare(large, tmp_path / "out", left_reader=HF(), right_reader=HF()).differences
    assert not [path for path in tmp_path.iterdir() if path.name != "out"]


@pytest.mark.parametrize("name", [workers.PRELOADED, *(name for one in (HF, DCP, GGUF) for name in one.preloaded)])
def test_modules_that_are_imported_before_forks_exist(name):
    """The fork server ignores modules that it cannot import."""
    assert importlib.util.find_spec(name) is not None
