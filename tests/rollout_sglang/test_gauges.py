"""What the servers' own gauges become."""

import pytest
from plasmid_sglang.gauges import busy, flat, gauges


def load(running, speed, **more):
    core = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": 1, "gen_throughput": speed}
    return flat({**core, "token_usage": 0.5, "cache_hit_rate": 0.25, "lora": None, "loaded": True, **more})


def test_gauges_are_sums_over_schedulers_and_means_of_fractions():
    spec = {"speculative": {"accept_length": 3.0, "accept_rate": 0.5}}
    loads = {"engine-0": [load(2, 100.0), load(4, 50.0, **spec)], "engine-1": [load(0, 30.0, token_usage=0.2)]}
    found = gauges(loads)
    assert found.pop("engine/kv_usage") == pytest.approx(0.4)
    assert found == {
        "engine/tokens_per_s": 180.0,
        "engine/running": 6.0,
        "engine/queued": 3.0,
        "engine/cache_hit_rate": 0.25,
        "engine/accept_length": 3.0,
        "engine/accept_rate": 0.5,
        "engine/engine-0/tokens_per_s": 150.0,
        "engine/engine-1/tokens_per_s": 30.0,
    }
    assert [busy(own) for own in loads.values()] == [8.0, 1.0]


def test_servers_without_speculative_decoding_tell_nothing_of_it():
    assert not [name for name in gauges({"engine-0": [load(1, 1.0)]}) if "accept" in name]
