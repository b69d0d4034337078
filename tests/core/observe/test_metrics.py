import math
from dataclasses import replace

import numpy as np
import pytest
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid.types import PromptGroup, Score
from plasmid.types.batch import GroupRef
from plasmid.types.shared_groups import LocalStore, store_group
from plasmid_runtime.loop.batch_metrics import pass_metrics
from plasmid_runtime.observe.metrics import Mean, rollout_metrics, step_metrics


def group(id_, rewards, *, lengths, prompt=2, version=0, dropped_by="", errors=(), truncated=0, **components):
    n = len(rewards)
    return GroupRef(
        id=id_,
        prompt_id=f"p:{id_}",
        sample_ids=tuple(f"{id_}/{i}" for i in range(n)),
        rollout_ids=tuple(f"{id_}/{i}" for i in range(n)),
        lengths=np.array(lengths, np.int64),
        prompt_lengths=np.full(n, prompt, np.int64),
        loss_tokens=np.array(lengths, np.int64) - prompt,
        rewards=np.array(rewards, np.float64),
        components={name: np.array(values, np.float64) for name, values in components.items()},
        truncated=np.arange(n) < truncated,
        errors=errors,
        oldest_version=version,
        dropped_by=dropped_by,
        rows=None,
        whole=None,
    )


def test_means_are_over_samples_and_not_over_groups():
    groups = [group(0, [1.0, 0.0, 0.0], lengths=[4, 5, 6], truncated=2), group(1, [1.0], lengths=[12])]
    metrics = rollout_metrics(groups, version=0)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == 0.5
    assert metrics["rollout/length_mean"] == (2 + 3 + 4 + 10) / 4
    assert metrics["rollout/tokens"] == 19
    assert metrics["rollout/truncated"] == 0.5


def test_reward_components_count_the_samples_that_have_them():
    groups = [group(0, [1, 1], lengths=[3, 3], right=[1, 0]), group(1, [0], lengths=[3], right=[1], short=[4])]
    groups.append(group(2, [0, 0], lengths=[3, 3], short=[6, math.nan]))
    metrics = rollout_metrics(groups, version=0)
    assert metrics["reward/right"] == pytest.approx(2 / 3)
    assert metrics["reward/short"] == 5


def test_turns_and_calls_are_counted_once_per_rollout():
    counted = replace(group(0, [1, 0], lengths=[3, 3]), counts={"turns": np.array([3.0, 1.0])})
    calls = {"turns": np.array([2.0]), "calls": np.array([4.0]), "failed_calls": np.array([1.0])}
    groups = [counted, replace(group(1, [1], lengths=[3]), counts=calls)]
    metrics = rollout_metrics(groups, version=0)
    assert (metrics["rollout/turns_mean"], metrics["rollout/calls_mean"]) == (2.0, 4.0)
    assert metrics["rollout/failed_calls"] == 0.25


def test_only_whole_numbers_that_workflows_give_are_counted():
    about = [{"turns": 2, "calls": 10**400}, {"turns": 2, "calls": True}, {"turns": 5, "calls": "3"}]
    samples = [
        make_sample(id=f"1/{i}", rollout_id="1/0" if i < 2 else "1/2", metadata=given, score=Score(value=1.0))
        for i, given in enumerate(about)
    ]
    shared = store_group(PromptGroup(id=1, prompt=make_prompt(), samples=samples), LocalStore())
    assert {name: values.tolist() for name, values in shared.counts.items()} == {"turns": [2.0, 5.0]}


def test_pass_at_k_is_over_prompts_and_failed_rollouts_do_not_pass():
    groups = [group(0, [1.0, 0.0, 0.0], lengths=[3, 3, 3], errors=("timed out",)), group(1, [0.5] * 4, lengths=[3] * 4)]
    assert pass_metrics(groups, num_samples=4, threshold=1.0) == {"reward/pass@1": 0.125, "reward/pass@4": 0.5}
    assert pass_metrics(groups, num_samples=4, threshold=0.5)["reward/pass@1"] == pytest.approx(0.625)
    assert pass_metrics([group(0, [1.0], lengths=[3])], num_samples=4, threshold=1.0) == {"reward/pass@1": 1.0}


def test_samples_of_one_rollout_pass_once_with_their_mean_reward():
    fan_out = group(0, [1.0, 1.0, 1.0, 0.0, 1.0], lengths=[3] * 5)
    fan_out = replace(fan_out, rollout_ids=("0/0", "0/0", "0/1", "0/1", "0/2"), errors=("timed out",))
    assert fan_out.rollout_rewards().tolist() == [1.0, 0.5, 1.0]
    assert pass_metrics([fan_out], num_samples=4, threshold=1.0) == {"reward/pass@1": 0.5, "reward/pass@4": 1.0}


def test_a_failed_rollout_does_not_pass_a_threshold_of_zero():
    failed = group(0, [-1.0], lengths=[3], errors=("timed out",))
    assert pass_metrics([failed], num_samples=2, threshold=0.0) == {"reward/pass@1": 0.0, "reward/pass@2": 0.0}


def test_metadata_does_not_make_a_sample_a_baseline():
    samples = [
        make_sample(id="1/0", metadata={"baseline": True}, score=Score(value=1.0)),
        make_sample(id="1/greedy", is_baseline=True, score=Score(value=0.25)),
    ]
    shared = store_group(PromptGroup(id=1, prompt=make_prompt(), samples=samples), LocalStore())
    assert (shared.sample_ids, shared.baseline) == (("1/0",), 0.25)


def test_staleness_is_the_distance_to_the_oldest_token_and_skips_groups_without_any():
    groups = [
        group(0, [1], lengths=[3], version=5),
        group(1, [1], lengths=[3], version=2),
        group(2, [1], lengths=[2], version=None),
    ]
    metrics = rollout_metrics(groups, version=5)
    assert (metrics["rollout/staleness_mean"], metrics["rollout/staleness_max"]) == (1.5, 3)


def test_failed_samples_and_dropped_groups_are_counted():
    groups = [
        group(0, [1, 0], lengths=[3, 3], errors=("timed out",)),
        group(1, [0, 0], lengths=[3, 3], dropped_by="no-spread"),
        group(2, [1, 1], lengths=[3, 3], dropped_by="no-spread"),
    ]
    metrics = rollout_metrics(groups, version=0)
    assert metrics["rollout/failed"] == pytest.approx(1 / 7)
    assert metrics["rollout/dropped/no-spread"] == 2


def test_a_group_whose_rollouts_all_failed_has_no_rewards_but_counts_as_failed():
    metrics = rollout_metrics(
        [group(0, [], lengths=[], version=None, errors=("a", "b"), dropped_by="failed")], version=0
    )
    assert metrics == {"rollout/failed": 1.0, "rollout/tokens": 0.0, "rollout/dropped/failed": 1.0}


def test_no_groups_give_no_metrics():
    assert rollout_metrics([], version=3) == {}


def test_a_mean_of_parts_is_the_mean_of_the_whole():
    assert (Mean(3.0, 1) + Mean(1.0, 3)).value == 1.0
    assert math.isnan(Mean().value)


def test_steps_of_a_batch_reduce_to_means_maxima_and_last_gauges():
    steps = [
        {"train/loss": 1.0, "train/logprob_diff_max": 3.0, "train/lr": 0.1, "train/step": 7},
        {"train/loss": 2.0, "train/logprob_diff_max": 1.0, "train/lr": 0.2, "train/step": 8, "train/kl": 4.0},
    ]
    expected = {"train/loss": 1.5, "train/logprob_diff_max": 3, "train/lr": 0.2, "train/step": 8, "train/kl": 4}
    assert step_metrics(steps) == expected
