"""Attacks on the listening ports of a run by processes that know only the ports."""

import contextlib
import secrets
import socket
import stat
import time
from datetime import timedelta

import pytest

from tests.security.attacked_run import CONNECT_S, HELLO, is_store, run_parallel, sends_greeting, status, stores
from tests.security.live_runs import listening, reachable

OPEN = ("/health", "/metrics", "/ready")
"""Prefixes of paths of SGLang's servers that only report the server's health."""
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


def open_listeners(run):
    """Return listeners that another machine could reach."""
    return {place: run.ports()[place] for place in run.ports() if not reachable(place)[0].startswith(("127.", "::1"))}


@pytest.mark.parametrize("use_libuv", [True, False])
def test_the_attacker_recognises_a_store_of_torch(use_libuv):
    import torch.distributed as dist

    limit = timedelta(seconds=10)
    store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False, use_libuv=use_libuv)
    assert is_store("127.0.0.1", store.port)


def reply_to(host, port, said):
    """Return the first byte that the control channel sends to a client after its greeting; empty if it closes."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as sock:
        assert len(sock.recv(HELLO, socket.MSG_WAITALL)) == HELLO
        sock.settimeout(20)
        try:
            sock.sendall(said)
            return sock.recv(1)
        except ConnectionError:
            return b""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_process_of_a_run_with_sglang_listens_on_external_addresses(attacked):
    assert open_listeners(attacked.run) == {}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_port_of_a_run_with_sglang_is_an_unauthenticated_store(attacked):
    assert stores(attacked.run) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_weight_sync_messages_cannot_be_forged_without_the_key(attacked):
    channels = [place for place, found in run_parallel(sends_greeting, attacked.places).items() if found]
    assert channels, "no channel asks who connects"
    message = b'{"operation": "put", "queue": "x"}\n{}'
    frame = len(message).to_bytes(4, "big") + secrets.token_bytes(HELLO) + message
    for said in (secrets.token_bytes(2 * HELLO) + frame, frame * 3, bytes(2 * HELLO) + frame):
        assert {reply_to(*place, said) for place in channels} == {b""}
    attacked.run.train_more()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_idle_unauthenticated_connections_do_not_delay_a_weight_sync(attacked):
    channels = [place for place, found in run_parallel(sends_greeting, attacked.places).items() if found]
    assert channels, "no channel asks who connects"
    with contextlib.ExitStack() as stack:
        for place in channels * 600:
            stack.enter_context(socket.create_connection(place, timeout=CONNECT_S))
        assert all(sends_greeting(*place) for place in channels)
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
def test_servers_of_a_run_reject_unauthenticated_requests(attacked):
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
def test_the_router_rejects_unauthenticated_requests(attacked):
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
def test_public_endpoints_of_the_router_expose_no_keys_or_texts(attacked):
    place, metrics = attacked.router()
    keys = attacked.keys
    answers = run_parallel(status, [(*place, "GET", path) for path in ROUTER_STATUS_PATHS])
    answers |= run_parallel(status, [(*metrics, "GET", "/metrics"), (*metrics, "GET", "/")])
    assert answers[*metrics, "GET", "/metrics"][0] == 200
    for call, got in answers.items():
        assert got is not None, call
        assert not [key for key in keys if key.encode() in got[1]], call
        assert str(attacked.run.folder).encode() not in got[1], call


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_weights_of_a_sync_cannot_be_fetched_without_the_key(attacked):
    """Bucket servers listen only during syncs."""
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
def test_keys_of_a_run_are_not_readable_by_other_users(attacked):
    keys, run = attacked.keys, attacked.run
    assert len(keys) >= 3  # the server's two and the router's
    assert not [line for line in run.commands().values() if any(key in line for key in keys)]
    files = [path for path in run.folder.rglob("*") if path.is_file() and path.stat().st_mode & stat.S_IROTH]
    assert files
    assert not [path for path in files if any(key.encode() in path.read_bytes() for key in keys)]
