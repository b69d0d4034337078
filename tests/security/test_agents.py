"""Agents and strangers at the policy's server: no keys of the run, no turns of others, no request that stalls it."""

import asyncio
import contextlib
import gzip
import http.client
import importlib
import json
import resource
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from plasmid.errors import PluginError
from plasmid.protocols import RunContext
from plasmid.settings.validation import validate
from plasmid.testing.rewards import make_prompt
from plasmid_agents import Agent
from plasmid_agents.server import AgentServer
from plasmid_agents.session import Session
from plasmid_models.tokenizer import Tokenizer
from plasmid_workflows.execution import execute

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))
cases = importlib.import_module("agent_cases")
"""A policy that says what a test wrote down."""
KEYS = ("WANDB_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "MY_SEARCH_KEY")
TURN = b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}'
AGENT = """
import json, os, sys, urllib.request

def tell_environment(prompt=""):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body)).read()
    return json.dumps(sorted(os.environ))

def spoil_output(path, *, device):
    for name in ("out", "err"):  # under these names output has once been kept
        try:
            os.remove(os.path.join(path, name))
        except FileNotFoundError:
            pass
        if device:
            os.symlink("/dev/zero", os.path.join(path, name))
        else:
            os.mkfifo(os.path.join(path, name))

def forge(prompt):
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"[[[ no result\\n")
        except OSError:
            pass
    os._exit(0)

if __name__ == "__main__":
    tell_environment()
    if len(sys.argv) > 1:
        spoil_output(os.path.dirname(os.environ["PLASMID_PROMPT_FILE"]), device=sys.argv[1] == "device")
    print(json.dumps(sorted(os.environ)))
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(cases.make_chat_tokenizer(tmp_path_factory.mktemp("models") / "tokenizer"))


@pytest.fixture
def agent(tmp_path):
    path = tmp_path / "some_agent.py"
    path.write_text(AGENT)
    return path


def sample_of(tokenizer, settings):
    """The sample of one rollout by an agent."""

    async def main():
        workflow = validate(Agent, {"kind": "agent", **settings})
        await workflow.open(RunContext(seed=1, run_dir=Path()))
        try:
            rollout = cases.make_rollout(tokenizer, cases.ScriptedEngine(tokenizer, ["hello"]))
            (sample,) = await execute(workflow, rollout, replace(make_prompt("hi"), messages=()), 60.0)
            return sample
        finally:
            await workflow.close()

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["function", "command"])
def test_agents_get_no_keys_of_the_run(tokenizer, agent, monkeypatch, kind):
    for key in KEYS:
        monkeypatch.setenv(key, "secret")
    how = {"function": f"{agent}:tell_environment"} if kind == "function" else {"command": ["python", str(agent)]}
    names = json.loads(sample_of(tokenizer, how).text)
    assert not set(KEYS) & set(names)
    assert {"PATH", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "PLASMID_SEED"} <= set(names)
    named = json.loads(sample_of(tokenizer, {**how, "environment": ["MY_SEARCH_KEY"]}).text)
    assert set(KEYS) & set(named) == {"MY_SEARCH_KEY"}


def test_a_variable_that_is_named_and_not_set_is_an_error(tokenizer, agent, monkeypatch):
    monkeypatch.delenv("MY_SEARCH_KEY", raising=False)
    with pytest.raises(PluginError, match=r"workflow\.environment: MY_SEARCH_KEY is not set where the run was started"):
        sample_of(tokenizer, {"function": f"{agent}:tell_environment", "environment": ["MY_SEARCH_KEY"]})


def test_a_forged_result_is_the_error_of_one_sample(tokenizer, agent):
    sample = sample_of(tokenizer, {"function": f"{agent}:forge"})
    assert sample.error.startswith("the agent failed: its result cannot be read: JSONDecodeError")


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_an_agent_that_replaces_its_output_holds_up_no_rollout(tokenizer, agent, what):
    """Who opened the pipe would wait forever, with all rollouts; who read the device would take all memory."""
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (2 << 30), limit[1]))
    signal.alarm(60)
    try:
        sample = sample_of(tokenizer, {"command": ["python", str(agent), what]})
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert sample.error is None and "OPENAI_BASE_URL" in json.loads(sample.text)


@contextlib.asynccontextmanager
async def two_sessions(tokenizer):
    """A server with two sessions: (port, [session, session], [key, key])."""
    server = AgentServer(host="127.0.0.1", advertised="127.0.0.1")
    await server.start()
    sessions = [
        Session(cases.make_rollout(tokenizer, lambda text: "hello", name=f"5/{i}"), cases.make_rules())
        for i in range(2)
    ]
    with server.serving(sessions[0]) as (url, first), server.serving(sessions[1]) as (_, second):
        yield int(url.rsplit(":", 1)[1].partition("/")[0]), sessions, [first, second]
    for session in sessions:
        await session.close()
    await server.close()


def attack(tokenizer, attacker):
    """What an attacker in another thread does to two sessions, and how many turns each of them has then."""

    async def main():
        async with two_sessions(tokenizer) as (port, sessions, keys):
            found = await asyncio.to_thread(attacker, port, keys)
            assert [session.error for session in sessions] == [None, None]
            return found, [session.num_turns for session in sessions]

    return asyncio.run(main())


def post(port, path, body=TURN, **headers):
    """Status of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", path, body, headers={"Content-Type": "application/json", **headers})
        return connection.getresponse().status
    except (ConnectionError, http.client.RemoteDisconnected):
        return 0  # the server has closed the connection in the middle of the body
    finally:
        connection.close()


PATHS = ("chat/completions", "completions", "messages", "messages/count_tokens")


def test_a_stranger_without_a_key_gets_no_turn(tokenizer):
    def stranger(port, keys):
        made_up = ["", "0" * 32, keys[0][:-1], keys[0].upper() + "x", "..", "%2e", "Bearer " + keys[0], "None"]
        by_header = [post(port, f"/v1/{path}", **{"x-api-key": key}) for path in PATHS for key in made_up]
        by_url = [post(port, f"/{key}/v1/{path}".replace(" ", "%20")) for path in PATHS for key in made_up if key]
        return {*by_header, *by_url, *(post(port, f"/v1/{path}") for path in PATHS)}

    statuses, turns = attack(tokenizer, stranger)
    assert statuses <= {401, 404}
    assert turns == [0, 0]


def test_an_agent_cannot_take_turns_of_another_session(tokenizer):
    def agent(port, keys):
        mine = keys[0]
        assert len(mine) == 32 and mine != keys[1]
        own = post(port, f"/{mine}/v1/chat/completions")
        foreign = post(port, f"/{'0' * 32}/v1/chat/completions", **{"x-api-key": mine})
        return own, foreign

    (own, foreign), turns = attack(tokenizer, agent)
    assert (own, foreign) == (200, 401)
    assert turns == [1, 0]


def test_a_key_ends_with_its_session(tokenizer):
    async def main():
        server = AgentServer(host="127.0.0.1", advertised="127.0.0.1")
        await server.start()
        with server.serving(Session(cases.make_rollout(tokenizer, ["hello"]), cases.make_rules())) as (url, key):
            port = int(url.rsplit(":", 1)[1].partition("/")[0])
        status = await asyncio.to_thread(post, port, f"/{key}/v1/chat/completions")
        await server.close()
        return status

    assert asyncio.run(main()) == 401


def test_a_peer_does_not_reach_the_server_by_default(tokenizer):
    addresses = {
        one.address
        for found in psutil.net_if_addrs().values()
        for one in found
        if one.family is socket.AF_INET and not one.address.startswith("127.")
    }
    if not addresses:
        pytest.skip("this machine has the loopback only")

    def peer(port, keys):
        refused = []
        for address in addresses:
            try:
                socket.create_connection((address, port), 5).close()
            except OSError:
                refused.append(address)
        return set(refused)

    assert attack(tokenizer, peer)[0] == addresses


def test_bodies_that_exhaust_memory_are_refused(tokenizer):
    def agent(port, keys):
        path = f"/{keys[0]}/v1/chat/completions"
        bomb = gzip.compress(b" " * (64 << 20), 9)
        return [
            post(port, path, b" " * (17 << 20)),
            post(port, path, b"[" + b"[]," * (6 << 20) + b"[]]"),
            post(port, path, bomb, **{"Content-Encoding": "gzip"}),
            post(port, path),
        ]

    (large, arrays, bomb, good), _ = attack(tokenizer, agent)
    assert {large, arrays, bomb} <= {413, 0}
    assert good == 200


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_no_parser_takes_are_refused(tokenizer, path):
    bodies = [
        b"[" * 200_000,
        b'{"messages": ' + b'{"a":' * 200_000,
        b'{"max_tokens": 1' + b"0" * 5000 + b"}",
        TURN.replace(b"hi", b"\\ud800"),
        b'{"prompt": "\\uDC00"}',
        b"\xff\xfe",
        b"",
        b"[]",
        b"null",
    ]

    def agent(port, keys):
        url = f"/{keys[0]}/v1/{path}"
        return [post(port, url, body) for body in bodies]

    statuses, turns = attack(tokenizer, agent)
    assert statuses == [400] * len(bodies)
    assert turns == [0, 0]


def test_endless_headers_are_refused(tokenizer):
    def stranger(port, keys):
        answers = []
        for request in (
            b"GET /v1/models HTTP/1.1\r\n" + b"".join(b"a%d: x\r\n" % i for i in range(50_000)),
            b"GET /" + b"a" * (1 << 20),
        ):
            with socket.create_connection(("127.0.0.1", port), 10) as one, contextlib.suppress(OSError):
                one.sendall(request)
                answers.append(one.recv(12))
        return answers, post(port, f"/{keys[0]}/v1/chat/completions")

    (answers, good), _ = attack(tokenizer, stranger)
    assert all(answer in (b"", b"HTTP/1.0 400", b"HTTP/1.1 400") for answer in answers)
    assert good == 200


def test_requests_that_are_no_http_leave_no_traceback_in_the_log(tokenizer, caplog):
    def stranger(port, keys):
        for request in (
            b"\xff\xfe\r\n\r\n",
            b"POST /\xff HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port), 10) as one:
                one.sendall(request)
                assert one.recv(12) == b"HTTP/1.0 400"
        return post(port, f"/{keys[0]}/v1/chat/completions")

    assert attack(tokenizer, stranger)[0] == 200
    assert not [record for record in caplog.records if record.exc_info]
