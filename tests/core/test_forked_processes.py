"""The server that forks ranks for all processes of a test run."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROCESS = """
import sys, time
from tests import forked_processes

forked_processes.IMPORTED = []
forked_processes.share_server(sys.argv[1])

def server():
    process = forked_processes.forked_processes().Process(target=time.sleep, args=(600,))
    process.start()
    with open(f"/proc/{process.pid}/status") as status:
        found = next(line.split()[1] for line in status if line.startswith("PPid"))
    process.kill()
    process.join()
    assert process.exitcode == -9
    return int(found)

for _ in sys.stdin:
    print(server(), flush=True)
"""


def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_processes_share_the_server_that_the_first_one_starts(tmp_path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as first, subprocess.Popen(command, cwd=ROOT, **pipes) as second:
        shared = ask(first)
        assert ask(second) == ask(first) == shared
        assert json.loads((tmp_path / "rank_server.json").read_text())["pid"] == first.pid
        first.stdin.close()
        assert first.wait(30) == 0
        own = ask(second)
        assert own != shared and ask(second) == own
