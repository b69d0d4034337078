"""Attacks on the processes of a run on one machine and of its Ray, from other processes that know only its ports."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import grpc
import httpx
import pytest

from tests.security.attacked_run import is_open_to_others, sockets, stores
from tests.security.live_runs import FAKES, KNOWN, RANKS, WAITING, make_waiting_job, reachable, start_waiting

pytestmark = pytest.mark.timeout(1200)  # starting the run takes minutes on a busy machine
JOINING = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("ran as", ray.get(ray.remote(num_cpus=0)(lambda: __import__("os").getuid()).remote(), timeout=60))
"""
REQUESTS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "InternalKVGcsService/InternalKVKeys",
    "JobInfoGcsService/AddJob",
    "ActorInfoGcsService/RegisterActor",
    "NodeManagerService/RequestWorkerLease",
    "ObjectManagerService/Pull",
    "CoreWorkerService/PushTask",
)
"""gRPC methods of the head, of the machine's scheduler, of its object store, and of a worker."""
PAGES = ("/api/job_agent/jobs/", "/get_or_create_runtime_env")
"""URL paths of a machine's job server, and of the program that installs packages for workers."""


@pytest.fixture(scope="module", params=[FAKES, pytest.param(RANKS, marks=pytest.mark.long)], ids=["fakes", "ranks"])
def running(request, tmp_path_factory, tiny_model):
    """A run that waits for a reward, of fakes or with two trainer ranks.

    Its environment asks Ray for no authentication.
    """
    folder = tmp_path_factory.mktemp("run")
    make_waiting_job(folder, tiny_model, request.param)
    run = start_waiting(folder, RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN=KNOWN)
    yield run
    run.end()


def address_of(run):
    """Return the address of the head of its Ray."""
    (found,) = [place for place, command in run.ports().items() if "gcs_server" in command]
    return f"127.0.0.1:{found[1]}"


def token_of(run):
    """Return the token that only the user of the run can read."""
    (head,) = [one for one in run.processes() if "gcs_server" in one.name()]
    return head.environ()["RAY_AUTH_TOKEN"]


def answers(ports, token):
    """Return request -> answer of the servers at these ports; some requests would change something, others reveal
    something."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def ask(where, name):
        host, port = reachable(where)
        server = f"{host}:{port}"
        try:
            if name in PAGES:
                url = f"http://{server}{name}"
                return httpx.post(url, headers=dict(metadata), json={"entrypoint": "id"}, timeout=2).status_code
            with grpc.insecure_channel(server) as channel:
                channel.unary_unary(f"/ray.rpc.{name}")(b"", timeout=2, metadata=metadata)
                return "answered"
        except httpx.HTTPError:
            return "no page"
        except grpc.RpcError as error:
            return error.code().name

    with ThreadPoolExecutor(32) as pool:
        found = {name: [pool.submit(ask, where, name) for where in ports] for name in (*REQUESTS, *PAGES)}
        return {name: {answer.result() for answer in asked} for name, asked in found.items()}


@pytest.mark.parametrize("token", ["", KNOWN], ids=["no token", "an inherited token"])
def test_no_server_of_a_run_answers_unauthenticated_requests(running, token):
    found = answers(running.ports(), token)
    for name in REQUESTS:
        assert "UNAUTHENTICATED" in found[name], (name, found[name])
        assert found[name] <= {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE", "UNKNOWN", "DEADLINE_EXCEEDED"}
    for page in PAGES:
        assert found[page] & {401, 403}, (page, found[page])
        assert found[page] <= {401, 403, 404, 405, "no page"}, (page, found[page])


def test_a_run_on_one_machine_cannot_be_reached_from_others(running):
    ports = running.ports()
    assert len(ports) >= 6
    assert not [place for place in ports if not ip_address(place[0].removeprefix("::ffff:")).is_loopback]


def test_a_run_starts_only_the_daemons_it_uses_in_process_groups_of_their_own(running):
    """A signal to the process group of the run would otherwise end them while it saves."""
    children = [one for one in running.process.children() if "ray_watch.py" not in " ".join(one.cmdline())]
    assert sorted(child.name() for child in children) == ["gcs_server", "raylet"]
    assert os.getpgid(running.process.pid) not in {os.getpgid(child.pid) for child in children}


def test_no_port_of_a_run_is_an_unauthenticated_store(running):
    assert len(running.ports()) >= 6
    assert stores(running) == []


def test_no_socket_file_of_a_run_is_open_to_others(running):
    assert [name for name in sockets(running) if "plasma_store" in name]
    assert [name for name in sockets(running) if is_open_to_others(name)] == []


def test_the_token_of_a_run_is_not_readable_by_other_users(running):
    token = token_of(running)
    assert len(token) == 64 and token != KNOWN
    assert not [command for command in running.commands().values() if token in command]
    folders = (running.folder, running.temporary)
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in files if token.encode() in path.read_bytes()]


def test_programs_that_a_run_starts_do_not_inherit_its_token(running):
    inherited = (running.folder / "inherited").read_text()
    assert "PATH=" in inherited
    assert token_of(running) not in inherited


def test_other_users_cannot_enter_the_folder_of_rays_sockets(running):
    (folder,) = running.temporary.iterdir()
    assert list(folder.rglob("plasma_store"))
    found = folder.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.getuid(), 0o700)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_cluster_of_a_run_rejects_unauthenticated_tasks(running, tmp_path):
    """As another user would try: with another home folder, and the address from the process list."""
    file = tmp_path / "home/.ray/auth_token"
    file.parent.mkdir(parents=True)
    file.write_text("of-another-cluster")
    token = {"RAY_AUTH_MODE": "token"}
    found = join(
        address_of(running),
        tmp_path / "home",
        {},
        {"RAY_AUTH_MODE": "disabled"},
        token,
        {**token, "RAY_AUTH_TOKEN": KNOWN},
        {**token, "RAY_AUTH_TOKEN": token_of(running)},  # so that a refusal can only be due to the missing token
    )
    assert [code for code, _ in found] == [1, 1, 1, 1, 0], found
    assert all("ran as" not in out for _, out in found[:-1])


def join(address, home, *attempts):
    """Return exit codes and output of programs that join a cluster and run a task there, all at the same time."""
    path = {"PATH": os.environ["PATH"], "HOME": str(home), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", JOINING, address]
    started = [subprocess.Popen(command, env={**path, **one}, **pipes) for one in attempts]
    outputs = [process.communicate()[0] for process in started]
    return [(process.returncode, out) for process, out in zip(started, outputs, strict=True)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ray_imported_before_the_run_uses_the_token(tmp_path, tiny_model):
    make_waiting_job(tmp_path, tiny_model)
    (tmp_path / "waiting.py").write_text(f"import ray\n{WAITING}")
    run = start_waiting(tmp_path, RAY_AUTH_MODE="disabled")
    try:
        assert len(token_of(run)) == 64
        for name, found in answers(run.ports(), "").items():
            assert found & {"UNAUTHENTICATED", 401}, (name, found)
            assert not found & {"answered", 200}, (name, found)
    finally:
        run.end()
