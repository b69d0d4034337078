"""A server that listens, as SGLang's does, and stays alive if it cannot."""

import asyncio
import select
import signal
import sys
import time
from pathlib import Path

from plasmid_serving.processes.launch import wait_until_allowed


def serve(arguments):
    """Listen, then write the server's name into a file."""
    asyncio.run(listen(**arguments))


async def listen(*, host, port, name, file, api_key):
    """Listen with asyncio, whose error uvicorn logs before it shuts down; SGLang's process does not end then."""
    try:
        await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except OSError as error:
        print(f"ERROR:    {error}", flush=True)
        time.sleep(1000)
    Path(file).write_text(name)
    await asyncio.sleep(1000)


def load(arguments):
    """Record whether the server must wait before it loads a model, wait, and serve."""
    with open(arguments["file"] + "-events", "a") as events:
        is_allowed = bool(select.select([sys.stdin], [], [], 0)[0])
        print("allowed" if is_allowed else "imported", file=events, flush=True)
        wait_until_allowed()
        print("loads", file=events, flush=True)
    serve(arguments)


def serve_until_asked(arguments):
    """Serve, record SIGTERM, and then take longer to end than a run waits."""

    def record(*_):
        with open(arguments["file"] + "-events", "a") as events:
            print("asked to end", file=events, flush=True)
        time.sleep(1000)

    signal.signal(signal.SIGTERM, record)
    serve(arguments)
