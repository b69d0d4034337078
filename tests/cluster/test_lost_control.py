"""A cluster whose control process is killed: the run ends, and none of its processes is left."""

import contextlib
import re
import time
from pathlib import Path

import plasmid.testing.fakes
import psutil
import pytest

from tests.cluster import killing_plugin
from tests.cluster.test_lost_machine import SECOND, wait_for

SETTINGS = [
    "placement.nodes=2",
    "placement.trainer_ranks=1",
    "placement.engine_ranks=1",
    "trainer={kind='fake', seconds=0.5}",
    "rollout={kind='fake'}",
    "algorithm={kind='fake'}",
    "checkpoint={every=1, export=false}",
    "run.batches=200",
    "run.dir=run",
    "--plugin",
    plasmid.testing.fakes.__file__,
]


def of_the_run(cluster):
    """Return the processes of the cluster that belong to the run."""
    below = psutil.Process(cluster.process.pid).children(recursive=True)
    return [one for one in below if "ActorProcess" in command_of(one)]


def command_of(process):
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def control_of(cluster):
    """Return the control process of a cluster."""
    below = psutil.Process(cluster.process.pid).children(recursive=True)
    (control,) = (one for one in below if one.name() == "gcs_server")
    return control


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_whose_cluster_loses_its_control_process_ends_and_leaves_nothing(cluster_of, job):
    node = {"num_cpus": 3}
    with cluster_of(node, {**node, "node_ip_address": SECOND}) as cluster:
        process = job.begin(*SETTINGS, environment=cluster.environment)
        wait_for(job.folder / "run/checkpoints/batch-000002", process)
        own = [*of_the_run(cluster), *psutil.Process(process.pid).children(recursive=True)]
        assert len(own) >= 4, own
        shared = set(Path("/dev/shm").iterdir())
        control_of(cluster).kill()
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 75, out
        errors = [line for line in out.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "the cluster's control process (gcs_server) was lost" in errors[0], out
        assert "Failed to connect to GCS" not in out, out  # Ray would end the driver after 60 s
        assert "Traceback" not in out and "\x1b[33m(" not in out, out
        _, alive = psutil.wait_procs(own, timeout=20)
        assert not [one.cmdline() for one in alive if one.status() != psutil.STATUS_ZOMBIE]
        assert set(Path("/dev/shm").iterdir()) <= shared


AT_START = [
    *(setting for setting in SETTINGS if not setting.startswith(("trainer=", "placement.nodes", "run.batches"))),
    "run.batches=2",
    "--plugin",
    killing_plugin.__file__,
]
MOMENTS = ["moment='before'", "moment='while'", "moment='while', delay_s=0.1", "moment='after'"]
OWN_LOST = r"error: Ray's control process \(gcs_server\), process \d+, has ended, which ends the run; .*"
CLUSTERS_LOST = r"error: .*the cluster's control process \(gcs_server\) was lost.*"


def shared_memory():
    """Return the names in /dev/shm, except semaphores, which any Python program on this machine creates briefly."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}


def end_at_start(process, lost, others=tuple, *, wait_s=20):
    """Wait until the run has ended with one line and its processes are gone soon after; `others` returns more
    processes."""
    own, shared = set(), shared_memory()
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            own |= {*psutil.Process(process.pid).children(recursive=True), *others()}
        time.sleep(0.05)
    out = process.stdout.read()
    assert process.returncode == 75, out
    (error,) = (line for line in out.splitlines() if line.startswith("error: "))
    assert re.fullmatch(lost, error), out
    assert "Traceback" not in out and "GCS" not in out and "\x1b[33m(" not in out, out
    _, alive = psutil.wait_procs(own, timeout=wait_s)
    assert not [one.cmdline() for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    assert shared_memory() <= shared
    return error


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_whose_own_control_process_dies_at_the_start_ends_and_leaves_nothing(job, plain_environment, moment):
    process = job.begin(*AT_START, f"trainer={{kind='killing', {moment}}}", environment=plain_environment)
    error = end_at_start(process, OWN_LOST)
    assert error in (job.folder / "run/logs/driver.log").read_text()
    assert not list(Path(plain_environment["RAY_TMPDIR"]).glob("*/ray/session_*"))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_whose_cluster_loses_its_control_process_at_the_start_ends(cluster_of, job, moment):
    node = {"num_cpus": 3}
    with cluster_of(node, {**node, "node_ip_address": SECOND}) as cluster:
        trainer = f"trainer={{kind='killing', {moment}, pid={control_of(cluster).pid}}}"
        process = job.begin(*AT_START, "placement.nodes=2", trainer, environment=cluster.environment)
        # the run does not know a process that Ray is just starting; it ends with its raylet, after 60 s
        error = end_at_start(process, CLUSTERS_LOST, lambda: of_the_run(cluster), wait_s=150)
    assert error in (job.folder / "run/logs/driver.log").read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_supervised_run_starts_again_after_its_control_process_died_at_the_start(job, plain_environment):
    trainer = "trainer={kind='killing', moment='before'}"
    process = job.begin(*AT_START, trainer, "--supervise", environment=plain_environment)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    (restart,) = (line for line in out.splitlines() if line.startswith("warning: the run died "))
    assert "restart 1 of 5" in restart
    assert len((job.folder / "run/metrics.jsonl").read_text().splitlines()) == 2
