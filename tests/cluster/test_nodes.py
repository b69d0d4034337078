"""Runs over several machines, which are nodes of a Ray cluster on this one; each has an address of its own."""

import asyncio
import os
import sys

import pytest

FIRST, SECOND = "127.0.0.1", "127.0.0.2"
TWO = "placement.nodes=2"


def test_actors_see_the_gpus_of_their_machine_that_the_run_was_given(cluster_of, tmp_path):
    nodes = [{"num_cpus": 3, "num_gpus": 3, "node_ip_address": address} for address in (FIRST, SECOND)]
    cluster = cluster_of(*nodes)
    found = asyncio.run(look_at_gpus(cluster, tmp_path))
    assert {address for address, _ in found} == {FIRST, SECOND}
    for address, gpus in found:
        assert len(gpus.split(",")) == 2 and set(gpus.split(",")) < {"0", "1", "2"}, address


async def look_at_gpus(cluster, folder):
    """On two machines an actor with two GPUs, as programs see them; another program holds one GPU of each."""
    import ray
    from plasmid.protocols import Bundle, Resources, Share
    from plasmid.run.cluster import RayCluster

    os.environ["RAY_AUTH_MODE"] = "disabled"
    found = RayCluster(log_dir=folder, address=cluster.address)
    try:
        holders = [ray.remote(num_gpus=1, num_cpus=0)(Looking).remote() for _ in range(2)]
        ray.get([holder.look.remote() for holder in holders])
        await found.reserve([Share(gpus=2, cpus=1)] * 2)
        both = [Resources(bundles=(Bundle(node, 0), Bundle(node, 1))) for node in range(2)]
        actors = [await found.start(Looking, name=f"looking-{i}", resources=one) for i, one in enumerate(both)]
        return [await actor.call("look", timeout_s=60) for actor in actors]
    finally:
        await found.close()


class Looking:
    def look(self):
        from plasmid.run.host import own_address

        return own_address(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_over_two_machines_trains_on_both(cluster_of, job):
    cluster = cluster_of(*({"num_cpus": 3, "node_ip_address": address} for address in (FIRST, SECOND)))
    code, out = job.train(TWO, environment=cluster.environment)
    assert code == 0, out
    assert "batch 2/2" in out
    assert set(job.machines()) == {FIRST, SECOND}
    logs = job.folder / "runs/job/logs"
    assert {log.name for log in logs.iterdir()} >= {"node-0.log", "node-1.log", "trainer-1.log", "engine-1.log"}
    assert not [log for log in logs.iterdir() if "blocking ray.get" in log.read_text()]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_waits_for_machines_and_says_for_what(cluster_of, job):
    cluster = cluster_of({"num_cpus": 3, "node_ip_address": FIRST})
    process = job.begin(TWO, environment=cluster.environment)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "waiting for the Ray cluster" in line:
            cluster.add(num_cpus=3, node_ip_address=SECOND)
    assert process.wait() == 0, lines
    (said,) = {line.strip() for line in lines if "waiting for the Ray cluster" in line}
    wanted = "2 machines with 3 CPUs each; it has 127.0.0.1 with 3 CPUs, of which are free 3 CPUs"
    assert said.endswith(f"waiting for the Ray cluster to have {wanted}"), said


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_a_machine_lacks_ends_the_run_with_its_name(cluster_of, job, tmp_path):
    shadow = tmp_path / "older/plasmid_rewards-0.0.1.dist-info"
    shadow.mkdir(parents=True)
    (shadow / "METADATA").write_text("Metadata-Version: 2.1\nName: plasmid-rewards\nVersion: 0.0.1\n")
    (shadow / "entry_points.txt").write_text("[plasmid]\nrewards = plasmid_rewards.plugin\n")
    older = {"PYTHONPATH": os.pathsep.join([str(shadow.parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    cluster = cluster_of(
        {"num_cpus": 3, "node_ip_address": FIRST}, {"num_cpus": 3, "node_ip_address": SECOND, "env_vars": older}
    )
    short = ["placement.wait_timeout_s=2"]
    code, out = job.train("placement.nodes=3", *short, environment=cluster.environment)
    assert code == 2 and "error: placement: the Ray cluster could not give the run what it needs within 2 s" in out
    code, out = job.train(TWO, environment=cluster.environment)
    assert code == 2
    version = "plasmid-rewards is 0.0.1 there and 0.1.0 where rl was called; install the same on all machines"
    assert f"error: node {SECOND}: {version}" in out.replace("\n", " "), out
    assert sys.version_info[:2] and not (job.folder / "runs/job/config.json").exists()
