"""A program with child processes like those of a server: spawned, forked, ignoring signals, and not Python."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path


def serve(arguments):
    """Start the processes, write their ids into a file, and hang."""
    multiprocessing.get_context("spawn").Process(target=schedule, args=(arguments["file"],)).start()
    if os.fork() == 0:
        detokenize(arguments["file"])
    deaf = multiprocessing.get_context("fork").Process(target=ignore, args=(arguments["file"],))
    deaf.start()
    note(arguments["file"], "sleep", subprocess.Popen(["sleep", "1000"]).pid)
    answer(arguments["file"])


def schedule(file):
    """Hang."""
    note(file, "scheduler")
    time.sleep(1000)


def detokenize(file):
    """Hang."""
    note(file, "detokenizer")
    time.sleep(1000)


def ignore(file):
    """Hang and ignore signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    note(file, "deaf")
    time.sleep(1000)


def answer(file):
    """Hang."""
    note(file, "server")
    time.sleep(1000)


def note(file, name, pid=0):
    """Write the id of a process."""
    with Path(file).open("a") as opened:
        opened.write(f"{name} {pid or os.getpid()}\n")
