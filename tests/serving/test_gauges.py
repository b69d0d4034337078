"""Metrics computed from the servers' gauges."""

import pytest
from plasmid_serving.engine import Speeds, gauges
from plasmid_sglang.dialect import read_load


def load(running, tokens, seconds, **more):
    core = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": 1, "gen_throughput": 0.0}
    moments = [5.0, 10.0, seconds * 1e6, 20.0, 1.0, tokens]
    core |= {"token_usage": 0.5, "cache_hit_rate": 0.25, "lora": None, "loaded": True, "decode_moments": moments}
    return read_load({**core, **more})


def test_gauges_are_sums_over_schedulers_and_means_of_fractions():
    spec = {"speculative": {"accept_length": 3.0, "accept_rate": 0.5}}
    loads = {
        "engine-0": [load(2, 200, 2.0), load(4, 100, 2.0, **spec)],
        "engine-1": [load(0, 30, 1.0, token_usage=0.2)],
    }
    found = gauges(loads, Speeds())
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


def test_the_speed_is_that_since_the_last_look():
    speeds = Speeds()
    assert speeds.of("a", [load(0, 100, 1.0)]) == 100.0
    assert speeds.of("a", [load(0, 400, 3.0)]) == 150.0
    assert speeds.of("a", [load(0, 400, 3.0)]) == 0.0
    assert speeds.of("b", [load(0, 40, 1.0)]) == 40.0
    assert speeds.of("a", [load(0, 60, 1.5)]) == 40.0  # it was restarted, and counts from 0
    assert speeds.of("c", [read_load({"decode_moments": None, "num_running_reqs": 0})]) == 0.0


def test_speculative_decoding_metrics_exist_only_if_enabled():
    assert not [name for name in gauges({"engine-0": [load(1, 1, 1.0)]}, Speeds()) if "accept" in name]
