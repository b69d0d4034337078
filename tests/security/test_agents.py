"""Programs and functions as agents: no keys of the run, no forged results, no full disk, nothing left behind."""

import ctypes
import json
import os
import subprocess
import time

import pytest
from plasmid_cli.main import app
from plasmid_runtime.cluster.local import LocalCluster

from tests.security.agent_runs import WITHOUT_RAY, make_policy, sample, start, write_job
from tests.security.rl_command import RL

KEYS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY", "MY_SEARCH_KEY", "MY_TEST_KEY")
SECRET = "a-secret-of-the-run"
MAX_BYTES = 1 << 20
LANDLOCK_VERSION = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)
AGENT = r'''
import json, os, signal, sys, time, urllib.request
from pathlib import Path

def ask():
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body)).read()

def variables():
    return sorted(os.environ)

def others_secrets():
    """Processes whose environment or memory can be read, and has a key."""
    found = []
    for folder in set(Path("/proc").glob("[0-9]*")) - {Path(f"/proc/{os.getpid()}")}:
        for file in ("environ", "mem"):
            try:
                if file == "environ" and b"a-secret-of-the-run" in (folder / file).read_bytes():
                    found.append(str(folder))
                if file == "mem" and int(folder.name) == os.getppid():
                    open(folder / file, "rb").close()
                    found.append(f"memory of {folder}")
            except OSError:
                pass
    return found

def kill_others():
    refused = 0
    for pid in (os.getppid(), int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])):
        try:
            os.kill(pid, signal.SIGTERM)
        except PermissionError:
            refused += 1
    return refused

def daemon():
    """Leaves the process group and the session twice, as daemons do."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(f"daemon.{kind()}").write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        os._exit(0)
    while not os.path.exists(f"daemon.{kind()}"):
        time.sleep(0.05)
    return "started"

def look_for_daemon():
    """Whether the process that the agent of another rollout has left still runs, at most 30 s later."""
    file, until = Path(f"daemon.{kind()}"), time.monotonic() + 30
    while time.monotonic() < until:
        if file.exists() and file.read_text() and is_over(file.read_text()):
            return "over"
        time.sleep(0.1)
    return "still there"

def is_over(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True

def kind():
    return "program" if "PLASMID_PROMPT_FILE" in os.environ else "function"

def fill_disk():
    with open(f"large.{kind()}", "wb") as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))

def fill_disk_by_shell():
    os.system(f"cat /dev/zero > shell.{kind()}")

def flood_output():
    while True:
        os.write(1, b"x" * (1 << 20))

def pipe_output():
    spoil_output(lambda path: os.mkfifo(path))

def device_output():
    spoil_output(lambda path: os.symlink("/dev/zero", path))

def spoil_output(make):
    folder = Path(os.environ["PLASMID_PROMPT_FILE"]).parent
    for name in ("out", "err", "stdout", "stderr"):  # under the first two, output has once been kept
        make(folder / name)

def forge():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"[[[ no result\n")
        except OSError:
            pass
    os._exit(0)

def run(prompt):
    ask()
    return json.dumps(globals()[prompt]())

if __name__ == "__main__":
    print(run(sys.stdin.read()))
'''
ATTACKS = ["variables", "others_secrets", "kill_others", "daemon", "look_for_daemon", "fill_disk", "fill_disk_by_shell"]
KINDS = {
    "function": ('function = "attacker.py:run"', [*ATTACKS, "forge"], WITHOUT_RAY),
    "function-ray": ('function = "attacker.py:run"', [*ATTACKS, "forge"], RL),
    "program": (
        'command = ["python", "attacker.py"]',
        [*ATTACKS, "flood_output", "pipe_output", "device_output"],
        WITHOUT_RAY,
    ),
}


@pytest.fixture(scope="module", params=["function", "program", pytest.param("function-ray", marks=pytest.mark.long)])
def attacked(request, tmp_path_factory):
    """Folder and samples of a run in which each agent tries one attack, all at the same time."""
    how, attacks, rl = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "attacker.py").write_text(AGENT)
    settings = f'{how}\nmax_file_bytes = {MAX_BYTES}\nenvironment = ["MY_SEARCH_KEY"]'
    # another process of the user, because what /proc shows of a fork's environment does not contain the keys
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **dict.fromkeys(KEYS, SECRET)}) as other:
        try:
            samples, _ = sample(folder, settings, attacks, rl=rl, **dict.fromkeys(KEYS, SECRET))
        finally:
            other.kill()
    assert set(samples) == set(attacks)
    return folder, samples


def answer(attacked, attack):
    _, samples = attacked
    assert samples[attack]["error"] is None
    return json.loads(samples[attack]["response"])


def test_agents_get_no_keys_of_the_run_but_those_named(attacked):
    names = set(answer(attacked, "variables"))
    assert set(KEYS) & names == {"MY_SEARCH_KEY"}
    assert {"PATH", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "PLASMID_SEED"} <= names


@pytest.mark.skipif(LANDLOCK_VERSION < 2, reason="the kernel has no Landlock")
def test_an_agent_reads_no_keys_in_other_processes(attacked):
    assert answer(attacked, "others_secrets") == []


@pytest.mark.skipif(LANDLOCK_VERSION < 6, reason="Landlock of this kernel does not keep signals")
def test_an_agent_ends_no_process_of_the_run(attacked):
    assert answer(attacked, "kill_others") == 2


def test_nothing_that_an_agent_has_started_outlives_its_rollout(attacked):
    assert answer(attacked, "daemon") == "started"
    assert answer(attacked, "look_for_daemon") == "over"


def test_no_file_of_an_agent_grows_beyond_its_limit(attacked):
    folder, samples = attacked
    kind = "program" if folder.name.startswith("program") else "function"
    error = samples["fill_disk"]["error"]
    assert "File too large" in error or f"workflow.max_file_bytes = {MAX_BYTES}" in error
    assert (folder / f"large.{kind}").stat().st_size == MAX_BYTES
    assert (folder / f"shell.{kind}").stat().st_size == MAX_BYTES
    if kind == "program":
        assert "File too large" in samples["flood_output"]["error"]


def test_an_agent_that_replaces_its_output_holds_up_no_rollout(attacked):
    """Opening the pipe would block all rollouts forever, and reading the device would use all memory."""
    _, samples = attacked
    for attack in {"pipe_output", "device_output"} & set(samples):
        assert answer(attacked, attack) is None


def test_a_forged_result_is_the_error_of_one_sample(attacked):
    _, samples = attacked
    if "forge" in samples:
        assert samples["forge"]["error"].startswith("the agent failed: cannot read its result: JSONDecodeError")


def test_a_variable_that_is_named_and_not_set_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "attacker.py").write_text(AGENT)
    with make_policy(tmp_path) as policy:
        settings = 'function = "attacker.py:run"\nenvironment = ["MY_UNSET_KEY"]'
        write_job(tmp_path, policy, settings, ["variables"])
        with pytest.raises(SystemExit) as ended:
            arguments = ["sample", "recipe.toml", "-n", "1", "--out", "samples.jsonl"]
            app(arguments, make_cluster=lambda _: LocalCluster())
    said = capsys.readouterr().err
    assert ended.value.code
    assert "error: workflow.environment: MY_UNSET_KEY is not set in the environment of the run\n" in said
    assert not (tmp_path / "samples.jsonl").exists()


@pytest.mark.parametrize("rl", [WITHOUT_RAY, pytest.param(RL, marks=pytest.mark.long)], ids=["thread", "ray"])
def test_a_run_that_is_killed_leaves_no_agent(tmp_path, rl):
    (tmp_path / "waiting.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    with make_policy(tmp_path) as policy:
        process = start(tmp_path, policy, 'command = ["python", "waiting.py"]', ["wait"], rl=rl)
        until = time.monotonic() + 120
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        process.kill()
        process.wait()
    pid, until = (tmp_path / "pid").read_text(), time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pid}")
