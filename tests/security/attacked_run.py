"""A run with SGLang servers that is attacked during weight syncs, and what the ports and sockets of a run answer."""

import contextlib
import http.client
import json
import os
import re
import secrets
import socket
import stat
import struct
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.security.live_runs import listening, reachable

RECIPE = """
model.path = "{model}"
data.path = "prompts.jsonl"
trainer = {{ kind = "fsdp", lr = 1e-3 }}
algorithm.kind = "grpo"
rewards = [{{ kind = "random" }}]
sampling.max_new_tokens = 4
checkpoint = {{ at_end = false, export = false }}
run = {{ batches = 10000, prompts_per_batch = 2, samples_per_prompt = 4, dir = "run" }}
placement = {{ device = "cpu", trainer_ranks = 2, rollout_workers = 1, threads = 1, start_timeout_s = 900 }}

[rollout]
kind = "sglang"
dtype = "float32"
wire = "http"
bucket_bytes = 4096
router = true
server_args = {{ max_total_tokens = 4096 }}
"""
"""Small buckets make a weight sync take long enough to be attacked."""
CONNECT_S = 5
SILENCE_S = 2
HELLO = 32
"""Length of the random number with which the control channel of weight syncs greets, in bytes."""


def run_parallel(function, targets):
    """Return the results by target."""
    targets = list(targets)
    with ThreadPoolExecutor(32) as pool:
        return dict(zip(targets, pool.map(lambda target: function(*target), targets), strict=True))


def status(host, port, method, path, headers=()):
    """Return status and body of an HTTP answer; None if there is no HTTP server."""
    connection = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
    try:
        connection.putrequest(method, path, skip_host=any(name == "Host" for name, _ in headers))
        for name, value in (("Content-Type", "application/json"), ("Content-Length", "2"), *headers):
            connection.putheader(name, value)
        connection.endheaders(b"{}")
        answer = connection.getresponse()
        return answer.status, answer.read() if answer.length else b""
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def sends_greeting(host, port):
    """Return True if the listener sends the greeting of the control channel."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as sock:
            sock.settimeout(SILENCE_S)
            return len(sock.recv(2 * HELLO)) == HELLO
    except OSError:
        return False


class Recorder(threading.Thread):
    """Records the first bytes of each TCP connection on the loopback interface. Needs root."""

    LIMIT = 1 << 20

    def __init__(self):
        super().__init__(daemon=True)
        self.said = defaultdict(bytes)
        """(port of the sender, port of the listener) -> bytes."""
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.bind(("lo", 0x0800))

    def run(self):
        while True:
            packet = self._socket.recv(1 << 17)
            if packet[9] != socket.IPPROTO_TCP:
                continue
            start = (packet[0] & 15) * 4
            ports = struct.unpack_from("!HH", packet, start)
            if len(self.said[ports]) < self.LIMIT:
                self.said[ports] += packet[start + (packet[start + 12] >> 4) * 4 :]


class Attacked:
    """A run with SGLang servers: its ports, and the keys that its user can read."""

    def __init__(self, run, recorder):
        self.run, self.recorder, self._keys = run, recorder, set()
        run.wait_for(self._has_router)  # a run samples without it until it has started

    @property
    def keys(self):
        """Keys that only the user of the run can read."""
        return sorted(self._keys - set(os.environ.values()))

    @property
    def places(self):
        """(host, port) of each listener."""
        return [place for place in map(reachable, self.run.ports()) if ":" not in place[0]]

    def servers(self):
        """Return [(host, port), list of "METHOD path"] of SGLang's servers, which list their paths to clients with the
        key."""
        headers = [(("Authorization", f"Bearer {key}"),) for key in ["", *self.keys]]
        listed = run_parallel(
            status, [(*place, "GET", "/openapi.json", one) for place in self.places for one in headers]
        )
        for target, answer in listed.items():
            if answer is not None and answer[0] == 200 and answer[1].startswith(b"{"):
                paths = json.loads(answer[1])["paths"]
                yield target[:2], [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]

    def router(self):
        """Return (host, port) of the router's API and of its metrics."""
        self.run.wait_for(self._has_router)
        places = [reachable(place) for place in self._router_ports()]
        metrics = [place for place in places if (status(*place, "GET", "/metrics") or (0,))[0] == 200]
        assert len(places) == 2 and len(metrics) == 1, places
        return next(place for place in places if place not in metrics), metrics[0]

    def _has_router(self):
        """Return True if the router listens. Reads keys meanwhile: its title later overwrites its environment."""
        for process in self.run.processes():
            self._keys.update(value for value in variables(process) if len(value) > 30)
        return len(self._router_ports()) == 2

    def _router_ports(self):
        commands = self.run.commands().items()
        routers = [process for process, command in commands if re.search("::router|launch:route", command)]
        return [place for process in routers for place in listening(process)]


def variables(process):
    """Return the values of a process's environment variables whose names look like keys."""
    try:
        return [value for name, value in process.environ().items() if name.endswith("_KEY")]
    except psutil.Error:
        return []


def is_store(host, port):
    """Return True if torch's key-value store answers at this port: its keys can then be listed and changed.

    Uses its protocol directly, because torch's own client can hang for minutes at other ports, whatever its timeout is.
    """
    validate, ping, nonce = struct.pack("=BI", 0, 0x3C85F7CE), b"\x0d", secrets.token_bytes(4)
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as sock:
            sock.settimeout(SILENCE_S)
            sock.sendall(validate + ping + nonce)
            return sock.recv(4, socket.MSG_WAITALL) == nonce
    except OSError:
        return False


def outer_addresses():
    found = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    return [address.address for address in found if address.family == socket.AF_INET]


def stores(run):
    ports = {port for _, port in run.ports()}
    found = run_parallel(is_store, [(host, port) for port in ports for host in outer_addresses()])
    return sorted(target for target, is_one in found.items() if is_one)


def sockets(run):
    """Return the names of the Unix sockets of a run's processes; those without a file begin with a zero byte or `@`."""
    found = set()
    for process in run.processes():
        with contextlib.suppress(psutil.Error):
            found.update(one.laddr for one in process.net_connections("unix") if one.laddr)
    short = {
        name for name in found if name.startswith("/proc/self/fd/")
    }  # paths through descriptors that are closed by now
    return found - short | {str(path) for name in short for path in run.folder.rglob(Path(name).name)}


def is_open_to_others(name):
    """Return True if a process of another user can connect."""
    path = Path(name)
    if not path.is_absolute():
        return True
    try:
        return bool(path.stat().st_mode & stat.S_IWOTH) and all(p.stat().st_mode & stat.S_IXOTH for p in path.parents)
    except FileNotFoundError:
        return False
