"""Ports and starts of server processes."""

import asyncio
import errno
import os
import signal
import socket
import struct
import subprocess
import sys

import pytest
from plasmid.errors import EngineError
from plasmid_serving.api import ServerAddress
from plasmid_serving.processes.actor import READY_S, TRIES, ServerActor
from plasmid_serving.processes.handles import OwnServer
from plasmid_serving.processes.server import listens_as_this_user

from tests.serving.server_cases import StandInDialect, make_options

IP_LOCAL_PORT_RANGE = 51
LISTEN = "import os, socket; os.setuid(65534); s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1])"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_listens_as_this_user_is_false_for_free_ports(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        assert listens_as_this_user(host, port)
    assert not listens_as_this_user(host, port)


def test_a_port_on_which_another_user_listens_is_not_this_users():
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    program = f"{LISTEN}; import sys; sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert not listens_as_this_user("127.0.0.1", int(other.stdout.readline()))
        other.stdin.close()


def test_every_server_start_has_a_different_key():
    keys = {ServerAddress("http://127.0.0.1:1", start).key("secret") for start in ("a", "b")}
    assert len(keys) == 2 and "secret" not in keys
    assert ServerAddress("http://127.0.0.1:1").key("given") == "given"


@pytest.mark.parametrize(
    "modules", ["plasmid_serving.start, plasmid_sglang.dialect", "plasmid_vllm.dialect", "plasmid_hf.engine"]
)
def test_a_driver_starts_an_engine_without_importing_torch(modules):
    """The import takes seconds, in which no process of the run starts."""
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def limited_to(port):
    """Return a socket for which the kernel chooses this port or none."""
    limited = socket.socket()
    try:
        limited.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("=I", port << 16 | port))
    except OSError:
        limited.close()
        pytest.skip("requires Linux 6.3")
    return limited


def can_get(port):
    """Return whether the kernel gives the port to a socket that listens, and to one that connects."""
    found = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for use, argument in ((socket.socket.bind, ("127.0.0.1", 0)), (socket.socket.connect, server.getsockname())):
            with limited_to(port) as limited:
                try:
                    use(limited, argument)
                except OSError as error:
                    assert error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
                found.append(limited.getsockname()[1] == port)
    return found


def test_a_port_is_reserved_until_the_server_listens_and_free_after_its_end(tmp_path):
    dialect = StandInDialect(tmp_path)
    spawned, launch = [], dialect.launch

    def check_and_launch(start):
        spawned.append(can_get(start.port))
        return launch(start)

    dialect.launch = check_and_launch
    actor = ServerActor(make_options(tmp_path, dialect))

    async def run():
        started = await actor.launch()
        port = int(started.address.url.rpartition(":")[2])
        await actor.close()
        return can_get(port)

    assert asyncio.run(run()) == [True, True]
    assert spawned == [[False, False]]


def test_a_server_that_stays_alive_without_its_port_is_started_with_another(tmp_path):
    dialect = StandInDialect(tmp_path, taken=1)
    actor = ServerActor(make_options(tmp_path, dialect))

    async def run():
        started = await actor.launch()
        await actor.close()
        return started.address.url

    url = asyncio.run(run())
    first, second = (start.port for start in dialect.starts)
    assert url == f"http://127.0.0.1:{second}" and first != second


def test_a_server_that_never_gets_its_port_ends_with_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr("plasmid_serving.processes.actor.TRIES", 2)
    dialect = StandInDialect(tmp_path, taken=TRIES)
    with pytest.raises(EngineError, match=r"^engine-0: found no free port in 2 attempts; last output: .*in use"):
        asyncio.run(ServerActor(make_options(tmp_path, dialect)).launch())
    assert len(dialect.starts) == 2


def test_a_prepared_server_loads_its_model_only_when_it_is_launched(tmp_path):
    dialect = StandInDialect(tmp_path, program="tests.serving.listening_program:load")
    actor, events = ServerActor(make_options(tmp_path, dialect)), tmp_path / "name-events"

    async def run():
        await actor.prepare()
        while not (events.exists() and events.read_text()):
            await asyncio.sleep(0.01)
        before = events.read_text()
        await actor.launch()
        await actor.close()
        return before

    assert asyncio.run(run()) == "imported\n"
    assert events.read_text() == "imported\nloads\n" and len(dialect.starts) == 1


def test_a_ready_server_may_take_the_rest_of_its_start_to_describe_itself(tmp_path):
    """On a busy machine, SGLang's description of its API took over ten seconds."""
    dialect, limits = StandInDialect(tmp_path), []
    options = make_options(tmp_path, dialect, start_s=600.0)
    describe = dialect.describe

    async def record(api):
        limits.append(api._timeout_s)
        return await describe(api)

    async def run():
        actor = ServerActor(options)
        await actor.launch()
        await actor.close()

    dialect.describe = record
    asyncio.run(run())
    (limit_s,) = limits
    assert READY_S < limit_s <= options.start_s


class RecordedActor:
    """Stands in for the actor of a server."""

    name = "engine-0"

    def __init__(self, calls):
        self._calls = calls

    async def call(self, method, *, timeout_s):
        self._calls.append(method)


def test_a_server_on_the_gpus_of_a_trainer_is_launched_after_it_has_loaded_and_restarts_at_once():
    async def run():
        loaded, calls = asyncio.Event(), []

        async def make():
            return RecordedActor(calls)

        server = OwnServer(make, loaded.wait)
        start = asyncio.ensure_future(server.start(timeout_s=60))
        while not calls:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        before = list(calls)
        loaded.set()
        await start
        await server.start(timeout_s=60)
        return before, calls

    before, calls = asyncio.run(run())
    assert before == ["prepare"]
    assert calls == ["prepare", "launch", "kill", "prepare", "launch"]


@pytest.mark.parametrize("method", ["prepare", "launch"])
def test_a_server_is_killed_without_being_asked_to_end(method, tmp_path):
    """Asked to end, SGLang waits for 5 s, both while it starts and afterwards."""
    dialect = StandInDialect(tmp_path, program="tests.serving.listening_program:serve_until_asked")
    actor = ServerActor(make_options(tmp_path, dialect))

    async def run():
        await getattr(actor, method)()
        await actor.close()
        return await actor.exit_code()

    assert asyncio.run(run()) == -signal.SIGKILL
    assert not (tmp_path / "name-events").exists()
