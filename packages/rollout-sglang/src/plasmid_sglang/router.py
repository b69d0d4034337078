"""SGLang's router in front of the servers: a child process that is watched, started anew, and told who serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plasmid.errors import EngineError
from plasmid.safe_files import append_private, write_text

from .api import Api
from .launch import API_KEY_VARIABLE
from .process import address_to_listen_on, free_port

log = logging.getLogger(__name__)
LOOK_S = 0.5
ANSWER_S = 10.0


class Router:
    """Keeps a router running that knows exactly the servers of `route_to`. Used on one event loop."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        host: str,
        api_key: str,
        folder: Path,
        log_file: Path,
        changed: Callable[[], None],
    ) -> None:
        """The router and its servers have one API key. ``changed`` is called when it comes up or goes away."""
        self._arguments, self._folder, self._log_file = dict(arguments), folder, log_file
        self._host, self._key = address_to_listen_on(host), api_key
        self._changed = changed
        self._process: subprocess.Popen[bytes] | None = None
        self._api: Api | None = None
        self._wanted: frozenset[str] = frozenset()
        self._task: asyncio.Task[None] | None = None
        self.url = ""
        """Where it answers, with all wanted servers behind it; empty while it does not."""

    def begin(self) -> None:
        """Start it, and look after it until `close`."""
        self._task = asyncio.create_task(self._look_after())

    def route_to(self, urls: tuple[str, ...]) -> None:
        """Who serves from now on."""
        self._wanted = frozenset(urls)

    async def _look_after(self) -> None:
        while True:
            try:
                if self._process is None or self._process.poll() is not None:
                    await self._start()
                if await self._reconcile():
                    self._is_up(self._api.url if self._api is not None else "")
            except EngineError as error:
                self._is_up("")
                log.warning("the router does not answer: %s", error)
            await asyncio.sleep(LOOK_S)

    def _is_up(self, url: str) -> None:
        if url != self.url:
            self.url = url
            self._changed()

    async def _start(self) -> None:
        if self._process is not None:
            log.warning("the router ended with code %s; it is started anew", self._process.returncode)
        self._is_up("")
        if self._api is not None:
            await self._api.close()
        port = free_port(self._host)
        own = {"host": self._host, "port": port, "worker_urls": []}
        own |= {"prometheus_host": self._host, "prometheus_port": free_port(self._host)}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        file = self._folder / "router.json"
        write_text(file, json.dumps({**self._arguments, **own}, indent=1))
        with append_private(self._log_file) as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "plasmid_sglang.launch", "router", str(os.getpid()), str(file)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, API_KEY_VARIABLE: self._key},
            )
        self._api = Api(f"http://{self._host}:{port}", self._key)

    async def _reconcile(self) -> bool:
        """Add and remove servers; True once the router has those that are wanted, and no other."""
        assert self._api is not None
        try:
            answer = await self._api.get("/workers", timeout_s=ANSWER_S)
        except EngineError:
            if self.url:
                raise
            return False  # it is starting
        known = {worker["url"].rstrip("/"): worker for worker in answer["workers"]}
        for url in self._wanted - known.keys():
            with contextlib.suppress(EngineError):  # 202: it takes its time, and we look again
                await self._api.post("/workers", {"url": url, "api_key": self._key}, timeout_s=ANSWER_S)
        for url in known.keys() - self._wanted:
            with contextlib.suppress(EngineError):
                await self._api.delete(f"/workers/{known[url]['id']}", timeout_s=ANSWER_S)
        healthy = {url for url, worker in known.items() if worker.get("is_healthy", True)}
        return bool(self._wanted) and healthy == self._wanted

    async def close(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._api is not None:
            await self._api.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
