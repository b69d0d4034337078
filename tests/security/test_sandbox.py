"""Programs that attack the run from their sandbox, through `rl reward`, with and without namespaces."""

import platform
import subprocess
import time
from pathlib import Path

import pytest

from tests.security.reward_runs import HOSTS, descendants, score

TABLES = {"shm": "/proc/sysvipc/shm", "sem": "/proc/sysvipc/sem", "msg": "/proc/sysvipc/msg"}
BEGIN = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def refused(what, result):
    if result != -1:
        raise SystemExit(f"ESCAPED: {what} gave {result}")
"""
END = "\nprint('well')"
IO_SETUP = {"x86_64": 206, "aarch64": 0}[platform.machine()]
KCMP = {"x86_64": 312, "aarch64": 272}[platform.machine()]
F_SETSIG, F_SETOWN, F_SETLEASE, F_SETPIPE_SIZE = 10, 8, 1024, 1031
REFUSED = {
    "signals through a pipe": f"""
pipe = os.pipe()[0]; refused(1, libc.fcntl(pipe, {F_SETSIG}, 15)); refused(2, libc.fcntl(pipe, {F_SETOWN}, 1))""",
    "leases, for which others wait": f"""
refused('lease', libc.fcntl(os.open(__file__, os.O_RDONLY), {F_SETLEASE}, 1))""",
    "large pipes": f"refused('pipe', libc.fcntl(os.pipe()[1], {F_SETPIPE_SIZE}, 1 << 20))",
    "other processes' share of the processor": """
refused(1, libc.setpriority(2, os.getuid(), 1)); refused(2, libc.setpriority(0, os.getppid() or 1, 1))
refused(3, libc.sched_setaffinity(os.getppid() or 1, 8, b'\\1' + bytes(7)))""",
    "System V shared memory": "refused('shmget', libc.shmget(0, 1 << 26, 0o1600))",
    "System V semaphores": "refused('semget', libc.semget(0, 32000, 0o1600))",
    "System V messages": "refused('msgget', libc.msgget(0, 0o1600))",
    "files in memory": "refused('memfd_create', libc.memfd_create(b'x', 0)); refused('secret', libc.syscall(447, 0))",
    "growing its input": "try: os.ftruncate(0, 1 << 30)\nexcept OSError: pass\nelse: raise SystemExit('ESCAPED')",
    "asynchronous input and output": f"""
context = ctypes.c_ulong(0); refused('io_setup', libc.syscall({IO_SETUP}, 60000, ctypes.byref(context)))""",
    "the kernel's log": "refused('syslog', libc.klogctl(10, None, 0)); refused('read', libc.klogctl(3, b' ' * 99, 99))",
    "message queues": "refused('mq_open', ctypes.CDLL('librt.so.1').mq_open(b'/x', 0o102, 0o600, None))",
    "watches of files": "refused('inotify', libc.inotify_init1(0)); refused('fanotify', libc.fanotify_init(0, 0))",
    "calls newer than the filter": "for n in range(451, 600): refused(n, libc.syscall(n, 0, 0, 0, 0, 0, 0))",
    "other processes' descriptors": f"refused(1, libc.syscall({KCMP}, 1, 1, 0, 0, 0)); refused(2, libc.syscall(438))",
}
CALLS = ["assert f(1) == 1", "assert f(2) == 4"]
SQUARE = "def f(x): return x * x\n"
VERDICTS = {
    "a good program": (SQUARE, CALLS, 1.0, None),
    "a program that prints besides its answers": (SQUARE + "print('noise')", CALLS, 1.0, None),
    "a program that prints besides what it must": ("print('noise'); print('well')", None, 0.0, "wrong output"),
    "a program that prints and hangs": (
        "import time\nprint('well', flush=True)\ntime.sleep(99)",
        None,
        0.0,
        "did not finish within",
    ),
    "a program that answers and hangs": (
        SQUARE + "import atexit, time; atexit.register(time.sleep, 99)",
        CALLS,
        0.0,
        "f: did not finish within wall_s = 2",
    ),
    "a program that answers and crashes": (
        SQUARE + "import atexit, os; atexit.register(os._exit, 3)",
        CALLS,
        0.0,
        "f: exit code 3",
    ),
    "a program whose thread does not end": (
        SQUARE + "import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()",
        CALLS,
        0.0,
        "f: did not finish within wall_s = 2",
    ),
}


def fenced(source):
    return f"```python\n{source}\n```"


def case(target):
    return [{"input": "", "output": target}]


def rewards(isolation, **sandbox):
    settings = {"isolation": f'"{isolation}"', "wall_s": 20.0, "memory_mb": 160, "disk_mb": 64, **sandbox}
    table = ", ".join(f"{name} = {value}" for name, value in settings.items())
    return f'rewards=[{{kind="code", workers=8, sandbox={{{table}}}}}]'


@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
def test_memory_that_no_limit_counts_is_refused(isolation):
    before = {name: Path(path).read_text().count("\n") for name, path in TABLES.items()}
    attacks = {name: (fenced(BEGIN + attack + END), case("well")) for name, attack in REFUSED.items()}
    found = score(rewards(isolation), attacks)
    assert found == dict.fromkeys(attacks, (1.0, None))
    after = {name: Path(path).read_text().count("\n") for name, path in TABLES.items()}
    assert after == before, "a program left memory of the kernel behind"


SEARCH = """
import os, re
def ancestors():
    pid = os.getppid()
    while pid > 1:
        yield pid
        try: pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        except OSError: return
def search():
    for pid in [PID_OF_RL, *ancestors()]:
        try:
            if found := re.search(b"WORD-[0-9a-f]{16}", open(f"/proc/{pid}/environ", "rb").read()): return found
        except OSError: pass
        try:
            lines, memory = open(f"/proc/{pid}/maps").read().splitlines(), open(f"/proc/{pid}/mem", "rb", 0)
        except OSError: continue
        for line in lines:
            first, last = (int(n, 16) for n in line.split()[0].split("-"))
            if " rw-p " not in line: continue
            for begin in range(first, last, 1 << 20):
                try:
                    memory.seek(begin)
                    if found := re.search(b"WORD-[0-9a-f]{16}", memory.read(min(1 << 20, last - begin))): return found
                except (OSError, ValueError, OverflowError): break
found = search()
print(found.group().decode() if found else "nothing")
"""
EXPECTED, VARIABLE = "answer-" + "0123456789abcdef", "variable-" + "0123456789abcdef"


@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
def test_a_program_reads_neither_the_expected_output_nor_the_environment_of_the_run(isolation):
    check_reading(isolation, HOSTS[0])


@pytest.mark.long
@pytest.mark.parametrize("host", HOSTS[1:])
def test_a_program_without_namespaces_reads_no_memory_of_the_run_on_other_hosts(host):
    check_reading("limits", host)


def check_reading(isolation, host):
    attacks = {
        "the expected output": (fenced(SEARCH.replace("WORD", "answer")), case(EXPECTED)),
        "the environment": (fenced(SEARCH.replace("WORD", "variable")), case(VARIABLE)),
    }
    found = score(rewards(isolation), attacks, host=host, fork=False, HUSH_KEY=VARIABLE)
    assert found == dict.fromkeys(attacks, (0.0, "wrong output"))


FILES = {
    "reading a file": "open('FILE').read()",
    "listing a folder": "os.listdir(os.path.dirname('FILE'))",
    "writing a file": "open('FILE', 'a').write('x')",
    "removing a file": "os.remove('FILE')",
    "giving it an attribute": "os.setxattr('FILE', 'user.x', b'y')",
    "writing beside it": "open('FILE.new', 'w')",
    "reading processes": "os.listdir('/proc')",
}


@pytest.mark.parametrize("host", [HOSTS[0], pytest.param(HOSTS[1], marks=pytest.mark.long)])
def test_a_program_without_namespaces_reaches_no_files_of_the_user(host, tmp_path):
    secret = Path(f"/tmp/plasmid-attacked-{time.time_ns()}")
    secret.write_text("hush")
    secret.chmod(0o666)
    before = secret.stat()
    attempts = {
        name: "try: " + attack.replace("FILE", str(secret)) + "\nexcept OSError: print('well')"
        for name, attack in FILES.items()
    }
    attempts["its modes"] = f"os.chmod('{secret}', 0o777); os.utime('{secret}', (0, 0)); print('well')"
    attempts["its own folder"] = (
        "import shutil; open('x', 'w').write('y'); os.mkdir('d'); os.rename('x', 'd/x'); shutil.copy2('d/x', 'z'); "
        "print('well')"
    )
    try:
        attacks = {name: (fenced("import os\n" + attack), case("well")) for name, attack in attempts.items()}
        assert score(rewards("limits"), attacks, host=host) == dict.fromkeys(attacks, (1.0, None))
        after = secret.stat()
        assert (after.st_mode, after.st_mtime, secret.read_text()) == (before.st_mode, before.st_mtime, "hush")
    finally:
        secret.unlink(missing_ok=True)


@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
def test_a_program_leaves_no_folder_behind_however_deep(isolation, tmp_path):
    source = "import os\nfor _ in range(%d): os.mkdir('d'); os.chdir('d')\nos.mkdir('closed', 0)\nprint('well')"
    texts = {"deep": (fenced(source % (2000 if isolation == "limits" else 500)), case("well"))}
    try:
        assert score(rewards(isolation), texts, TMPDIR=str(tmp_path)) == {"deep": (1.0, None)}
        assert list(tmp_path.glob("plasmid-sandbox-*")) == []
    finally:
        subprocess.run(["rm", "-rf", *tmp_path.glob("plasmid-sandbox-*")], check=True)  # pytest cannot remove it


def test_a_program_passes_only_if_the_exit_is_clean():
    texts = {name: (fenced(source), target or case("well")) for name, (source, target, *_) in VERDICTS.items()}
    found = score(rewards("namespaces", wall_s=2.0), texts)
    for name, (_, _, value, error) in VERDICTS.items():
        reward, reason = found[name]
        assert reward == value and (reason or "").startswith(error or ""), (name, found[name])


def bounds_memory():
    """Return whether this process may create control groups (version 2) that limit memory."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((Path("/sys/fs/cgroup") / line[4:] for line in lines if line.startswith("0::/")), None)
    if own is None:
        return False
    files = [path / "cgroup.subtree_control" for path in (own, own.parent)]
    return any(file.is_file() and "memory" in file.read_text().split() for file in files)


@pytest.mark.skipif(not bounds_memory(), reason="no control group (version 2) for memory can be made here")
def test_all_processes_of_a_program_share_one_bound_of_memory():
    source = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        data = bytearray(100 << 20)
        for place in range(0, len(data), 4096): data[place] = 1
        time.sleep(3)
        os._exit(0)
time.sleep(4)
print("well")
"""
    most = 0

    def watch(pid):
        nonlocal most
        until = time.monotonic() + 60
        while time.monotonic() < until and (below := [pid, *descendants(pid)]):
            python = [p for p in below[1:] if p != pid]
            most = max(most, sum(map(resident, python)))
            if not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                break
            time.sleep(0.05)

    found = score(rewards("namespaces", disk_mb=1), {"": (fenced(source), case("well"))}, watch=watch)
    assert found == {"": (1.0, None)}, "the first process goes on; those beyond the bound were killed"
    assert 100 << 20 < most < 300 << 20


def resident(pid):
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0
