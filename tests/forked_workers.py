"""A pytest plugin: `--workers N` runs the tests in N forks of the process that has collected them.

A worker of pytest-xdist is a new interpreter that imports and collects all tests again, which takes 10 s of processor
time. A worker runs all tests of a group, which is a file or the tests with the same attribute `group`, then another
group of the folder, whose modules and fixtures it has, then a folder that no worker has begun, and then helps with the
one that has the most tests left. A worker that dies fails its test and is replaced.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections import defaultdict, deque
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import wait
from types import SimpleNamespace

import pytest

from tests.forked_processes import share_server

ENDINGS = ((None, 2), (signal.SIGINT, 10), (signal.SIGKILL, 10))
"""Signals that end workers after an interruption, and seconds to wait. A terminal also interrupts workers itself."""


def pytest_addoption(parser):
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the tests in N forks, 0: in this process")


def pytest_configure(config):
    if config.option.workers and (config.getoption("numprocesses", None) or config.option.usepdb):
        raise pytest.UsageError("--workers: cannot be combined with -n and --pdb; set it to 0")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Run the tests in workers; return None, for pytest's own loop, without workers or after errors of collection."""
    option = session.config.option
    if option.workers and not option.collectonly and (not session.testsfailed or option.continue_on_collection_errors):
        Workers(session).run()
        return True


class Workers:
    """The workers of a session, and by folder the groups that none of them has begun: lists of indices of tests."""

    def __init__(self, session):
        self.session, self.running, self.num_started = session, [], 0
        self.left, self.begun = defaultdict(deque), set()
        indices = {item: index for index, item in enumerate(session.items)}
        for _, items in groupby(session.items, lambda item: getattr(item, "group", item.path)):
            group = list(items)
            self.left[group[0].path.parent].append([indices[item] for item in group])
        share_server(session.config._tmp_path_factory.getbasetemp())
        session.config.pluginmanager.getplugin("terminalreporter").showfspath = False  # files are interleaved

    def run(self):
        session = self.session
        try:
            while self.running or self.left:
                while self.left and len(self.running) < session.config.option.workers:
                    self.running.append(Worker(self))
                ends = {end: worker for worker in self.running for end in (worker.connection, worker.ended)}
                for worker in {ends[ready] for ready in wait(list(ends))}:
                    worker.receive()
                if self.left and (session.shouldfail or session.shouldstop):
                    self.left.clear()
                    for worker in self.running:
                        worker.give(None)
        finally:
            self.end_all()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def take(self, folder):
        """Return the next group for a worker that has run tests of this folder, and its folder."""
        if folder not in self.left:
            folder = next(
                (name for name in self.left if name not in self.begun),
                max(self.left, key=lambda name: sum(map(len, self.left[name]))),
            )
        self.begun.add(folder)
        group = self.left[folder].popleft()
        if not self.left[folder]:
            del self.left[folder]
        return group, folder

    def end_all(self):
        for number, seconds in ENDINGS:
            for worker in self.running if number else ():
                os.kill(worker.pid, number)
            while self.running and (ended := wait([worker.ended for worker in self.running], seconds)):
                for worker in [worker for worker in self.running if worker.ended in ended]:
                    worker.close()


class Worker:
    """A worker, in the process that has forked it."""

    def __init__(self, workers):
        self.workers, self.session = workers, workers.session
        self.group, self.folder, self.test = [], None, None
        workers.num_started += 1
        self.name = f"w{workers.num_started}"
        self.gateway, self._workerinfocache = SimpleNamespace(id=self.name), f"[{self.name}]"  # for reports of pytest
        self.connection, theirs = multiprocessing.Pipe()
        self.session.config.get_terminal_writer().flush()
        self.pid = os.fork()
        if self.pid == 0:
            for worker in [self, *workers.running]:
                worker.connection.close()  # a worker ends when no process has the other end of its pipe
            run_worker(self.session, theirs, self.name)
        theirs.close()
        self.ended = os.pidfd_open(self.pid)

    def give(self, group):
        """Send the next group; None ends the worker after its test or group."""
        self.group += group or []
        with suppress(OSError):  # it has ended
            self.connection.send(group)

    def receive(self):
        """Handle messages, and then the end of the process."""
        has_ended = bool(wait([self.ended], 0))
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while self.connection.poll():
                name, value = self.connection.recv()
                getattr(self, f"on_{name}")(value)
        if has_ended:
            code = self.close()
            if self.test is not None:
                if self.group and not (self.session.shouldfail or self.session.shouldstop):
                    self.workers.left[self.folder].appendleft(self.group)
                self.fail_test(f"its process ended with code {code}")
            elif code:
                raise RuntimeError(f"a worker ended with code {code} outside of a test; its error is above")

    def on_next(self, _):
        group, self.folder = self.workers.take(self.folder) if self.workers.left else (None, None)
        self.give(group)

    def on_test(self, index):
        """Remember the test that runs now, None between tests."""
        self.test = index
        if index is not None:
            self.group.remove(index)

    def on_report(self, data):
        report = self.session.config.hook.pytest_report_from_serializable(config=self.session.config, data=data)
        self.log(report)

    def on_warning(self, value):
        (text, category, *place), values = value
        values["warning_message"] = warnings.WarningMessage(text, type(category, (Warning,), {}), *place)
        self.session.config.hook.pytest_warning_recorded.call_historic(kwargs=values)

    def on_stop(self, reason):
        self.session.shouldstop = reason

    def fail_test(self, reason):
        item = self.session.items[self.test]
        self.log(pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call"))

    def log(self, report):
        report.node = self  # as in reports of xdist
        self.session.config.hook.pytest_runtest_logreport(report=report)

    def close(self):
        """Return the exit code of the ended process; negative for a signal."""
        self.workers.running.remove(self)
        self.connection.close()
        os.close(self.ended)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Sender:
    """Sends reports and warnings of a worker; registered in place of the plugin that prints them."""

    def __init__(self, session, connection):
        self.session, self.connection = session, connection
        self._tw = session.config.get_terminal_writer()  # for stacks of pytest-timeout

    def send(self, name, value=None):
        self.connection.send((name, value))

    def pytest_runtest_logreport(self, report):
        config = self.session.config
        self.send("report", config.hook.pytest_report_to_serializable(config=config, report=report))

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        category = warning_message.category.__name__  # the class may be unknown to the other process
        text = str(warning_message.message), category, warning_message.filename, warning_message.lineno
        self.send("warning", (text, {"when": when, "nodeid": nodeid, "location": location}))

    def run_tests(self):
        """Run tests until there are no more groups or the session stops."""
        session, left = self.session, deque()

        def take():
            if not left and not self.connection.poll():  # a message without a request ends this worker
                self.send("next")
                left.extend(self.connection.recv() or ())
            return left.popleft() if left else None

        index = take()
        while index is not None:
            following = take()
            self.send("test", index)
            nextitem = None if following is None else session.items[following]
            session.config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=nextitem)
            self.send("test")
            if session.shouldfail or session.shouldstop or self.connection.poll():
                break
            index = following


def run_worker(session, connection, name):
    """Run tests in a fork; never returns."""
    code, config = 1, session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    try:
        sender = Sender(session, connection)
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(sender, "terminalreporter")
        capture.stop_global_capturing()  # its files are shared with the other workers
        capture.start_global_capturing()
        capture.suspend_global_capture()
        config._tmp_path_factory._basetemp = config._tmp_path_factory.mktemp(name, numbered=False)
        for module in ("random", "numpy.random"):  # all forks would draw the same numbers
            if module in sys.modules:
                sys.modules[module].seed()
        try:
            sender.run_tests()
        except (KeyboardInterrupt, pytest.exit.Exception) as error:
            session.shouldstop = str(error) or "interrupted"
        session._setupstate.teardown_exact(None)  # if it stopped before its last test
        if session.shouldstop:
            sender.send("stop", session.shouldstop)
        atexit._run_exitfuncs()  # unlike the interpreter at its end, do not wait for threads, which some tests leave
        code = 0
    finally:
        if code:
            capture.suspend_global_capture()
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
