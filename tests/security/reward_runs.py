"""Runs `rl reward` in another process, as this user or another one, with or without Landlock.

A fork is used for this user, except where the environment matters that /proc shows of the process.
"""

import contextlib
import ctypes
import inspect
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.forked_rl import run_rl
from tests.security.model_files import make_tokenizer
from tests.security.rl_command import RECIPE

HOSTS = ("as this user", "as nobody", "without Landlock", "as nobody without Landlock")
NOBODY = 65534
START = """
import ctypes, os, struct, sys
REFUSE
folder, *command = sys.argv[1:]
rows = open(folder + "/rows.jsonl").read().replace("PID_OF_RL", str(os.getpid()))
open(folder + "/rows.jsonl", "w").write(rows)
if os.environ.pop("TEST_WITHOUT_LANDLOCK", ""):
    refuse_landlock()
os.execv(command[0], command)
"""
"""Becomes `rl reward`, whose process id the attacks know."""


def score(rewards, attacks, *, host=HOSTS[0], plugin=None, timeout_s=120, watch=None, fork=True, **environment):
    """Return rewards and errors of texts by name: ``attacks`` has a text, or a text and its target."""
    with tempfile.TemporaryDirectory(prefix="plasmid-attack-") as name:
        fork = fork and host == HOSTS[0] and watch is None
        return _score(Path(name), rewards, attacks, host, plugin, timeout_s, watch, fork, environment)


def _score(folder, rewards, attacks, host, plugin, timeout_s, watch, fork, environment):
    make_tokenizer(folder / "model")
    (folder / "recipe.toml").write_text(RECIPE)
    rows = [text if isinstance(text, tuple) else (text, "well") for text in attacks.values()]
    lines = [json.dumps({"prompt": "p", "response": text, "target": target}) for text, target in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    arguments = ["reward", "recipe.toml", "--data", "rows.jsonl", "--json", rewards]
    if plugin is not None:
        (folder / "plugin.py").write_text(plugin)
        arguments += ["--plugin", "plugin.py"]
    if fork:
        env = {**os.environ, "HOME": str(folder), **environment}
        done = run_rl(*arguments, timeout=timeout_s, cwd=folder, env=env, told_pid=folder / "rows.jsonl")
        return _read(done.stdout, done.stderr, attacks)
    command = [sys.executable, "-m", "plasmid_cli", *arguments]
    if "without Landlock" in host:
        environment["TEST_WITHOUT_LANDLOCK"] = "1"
    start = START.replace("REFUSE", inspect.getsource(refuse_landlock))
    command = [sys.executable, "-c", start, str(folder), *command]
    if "nobody" in host:
        command = as_nobody(folder, command)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "HOME": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            if watch is not None:
                watch(process.pid)
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return _read(out, err, attacks)


def _read(out, err, attacks):
    assert out, err
    samples = json.loads(out)["samples"]
    assert len(samples) == len(attacks), (out, err)
    return {name: (row["reward"], row["error"] or None) for name, row in zip(attacks, samples, strict=True)}


def as_nobody(folder, command):
    """Return the command as a user without privileges, who can find Python even if it is in root's folder."""
    if os.getuid() != 0:
        pytest.skip("this is no privileged user already")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    user = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    closed = next((p for p in reversed(Path(sys.base_prefix).parents) if not p.stat().st_mode & 1), None)
    if closed is None:
        return [*user.split(), *command]
    # in a mount namespace, a readable folder that contains only Python replaces the unreadable one
    python, aside = sys.base_prefix, folder / "python"
    aside.mkdir()
    script = (
        f"mount --bind {python} {aside} && mount -t tmpfs -o mode=755 tmpfs {closed} && mkdir -p {python} "
        f'&& mount --bind {aside} {python} && exec {user} "$@"'
    )
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command]


def refuse_landlock():
    """Make Landlock calls of this process and its children fail, as on a kernel without it."""
    code = [(0x20, 0, 0, 0), (0x35, 0, 2, 444), (0x25, 1, 0, 446), (0x06, 0, 0, 0x50000 | 38), (0x06, 0, 0, 0x7FFF0000)]
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    libc, zero = ctypes.CDLL(None), ctypes.c_ulong(0)
    libc.prctl(38, ctypes.c_ulong(1), zero, zero, zero)
    assert libc.prctl(22, ctypes.c_ulong(2), ctypes.c_char_p(header), zero, zero) == 0


def descendants(pid):
    """Return the descendants of this process."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found
