"""Loss and gradient in one pass over the logits: equal to those from log-probabilities, and used only where valid."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from algorithm_cases import advantage_inputs, loss_inputs, make_case, weights_of
from plasmid.errors import AlgorithmError
from plasmid_training.algorithms.grpo import GRPO
from plasmid_training.algorithms.parts.correction import Correction
from plasmid_training.algorithms.ppo import PPO
from plasmid_training.algorithms.sft import SFT
from plasmid_training.head.logprobs import token_logprobs
from plasmid_training.head.token_loss import linear_token_loss
from plasmid_training.objective.objective import fused_loss, microbatch_loss
from plasmid_training.testing import check_algorithm
from test_family import ALGORITHMS

WHOLE_SAMPLES = ("gspo", "opsm", "sequence", "geometric", "veto")
TOKENWISE = [name for name in ALGORITHMS if not any(part in name for part in WHOLE_SAMPLES)]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
IN_EACH_TYPE = ("grpo", "grpo, kl in the loss", "opd", "truncate, token", "sft")
"""Algorithms whose quick tests compare both types, with and without old log-probabilities."""


def fused_cases():
    for name, dtype, with_old in product([*TOKENWISE, "sft"], TOLERANCE, [True, False]):
        is_quick = name in IN_EACH_TYPE or (dtype is torch.float64 and with_old)
        marks = () if is_quick else pytest.mark.long
        yield pytest.param(name, dtype, with_old, marks=marks, id=f"{name}-{dtype}-{with_old}")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_declare_whether_they_are_tokenwise(name):
    assert ALGORITHMS[name][0].is_tokenwise() == (name in TOKENWISE)


def head_case(algorithm, dtype):
    """Return a head, and inputs of the algorithm with old log-probabilities close to the current ones."""
    case, draw = make_case([[2, 3], [4], [1, 5, 2]], 3), torch.Generator().manual_seed(0)
    count = len(case.tokens)
    hidden, weight = (torch.randn(rows, 16, generator=draw, dtype=torch.float64).to(dtype) for rows in (count, 30))
    targets = torch.randint(30, (count,), generator=draw)
    arguments = (hidden.requires_grad_(), weight.requires_grad_(), targets, torch.full((count,), 0.8, dtype=dtype))
    now = token_logprobs(*arguments).logprobs.detach()
    near = {n: now + 0.3 * torch.randn(count, generator=draw).to(now) for n in ("old_logprobs", "rollout_logprobs")}
    near["ref_logprobs"] = now + 0.5 * torch.randn(count, generator=draw).to(now)
    inputs = loss_inputs(case, algorithm.advantages(advantage_inputs(case)).to(now))
    inputs = replace(inputs, **near, teacher_logprobs=inputs.teacher_logprobs.to(now))
    return SimpleNamespace(arguments=arguments, inputs=inputs, weights=weights_of(case, algorithm))


@pytest.mark.parametrize(("name", "dtype", "with_old"), fused_cases())
def test_the_fused_loss_and_its_gradient_are_the_plain_ones(name, dtype, with_old):
    algorithm = SFT() if name == "sft" else ALGORITHMS[name][0]
    head = head_case(algorithm, dtype)
    inputs = head.inputs if with_old else replace(head.inputs, old_logprobs=None)
    options = {"with_entropy": True, "entropy_grad": algorithm.weights_need_entropy(), "chunk_size": 4}
    scores = token_logprobs(*head.arguments, **options)
    plain = microbatch_loss(
        algorithm, replace(inputs, logprobs=scores.logprobs, entropy=scores.entropy), head.weights
    ).loss
    expected = torch.autograd.grad(plain, head.arguments[:2])
    fused = linear_token_loss(*head.arguments, fused_loss(algorithm, inputs, head.weights), **options)
    gradients = torch.autograd.grad(fused.loss, head.arguments[:2])
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(fused.loss, plain, rtol=limit, atol=limit)
    torch.testing.assert_close(fused.scores.logprobs, scores.logprobs, rtol=0, atol=limit)
    for got, want in zip(gradients, expected, strict=True):
        assert want.abs().max() > 1e-4
        torch.testing.assert_close(got, want, rtol=limit, atol=limit)


class OwnLoss(GRPO):
    """Changes the loss of an algorithm that is marked as tokenwise."""

    def policy_loss(self, inputs, old_logprobs):
        plain = super().policy_loss(inputs, old_logprobs)
        mean = inputs.per_sample_sum(plain.loss)[inputs.sample_index]
        return replace(plain, loss=mean)


class OwnDemonstrations(SFT):
    def loss(self, inputs):
        return super().loss(inputs)


class Wrong(OwnLoss):
    """Claims to be tokenwise, and is not."""

    def is_tokenwise(self):
        return True


def test_a_loss_that_was_changed_is_not_taken_for_tokenwise():
    assert not OwnLoss().is_tokenwise() and not OwnDemonstrations().is_tokenwise()
    assert PPO(old_policy="decoupled", correction=Correction(mode="truncate")).is_tokenwise()


def test_the_check_of_algorithms_finds_one_that_is_not_tokenwise():
    check_algorithm(OwnLoss())
    with pytest.raises(AlgorithmError, match=r"is_tokenwise\(\) must return False: the loss of token \d+ is .* alone"):
        check_algorithm(Wrong())
