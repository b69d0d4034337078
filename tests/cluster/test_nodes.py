"""Runs over several machines, which are nodes of a Ray cluster on this one with an address each."""

import asyncio
import os

import pytest

SECOND = "127.0.0.2"
TWO = "placement.nodes=2"


@pytest.mark.long
def test_actors_see_the_gpus_of_their_machine_that_the_run_was_given(two_machines, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # whoever runs the tests may have a token
    found = asyncio.run(look_at_gpus(two_machines, tmp_path))
    assert {address for address, _ in found} == {two_machines.first, SECOND}
    for address, gpus in found:
        assert len(gpus.split(",")) == 2 and set(gpus.split(",")) < {"0", "1", "2"}, address
    assert "GPUs for the run: " in (tmp_path / "node-1.log").read_text()


async def look_at_gpus(cluster, folder):
    """Return the GPUs that an actor with two GPUs sees on each machine, while another actor holds one GPU of each."""
    import ray
    from plasmid.protocols import Bundle, Resources, Share
    from plasmid_runtime.cluster import open_cluster

    found = open_cluster(log_dir=folder, address=cluster.address)
    try:
        holders = [ray.remote(num_gpus=1, num_cpus=0, scheduling_strategy="SPREAD")(Looking).remote() for _ in "ab"]
        ray.get([holder.look.remote() for holder in holders])
        await found.reserve([Share(gpus=2, cpus=1)] * 2)
        both = [Resources(bundles=(Bundle(node, 0), Bundle(node, 1))) for node in range(2)]
        actors = [await found.start(Looking, name=f"looking-{i}", resources=one) for i, one in enumerate(both)]
        return [await actor.call("look", timeout_s=60) for actor in actors]
    finally:
        await found.close()


class Looking:
    def look(self):
        from plasmid.utils.addresses import find_own_address

        return find_own_address(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_over_two_machines_trains_on_both(two_machines, job):
    code, out = job.train(TWO, environment=two_machines.environment)
    assert code == 0, out
    assert "batch 2/2" in out
    assert set(job.machines()) == {two_machines.first, SECOND}
    logs = job.folder / "runs/job/logs"
    assert {log.name for log in logs.iterdir()} >= {"node-0.log", "node-1.log", "trainer-1.log", "engine-1.log"}
    assert not [log for log in logs.iterdir() if "blocking ray.get" in log.read_text()]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_reference_on_the_other_machine_follows_the_policy(two_machines, job):
    place = ["placement.trainer_ranks=1", "placement.engine_ranks=1", "placement.reference_ranks=2"]
    follows = ["algorithm.kl_coef=0.1", "reference.update_every=1"]
    code, out = job.train(TWO, *place, *follows, environment=two_machines.environment)
    assert code == 0, out
    assert "batch 2/2" in out
    assert set(job.machines()) == {two_machines.first, SECOND}
    logs = job.folder / "runs/job/logs"
    assert {log.name for log in logs.iterdir()} >= {"trainer-0.log", "reference-0.log", "reference-1.log"}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_without_enough_machines_names_required_and_available_ones(two_machines, job):
    short = ["placement.nodes=3", "placement.wait_timeout_s=2"]
    code, out = job.train(*short, environment=two_machines.environment)
    there = ", ".join(sorted(f"{address} with 3 GPUs and 3 CPUs" for address in (two_machines.first, SECOND)))
    assert code == 75, out
    (said,) = (line for line in out.splitlines() if line.startswith("error: "))
    assert said.startswith(
        "error: placement: the Ray cluster did not provide the resources of the run within 2 s "
        "(placement.wait_timeout_s): "
        f"1 machine with 3 CPUs, 1 machine with 2 CPUs, 1 machine with 1 CPU; it has {there}; free in total: "
    )
    said, _, hang = said.partition("; at the start; ")
    assert said.endswith("; add machines, wait for other jobs to end, or set fewer nodes or ranks")
    assert "stacks of all processes: " in hang
    assert out.count("runs without authentication: anyone who can reach its ports can run code") == 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_waits_for_machines_and_reports_the_wait(cluster_of, job):
    with cluster_of({"num_cpus": 3}) as cluster:
        process = job.begin(TWO, environment=cluster.environment)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "waiting for the Ray cluster" in line:
                cluster.add(num_cpus=3, node_ip_address=SECOND)
        assert process.wait() == 0, lines
    (said,) = {line.strip() for line in lines if "waiting for the Ray cluster" in line}
    wanted = f"2 machines with 3 CPUs each; it has {cluster.first} with 3 CPUs; free in total: "
    assert f"waiting for the Ray cluster to provide {wanted}" in said, said


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_machine_with_other_versions_ends_the_run_with_its_name(cluster_of, job, tmp_path):
    older = tmp_path / "older/plasmid_rewards-0.0.1.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: plasmid-rewards\nVersion: 0.0.1\n")
    (older / "entry_points.txt").write_text("[plasmid]\nrewards = plasmid_rewards.plugin\n")
    path = os.pathsep.join([str(older.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    second = {"num_cpus": 3, "node_ip_address": SECOND, "env_vars": {"PYTHONPATH": path}}
    with cluster_of({"num_cpus": 3}, second) as cluster:
        code, out = job.train(TWO, environment=cluster.environment)
    assert code == 2, out
    version = (
        "plasmid-rewards is 0.0.1 there and 0.1.0 on the driver's machine; install the same version on all machines"
    )
    assert f"error: node {SECOND}: {version}" in " ".join(out.split()), out
    assert not (job.folder / "runs/job/config.json").exists()
