"""Ctrl-C and SIGTERM before a run starts."""

import os
import pty
import signal
import subprocess
import sys

import pytest
from plasmid_cli.interrupts import INTERRUPTED, exit_on_interrupt

CODE = """
import os, sys
from plasmid_cli.interrupts import exit_on_interrupt
with exit_on_interrupt():
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_and_shows_the_cursor_again(number):
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, "-c", CODE, str(int(number))]
        ended = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, timeout=60)
        assert ended.returncode == INTERRUPTED and ended.stderr == b"interrupted\n"
        os.set_blocking(ours, False)
        assert os.read(ours, 100).startswith(b"\x1b[?25h")
    finally:
        os.close(ours)
        os.close(theirs)


BLOCKED = """
import hashlib, os, signal, threading
from plasmid_cli.interrupts import exit_on_interrupt
with exit_on_interrupt():
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # takes minutes, during which Python handles no signal
"""


def test_a_signal_ends_a_process_whose_main_thread_is_in_a_call_to_c():
    ended = subprocess.run([sys.executable, "-c", BLOCKED], stderr=subprocess.PIPE, timeout=60)
    assert ended.returncode == INTERRUPTED and ended.stderr == b"interrupted\n"


def test_a_handler_that_python_did_not_set_stays(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    called = []
    monkeypatch.setattr(signal, "signal", lambda *given: called.append(given))
    with exit_on_interrupt():
        pass
    assert not called
