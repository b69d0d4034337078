"""Every algorithm against its paper's formula, and equal results for every split over ranks."""

import literal_formulas as literal
import pytest
import torch
from algorithm_cases import advantage_inputs, loss_inputs, make_case, split_over_ranks, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.components.objective_inputs import ValueInputs
from plasmid_training.algorithms.cispo import CISPO
from plasmid_training.algorithms.dapo import DAPO
from plasmid_training.algorithms.dr_grpo import DrGRPO
from plasmid_training.algorithms.grpo import GRPO
from plasmid_training.algorithms.gspo import GSPO
from plasmid_training.algorithms.opd import OPD
from plasmid_training.algorithms.parts.correction import Correction
from plasmid_training.algorithms.ppo import PPO
from plasmid_training.algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from plasmid_training.algorithms.rloo import RLOO, ReMax
from plasmid_training.algorithms.sft import SFT

SHAPE = [[1, 2, 1], [1], [3, 1], [1, 1, 1, 1]]
KL = {"reward_kl_coef": 0.3}
ALGORITHMS = {
    "grpo": (GRPO(), literal.grpo),
    "grpo, no std": (GRPO(normalize_std=False), literal.grpo),
    "grpo, population std": (GRPO(std_form="population"), literal.grpo),
    "cispo, std of the others": (CISPO(std_form="leave-one-out", std_eps=0.1), literal.grpo),
    "grpo, kl in the reward": (GRPO(**KL, reward_kl_estimator="k3"), literal.grpo),
    "grpo, kl of the engine in the reward": (GRPO(**KL, old_policy="rollout"), literal.grpo),
    "grpo, kl in the loss": (GRPO(kl_coef=0.2, kl_estimator="k2", entropy_coef=0.1), literal.grpo),
    "grpo, unbiased kl": (GRPO(kl_coef=0.2, unbiased_kl=True), literal.grpo),
    "grpo, k1 in the loss": (GRPO(kl_coef=0.2, kl_estimator="k1", unbiased_kl=True), literal.grpo),
    "grpo, kl against the engine": (
        GRPO(kl_coef=0.2, kl_estimator="low_var_kl", unbiased_kl=True, old_policy="rollout"),
        literal.grpo,
    ),
    "grpo, per prompt": (GRPO(reduction="per-prompt"), literal.grpo),
    "grpo, dual clip": (GRPO(dual_clip=1.2), literal.grpo),
    "dapo": (DAPO(), literal.grpo),
    "dr-grpo": (DrGRPO(constant_length=9), literal.centred),
    "dr-grpo, kl in the reward": (DrGRPO(constant_length=9, **KL), literal.centred),
    "rloo": (RLOO(), literal.rloo),
    "rloo, kl in the reward": (RLOO(**KL), literal.rloo),
    "remax": (ReMax(), literal.remax),
    "remax, kl in the reward": (ReMax(**KL), literal.remax),
    "reinforce++": (ReinforcePlusPlus(), literal.reinforce_plus_plus),
    "reinforce++, kl and discount": (ReinforcePlusPlus(gamma=0.9, **KL), literal.reinforce_plus_plus),
    "reinforce++-baseline": (ReinforcePlusPlusBaseline(**KL), literal.reinforce_plus_plus_baseline),
    "ppo": (PPO(), literal.ppo),
    "ppo, kl and discount": (PPO(gamma=0.97, lam=0.8, whiten=False, **KL), literal.ppo),
    "ppo, lambda 0": (PPO(lam=0.0), literal.ppo),
    "dapo, kl in the reward": (DAPO(**KL, reward_kl_estimator="k2"), literal.grpo),
    "gspo, kl in the reward": (GSPO(**KL, clip_low=0.05, clip_high=0.1), literal.grpo),
    "cispo, kl in the reward": (CISPO(**KL, reduction="constant", constant_length=6), literal.grpo),
    "gspo": (GSPO(clip_low=0.05, clip_high=0.1), literal.grpo),
    "cispo": (CISPO(clip_low=0.3, clip_high=0.2), literal.grpo),
    "opd": (OPD(reduction="per-token"), literal.opd),
    "opd of the engine": (OPD(old_policy="rollout"), literal.opd),
    "opsm": (GRPO(opsm=0.05), literal.grpo),
    "opsm of the engine": (GSPO(opsm=0.05, old_policy="rollout"), literal.grpo),
    "decoupled": (GRPO(old_policy="decoupled"), literal.grpo),
}
for mode in ("truncate", "mask", "reject"):
    for level in ("token", "sequence", "geometric"):
        bounds = {"high": 1.1} if mode == "truncate" else {"low": 0.9, "high": 1.2}
        chosen = Correction(mode=mode, level=level, **bounds)
        ALGORITHMS[f"{mode}, {level}"] = (RLOO(old_policy="decoupled", correction=chosen), literal.rloo)
ALGORITHMS["veto"] = (
    CISPO(old_policy="decoupled", correction=Correction(mode="truncate", high=1.2, veto=0.7)),
    literal.grpo,
)
ALGORITHMS["renormalized"] = (
    GRPO(old_policy="decoupled", correction=Correction(mode="mask", low=0.9, high=1.3, renormalize=True)),
    lambda case, algorithm: [a / literal.mean_importance(case, algorithm) for a in literal.grpo(case, algorithm)],
)


def slopes_of(loss, scalars):
    """Return the derivatives with respect to each scalar; 0 where a clip removed it."""
    slopes = torch.autograd.grad(loss, scalars, retain_graph=True, allow_unused=True)
    return torch.stack([torch.zeros((), dtype=torch.float64) if s is None else s for s in slopes])


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_advantages_are_the_formula_on_any_number_of_ranks(name, seed):
    algorithm, formula = ALGORITHMS[name]
    case = make_case(SHAPE, seed)
    expected = torch.tensor(formula(case, algorithm), dtype=torch.float64)
    assert expected.abs().max() > 0.1
    for num_ranks in (1, 2, 5):
        got = split_over_ranks(case, num_ranks, algorithm.advantages)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("with_old", [True, False], ids=["several steps", "one step"])
def test_loss_and_gradient_are_the_formula(name, with_old):
    algorithm, formula = ALGORITHMS[name]
    case = make_case(SHAPE, seed=3)
    advantages = algorithm.advantages(advantage_inputs(case))
    inputs = loss_inputs(case, advantages, with_old=with_old)
    ours = (algorithm.loss(inputs).loss * weights_of(case, algorithm)).sum()
    got = torch.autograd.grad(ours, (inputs.logprobs, inputs.entropy), allow_unused=True)
    logprobs = [x.clone().requires_grad_() for x in case.column("logprob")]
    entropies = [x.clone().requires_grad_() for x in case.column("entropy")]
    values = formula(case, algorithm)
    losses = literal.token_losses(case, algorithm, logprobs, entropies, values, with_old=with_old)
    theirs = literal.reduce(case, algorithm, losses)
    expected = slopes_of(theirs, logprobs)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-12)
    assert expected.abs().max() > 1e-3
    slope = torch.autograd.grad(theirs, entropies, allow_unused=True)[0]
    if algorithm.entropy_coef:
        assert got[1][0].item() == pytest.approx(slope.item(), abs=1e-14)


def test_the_cases_put_clips_masks_and_weights_to_the_test():
    """Metrics of the losses above show that each special case applies to some tokens but not all."""
    case = make_case(SHAPE, seed=3)
    for name, metric in [
        ("grpo", "clip_fraction"),
        ("grpo, dual clip", "dual_clip_fraction"),
        ("gspo", "clip_fraction"),
        ("cispo", "clip_fraction"),
        ("opsm", "opsm_masked"),
        *((f"{m}, {lv}", "correction_bounded") for m in ("truncate", "mask") for lv in ("token", "geometric")),
        ("veto", "correction_bounded"),
    ]:
        algorithm, _ = ALGORITHMS[name]
        advantages = algorithm.advantages(advantage_inputs(case))
        fraction = algorithm.loss(loss_inputs(case, advantages)).metrics[metric].mean().item()
        assert 0 < fraction < 1, name


def test_the_likelihood_of_demonstrations():
    case, algorithm = make_case(SHAPE, seed=4), SFT()
    inputs = loss_inputs(case, algorithm.advantages(advantage_inputs(case)))
    loss = (algorithm.loss(inputs).loss * weights_of(case, algorithm)).sum()
    (got,) = torch.autograd.grad(loss, inputs.logprobs)
    assert loss.item() == pytest.approx(-sum(t.logprob for t in case.tokens) / len(case.tokens), abs=1e-13)
    torch.testing.assert_close(got, torch.full_like(got, -1 / len(case.tokens)), rtol=0, atol=1e-15)


@pytest.mark.parametrize("clip", ["off", 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_returns_and_value_loss_are_the_formula(clip, seed):
    algorithm, case = PPO(value_clip=clip, gamma=0.95, **KL), make_case(SHAPE, seed)
    returns = split_over_ranks(case, 3, algorithm.returns)
    expected = literal.ppo_returns(case, algorithm)
    torch.testing.assert_close(returns.tolist(), expected, rtol=0, atol=1e-12)
    now = case.column("value") + 0.5 * torch.randn(len(case.tokens), dtype=torch.float64)
    inputs = ValueInputs(values=now.requires_grad_(), old_values=case.column("value"), returns=returns)
    result = algorithm.value_loss(inputs)
    ours = (result.loss * weights_of(case, algorithm)).sum()
    values = [x.detach().clone().requires_grad_() for x in now]
    losses = literal.value_losses(algorithm, values, [t.value for t in case.tokens], expected)
    theirs = literal.reduce(case, algorithm, losses)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(ours, now)[0], slopes_of(theirs, values), rtol=0, atol=1e-12)
    if clip != "off":
        assert 0 < result.metrics["value_clip_fraction"].mean().item() < 1


shapes = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4)


@given(
    shapes, st.sampled_from(list(ALGORITHMS)), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([0, 0.5, 1])
)
@settings(max_examples=25, deadline=None)
def test_advantages_hold_for_any_batch(shape, name, num_ranks, seed, silent):
    algorithm, formula = ALGORITHMS[name]
    case = make_case(shape, seed, silent=silent)
    if not case.tokens:
        assert algorithm.advantages(advantage_inputs(case)).shape == (0,)
        return
    got = split_over_ranks(case, num_ranks, algorithm.advantages)
    torch.testing.assert_close(got.tolist(), formula(case, algorithm), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_batch_without_loss_tokens_has_a_loss_of_zero(name):
    algorithm, case = ALGORITHMS[name][0], make_case(SHAPE, silent=1.0)
    inputs = loss_inputs(case, algorithm.advantages(advantage_inputs(case)))
    result = algorithm.loss(inputs)
    assert result.loss.shape == (0,) and result.loss.requires_grad
