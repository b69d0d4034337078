"""Attacks on what a run listens to, by processes that know only its ports."""

import http.client
import json
import os
import re
import secrets
import socket
import stat
import struct
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.util import find_spec

import psutil
import pytest

from tests.security.live_runs import listening, reachable, start, write_prompts

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
"""Bytes of the random number by which the control channel of weight syncs sends_greeting."""
OPEN = ("/health", "/metrics", "/ready")
"""Prefixes of the paths of SGLang's servers that report only the server's health."""
ROUTER_PATHS = """
POST /generate
POST /v1/chat/completions
POST /v1/completions
POST /v1/responses
GET /v1/responses/x
DELETE /v1/responses/x
POST /v1/responses/x/cancel
POST /v1/conversations
GET /v1/conversations/x
POST /v1/embeddings
POST /v1/classify
POST /v1/rerank
POST /rerank
POST /v1/tokenize
POST /v1/detokenize
GET /v1/tokenizers
POST /v1/tokenizers
DELETE /v1/tokenizers/x
GET /workers
POST /workers
GET /workers/x
PUT /workers/x
DELETE /workers/x
POST /flush_cache
GET /get_loads
GET /wasm
POST /wasm
DELETE /wasm/x
POST /parse/reasoning
POST /parse/function_call
GET /ha/status
GET /ha/workers
POST /ha/config
POST /ha/rate-limit
POST /ha/shutdown
"""
"""Paths of SGLang's router, which publishes no list of them."""
ROUTER_STATUS_PATHS = (
    *("/health", "/health_generate", "/liveness", "/readiness", "/engine_metrics"),
    *("/v1/models", "/get_model_info", "/get_server_info"),
)
"""Paths of the router that need no key."""


def run_parallel(function, targets):
    """Results, by target."""
    targets = list(targets)
    with ThreadPoolExecutor(32) as pool:
        return dict(zip(targets, pool.map(lambda target: function(*target), targets), strict=True))


def is_store(host, port):
    """True if torch's key-value store answers there, by its protocol: then its keys can be listed and changed.

    Torch's own client can hang for minutes at the ports of others, whatever its timeout is.
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


def open_listeners(run):
    """Those that another machine could reach."""
    return {place: run.ports()[place] for place in run.ports() if not reachable(place)[0].startswith(("127.", "::1"))}


@pytest.mark.parametrize("use_libuv", [True, False])
def test_the_attacker_recognises_a_store_of_torch(use_libuv):
    import torch.distributed as dist

    limit = timedelta(seconds=10)
    store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False, use_libuv=use_libuv)
    assert is_store("127.0.0.1", store.port)


def test_no_port_of_a_run_is_a_store_that_strangers_can_read(running):
    assert len(running.ports()) >= 6
    assert stores(running) == []


def status(host, port, method, path, headers=()):
    """Status and body of an HTTP answer; None where there is no HTTP server."""
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
    """True if the listener sends the greeting of the control channel."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as sock:
            sock.settimeout(SILENCE_S)
            return len(sock.recv(2 * HELLO)) == HELLO
    except OSError:
        return False


def reply_to(host, port, said):
    """First byte that the control channel sends after its greeting to a client that sends this; empty if it closes."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as sock:
        assert len(sock.recv(HELLO, socket.MSG_WAITALL)) == HELLO
        sock.settimeout(20)
        try:
            sock.sendall(said)
            return sock.recv(1)
        except ConnectionError:
            return b""


class Recorder(threading.Thread):
    """Records the first bytes of each TCP connection on the loopback. Needs root."""

    LIMIT = 1 << 20

    def __init__(self):
        super().__init__(daemon=True)
        self.said = defaultdict(bytes)
        """(port of the speaker, port of the listener) -> bytes."""
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
        self.run, self.recorder = run, recorder
        own = set(os.environ.values())
        found = {value for one in run.processes() for value in variables(one) if len(value) > 30}
        self.keys = sorted(found - own)
        """As the user of the run, and nobody else, can read them."""
        self.places = [reachable(place) for place in run.ports() if ":" not in reachable(place)[0]]

    def servers(self):
        """[(host, port), list of "METHOD path"] of SGLang's servers, which list their paths to who has the key."""
        headers = [(("Authorization", f"Bearer {key}"),) for key in ["", *self.keys]]
        listed = run_parallel(
            status, [(*place, "GET", "/openapi.json", one) for place in self.places for one in headers]
        )
        for target, answer in listed.items():
            if answer is not None and answer[0] == 200 and answer[1].startswith(b"{"):
                paths = json.loads(answer[1])["paths"]
                yield target[:2], [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]

    def router(self):
        """(host, port) of the router's API and of its metrics."""
        self.run.wait_for(lambda: len(self._router_ports()) == 2)  # a run samples without it until it is up
        places = [reachable(place) for place in self._router_ports()]
        metrics = [place for place in places if (status(*place, "GET", "/metrics") or (0,))[0] == 200]
        assert len(places) == 2 and len(metrics) == 1, places
        return next(place for place in places if place not in metrics), metrics[0]

    def _router_ports(self):
        commands = self.run.commands().items()
        routers = [process for process, command in commands if re.search("::router|launch:route", command)]
        return [place for process in routers for place in listening(process)]


def variables(process):
    """Values of a process's variables whose names say that they are keys."""
    try:
        return [value for name, value in process.environ().items() if name.endswith("_KEY")]
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def attacked(tmp_path_factory, tiny_model):
    """A run that syncs its weights to an SGLang server behind a router until the attacks are over."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; `make dev` does that")
    folder = tmp_path_factory.mktemp("run")
    write_prompts(folder, 40)
    (folder / "job.toml").write_text(RECIPE.format(model=tiny_model))
    recorder = None
    if os.getuid() == 0:
        recorder = Recorder()
        recorder.start()
    run = start(folder, "data.epochs=10000")
    try:
        run.train_more()
        yield Attacked(run, recorder)
    finally:
        run.end()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_part_of_a_run_with_sglang_listens_where_others_reach_it(attacked):
    assert open_listeners(attacked.run) == {}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_port_of_a_run_with_sglang_is_a_store_that_strangers_can_read(attacked):
    assert stores(attacked.run) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_stranger_cannot_forge_messages_of_weight_syncs(attacked):
    channels = [place for place, found in run_parallel(sends_greeting, attacked.places).items() if found]
    assert channels, "no channel asks who connects"
    message = b'{"operation": "put", "queue": "x"}\n{}'
    frame = len(message).to_bytes(4, "big") + secrets.token_bytes(HELLO) + message
    for said in (secrets.token_bytes(2 * HELLO) + frame, frame * 3, bytes(2 * HELLO) + frame):
        assert {reply_to(*place, said) for place in channels} == {b""}
    attacked.run.train_more()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_peer_cannot_replay_recorded_messages_of_weight_syncs(attacked):
    if attacked.recorder is None:
        pytest.skip("only root can record what others say")
    channels = [place for place, found in run_parallel(sends_greeting, attacked.places).items() if found]
    assert channels, "no channel asks who connects"
    recorded = dict(attacked.recorder.said)
    for host, port in channels:
        conversations = [said for (_, to), said in recorded.items() if to == port and len(said) > 4 * HELLO]
        assert len(conversations) >= 2
        assert {reply_to(host, port, said) for said in conversations} == {b""}
    attacked.run.train_more()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_stranger_cannot_call_the_servers_of_a_run(attacked):
    servers = list(attacked.servers())
    assert servers
    wrong = (("Authorization", f"Bearer {secrets.token_urlsafe(32)}"),)
    disguised = (("Host", "localhost/health?"),)
    upgrade = (("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"))
    upgrade += (("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="),)
    for place, paths in servers:
        calls = [tuple(path.replace("{", "").replace("}", "").split(" ")) for path in paths]
        calls = [(method, path) for method, path in calls if not path.startswith(OPEN)]
        assert len(calls) > 30 and ("POST", "/update_weights_from_tensor") in calls
        answers = run_parallel(status, [(*place, *call, given) for call in calls for given in ((), wrong, disguised)])
        assert {call: got for call, got in answers.items() if got is None or got[0] not in (401, 403)} == {}
        assert (status(*place, "GET", "/v1/realtime", upgrade) or (0,))[0] != 101
    attacked.run.train_more()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_stranger_cannot_call_the_router_of_a_run(attacked):
    place, _ = attacked.router()
    calls = [tuple(line.split()) for line in ROUTER_PATHS.split("\n") if line]
    wrong = (("Authorization", f"Bearer {secrets.token_urlsafe(32)}"),)
    disguised = (("Host", "localhost/health?"),)
    answers = run_parallel(status, [(*place, *call, given) for call in calls for given in ((), wrong, disguised)])
    assert {call: got for call, got in answers.items() if got is None or got[0] not in (401, 403, 404)} == {}
    right = [(("Authorization", f"Bearer {key}"),) for key in attacked.keys]
    listed = [status(*place, "GET", "/workers", given) for given in right]
    assert any(got is not None and got[0] == 200 for got in listed), "no key of the run opens the router"
    attacked.run.train_more()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_a_router_publishes_holds_no_key_and_no_text(attacked):
    place, metrics = attacked.router()
    answers = run_parallel(status, [(*place, "GET", path) for path in ROUTER_STATUS_PATHS])
    answers |= run_parallel(status, [(*metrics, "GET", "/metrics"), (*metrics, "GET", "/")])
    assert answers[*metrics, "GET", "/metrics"][0] == 200
    for call, got in answers.items():
        assert got is not None, call
        assert not [key for key in attacked.keys if key.encode() in got[1]], call
        assert str(attacked.run.folder).encode() not in got[1], call


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_stranger_cannot_fetch_the_weights_of_a_sync(attacked):
    """Servers of buckets listen during syncs only."""
    known, answers, deadline = set(attacked.run.ports()), [], time.monotonic() + 120
    trainers = [process for process, command in attacked.run.commands().items() if command.startswith("ray::")]
    assert trainers
    while len(answers) < 10 and time.monotonic() < deadline:
        for place in {place for one in trainers for place in listening(one)} - known:
            guesses = ("/", "/0", "/1", f"/{secrets.token_hex(16)}/0", "/../0", "//0", "/*/0")
            answers += [got for path in guesses if (got := status(*reachable(place), "GET", path))]
    assert len(answers) >= 10
    assert {code for code, _ in answers} == {404}
    attacked.run.train_more()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_keys_of_a_run_are_nowhere_where_others_can_read_them(attacked):
    assert len(attacked.keys) >= 2
    run = attacked.run
    assert not [line for line in run.commands().values() if any(key in line for key in attacked.keys)]
    files = [path for path in run.folder.rglob("*") if path.is_file() and path.stat().st_mode & stat.S_IROTH]
    assert files
    assert not [path for path in files if any(key.encode() in path.read_bytes() for key in attacked.keys)]
