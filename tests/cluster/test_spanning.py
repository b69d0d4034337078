"""A run whose SGLang server spans two machines, which are nodes of a Ray cluster on this one."""

import json
from importlib.util import find_spec

import pytest
from plasmid_runtime.observe.journal import read_journal

SPANNING = """
[rollout]
kind = "sglang"
dtype = "float32"
gpus_per_engine = 2
wire = "broadcast"
server_args.max_total_tokens = 4096

[placement]
nodes = 2
trainer_ranks = 1
engine_ranks = 2
start_timeout_s = 900
"""
SECOND = "127.0.0.2"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed; `make dev` does that")
def test_a_server_over_two_machines_is_trained_with(two_machines, job):
    (job.folder / "spanning.toml").write_text(SPANNING)
    code, out = job.train("spanning.toml", environment=two_machines.environment)
    assert code == 0, out
    assert "batch 2/2" in out
    run = job.folder / "runs/job"  # the first recipe names the run
    told = [
        json.loads((run / f"engines/{name}/arguments.json").read_text()) for name in ("engine-0", "engine-0-node-1")
    ]
    hosts = [one["host"] for one in told]
    assert sorted(hosts) == sorted([two_machines.first, SECOND])  # Ray determines which of them is machine 0
    assert {one["dist_init_addr"].rpartition(":")[0] for one in told} == {hosts[0]}
    assert {log.name for log in (run / "logs").iterdir()} >= {"engine-0-server.log", "engine-0-node-1-server.log"}
    metrics = [entry.metrics for entry in read_journal(run / "metrics.jsonl")]
    assert max(found["sync/canary_difference"] for found in metrics) < 1e-4
