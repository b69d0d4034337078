"""Loss of a machine of a joined cluster: the run ends with its name, or resumes if another machine is available."""

import time

import plasmid.testing.fakes
import psutil
import pytest
from plasmid_runtime.observe.journal import read_journal

SECOND, THIRD = "127.0.0.2", "127.0.0.3"
SETTINGS = [
    "placement.nodes=2",
    "placement.trainer_ranks=1",
    "placement.engine_ranks=1",
    "trainer={kind='fake', seconds=0.5}",
    "rollout={kind='fake'}",
    "algorithm={kind='fake'}",
    "checkpoint={every=1, export=false}",
    "run.batches=12",
    "run.dir=run",
    "--plugin",
    plasmid.testing.fakes.__file__,
]


def kill_machine(cluster, address):
    """Kill all processes of a node at once, as a power failure would."""
    below = psutil.Process(cluster.process.pid).children(recursive=True)
    (raylet,) = (one for one in below if one.name() == "raylet" and f"={address}" in " ".join(one.cmdline()))
    for one in [raylet, *raylet.children(recursive=True)]:
        one.kill()


def wait_for(path, process):
    deadline = time.monotonic() + 400
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_supervised_run_that_loses_a_machine_goes_on_with_another_one(cluster_of, job):
    node = {"num_cpus": 3}
    with cluster_of(node, {**node, "node_ip_address": SECOND}) as cluster:
        process = job.begin(*SETTINGS, "--supervise", environment=cluster.environment)
        wait_for(job.folder / "run/checkpoints/batch-000002", process)
        kill_machine(cluster, SECOND)
        cluster.add(**node, node_ip_address=THIRD)
        out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out
    lost = [line for line in out.splitlines() if "; restart " in line]
    assert len(lost) == 1, out
    assert f"its machine {SECOND} was lost" in lost[0], out
    assert "Traceback" not in out and "\x1b[33m(raylet" not in out, out
    assert set(job.machines()) == {cluster.first, SECOND, THIRD}
    assert [entry.step for entry in read_journal(job.folder / "run/metrics.jsonl")] == list(range(1, 13))
