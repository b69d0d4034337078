"""Clusters started with Ray's own commands, as documented, and jobs submitted to them."""

import contextlib
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/clusters.md"
SERVER_START_S = 120
AGENT_START_S = 120
JOB_S = 300


def command(beginning):
    """Return the command of the page that starts with this text."""
    (found,) = re.findall(rf"^```text\n({re.escape(beginning)}.*)\n```$", PAGE.read_text(), re.MULTILINE)
    return found


def free_ports(count):
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture
def started(plain_environment):
    """Return a function that starts nodes with ``ray start``; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(line, *options):
            """Start a node and return its address."""
            process = subprocess.Popen(
                [*shlex.split(line), "--block", "--num-cpus=4", "--num-gpus=0", *options],
                env=plain_environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

            def end():
                process.send_signal(signal.SIGTERM)
                process.communicate()

            stack.callback(end)
            said = ""
            for line in process.stdout:  # ends even if the process does
                said += re.sub(r"\x1b\[\d+m", "", line)
                if "Ray runtime started" in said:
                    return re.search(r"Local node IP: (\S+)", said)[1]
            raise AssertionError(f"ended with {process.wait()}: {said}")

        yield start


def wait_for_page(url):
    """Wait until the job server answers; it starts after the other processes."""
    deadline = time.monotonic() + SERVER_START_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/api/version", timeout=10):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            assert time.monotonic() < deadline, f"no job server at {url} after {SERVER_START_S} s: {error}"
            time.sleep(0.5)


def submit(line, folder, environment):
    """Submit a job; return its exit code and output once it has ended."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    deadline = time.monotonic() + AGENT_START_S
    while True:
        done = subprocess.run(shlex.split(line), cwd=folder, env=environment, timeout=JOB_S, **pipes)
        if "No available agent to submit job" not in done.stdout:  # the agents start last
            return done.returncode, done.stdout
        message = f"no job agent after {AGENT_START_S} s; Ray's dashboard agent has probably ended: {done.stdout}"
        assert time.monotonic() < deadline, message
        time.sleep(0.5)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_submitted_job_trains_over_two_machines(started, job, plain_environment, tmp_path):
    port, page, first_agent, second_agent = free_ports(4)
    url = f"http://127.0.0.1:{page}"
    first = command("ray start --head").replace("6379", str(port))
    # agents of other clusters on this machine use Ray's default port, and an agent without its port accepts no jobs
    ports = f"--dashboard-port={page}", f"--dashboard-agent-listen-port={first_agent}"
    head = started(first, *ports, "--include-dashboard=true")
    other = command("ray start --address").replace("10.0.0.1:6379", f"{head}:{port}")
    own_folder = f"--temp-dir={plain_environment['RAY_TMPDIR']}/2"  # otherwise both would unpack a job into one folder
    agent = f"--dashboard-agent-listen-port={second_agent}"
    assert started(other, "--node-ip-address=127.0.0.2", own_folder, agent) == "127.0.0.2"
    wait_for_page(url)
    line = command("ray job submit").replace("http://10.0.0.1:8265", url)
    code, out = submit(line.replace(" run.dir=/shared/runs/job", ""), job.folder, plain_environment)
    assert code == 1 and "error: run.dir: " in out, out
    run = tmp_path / "runs/job"
    code, out = submit(line.replace("/shared/runs/job", str(run)), job.folder, plain_environment)
    assert code == 0 and "batch 2/2" in out, out
    found = job.machines()
    assert set(found) == {head, "127.0.0.2"}
    assert all("_ray_pkg_" in str(plugin) for plugin in found.values())  # the job's own copy of the folder
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
