"""Experts of requests, collected from steps of vLLM's scheduler, with stand-ins for vLLM's own classes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm_stub
from plasmid.types.routing import Routing
from plasmid_vllm.worker_process.expert_recorder import ExpertRecorder, ScheduledTokens

ROUTING = Routing(layers=2, choices=3, experts=8)
BLOCK = 4


class Step:
    """Rows of random experts of one step, and an event that is set by the test."""

    def __init__(self, seed, count, *, is_done=True):
        drawn = np.random.default_rng(seed).integers(0, 8, (count, 2, 3))
        self.rows, self.is_done = torch.from_numpy(drawn).to(torch.uint8), is_done

    def query(self):
        return self.is_done

    def synchronize(self):
        self.is_done = True

    def __getitem__(self, part):
        return self.rows.numpy()[part]


def scheduled(name, start, count, blocks, wanted_from=0, **more):
    return ScheduledTokens(name=name, wanted_from=wanted_from, start=start, count=count, blocks=blocks, **more)


def make():
    return ExpertRecorder(ROUTING, num_slots=40, block_size=BLOCK)


def test_rows_of_a_step_go_to_their_requests_in_order():
    recorder = make()
    first, second = Step(1, 8), Step(2, 2)
    recorder.add(first.rows, None, [scheduled("a", 0, 5, [1, 2]), scheduled(None, 0, 3, [3])])
    recorder.add(second.rows, None, [scheduled(None, 3, 1, [3]), scheduled("a", 5, 1, [1, 2])])
    assert np.array_equal(recorder.take("a", 9), np.concatenate([first[:5], second[1:]]))
    assert recorder.take("a", 9).shape == (0, 2, 3), "it was removed"


def test_a_cached_prefix_has_the_experts_with_which_it_was_computed():
    """Also of a request that asked for none, and that is computed in the same step."""
    recorder = make()
    step = Step(1, 11)
    other, own = scheduled(None, 0, 9, [1, 2, 3]), scheduled("a", 8, 2, [1, 2, 4])
    recorder.add(step.rows, None, [other, own])
    assert np.array_equal(recorder.take("a", 99), np.concatenate([step[:8], step[9:]]))


def test_the_first_experts_of_a_token_remain_and_earlier_tokens_are_left_out():
    recorder = make()
    first, again = Step(1, 6), Step(2, 8)
    recorder.add(first.rows, None, [scheduled("a", 0, 6, [1, 2], wanted_from=2)])
    recorder.add(again.rows, None, [scheduled("a", 0, 8, [5, 6], wanted_from=2)])
    assert np.array_equal(recorder.take("a", 5), np.concatenate([first[2:6], again[6:7]]))


def test_experts_of_tokens_that_a_preemption_dropped_are_replaced():
    recorder = make()
    first, again = Step(1, 6, is_done=False), Step(2, 7)
    recorder.add(first.rows, first, [scheduled("a", 0, 6, [1, 2], wanted_from=1)])
    recorder.add(again.rows, again, [scheduled("a", 0, 7, [5, 6], wanted_from=1, num_kept=4)])
    assert np.array_equal(recorder.take("a", 99), np.concatenate([first[1:4], again[4:]]))


def test_a_prompt_computed_in_parts_after_a_preemption_adds_nothing_known():
    recorder = make()
    first, part, rest = Step(1, 6), Step(2, 3), Step(3, 4)
    recorder.add(first.rows, None, [scheduled("a", 0, 6, [1, 2])])
    recorder.add(part.rows, None, [scheduled("a", 0, 3, [5], num_kept=6)])
    recorder.add(rest.rows, None, [scheduled("a", 3, 4, [5, 6])])
    assert np.array_equal(recorder.take("a", 99), np.concatenate([first[:], rest[3:]]))


def test_experts_of_blocks_that_are_not_kept_are_unknown():
    """vLLM gives block 0 in place of blocks outside of a sliding window."""
    recorder = make()
    step = Step(1, 10)
    recorder.add(step.rows, None, [scheduled(None, 0, 5, [0, 2]), scheduled("a", 4, 5, [0, 3, 4])])
    assert np.array_equal(recorder.take("a", 99), np.concatenate([ROUTING.rows(4), step[5:]]))


def test_rows_are_read_once_they_are_copied():
    recorder = make()
    waiting, later = Step(1, 4, is_done=False), Step(2, 1)
    rows = waiting.rows.clone()
    waiting.rows.zero_()
    recorder.add(waiting.rows, waiting, [scheduled("a", 0, 4, [1])])
    recorder.add(later.rows, later, [scheduled("a", 4, 1, [1, 2])])
    waiting.rows.copy_(rows)
    assert np.array_equal(recorder.take("a", 99), np.concatenate([rows.numpy(), later[:]]))
    assert waiting.is_done


class Runner:
    """vLLM's model runner, with two groups of blocks; only the second has those of all tokens."""

    def __init__(self, whole):
        specs = SimpleNamespace(block_size=16), whole(BLOCK)
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups, num_blocks=10)
        self.input_batch = SimpleNamespace(req_ids=["x-1", "y-1"])
        self.requests = {}

    def get_model(self):
        return "model"


@pytest.fixture
def worker(monkeypatch):
    vllm_stub.install(monkeypatch)
    from plasmid_vllm.worker_process import gpu as worker

    class Base:
        """vLLM's worker."""

        rank, ran = 0, 0

        def load_model(self, **kwargs):
            self.loaded = True

        def execute_model(self, scheduler_output):
            self.ran += 1
            return "output"

    class Recording(worker.RecordingWorker, Base):
        pass

    made = Recording()
    made.model_runner = Runner(worker.FullAttentionSpec)
    made.model_runner.sampler = SimpleNamespace(logprobs_mode="raw_logprobs", use_fp64_gumbel=False)
    made.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
        model_config=SimpleNamespace(get_num_experts=lambda: 8),
    )
    made.load_model()
    return made


def test_a_worker_records_the_batch_in_the_order_in_which_it_is_computed(worker):
    capturer = worker._capturer
    assert (capturer.limit, capturer.model) == (32, "model") and worker.loaded
    states = worker.model_runner.requests
    for name, start, wanted in (("x-1", 2, None), ("y-1", 0, {"record_as": "y", "experts_from": 1})):
        sampling = SimpleNamespace(extra_args=wanted)
        states[name] = SimpleNamespace(num_computed_tokens=start, block_ids=([9], [3, 4]), sampling_params=sampling)
    step = Step(1, 7)
    capturer.rows = step.rows
    both = SimpleNamespace(req_ids=["x-1", "y-1"], num_output_tokens=[3, 1], resumed_req_ids=set())
    output = SimpleNamespace(
        total_num_scheduled_tokens=5, num_scheduled_tokens={"y-1": 4, "x-1": 1}, scheduled_cached_reqs=both
    )
    assert worker.execute_model(output) == "output"
    states["y-1"].num_computed_tokens, states["x-1"].num_computed_tokens = 4, 3
    later = Step(2, 2)
    capturer.rows = later.rows
    worker.execute_model(
        SimpleNamespace(
            total_num_scheduled_tokens=2, num_scheduled_tokens={"x-1": 1, "y-1": 1}, scheduled_cached_reqs=both
        )
    )
    assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=0)) == "output"
    again = Step(3, 6)
    states["y-1"].num_computed_tokens, states["y-1"].num_prompt_tokens = 0, 2
    capturer.rows, worker.model_runner.input_batch.req_ids, both.resumed_req_ids = again.rows, ["y-1"], {"y-1"}
    worker.execute_model(
        SimpleNamespace(total_num_scheduled_tokens=6, num_scheduled_tokens={"y-1": 6}, scheduled_cached_reqs=both)
    )
    expected = np.concatenate([step[2:4], again[3:]])  # of two tokens of the prompt and one that was kept
    assert worker.take_experts("y", 5) == expected.tobytes()
    assert worker.take_experts("y", 4) == b""


def test_only_the_first_rank_records(worker):
    worker.rank = 1
    worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=5, num_scheduled_tokens={}))
    assert worker.take_experts("y", 4) == b""
