"""The router in front of the servers: a supervised child process with an up-to-date server list."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

from plasmid.errors import EngineError
from plasmid.utils.addresses import LOOPBACK

from ..api import HttpApi, ServerAddress, start_key
from ..dialect import RouterDialect
from .launch import API_KEY_VARIABLE
from .ports import reserve_ports
from .server import address_to_listen_on, host_and_port, listens_as_this_user, spawn

log = logging.getLogger(__name__)
POLL_S = 0.5
ANSWER_S = 10.0


class Router:
    """Keeps a router running with exactly the servers of `route_to`. Use it on one event loop."""

    def __init__(
        self,
        dialect: RouterDialect,
        host: str,
        secret: str,
        *,
        folder: Path,
        log_file: Path,
        changed: Callable[[], None],
    ) -> None:
        """The router and its servers share one secret. ``changed`` is called when it becomes available or
        unavailable."""
        self._dialect, self._folder, self._log_file = dialect, folder, log_file
        self._host, self._secret = address_to_listen_on(host), secret
        self._changed = changed
        self._process: subprocess.Popen[bytes] | None = None
        self._api: HttpApi | None = None
        self._port = 0
        self._ports = contextlib.ExitStack()
        """Reservations of the router's ports, until it is restarted or closed."""
        self._starting = ServerAddress("")
        self._wanted: dict[str, str] = {}
        """Key of each server, by URL."""
        self.address: ServerAddress | None = None
        """Address of the router once all wanted servers are behind it; None otherwise."""
        self._task = asyncio.create_task(self._supervise())

    def route_to(self, servers: tuple[ServerAddress, ...]) -> None:
        """Set the servers to route to."""
        self._wanted = {server.url: server.key(self._secret) for server in servers}

    async def _supervise(self) -> None:
        while True:
            try:
                if self._process is None or self._process.poll() is not None:
                    await self._start()
                if self._api is not None and await self._reconcile(self._api):
                    self._set_address(self._starting)
            except EngineError as error:
                self._set_address(None)
                log.warning("the router does not respond: %s", error)
            await asyncio.sleep(POLL_S)

    def _set_address(self, address: ServerAddress | None) -> None:
        if address != self.address:
            self.address = address
            self._changed()

    async def _start(self) -> None:
        if self._process is not None:
            log.warning("the router exited with code %s; restarting it", self._process.returncode)
        self._set_address(None)
        if self._api is not None:
            await self._api.close()
        self._ports.close()
        self._port, start = self._ports.enter_context(reserve_ports(self._host)), uuid.uuid4().hex
        metrics_port = self._ports.enter_context(reserve_ports(LOOPBACK))
        program = self._dialect.launch_router(self._host, self._port, metrics_port)
        file = self._folder / "router.json"
        self._process = spawn(program, file, self._log_file, env={API_KEY_VARIABLE: start_key(self._secret, start)})
        self._starting = ServerAddress(f"http://{host_and_port(self._host, self._port)}", start)
        self._api = self._starting.open(self._secret, timeout_s=ANSWER_S)

    async def _reconcile(self, api: HttpApi) -> bool:
        """Add and remove servers. Returns True once the router has exactly the wanted ones."""
        if not self.address and not listens_as_this_user(self._host, self._port):
            return False  # the router is starting, or another user took its port and would receive the servers' keys
        try:
            answer = await api.get("/workers")
        except EngineError:
            if self.address:
                raise
            return False  # the router is starting
        known = {worker["url"].rstrip("/"): worker for worker in answer["workers"]}
        for url in self._wanted.keys() - known.keys():
            with contextlib.suppress(EngineError):  # status 202: the router adds it later, which the next call checks
                await api.post("/workers", {"url": url, "api_key": self._wanted[url]})
        for url in known.keys() - self._wanted.keys():
            with contextlib.suppress(EngineError):
                await api.call("DELETE", f"/workers/{known[url]['id']}")
        healthy = {url for url, worker in known.items() if worker.get("is_healthy", True)}
        return bool(self._wanted) and healthy == self._wanted.keys()

    async def close(self) -> None:
        """Stop the router."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._api is not None:
            await self._api.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._ports.close()
