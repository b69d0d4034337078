"""A cluster of forked processes, because Ray's take several seconds of CPU time to start and to import modules."""

import asyncio
import os
import pickle
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plasmid.errors import ActorDiedError, DeadlineError
from plasmid.utils.log_files import redirect_output
from plasmid_runtime.cluster.actor_host import ActorHost, unwrap_outcome
from plasmid_runtime.cluster.local import LocalCluster

from tests.forked_processes import forked_processes

MAX_SIZE = 1 << 30
LENGTH_BYTES = 8
CLOSED = "close"
"""The last operation of a process."""


@dataclass(frozen=True, slots=True)
class ForkedActor:
    """Handle of a process. Picklable, so that other processes can call it. Implements `protocols.Actor`."""

    name: str
    address: str
    """File of the Unix socket on which the process listens."""

    async def call(self, method, *args, timeout_s, **kwargs):
        return await self.run("call", timeout_s, method, args, kwargs)

    async def run(self, operation, timeout_s, *args, **options):
        """Run a coroutine of the process's `ActorHost`."""
        try:
            outcome = await asyncio.wait_for(self._send((operation, args, options)), timeout_s)
        except TimeoutError:
            raise DeadlineError(f"{self.name}.{operation}: no answer within {timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise ActorDiedError(f"{self.name} died during {operation}") from None
        return unwrap_outcome(outcome, self.name)

    async def _send(self, request):
        reader, writer = await asyncio.open_unix_connection(self.address, limit=MAX_SIZE)
        try:
            await _write(writer, request)
            return await _read(reader)
        finally:
            writer.close()

    async def stop(self, *, grace_s=10.0):
        with suppress(ActorDiedError, DeadlineError):  # it has been stopped before
            await self.run(CLOSED, grace_s, wait=False)


class ForkedCluster(LocalCluster):
    """Starts every actor in a process of its own that logs into ``log_dir``. Implements `protocols.Cluster`."""

    def __init__(self, log_dir):
        super().__init__()
        self._log_dir = log_dir
        self._folder = Path(tempfile.mkdtemp(prefix="cluster"))  # socket paths are limited to 107 bytes
        self.processes = {}

    async def start(self, factory, /, *args, name, resources, timeout_s=120.0, **kwargs):
        context, address = forked_processes(), str(self._folder / name)
        receiving, sending = context.Pipe(duplex=False)
        log_file = str(self._log_dir / f"{name}.log")
        process = context.Process(target=serve, args=(name, address, log_file, sending), daemon=True)
        self.processes[name] = process
        await asyncio.to_thread(process.start)
        sending.close()
        await asyncio.to_thread(receiving.recv)
        actor = ForkedActor(name, address)
        await actor.run("make", timeout_s, factory, args, kwargs)
        return actor

    async def inspect(self):
        return ()

    async def close(self):
        await asyncio.gather(*(ForkedActor(name, str(self._folder / name)).stop() for name in self.processes))
        for process in self.processes.values():
            await asyncio.to_thread(process.join, 20)
            assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
        shutil.rmtree(self._folder)


def serve(name, address, log_file, ready):
    """Run the calls of an actor in this process until it is closed."""
    redirect_output(Path(log_file))
    asyncio.run(_serve(name, address, ready))
    os._exit(0)  # threads of the actor may wait forever


async def _serve(name, address, ready):
    host, closed = ActorHost(name), asyncio.Event()

    async def answer(reader, writer):
        operation, args, options = await _read(reader)
        outcome = await getattr(host, operation)(*args, **options)
        with suppress(OSError):  # the caller waits no longer
            await _write(writer, outcome)
        writer.close()
        if operation == CLOSED:
            closed.set()

    server = await asyncio.start_unix_server(answer, address, limit=MAX_SIZE)
    ready.send(os.getpid())
    await closed.wait()
    server.close()


async def _write(writer, value):
    data = pickle.dumps(value)
    writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
    await writer.drain()


async def _read(reader):
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return pickle.loads(await reader.readexactly(size))
