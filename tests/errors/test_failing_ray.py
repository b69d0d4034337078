"""If Ray fails to start or cannot be joined, the error is one line."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from plasmid.errors import EXIT_RETRY, ClusterError

from tests.lazy_module import LazyModule

connection = LazyModule("plasmid_runtime.cluster.connection")

STARTING = "run: starting; all output of the run is written there\n"
LOGS = "ray/session_latest/logs; if the machine is busy, try again later, or start Ray yourself with `ray start --head`"
WITHOUT_RAYLET = """
import sys
import ray._private.services
from plasmid_cli.main import app
ray._private.services.RAYLET_EXECUTABLE = sys.argv[1]
app(["train", "recipe.toml", "placement.address=local"])
"""


@pytest.fixture
def short_folder():
    """A folder whose path is short enough for the names of Ray's sockets, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="ray-") as path:
        yield Path(path)


def test_the_error_of_ray_at_start_names_the_cause_and_the_logs(rl, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)  # not installed
    monkeypatch.setenv("RAY_object_spilling_config", '{"type": "smart_open", "params": {"uri": "s3://bucket"}}')
    (said,) = rl("train", "recipe.toml", "placement.address=local", printed=STARTING, code=EXIT_RETRY)
    assert said.startswith("ray did not start on this machine: ModuleNotFoundError: ")
    assert said.endswith(f"{LOGS} and set placement.address")


def test_settings_of_one_ray_are_not_those_of_the_next(rl, monkeypatch):
    given = []

    def init(**options):
        given.append(dict(options["_system_config"]))
        options["_system_config"]["object_spilling_config"] = "of the first"  # as Ray does
        raise OSError("no Ray in this test")

    monkeypatch.setattr("ray.init", init)
    for _ in range(2):
        rl("train", "recipe.toml", "placement.address=local", printed=STARTING, code=EXIT_RETRY)
    assert given[0] == given[1]


def test_a_ray_that_is_too_slow_is_started_once_more(monkeypatch, short_folder, caplog):
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder))
    slow = Exception("The current node timed out during startup. This could happen because ...")
    attempts = iter([slow, None, slow, slow])

    def init(**options):
        if error := next(attempts):
            raise error

    monkeypatch.setattr("ray.init", init)
    connection.start_ray().close()
    assert "ray did not start within 30 s; starting it again (2 of 2)" in caplog.text
    with pytest.raises(ClusterError, match="The current node timed out during startup"):
        connection.start_ray()
    assert not list(attempts)


def test_a_cluster_address_without_a_listener_is_reported_at_once(rl):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # no other process gets the port, and nothing listens on it
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        (said,) = rl("train", "recipe.toml", f"placement.address={address}", printed=STARTING, code=EXIT_RETRY)
    assert said.startswith(f"cannot join the Ray cluster at {address}: ConnectionRefusedError: ")
    assert said.endswith("; it must be running, include this machine, and have the same versions of Ray and Python")


@pytest.mark.long
def test_a_ray_whose_own_process_does_not_come_up_in_time_is_one_line(folder, short_folder):
    command = [sys.executable, "-c", WITHOUT_RAYLET, shutil.which("false")]
    environment = {**os.environ, "RAY_TMPDIR": str(short_folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == EXIT_RETRY, done.stderr
    assert "Traceback" not in done.stderr
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "Exception: The current node timed out during startup" in said
    assert f"; its logs are in {short_folder}/plasmid-{os.getuid()}/{LOGS}" in said
    assert (short_folder / f"plasmid-{os.getuid()}/ray/session_latest/logs").is_dir()


def test_a_ray_that_was_imported_and_keeps_no_token_is_not_started(rl, short_folder, monkeypatch):
    import ray._raylet as raylet

    monkeypatch.setattr(raylet, "get_authentication_mode", lambda: raylet.AuthenticationMode.DISABLED)
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder))
    (said,) = rl("train", "recipe.toml", "placement.address=local", printed=STARTING)
    assert said == (
        "ray was imported before the run could set an authentication token, without which others on this "
        "machine could run code in the run; start the run in a separate process, with `rl train`"
    )
    assert not list(short_folder.iterdir())


def test_a_folder_for_rays_sockets_that_somebody_else_has_made_is_refused(rl, short_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder))
    folder = short_folder / f"plasmid-{os.getuid()}"
    folder.symlink_to(tmp_path)
    (said,) = rl("train", "recipe.toml", "placement.address=local", printed=STARTING)
    assert said == f"{folder}: not owned by this user; remove it, or set RAY_TMPDIR to another folder"
