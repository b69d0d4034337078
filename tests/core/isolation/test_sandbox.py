"""Attempts to escape from the sandbox, and the expected outcome of each."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from plasmid_sandbox import Program, Sandbox, SandboxSettings
from plasmid_sandbox.confinement import seccomp

SETTINGS = {"wall_s": 5.0, "cpu_s": 3, "memory_mb": 256, "processes": 8, "disk_mb": 4, "output_kb": 64}
TRY = """
import ctypes, errno, os, signal, socket, stat, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, *args):
    try:
        result = what(*args)
    except BaseException as error:
        print("no", type(error).__name__)
        return None
    print("ESCAPED", result)
    return result
def call(number, *args):
    if libc.syscall(number, *args) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


def run(source, **settings):
    return Sandbox(SandboxSettings(**(SETTINGS | settings))).run(Program(source=TRY + source))


def held(source, **settings):
    """Run a program that makes attempts: all of them must fail, and the program must exit normally."""
    outcome = run(source, **settings)
    text = outcome.stdout.decode()
    assert outcome.error is None, (outcome, text)
    assert "ESCAPED" not in text and "no " in text, text
    return text


def test_this_host_permits_the_sandbox_and_a_plain_program_runs_in_it():
    Sandbox(SandboxSettings()).check()
    outcome = run("import json, decimal, threading; print(json.dumps({'a': sum(range(10))}), input())")
    assert outcome.error == "exit code 1: EOFError: EOF when reading a line"
    outcome = Sandbox(SandboxSettings()).run(Program(source="print(input() * 2)", stdin=b"ab\n"))
    assert (outcome.stdout, outcome.stderr, outcome.error) == (b"abab\n", b"", None)


def test_threads_and_child_processes_work_inside():
    source = """
seen = []
thread = threading.Thread(target=seen.append, args=(1,)); thread.start(); thread.join()
print(seen, subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True).stdout)
"""
    assert run(source).stdout == b"[1] 5\n\n"


HARMLESS = {
    "the parent's files": """
for path in ("SECRET", "/etc/passwd", "/etc/shadow", "HERE", "/var/log", "HOME/.bashrc"):
    attempt(open, path)
attempt(os.listdir, "/home"); attempt(os.listdir, "/proc"); attempt(os.listdir, "/sys")
""",
    "links to the parent's files": """
os.symlink("SECRET", "link"); attempt(open, "link")
os.symlink("/../../../../../SECRET", "up"); attempt(open, "up")
attempt(os.link, sys.executable, "hard")
os.mkdir("d"); attempt(os.chroot, "d"); os.chdir("/../../.."); attempt(open, "." + "SECRET")
""",
    "the parent's environment": """
attempt(open, "/proc/1/environ"); attempt(open, f"/proc/{os.getppid()}/environ"); attempt(open, "/proc/self/environ")
attempt(lambda: os.environ["PLASMID_TEST_HUSH"])
""",
    "mounting its own /proc": """
attempt(call, 165, b"proc", b"/work", b"proc", 0, None)
attempt(call, 272, 0x10000000); attempt(call, 272, 0x00020000); attempt(call, 56, 0x10000000 | 17, 0, 0, 0, 0)
attempt(call, 435, 0, 0)
""",
    "the network": """
attempt(socket.create_connection, ("127.0.0.1", PORT), 2)
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_VSOCK, socket.AF_PACKET, 38):
    attempt(socket.socket, family, socket.SOCK_DGRAM)
attempt(socket.getaddrinfo, "example.org", 80)
unix = socket.socket(socket.AF_UNIX); attempt(unix.connect, "\\0plasmid-test-PORT"); attempt(unix.connect, "NAMED")
attempt(call, 425, 8, ctypes.create_string_buffer(120))
""",
    "writing elsewhere": """
for path in ("/x", "/usr/x", "/lib/x", "/etc/x", "/dev/x", "/dev/shm/x", os.path.dirname(os.__file__) + "/x", "HERE.x"):
    attempt(open, path, "w")
attempt(os.remove, os.__file__); attempt(os.chmod, "/usr", 0o777); attempt(os.utime, os.__file__)
attempt(open, os.__file__, "a"); attempt(os.mkdir, "/dev/y"); attempt(os.mkdir, "/y")
attempt(call, 165, None, b"/", None, 32, None); attempt(call, 165, None, b"/usr", None, 32 | 4096, None)
attempt(os.mknod, "disk", stat.S_IFBLK | 0o666, os.makedev(254, 0))
attempt(os.mknod, "memory", stat.S_IFCHR | 0o666, os.makedev(1, 1))
""",
    "killing others": """
for pid in (1, os.getppid()):
    os.kill(pid, signal.SIGKILL); os.kill(pid, signal.SIGINT); os.kill(pid, signal.SIGSTOP)
attempt(os.kill, PARENT, signal.SIGTERM); attempt(os.killpg, PARENT, signal.SIGTERM); attempt(os.kill, -1, 0)
""",
    "tracing others": """
for request in (0, 16, 0x4206):
    attempt(call, 101, request, 1, 0, 0)
attempt(call, 310, 1, 0, 0, 0, 0, 0); attempt(call, 311, 1, 0, 0, 0, 0, 0); attempt(open, "/proc/1/mem", "rb")
attempt(call, 438, os.pidfd_open(1), 0, 0)
""",
    "getting privileges": """
for what in (os.setuid, os.setgid): attempt(what, 0)
attempt(os.setgroups, [0]); attempt(socket.sethostname, "x"); attempt(os.nice, -5); attempt(os.chown, ".", 0, 0)
attempt(call, 246, 0, 0, 0, 0); attempt(call, 321, 5, 0, 0); attempt(call, 323, 0); attempt(call, 250, 0, 0)
attempt(call, 298, 0, 0, -1, -1, 0); attempt(call, 308, 0, 0); attempt(call, 175, 0, 0, 0)
import resource
attempt(resource.setrlimit, resource.RLIMIT_AS, (-1, -1)); attempt(resource.setrlimit, resource.RLIMIT_NPROC, (-1, -1))
attempt(resource.prlimit, 1, resource.RLIMIT_CPU, (1, 1))
print("no" if libc.prctl(39, 0, 0, 0, 0) == 1 else "ESCAPED: could still gain privileges by exec")
""",
    "descriptors left open": """
attempt(lambda: [number for number in range(3, 256) if not attempt(os.fstat, number) and False][0])
""",
    "a terminal": """
attempt(open, "/dev/tty"); attempt(os.ttyname, 0)
import fcntl
for number in (0, 1, 2): attempt(fcntl.ioctl, number, 0x5412, b"x")
""",
}


@pytest.mark.parametrize("source", HARMLESS.values(), ids=HARMLESS)
def test_attempts_fail(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PLASMID_TEST_HUSH", "hush")
    secret = tmp_path / "secret"
    secret.write_text("hush")
    connected = []
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        port = server.getsockname()[1]
        unix = f"/tmp/plasmid-test-{port}"
        named.bind(unix)
        abstract.bind(f"\0plasmid-test-{port}")
        for listener in (named, abstract, server):
            listener.listen()
            listener.settimeout(0.1)
        names = {
            "SECRET": secret,
            "HERE": __file__,
            "PORT": port,
            "NAMED": unix,
            "PARENT": os.getpid(),
            "HOME": Path.home(),
        }
        for name, value in names.items():
            source = source.replace(name, str(value))
        text = held(source)
        for listener in (named, abstract, server):
            try:
                connected.append(listener.accept())
            except TimeoutError:
                continue
    Path(unix).unlink()
    assert "hush" not in text and not connected


LIMITED = {
    # the processes write at the same time, so that their lines are interleaved
    "a fork bomb": ("while True:\n    os.fork()", "exit code 1: "),
    "a fork bomb that ignores errors": (
        "while True:\n    try: os.fork()\n    except OSError: pass",
        "did not finish within wall_s|killed by SIGXCPU|killed by SIGKILL",
    ),
    "too many threads": (
        "for _ in range(50): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "exit code 1: RuntimeError: can't start new thread",
    ),
    "memory": ("x = bytearray(1 << 30)", "exit code 1: MemoryError"),
    "a stack without end": (
        "sys.setrecursionlimit(10**9)\ndef f(): return [f() for _ in range(2)]\nf()",
        "killed by SIGSEGV|exit code 1: (MemoryError|RecursionError)|did not finish within wall_s",
    ),
    "processor time": ("while True: pass", r"killed by SIGXCPU|killed by SIGKILL|did not finish within wall_s"),
    "sleeping": ("time.sleep(99)", "did not finish within wall_s = 1"),
    "sleeping with signals blocked": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.Signals)\n"
        "os.setsid() if os.fork() == 0 else 0\ntime.sleep(99)",
        "did not finish within wall_s = 1",
    ),
    "a huge output": ("while True: print('x' * 1000)", "output exceeds output_kb = 64"),
    "a huge complaint": ("while True: print('x' * 1000, file=sys.stderr)", "output exceeds output_kb = 64"),
    "a huge file": ("open('f', 'wb').write(b'x' * (64 << 20))", "exit code 1: OSError|killed by SIGXFSZ"),
    "many large files": (
        "for i in range(99): open(f'f{i}', 'wb').write(b'x' * (1 << 20))",
        "exit code 1: OSError: .Errno 28. No space left on device",
    ),
    "many small files": (
        "for i in range(99999): open(f'f{i}', 'w').close()",
        "exit code 1: OSError: .Errno 28. No space left on device",
    ),
    "many open files": ("files = [open('/dev/null') for _ in range(999)]", "Too many open files"),
    "a crash": ("ctypes.string_at(0)", "killed by SIGSEGV"),
    "closing everything": ("os.closerange(0, 999); time.sleep(99)", "did not finish within wall_s = 1"),
}


def time_for(reason: str) -> float:
    """Return a time limit: short if the time must run out, else long enough to reach the other limit on a busy
    machine."""
    return 1.0 if "wall_s" in reason else 30.0


@pytest.mark.parametrize(("source", "reason"), LIMITED.values(), ids=LIMITED)
def test_limits_hold(source, reason):
    outcome = run(source, wall_s=time_for(reason), cpu_s=1)
    assert outcome.error is not None and re.search(reason, outcome.error), outcome
    assert len(outcome.stdout) <= 64 << 10


def test_nothing_of_one_program_is_there_for_the_next():
    run("""
for name in ("sitecustomize.py", "usercustomize.py", "json.py", "main.py", "x.pth"):
    open(name, "w").write("print('TRICKED')")
os.makedirs("lib/python3/site-packages", exist_ok=True)
""")
    outcome = run("import json; print(os.listdir('.'), json.__file__)")
    assert outcome.stdout.startswith(b"['main.py'] /") and b"TRICKED" not in outcome.stdout


def test_modules_beside_a_program_do_not_shadow_the_standard_library():
    files = {"sitecustomize.py": "print('TRICKED')", "json.py": "print('TRICKED')"}
    outcome = Sandbox(SandboxSettings()).run(Program(source="import json; print(json.loads('1'))", files=files))
    assert outcome.stdout == b"1\n"


def test_background_processes_end_with_the_program():
    mark = f"601.{os.getpid()}"
    outcome = run(f"""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3): os.close(number)
        os.execv("/bin/sleep", ["sleep", "{mark}"])
    os._exit(0)
print("started")
""")
    assert outcome.stdout == b"started\n" and outcome.error is None
    commands = [f.read_bytes() for f in Path("/proc").glob("[0-9]*/cmdline") if f.exists()]
    assert not [command for command in commands if mark.encode() in command]


def test_a_program_dies_with_the_process_that_runs_it():
    mark = f"602.{os.getpid()}"
    source = f"import os; os.execv('/bin/sleep', ['sleep', '{mark}'])"
    code = f"""
from plasmid_sandbox import Program, Sandbox, SandboxSettings
Sandbox(SandboxSettings(wall_s=60)).run(Program(source={source!r}))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:

        def running():
            files = Path("/proc").glob("[0-9]*/cmdline")
            return [f for f in files if f.exists() and f.read_bytes().startswith(b"sleep\0" + mark.encode())]

        _wait_until(running)
        process.kill()
    _wait_until(lambda: not running())


def _wait_until(condition, timeout_s=20.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_only_named_folders_can_be_read_besides_the_systems(tmp_path):
    tmp_path.chmod(0o755)  # run by root, programs become nobody
    (tmp_path / "data.txt").write_text("for all")
    source = f"print(open('{tmp_path}/data.txt').read())\nattempt(open, '{tmp_path}/new', 'w')"
    assert run(source, readable=(str(tmp_path),)).stdout == b"for all\nno OSError\n"
    assert "FileNotFoundError" in run(source).error


def test_sandboxes_run_beside_each_other():
    outcomes = []
    threads = [threading.Thread(target=lambda i=i: outcomes.append((i, run(f"print({i})").stdout))) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [(i, f"{i}\n".encode()) for i in range(6)]


WITHOUT_NAMESPACES = {
    "fork": ("os.fork()", "killed by SIGSYS"),
    "start": ("subprocess.run(['/bin/true'])", "killed by SIGSYS"),
    "network": ("socket.socket()", "PermissionError"),
    "kill": ("os.kill(os.getppid(), 9)", "PermissionError"),
    "limits": ("x = bytearray(1 << 30)", "MemoryError"),
    "wait": ("time.sleep(99)", "did not finish within wall_s = 1"),
    "environment": ("print(os.environ['PLASMID_TEST_HUSH'])", "KeyError"),
}


@pytest.mark.long
@pytest.mark.parametrize(("source", "reason"), WITHOUT_NAMESPACES.values(), ids=WITHOUT_NAMESPACES)
def test_limits_alone_still_hold_one_process_without_network(source, reason, monkeypatch):
    monkeypatch.setenv("PLASMID_TEST_HUSH", "hush")
    outcome = run(source, isolation="limits", wall_s=time_for(reason))
    assert outcome.error and reason in outcome.error
    assert run("print(1)", isolation="limits").stdout == b"1\n"


def test_the_error_for_missing_user_namespaces_names_the_fix():
    """Runs in a user namespace that forbids nested ones, as some hosts and containers do."""
    code = """
from pathlib import Path
from plasmid.errors import IsolationError
from plasmid_sandbox import Program, Sandbox, SandboxSettings
Path("/proc/sys/user/max_user_namespaces").write_text("0")
Sandbox(SandboxSettings(isolation="limits")).check()
print(Sandbox(SandboxSettings()).run(Program(source="print(1)")).refused)
try:
    Sandbox(SandboxSettings()).check()
except IsolationError as error:
    print(error)
"""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "True\nsandbox: this host does not permit isolation = 'namespaces': unshare: No space left on device; allow "
        'unprivileged user namespaces, or set isolation = "limits", which is less strict\n'
    )


def test_both_architectures_have_a_filter_that_ends_in_a_decision():
    for machine in seccomp.ARCHITECTURES:
        for rules in (seccomp.sandbox_rules(), seccomp.worker_rules(network=False), seccomp.single_process_rules(1)):
            code = seccomp.program(rules, machine)
            assert len(code) % 8 == 0 and len(code) // 8 < 4096 and code[-8:-4] == b"\x06\0\0\0"
