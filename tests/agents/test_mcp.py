"""Tools of MCP servers: listing, calls with a deadline, size limits, and restart after they end."""

import asyncio
import json
import os
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from agent_cases import ScriptedEngine, make_rollout
from plasmid.components.interaction import ToolError
from plasmid.errors import ConfigError
from plasmid.protocols import RunContext
from plasmid.settings.validation import validate
from plasmid.testing.rewards import make_prompt
from plasmid_agents.mcp.tool import Mcp
from plasmid_workflows import CalculatorTool, Tools
from plasmid_workflows.execution import execute

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(os.environ.get("PLASMID_ENVIRONMENTS", ROOT / "build" / "environments"))
SERVER = """
import json, os, sys, time

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
NAMES = sys.argv[1].split(",") if len(sys.argv) > 1 else ["add", "fail", "hang", "flood", "die", "environment"]

def answer(method, params):
    if method == "initialize":
        about = {"name": "x", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        first = 0 if not params else int(params["cursor"])
        more = {"nextCursor": str(first + 2)} if first + 2 < len(NAMES) else {}
        page = [{"name": n, "description": "does " + n, "inputSchema": SCHEMA} for n in NAMES[first:first + 2]]
        return {"tools": page, **more}
    name, given = params["name"], params["arguments"]
    if name == "add":
        return {"content": [{"type": "text", "text": str(given["a"] + given["b"])}, {"type": "image", "data": "x"}]}
    if name == "fail":
        return {"content": [{"type": "text", "text": "no luck"}], "isError": True}
    if name == "hang":
        time.sleep(600)
    if name == "flood":
        return {"content": [{"type": "text", "text": "x" * 100000}]}
    if name == "environment":
        return {"content": [{"type": "text", "text": json.dumps(sorted(os.environ))}]}
    os._exit(3)

def serve(message):
    if "id" not in message:
        return None
    try:
        return {"jsonrpc": "2.0", "id": message["id"], "result": answer(message["method"], message.get("params"))}
    except KeyError as error:
        return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32602, "message": f"missing {error}"}}

if __name__ == "__main__":
    print('{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}', flush=True)
    print('{"jsonrpc": "2.0", "id": 999, "result": {}}', flush=True)
    for line in sys.stdin:
        if (reply := serve(json.loads(line))) is not None:
            print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def server(tmp_path) -> list[str]:
    (tmp_path / "server.py").write_text(SERVER)
    return [sys.executable, str(tmp_path / "server.py")]


def with_tool(settings, use):
    """Return the result of ``use`` with a connected server and its tools."""

    async def main():
        tool = validate(Mcp, {"kind": "mcp", **settings})
        try:
            return await use(tool, await tool.connect())
        finally:
            await tool.disconnect()

    return asyncio.run(main())


def test_tools_are_listed_and_called(server):
    async def use(tool, listed):
        assert [one["function"]["name"] for one in listed] == ["add", "fail", "hang", "flood", "die", "environment"]
        assert listed[0]["function"]["parameters"]["required"] == ["a", "b"]
        return await asyncio.gather(*(tool.call("add", {"a": i, "b": 1}) for i in range(3)))

    assert with_tool({"command": server}, use) == [f"{i + 1}\n(image left out)" for i in range(3)]


def test_tool_errors_are_returned_to_the_policy(server):
    async def use(tool, listed):
        with pytest.raises(ToolError, match="no luck"):
            await tool.call("fail", {})
        with pytest.raises(ToolError, match="missing 'a'"):
            await tool.call("add", {})

    with_tool({"command": server}, use)


def test_a_server_that_ends_is_started_anew(server):
    async def use(tool, listed):
        with pytest.raises(ToolError, match="the server of the tool failed: the program has ended"):
            await tool.call("die", {})
        return await tool.call("add", {"a": 1, "b": 1})

    assert with_tool({"command": server}, use).startswith("2")


def test_a_message_that_is_too_large_ends_the_connection(server):
    async def use(tool, listed):
        with pytest.raises(ToolError, match=r"cannot read a message: .*limit"):
            await tool.call("flood", {})
        return await tool.call("add", {"a": 1, "b": 1})

    assert with_tool({"command": server, "max_message_bytes": 4096}, use).startswith("2")


def test_the_program_gets_no_keys_of_the_run(server, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("SEARCH_KEY", "mine")

    async def use(tool, listed):
        return json.loads(await tool.call("environment", {}))

    names = with_tool({"command": server, "environment": ["SEARCH_KEY"]}, use)
    assert "SEARCH_KEY" in names and "WANDB_API_KEY" not in names


@pytest.mark.parametrize(
    ("settings", "names", "error"),
    [
        ({"only": ["divide"]}, "add", "it has no tool 'divide'; it has add"),
        ({}, "add,bad name", "it offers a tool named 'bad name'"),
        ({}, ",".join(f"t{i}" for i in range(60)), "offers 60 tools"),
        ({"environment": ["NOT_SET"]}, "add", "NOT_SET is not set"),
    ],
)
def test_servers_that_cannot_be_used_end_the_run(server, settings, names, error, monkeypatch):
    monkeypatch.setattr("plasmid_agents.mcp.tool.MAX_TOOLS", 50)

    async def use(tool, listed):
        raise AssertionError("it can be used")

    with pytest.raises(ConfigError, match=error):
        with_tool({"command": [*server, names], **settings}, use)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "set either command"),
        ({"command": ["no-such-program"]}, "command: no such program: no-such-program"),
        ({"url": "localhost:1"}, "url must begin with http://"),
    ],
)
def test_settings_are_checked(settings, error):
    with pytest.raises(ConfigError, match=error):
        validate(Mcp, {"kind": "mcp", **settings})


def roll_out(tokenizer, tools, calls, **settings):
    """Return the sample of a policy that makes these calls, one per turn, and then answers that it is done."""
    script = [f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls]

    async def main():
        workflow = Tools(tools=tuple(tools), workers=1, **settings)
        await workflow.open(RunContext(seed=1, run_dir=Path()))
        try:
            chat = replace(make_prompt("add"), messages=({"role": "user", "content": "add"},))
            run = make_rollout(tokenizer, ScriptedEngine(tokenizer, [*script, "done"]), max_length=8000)
            (sample,) = await execute(workflow, run, chat, 60.0)
            return sample
        finally:
            await workflow.close()

    return asyncio.run(main())


def test_a_policy_calls_tools_of_a_server_beside_others(tokenizer, server):
    tools = [CalculatorTool(), Mcp(command=tuple(server), only=("add", "fail", "hang"))]
    calls = [("add", {"a": 2, "b": 3}), ("fail", {}), ("calculate", {"expression": "6*7"}), ("hang", {})]
    sample = roll_out(tokenizer, tools, calls, call_timeout_s=1.0)
    assert (sample.error, sample.text) == (None, "done")
    told = [m["content"] for m in sample.metadata["messages"] if m["role"] == "tool"]
    assert told == ["5\n(image left out)", "error: no luck", "42", "error: no answer within call_timeout_s = 1"]
    assert (sample.metadata["calls"], sample.metadata["failed_calls"]) == (4, 2)
    assert "does add" in tokenizer.decode(sample.token_ids)


def test_two_tools_of_one_name_are_refused(tokenizer, server):
    tools = [Mcp(command=tuple(server), only=("add",)), Mcp(command=tuple(server), only=("add",))]
    with pytest.raises(ConfigError, match="two tools are named 'add'"):
        roll_out(tokenizer, tools, [])


@pytest.mark.parametrize("events", [False, True])
def test_a_server_is_reached_by_its_url(monkeypatch, events):
    monkeypatch.setattr("sys.argv", ["server"])
    module: dict = {"__name__": "server"}
    exec(SERVER, module)
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            """Log nothing."""

        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append((message["method"], self.headers["authorization"], self.headers["mcp-session-id"]))
            reply = module["serve"](message)
            body = b"" if reply is None else json.dumps(reply).encode()
            if events and body:
                body = b'event: message\ndata: {"method": "notifications/progress"}\n\ndata: ' + body + b"\n\n"
            self.send_response(202 if reply is None else 200)
            self.send_header("content-type", "text/event-stream" if events else "application/json")
            self.send_header("mcp-session-id", "s1")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    monkeypatch.setenv("TOKEN", "secret")

    async def use(tool, listed):
        assert len(listed) == 6
        with pytest.raises(ToolError, match="more than 4096 bytes"):
            await tool.call("flood", {})
        return await tool.call("add", {"a": 1, "b": 2})

    url = f"http://127.0.0.1:{http.server_port}/mcp"
    assert with_tool({"url": url, "token": "TOKEN", "max_message_bytes": 4096}, use).startswith("3")
    assert seen[0] == ("initialize", "Bearer secret", None)
    assert seen[1] == ("notifications/initialized", "Bearer secret", "s1")
    http.shutdown()


OFFICIAL = '''
import sys
from mcp.server import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a < 0:
        raise ValueError("too small")
    return a + b

if len(sys.argv) > 1:
    server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run()
'''


@pytest.mark.long
@pytest.mark.parametrize("by", ["command", "url"])
def test_a_server_of_the_official_library(tmp_path, by):
    import socket
    import subprocess
    import time

    python = ENVIRONMENTS / "mcp" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python}; make environments builds it")
    (tmp_path / "server.py").write_text(OFFICIAL)
    command = [str(python), str(tmp_path / "server.py")]
    process, settings = None, {"command": command, "start_timeout_s": 120.0}
    if by == "url":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen([*command, str(port)])
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        settings = {"url": f"http://127.0.0.1:{port}/mcp"}

    async def use(tool, listed):
        (one,) = listed
        assert one["function"]["description"] == "Add two numbers."
        assert set(one["function"]["parameters"]["properties"]) == {"a", "b"}
        with pytest.raises(ToolError):
            await tool.call("add", {"a": -1, "b": 3})
        return await tool.call("add", {"a": 2, "b": 3})

    try:
        assert with_tool(settings, use) == "5"
    finally:
        if process is not None:
            process.kill()
            process.wait()
