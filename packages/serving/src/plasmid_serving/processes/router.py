"""The router in front of the servers: a child process that is supervised, restarted, and told who serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path

from plasmid.errors import EngineError
from plasmid.utils.addresses import LOOPBACK

from ..api import HttpApi
from ..dialect import Dialect
from .launch import API_KEY_VARIABLE
from .server import address_to_listen_on, free_port, spawn

log = logging.getLogger(__name__)
POLL_S = 0.5
ANSWER_S = 10.0


class Router:
    """Keeps a router running that has exactly the servers of `route_to`. Use it on one event loop."""

    def __init__(
        self, dialect: Dialect, host: str, api_key: str, *, folder: Path, log_file: Path, changed: Callable[[], None]
    ) -> None:
        """The router and its servers share one API key. ``changed`` is called when it comes up or goes away."""
        self._dialect, self._folder, self._log_file = dialect, folder, log_file
        self._host, self._key = address_to_listen_on(host), api_key
        self._changed = changed
        self._process: subprocess.Popen[bytes] | None = None
        self._api: HttpApi | None = None
        self._wanted: frozenset[str] = frozenset()
        self.url = ""
        """Where it answers, with all wanted servers behind it; empty while it does not."""
        self._task = asyncio.create_task(self._supervise())

    def route_to(self, urls: tuple[str, ...]) -> None:
        """Set the servers to route to."""
        self._wanted = frozenset(urls)

    async def _supervise(self) -> None:
        while True:
            try:
                if self._process is None or self._process.poll() is not None:
                    await self._start()
                if self._api is not None and await self._reconcile(self._api):
                    self._set_url(self._api.url)
            except EngineError as error:
                self._set_url("")
                log.warning("the router does not answer: %s", error)
            await asyncio.sleep(POLL_S)

    def _set_url(self, url: str) -> None:
        if url != self.url:
            self.url = url
            self._changed()

    async def _start(self) -> None:
        if self._process is not None:
            log.warning("the router ended with code %s; it is started anew", self._process.returncode)
        self._set_url("")
        if self._api is not None:
            await self._api.close()
        port = free_port(self._host)
        program = self._dialect.launch_router(self._host, port, free_port(LOOPBACK))
        file = self._folder / "router.json"
        self._process = spawn(program, file, self._log_file, env={API_KEY_VARIABLE: self._key})
        self._api = HttpApi(f"http://{self._host}:{port}", self._key, timeout_s=ANSWER_S)

    async def _reconcile(self, api: HttpApi) -> bool:
        """Add and remove servers. True once the router has exactly those that are wanted."""
        try:
            answer = await api.get("/workers")
        except EngineError:
            if self.url:
                raise
            return False  # it is starting
        known = {worker["url"].rstrip("/"): worker for worker in answer["workers"]}
        for url in self._wanted - known.keys():
            with contextlib.suppress(EngineError):  # 202: it takes time, and we look again
                await api.post("/workers", {"url": url, "api_key": self._key})
        for url in known.keys() - self._wanted:
            with contextlib.suppress(EngineError):
                await api.call("DELETE", f"/workers/{known[url]['id']}")
        healthy = {url for url, worker in known.items() if worker.get("is_healthy", True)}
        return bool(self._wanted) and healthy == self._wanted

    async def close(self) -> None:
        """Stop it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._api is not None:
            await self._api.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
