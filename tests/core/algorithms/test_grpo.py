"""GRPO's settings, needs and metrics. Its loss as a whole is tested with the training objective."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plasmid import Role
from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
from plasmid.config.load import validate
from plasmid.errors import ConfigError
from plasmid.plugins.registry import find_components, load_plugins
from plasmid.testing.batches import random_batch
from plasmid_training.algorithms import grpo
from plasmid_training.algorithms.grpo import (
    GRPO,
    GroupNormalization,
    RatioClip,
    clipped_policy_loss,
    clipped_ratio_loss,
    group_advantages,
)


def inputs(**changes):
    base = LossInputs(
        num_samples=2,
        sample_index=torch.tensor([0, 0, 1]),
        table=random_batch([[1, 1]], silent=0.0).table(),
        table_index=torch.tensor([0, 0, 1]),
        token_ids=torch.tensor([5, 6, 7]),
        versions=torch.tensor([0, 0, 0]),
        logprobs=torch.tensor([-1.0, -2.0, -0.5], requires_grad=True),
        entropy=torch.tensor([1.0, 2.0, 3.0]),
        old_logprobs=torch.tensor([-1.5, -2.0, -0.4]),
        rollout_logprobs=torch.tensor([-1.1, -2.1, -0.6]),
        ref_logprobs=torch.tensor([-1.0, -2.5, -0.5]),
        teacher_logprobs=None,
        advantages=torch.tensor([1.0, -1.0, 0.5]),
        kept=None,
        read_metadata=lambda: (),
    )
    return dataclasses.replace(base, **changes)


def test_one_short_file_has_the_formulas_in_the_order_of_the_paper():
    text = Path(grpo.__file__).read_text()
    formulas = (GroupNormalization, group_advantages, RatioClip, clipped_policy_loss, clipped_ratio_loss, GRPO)
    starts = [text.index(inspect.getsource(formula).splitlines()[-1]) for formula in formulas]
    assert text.count("\n") < 150
    assert starts == sorted(starts)
    assert text.index("mean and standard deviation") < text.index("probability ratio") < text.index("kl_coef")


def test_grpo_can_be_found_without_importing_torch():
    code = (
        "import sys; from plasmid.plugins.registry import load_plugins, find_components; "
        "assert find_components(load_plugins())['algorithm']['grpo'].__name__ == 'GRPO'; "
        "from plasmid_training.algorithms.grpo import GRPO; GRPO(kl_coef=0.1).needs(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert find_components(load_plugins())["algorithm"]["grpo"] is GRPO


@pytest.mark.parametrize(
    ("settings", "steps", "roles"),
    [
        ({}, 1, ()),
        ({}, 2, (Role.POLICY,)),
        ({"old_policy": "rollout"}, 2, ()),
        ({"kl_coef": 0.1}, 1, (Role.REFERENCE,)),
        ({"monitor_kl": True}, 1, (Role.REFERENCE,)),
        ({"kl_coef": 0.1}, 4, (Role.POLICY, Role.REFERENCE)),
    ],
)
def test_only_roles_that_are_read_are_scored(settings, steps, roles):
    algorithm = GRPO(**settings)
    assert algorithm.roles(steps=steps) == roles
    assert algorithm.needs().reference == (Role.REFERENCE in roles)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dual_clip": 1}, "algorithm.dual_clip: must be 'off' or a number above 1, got 1"),
        ({"dual_clip": float("inf")}, "algorithm.dual_clip: must be 'off' or a number above 1, and finite, got inf"),
        ({"dual_clip": float("nan")}, "algorithm.dual_clip: must be 'off' or a number above 1, and finite, got nan"),
        (
            {"kl_estimator": "k2"},
            "algorithm: kl_estimator = 'k2' has no effect, because there is no KL; "
            "remove it, or set kl_coef or monitor_kl",
        ),
        (
            {"unbiased_kl": True},
            "algorithm: unbiased_kl = True has no effect, because there is no KL; "
            "remove it, or set kl_coef or monitor_kl",
        ),
        (
            {"normalize_std": False, "std_eps": 0.5},
            "algorithm: std_eps = 0.5 has no effect with normalize_std = false; remove it",
        ),
        (
            {"normalize_std": False, "std_form": "population"},
            "algorithm: std_form = 'population' has no effect with normalize_std = false; remove it",
        ),
        (
            {"reduction": "constant"},
            'algorithm: reduction = "constant" divides by constant_length; set it, for example to 1024',
        ),
        (
            {"constant_length": 8},
            'algorithm: constant_length = 8 has no effect; remove it or set reduction = "constant"',
        ),
        ({"clip_lo": 0.1}, "algorithm.clip_lo: no such setting; did you mean 'clip_low'?"),
        ({"kl_coef": -1}, "algorithm.kl_coef: must be at least 0, got -1"),
    ],
)
def test_settings_that_cannot_be_meant_are_errors(settings, message):
    with pytest.raises(ConfigError) as error:
        validate(GRPO, settings, "algorithm")
    assert str(error.value) == message


def test_settings_survive_a_dump():
    algorithm = GRPO(dual_clip=3, kl_coef=0.1, kl_estimator="k2", reduction="constant", constant_length=9)
    assert GRPO.model_validate(algorithm.model_dump(mode="json")) == algorithm


def test_the_kl_is_monitored_without_touching_the_loss():
    plain, monitored = GRPO().loss(inputs()), GRPO(monitor_kl=True).loss(inputs())
    assert torch.equal(plain.loss, monitored.loss)
    assert "kl" not in plain.metrics
    torch.testing.assert_close(monitored.metrics["kl"], torch.tensor([0.0, 0.5**1 - 1 + 2.718281828**-0.5, 0.0]))


def test_the_entropy_is_always_reported_and_rewarded_by_its_coefficient():
    plain, bonus = GRPO().loss(inputs()), GRPO(entropy_coef=0.1).loss(inputs())
    assert plain.metrics["entropy"].tolist() == [1.0, 2.0, 3.0]
    torch.testing.assert_close(bonus.loss, plain.loss - torch.tensor([0.1, 0.2, 0.3]))
    assert (GRPO().weights_need_entropy(), GRPO(entropy_coef=0.1).weights_need_entropy()) == (False, True)


def test_without_old_logprobs_the_ratio_is_one():
    metrics = GRPO().loss(inputs(old_logprobs=None)).metrics
    assert metrics["ratio_mean"].tolist() == [1.0] * 3 and metrics["approx_kl"].tolist() == [0.0] * 3


def test_the_engine_can_be_the_old_policy():
    now = inputs()
    ratio = GRPO(old_policy="rollout").loss(now).metrics["ratio_mean"]
    torch.testing.assert_close(ratio, (now.logprobs - now.rollout_logprobs).exp().detach())


def test_metrics_say_what_the_clips_did():
    now = inputs(advantages=torch.tensor([1.0, -1.0, -0.5]), old_logprobs=torch.tensor([-1.5, -3.5, -0.4]))
    metrics = GRPO(dual_clip=2.0).loss(now).metrics
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0]
    assert metrics["dual_clip_fraction"].tolist() == [0.0, 1.0, 0.0]
    assert "dual_clip_fraction" not in GRPO().loss(now).metrics
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"entropy_coef": 0.1}, {"entropy": None}, "entropy_coef needs the entropy, which the trainer did not compute"),
        ({"kl_coef": 0.1}, {"ref_logprobs": None}, "the KL needs the scores of the reference"),
    ],
)
def test_missing_scores_are_an_error(settings, changes, message):
    with pytest.raises(ValueError, match=message):
        GRPO(**settings).loss(inputs(**changes))


def test_advantages_are_spread_over_the_tokens_of_each_sample():
    table = random_batch([[1, 1], [1]], silent=0.0).table()
    table.rewards[:] = [0.0, 1.0, 9.0]
    advantages = GRPO(normalize_std=False).advantages(
        AdvantageInputs(
            table=table,
            sample_index=torch.tensor([1, 1, 0, 2]),
            token_ids=torch.zeros(4, dtype=torch.int64),
            versions=torch.zeros(4, dtype=torch.int64),
            rollout_logprobs=torch.zeros(4),
            old_logprobs=None,
            ref_logprobs=None,
            teacher_logprobs=None,
            values=None,
            all_reduce=lambda tensor: tensor,
            read_metadata=lambda: (),
            read_kept=lambda: None,
        )
    )
    assert advantages.tolist() == [0.5, 0.5, -0.5, 0.0] and advantages.dtype == torch.float32


def test_sums_per_sample_include_samples_without_tokens():
    now = inputs(num_samples=3, sample_index=torch.tensor([0, 2, 2]))
    assert now.per_sample_sum(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 0.0, 5.0]
