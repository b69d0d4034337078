"""Actors of servers that are small programs."""

import os
import socket
from pathlib import Path

from plasmid.errors import EngineError
from plasmid_serving.dialect import Program, ServerInfo
from plasmid_serving.processes.server import ServerOptions

ROOT = Path(__file__).parents[2]


class StandInDialect:
    """Launches `listening_program`. The first ``taken`` starts find that another process listens on their port."""

    def __init__(self, folder, *, taken=0, program="tests.serving.listening_program:serve"):
        self._file, self._taken, self._program = folder / "name", taken, program
        self.starts, self.others = [], []
        self.environment = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}

    def launch(self, start):
        self.starts.append(start)
        if len(self.starts) <= self._taken:
            self.others.append(socket.create_server((start.host, start.port)))
        arguments = {"host": start.host, "port": start.port, "name": start.name, "file": str(self._file)}
        return Program(self._program, arguments)

    async def served_name(self, api):
        if not self._file.exists():
            raise EngineError("starting")
        return self._file.read_text()

    async def describe(self, api):
        return ServerInfo(release="1", context_length=1, ranks=1)


def make_options(folder, dialect, *, start_s=60.0):
    return ServerOptions(
        name="engine-0",
        dialect=dialect,
        host="127.0.0.1",
        folder=folder,
        log_file=folder / "server.log",
        start_s=start_s,
        secret="secret",
        control_key=bytes(32),
    )
