"""Settings of all algorithms: unused ones are errors, requirements are declared, and torch is not imported."""

import subprocess
import sys
from pathlib import Path

import plasmid_training.algorithms
import pytest
from plasmid import Needs, Role
from plasmid.components import Algorithm
from plasmid.config.load import validate
from plasmid.errors import ConfigError
from plasmid.plugins.registry import find_components, load_plugins
from plasmid_training.algorithms.dr_grpo import DrGRPO
from plasmid_training.algorithms.grpo import GRPO
from plasmid_training.algorithms.gspo import GSPO
from plasmid_training.algorithms.opd import OPD
from plasmid_training.algorithms.ppo import PPO
from plasmid_training.algorithms.rloo import RLOO, ReMax
from plasmid_training.algorithms.sft import SFT

KINDS = {
    kind: cls
    for kind, cls in find_components(load_plugins())["algorithm"].items()
    if Path(sys.modules[cls.__module__].__file__ or "").parent
    == Path(plasmid_training.algorithms.__file__ or "").parent
}


def test_all_of_the_family_are_installed():
    assert set(KINDS) == {
        "cispo",
        "dapo",
        "dr-grpo",
        "gkd",
        "grpo",
        "gspo",
        "opd",
        "ppo",
        "reinforce-plus-plus",
        "reinforce-plus-plus-baseline",
        "remax",
        "rloo",
        "sft",
    }


def test_their_settings_are_read_without_torch():
    code = (
        "import sys; from plasmid.plugins.registry import load_plugins, find_components\n"
        "for kind, cls in find_components(load_plugins())['algorithm'].items():\n"
        "    a = cls(constant_length=9) if kind == 'dr-grpo' else cls()\n"
        "    a.needs(), a.roles(steps=2), a.reads_rollout_logprobs(), a.weights_need_entropy(), a.model_dump_json()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_survive_a_dump(kind):
    cls = KINDS[kind]
    assert issubclass(cls, Algorithm)
    algorithm = cls(constant_length=9) if kind == "dr-grpo" else cls()
    assert cls.model_validate(algorithm.model_dump(mode="json")) == algorithm


@pytest.mark.parametrize(
    ("algorithm", "steps", "needs", "roles"),
    [
        (GRPO(reward_kl_coef=0.1), 1, Needs(groups=True, reference=True), (Role.POLICY, Role.REFERENCE)),
        (RLOO(reward_kl_coef=0.1, old_policy="rollout"), 2, Needs(groups=True, reference=True), (Role.REFERENCE,)),
        (GRPO(old_policy="decoupled"), 1, Needs(groups=True), ()),
        (GRPO(old_policy="decoupled"), 2, Needs(groups=True), (Role.POLICY,)),
        (GRPO(old_policy="decoupled", correction={"renormalize": True}), 1, Needs(groups=True), (Role.POLICY,)),
        (ReMax(), 1, Needs(greedy_baseline=True), ()),
        (PPO(), 1, Needs(critic=True), (Role.CRITIC,)),
        (PPO(kl_coef=0.1), 2, Needs(critic=True, reference=True), (Role.POLICY, Role.REFERENCE, Role.CRITIC)),
        (OPD(), 1, Needs(rewards=False, teacher=True), (Role.POLICY, Role.TEACHER)),
        (OPD(old_policy="rollout"), 1, Needs(rewards=False, teacher=True), (Role.TEACHER,)),
        (SFT(), 3, Needs(rewards=False, engine=False, demonstrations=True), ()),
    ],
)
def test_needs_and_roles_are_what_is_read(algorithm, steps, needs, roles):
    assert algorithm.needs() == needs
    assert algorithm.roles(steps=steps) == roles


UNREAD = "correction has no effect with old_policy = 'trainer'; remove it, or set it to \"decoupled\""


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (GRPO, {"correction": {"mode": "truncate"}}, f"algorithm: {UNREAD}"),
        (
            GRPO,
            {"old_policy": "decoupled", "correction": {"high": 3.0}},
            "algorithm.correction: high = 3 has no effect with mode = 'none'; remove it",
        ),
        (
            GRPO,
            {"old_policy": "decoupled", "correction": {"mode": "truncate", "low": 0.1}},
            "algorithm.correction: low = 0.1 has no effect with mode = 'truncate'; remove it",
        ),
        (
            GRPO,
            {"old_policy": "decoupled", "correction": {"mode": "mask", "low": 3.0}},
            "algorithm.correction: low = 3 must be less than high = 2",
        ),
        (
            RLOO,
            {"reward_kl_estimator": "k2"},
            "algorithm: reward_kl_estimator = 'k2' has no effect, because there is no KL in the reward; "
            "remove it, or set reward_kl_coef",
        ),
        (DrGRPO, {}, "algorithm.constant_length: is required"),
        (
            DrGRPO,
            {"constant_length": 5, "std_eps": 1e-4},
            f"algorithm.std_eps: no such setting; settings here are {', '.join(sorted(DrGRPO.model_fields))}",
        ),
        (
            DrGRPO,
            {"constant_length": 5, "reduction": "per-token"},
            "algorithm.reduction: must be 'constant', got 'per-token'",
        ),
        (
            GSPO,
            {"gamma": 0.5},
            f"algorithm.gamma: no such setting; settings here are {', '.join(sorted(GSPO.model_fields))}",
        ),
        (OPD, {"reward_kl_coef": 0.1}, "algorithm.reward_kl_coef: no such setting; did you mean 'kl_coef'?"),
        (PPO, {"lam": 1.5}, "algorithm.lam: must be at most 1, got 1.5"),
        (PPO, {"gamma": 0}, "algorithm.gamma: must be more than 0, got 0"),
        (PPO, {"value_clip": 0}, "algorithm.value_clip: must be 'off' or a number above 0, got 0"),
        (RLOO, {"opsm": -1}, "algorithm.opsm: must be 'off' or a number of at least 0, got -1"),
    ],
)
def test_settings_that_cannot_be_meant_are_errors(cls, settings, message):
    with pytest.raises(ConfigError) as error:
        validate(cls, settings, "algorithm")
    assert str(error.value) == message
