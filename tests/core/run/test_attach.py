"""`rl attach`: a run is watched, paused, saved and stopped from another process, only by its owner."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time

import pytest
from plasmid.errors import ConfigError
from plasmid.plugins.hookspecs import hookimpl
from plasmid_cli.main import cli
from plasmid_runtime.control import protocol, server
from plasmid_runtime.control.client import Watcher, send_command


class Phases:
    """Lets a test wait for a phase, or for the n-th one."""

    def __init__(self):
        self.seen, self.changed = [], threading.Condition()

    @hookimpl
    def phase_started(self, phase, batch):
        with self.changed:
            self.seen.append((phase, batch))
            self.changed.notify_all()

    def wait(self, phase, count=1):
        with self.changed:
            assert self.changed.wait_for(lambda: [p for p, _ in self.seen].count(phase) >= count, timeout=60)


class Running:
    """A long run of fakes in a thread."""

    def __init__(self, runner, changes):
        self.phases, self.folder, self.result = Phases(), runner.folder / "run", None
        settings = {
            "run": {"batches": 100_000},
            "data": {"epochs": 10**6},
            "checkpoint": {"export": False},
            "trainer": {"seconds": 0.02},  # leaves the processor to the test
        }
        self.thread = threading.Thread(target=self._run, args=(runner, settings | changes))
        self.thread.start()
        self.phases.wait("train")

    def _run(self, runner, changes):
        self.result = runner.run(changes, observers=[self.phases])

    def stop(self):
        with contextlib.suppress(ConfigError):  # it has ended, or is ending
            send_command(self.folder, "stop")
        self.thread.join(60)
        return self.result


@pytest.fixture
def start(runner):
    started = []

    def start(**changes):
        started.append(Running(runner, changes))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture(scope="module")
def shared_run(shared_runner):
    run = Running(shared_runner, {})
    yield run
    run.stop()


def rl_attach(capsys, *arguments):
    cli(["attach", *map(str, arguments)], standalone_mode=False)
    return capsys.readouterr().out.strip()


def test_a_run_is_paused_saved_resumed_and_stopped(start, capsys):
    run = start()
    assert rl_attach(capsys, run.folder, "pause") == "the run pauses after the current batch"
    run.phases.wait("paused")
    time.sleep(0.1)
    before = (run.folder / "metrics.jsonl").read_bytes()
    assert rl_attach(capsys, run.folder, "pause") == "the run is paused"
    assert rl_attach(capsys, run.folder, "checkpoint") == "a checkpoint is written"
    run.phases.wait("paused", 3)  # the second request and the save both end in a pause again
    batch = json.loads(before.splitlines()[-1])["step"]
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == [f"batch-{batch:06d}"]
    assert (run.folder / "metrics.jsonl").read_bytes() == before, "no batch is begun in a pause"
    assert rl_attach(capsys, run.folder, "resume") == "the run continues"
    run.phases.wait("train", batch + 3)
    assert rl_attach(capsys, run.folder, "stop") == "the run saves and stops after the current batch"
    result = run.stop()
    assert result.interrupted and result.steps > batch and result.checkpoint is not None
    assert not (run.folder / protocol.SOCKET).exists()


def test_a_paused_run_can_be_stopped(start):
    run = start()
    send_command(run.folder, "pause")
    run.phases.wait("paused")
    assert send_command(run.folder, "stop") == "the run saves and stops"
    assert run.stop().interrupted


def test_a_checkpoint_between_batches_of_a_sync_waits_for_the_sync(start):
    run = start(run={"batches": 100_000, "sync_every": 4})
    send_command(run.folder, "checkpoint")
    run.phases.wait("save")
    assert next(batch for phase, batch in run.phases.seen if phase == "save") % 4 == 0


def test_a_watcher_receives_events_until_the_end(start):
    run = start()
    messages = Watcher(run.folder).messages()
    hello = next(messages)
    assert hello == {"event": "attached", "recipe": hello["recipe"], "batches": 100_000, "prompts_per_batch": 4}
    assert next(m for m in messages if m["event"] == "batch_finished")["metrics"]["reward/mean"] >= 0
    assert next(m for m in messages if m["event"] == "phase_started")["phase"] in ("sample", "score", "train", "sync")
    send_command(run.folder, "stop")
    saved = next(m for m in messages if m["event"] == "checkpoint_saved")
    assert saved["path"].startswith(str(run.folder))
    assert next(m for m in messages if m["event"] == "run_ended")


def test_ctrl_c_detaches_and_leaves_the_run_alone(start):
    run = start()
    command = [sys.executable, "-m", "plasmid_cli", "attach", str(run.folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "batch " in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "detached; the run continues" in out and "Traceback" not in err
    assert send_command(run.folder, "pause").startswith("the run pauses")


def test_a_folder_with_a_long_path_works(make_runner, capsys):
    runner = make_runner("/".join(["a" * 60] * 4))
    run = Running(runner, {})
    try:
        assert len(str(run.folder)) > 200
        assert send_command(run.folder, "pause").startswith("the run pauses")
    finally:
        run.stop()


def test_only_the_owner_may_connect(start, monkeypatch):
    run = start()
    assert stat.S_IMODE((run.folder / protocol.SOCKET).stat().st_mode) == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(server, "check_peer", lambda connection: None)  # only the client's own check is left
    asked = struct.pack("3i", 1, 777, 777)
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: asked)
    with pytest.raises(
        ConfigError, match=r"belongs to user 777, not 12345; only the user who started a run can attach"
    ):
        send_command(run.folder, "pause")


def test_the_run_refuses_connections_of_other_users(start, monkeypatch):
    run = start()

    def refuse(connection):
        raise PermissionError("the process at the other end belongs to user 777")

    monkeypatch.setattr(server, "check_peer", refuse)
    with pytest.raises(ConfigError, match="no answer"):
        send_command(run.folder, "stop")
    assert run.thread.is_alive()
    monkeypatch.undo()


@pytest.mark.parametrize(
    "sent",
    [b"x" * 5000, b"\xff\n", b"[]\n", b'{"do": "eval"}\n', b'{"do": ["stop"]}\n', b"[" * 900 + b"\n", b""],
    ids=["no end", "no text", "a list", "no command", "a list of commands", "deep", "nothing"],
)
def test_bytes_of_other_programs_are_refused_and_harm_nothing(shared_run, sent):
    with protocol.connect(shared_run.folder, timeout_s=30) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # it closed the connection before reading everything
            assert connection.recv(100) == b""
    assert send_command(shared_run.folder, "pause").startswith("the run pauses")
    assert send_command(shared_run.folder, "resume") == "the run continues"


def test_a_watcher_that_does_not_read_is_dropped(runner, monkeypatch):
    monkeypatch.setattr(server, "MAX_UNSENT", 100_000)
    folder, sent = runner.folder, 0

    async def flood():
        nonlocal sent
        control = server.ControlServer(runner.config())
        async with control.listen(folder):
            with protocol.connect(folder, timeout_s=30) as connection:
                connection.sendall(protocol.encode({"do": "watch"}))
                await asyncio.sleep(0.2)
                for step in range(2000):
                    control.batch_finished(step, {"a" * 1000: 1.0})
                    sent += 1000
                    await asyncio.sleep(0)
                received = 0
                with contextlib.suppress(ConnectionResetError):
                    while part := await asyncio.to_thread(connection.recv, 1 << 16):
                        received += len(part)
        return received

    assert 0 < asyncio.run(flood()) < sent


def test_invalid_replies_on_the_control_socket_are_rejected(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    listener = protocol.listen(tmp_path)
    listener.setblocking(True)

    def answer(reply):
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.sendall(reply)
        connection.close()

    for reply in (b"[1]\n", b"\x1b]0;owned\n", b"x" * 3_000_000):
        thread = threading.Thread(target=lambda r=reply: _ignore_errors(answer, r))
        thread.start()
        with pytest.raises(ConfigError, match=r"the answer is not from a run"):
            send_command(tmp_path, "pause")
        thread.join(30)
    listener.close()


def _ignore_errors(function, argument):
    with contextlib.suppress(OSError):
        function(argument)


def test_a_run_that_is_not_going_on_is_one_line(runner, tmp_path):
    with pytest.raises(ConfigError, match=r"nothing: not the folder of a run$"):
        send_command(tmp_path / "nothing", "pause")
    runner.run({"run": {"batches": 1}})
    with pytest.raises(ConfigError, match=rf"run: no run is active here; the last one was process {os.getpid()} on"):
        send_command(runner.folder / "run", "pause")


def test_the_socket_of_a_killed_run_is_replaced_and_another_file_is_not(tmp_path, caplog):
    protocol.listen(tmp_path).close()
    protocol.listen(tmp_path).close()
    (tmp_path / protocol.SOCKET).unlink()
    (tmp_path / protocol.SOCKET).write_text("mine")
    with pytest.raises(FileExistsError, match=r"exists and is not a socket"):
        protocol.listen(tmp_path)
    assert (tmp_path / protocol.SOCKET).read_text() == "mine"


def test_events_of_another_thread_come_before_the_end(make_runner, tmp_path):
    """The observers' thread ends before the socket does, but its last event waits for the event loop."""
    control, sent = server.ControlServer(make_runner("run").config()), []
    control._broadcast = sent.append

    async def run():
        async with control.listen(tmp_path):
            thread = threading.Thread(target=control.checkpoint_saved, args=(1, tmp_path, 1.0))
            thread.start()
            thread.join()

    asyncio.run(run())
    assert [message["event"] for message in sent] == ["checkpoint_saved", "run_ended"]
