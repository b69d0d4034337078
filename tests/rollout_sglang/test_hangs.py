"""A server that hangs: the stacks of its processes are saved in the run folder before it is restarted."""

import multiprocessing
import os

import psutil
import pytest
from plasmid_runtime.cluster.watch.stack_dumps import find_stacks_file
from plasmid_sglang import launch

from tests.stopped_process import hang_report_of


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_stopped_scheduler_is_named_with_the_stacks_of_its_server(sglang, tiny_model, tmp_path):
    rollout = "kind='sglang', dtype='float32', server_args={max_total_tokens=4096}"
    report = hang_report_of(tmp_path, tiny_model, rollout, "sglang::scheduler")
    text = report.read_text()
    assert "  engine-0/sglang::scheduler (process " in text and "): stopped by a signal; " in text
    assert "_watchdog" not in text
    for name, function in (("scheduler", "in event_loop"), ("detokenizer", "in event_loop"), ("python", "in serve")):
        (file,) = report.parent.glob(f"engine-0-*{name}*.txt")
        assert function in file.read_text(), name


def _fork_with_title(parent):
    """Set all variables again, as SGLang does with some, and send the title of a fork."""
    name = psutil.Process().name()
    launch.locate_title()
    assert psutil.Process().name() == name
    for name, value in list(os.environ.items()):
        os.environ[name] = value
    import setproctitle

    if not os.fork():
        setproctitle.setproctitle("sglang::fork")
        with open("/proc/self/cmdline") as file:
            parent.send(file.read().strip("\0"))
        os._exit(0)
    os.wait()


def test_processes_of_a_server_are_named_and_write_their_stacks(shared):
    found = [process for process in psutil.Process().children(recursive=True) if find_stacks_file(process.pid)]
    names = {process.name() for process in found}
    assert {"sglang::scheduler", "sglang::detokenizer"} < names and any(name.startswith("python") for name in names)


def test_a_fork_of_a_server_can_be_renamed():
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_fork_with_title, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(60) and ours.recv() == "sglang::fork"
    process.join()
