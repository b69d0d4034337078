"""Every option of every algorithm changes the results or is an error if it differs from its default: none is
ignored."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_cases import advantage_inputs, loss_inputs, make_case, weights_of
from plasmid.components import ActorCritic, Algorithm
from plasmid.components.objective_inputs import ValueInputs
from plasmid.config.load import validate
from plasmid.errors import ConfigError
from plasmid.plugins.registry import find_components, load_plugins

KINDS = {
    kind: cls
    for kind, cls in find_components(load_plugins())["algorithm"].items()
    if cls.__module__.startswith("plasmid_training.algorithms.")
}
MASK = {"mode": "mask", "low": 0.7, "high": 1.5}
OTHERS = {
    "reduction": ["per-token", "per-rollout", "per-prompt", "constant"],
    "constant_length": [5],
    "kl_coef": [0.3],
    "monitor_kl": [True],
    "kl_estimator": ["k1", "k2"],  # low_var_kl equals k3 except for tokens that are far from the reference
    "unbiased_kl": [True],
    "entropy_coef": [0.1],
    "old_policy": ["rollout", "decoupled"],
    "correction": [
        {"mode": "truncate"},
        MASK,
        {**MASK, "mode": "reject"},
        {"level": "sequence"},
        {**MASK, "level": "geometric"},
        {**MASK, "low": 0.95},
        {**MASK, "high": 1.1},
        {"low": 0.1},
        {"high": 3.0},
        {"veto": 0.7},
        {"renormalize": True},
    ],
    "opsm": [0.01],
    "clip_low": [0.01],
    "clip_high": [0.01],
    "dual_clip": [1.01],
    "reward_kl_coef": [0.2],
    "reward_kl_estimator": ["k2", "k3", "low_var_kl"],
    "normalize_std": [False],
    "std_form": ["population", "leave-one-out"],
    "std_eps": [0.5],
    "baseline": ["turn"],
    "gamma": [0.5],
    "lam": [0.5],
    "whiten": [False],
    "value_clip": ["off", 0.01],
    "critic_warmup": [3],
    "top_k": [3],
    "divergence": ["forward"],
}
"""Values that differ from every default."""
BESIDE = (
    {},
    {"monitor_kl": True},
    {"kl_coef": 0.1},
    {"reward_kl_coef": 0.1},
    {"old_policy": "rollout"},
    {"old_policy": "decoupled"},
    {"old_policy": "decoupled", "correction": MASK},
)
"""Additional settings of the recipe."""
REDUNDANT = [({"kl_coef": 0.1}, "monitor_kl")]
"""Options that request something that happens anyway: a KL in the loss is also reported."""
FORMULA_TESTED = ("dapo", "dr-grpo", "rloo", "remax", "reinforce-plus-plus", "reinforce-plus-plus-baseline")
"""Algorithms with few options beside those of GRPO, all of which occur in `test_family.py`."""


def with_turns(inputs):
    """Return inputs in which every token is a turn with a reward."""
    own = [inputs.sample_index == sample for sample in range(inputs.table.num_samples)]
    index = sum(mask.long().cumsum(0) * mask for mask in own) - 1
    turns = np.full((len(own), int(inputs.table.loss_tokens.max())), np.nan)
    turns[:, 0] = 0.0
    rewards = torch.sin(torch.arange(len(index)).double())
    turns[inputs.sample_index, index] = rewards
    return replace(inputs, table=replace(inputs.table, turn_rewards=turns), token_rewards=rewards, turn_index=index)


def outcome(algorithm):
    """Return everything that a trainer reads from an algorithm: needs, advantages, loss, gradients, metrics, and the
    critic's."""
    case = make_case([[1, 2, 1], [1], [3, 1], [1, 1, 1, 1]], seed=3)
    inputs = loss_inputs(case, algorithm.advantages(with_turns(advantage_inputs(case))))
    result = algorithm.loss(inputs)
    loss = (result.loss * weights_of(case, algorithm)).sum()
    slopes = torch.autograd.grad(loss, (inputs.logprobs, inputs.entropy), allow_unused=True)
    metrics = {name: value.tolist() for name, value in result.metrics.items()}
    seen = [algorithm.needs(), algorithm.roles(steps=2), loss.item(), metrics]
    seen += [None if slope is None else slope.tolist() for slope in slopes]
    if isinstance(algorithm, ActorCritic):
        returns = algorithm.returns(with_turns(advantage_inputs(case)))
        now = (case.column("value") + 0.5).requires_grad_()
        values = ValueInputs(values=now, old_values=case.column("value"), returns=returns)
        loss = (algorithm.value_loss(values).loss * weights_of(case, algorithm)).sum()
        seen += [algorithm.critic_warmup, loss.item(), torch.autograd.grad(loss, now)[0].tolist()]
    return seen


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind in FORMULA_TESTED else kind for kind in KINDS]
)
def test_another_value_changes_something_or_is_an_error(kind):
    cls = KINDS[kind]
    assert issubclass(cls, Algorithm)
    required = {"constant_length": 9} if kind == "dr-grpo" else {}
    changed, refused = set(), 0
    for beside in (b for b in BESIDE if set(b) <= set(cls.model_fields)):
        plain = cls(**required, **beside)
        seen = outcome(plain)
        for name in set(cls.model_fields) - {"kind"} - set(beside):
            for value in OTHERS[name]:
                try:
                    other = validate(cls, required | beside | {name: value}, "algorithm")
                except ConfigError:
                    refused += 1
                    continue
                if other != plain and (beside, name) not in REDUNDANT:
                    assert outcome(other) != seen, f"{name} = {value!r} beside {beside} has no effect"
                    changed.add(name)
    unread = {"kind", "constant_length"} if kind != "dr-grpo" else {"kind", "reduction"}
    assert changed == set(cls.model_fields) - unread
    assert refused >= (20 if "correction" in cls.model_fields else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_each_correction_setting_has_an_effect(kind):
    cls = KINDS[kind]
    if "correction" not in cls.model_fields:
        assert kind in ("gkd", "sft")
        return
    base = {"old_policy": "decoupled"} | ({"constant_length": 9} if kind == "dr-grpo" else {})
    seen = [outcome(cls(**base))]
    for value in OTHERS["correction"]:
        try:
            seen.append(outcome(validate(cls, base | {"correction": value}, "algorithm")))
        except ConfigError:
            assert set(value) <= {"low", "high"}, "bounds without a mode are the only ones that nothing reads"
    assert len(seen) == len(OTHERS["correction"]) - 1
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
