"""Every installed reward and filter passes the checks for plugin authors."""

import pytest
from plasmid.config.load import resolve, validate
from plasmid.plugins.registry import find_components, load_plugins
from plasmid.testing.light_contracts import check_filter, check_reward
from plasmid.testing.rewards import make_prompt

from tests.rewards.json_server import server

SLOTS = find_components(load_plugins())
NUMBER = {"kind": "number"}
FOLLOW = {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["cell"]}]}
COUNT = {"instruction_id_list": ["count:word_count_range"], "kwargs": [{"min_words": 1, "max_words": 3}]}
RECIPE = {
    "model": {"path": "model"},
    "data": {"path": "x.jsonl"},
    "workflow": {"kind": "environment", "environment": {"kind": "guess"}},
    "trainer": {"kind": "fsdp"},
    "rollout": {"kind": "hf"},
    "algorithm": {"kind": "grpo"},
}
SETTINGS = {
    "boxed": {"reward": NUMBER},
    "gate": {"condition": {"kind": "format"}, "reward": NUMBER},
    "isolated": {"reward": NUMBER},
    "judge": {"model": "any"},
    "length": {"max_tokens": 4, "slope_tokens": 2},
    "part": {"reward": {"kind": "dapo"}, "key": "accuracy"},
    "product": {"rewards": [NUMBER, {"kind": "format"}]},
    "regex": {"pattern": "[0-9]+"},
    "sum": {"rewards": [NUMBER, {"kind": "format", "weight": 0.5}]},
}
PROMPTS = {
    "code": {"target": ["assert double(2) == 4"]},
    "gpqa": {"target": "B"},
    "ifbench": {"metadata": COUNT},
    "ifeval": {"metadata": FOLLOW},
    "reasoning-gym": {"metadata": {"reasoning_gym": {"family": "gcd", "seed": 1}}},
}
PLAYED = {"environment": {"reward": 0.5, "rewards": [0.5], "done": True}}
POOLED = {"deepscaler", "ifbench", "ifeval", "math", "reasoning-gym"}
"""Rewards whose worker processes take seconds to import; those of `isolated` and `code` start quickly."""


def marked(kinds):
    return [pytest.param(kind, marks=pytest.mark.long) if kind in POOLED else kind for kind in sorted(kinds)]


@pytest.mark.parametrize("kind", marked(SLOTS["rewards"]))
def test_a_reward_satisfies_its_contract(kind):
    settings = {"kind": kind, **SETTINGS.get(kind, {})}
    if "workers" in SLOTS["rewards"][kind].model_fields:
        settings["workers"] = 1
    answer = {"choices": [{"message": {"content": "Score: 5"}}]} if kind == "judge" else 0.5
    with server(lambda body, number: (200, answer)) as (url, got):
        if kind in ("judge", "remote"):
            settings["url"] = url
        (reward,) = resolve({**RECIPE, "rewards": [settings]}).rewards
        check_reward(reward, make_prompt(**{"target": "12", **PROMPTS.get(kind, {})}), metadata=PLAYED)
        assert bool(got) == (kind in ("judge", "remote"))


FILTERS = {
    "length-range": {"max_tokens": 9},
    "reward-range": {"low": 0, "high": 1},
    "staleness": {"max_versions": 0},
}


@pytest.mark.parametrize("kind", sorted(SLOTS["filters"]))
def test_a_filter_satisfies_its_contract(kind, tmp_path):
    (tmp_path / "keep.py").write_text("def keep(group): return len(group.samples) > 1\n")
    settings = {**FILTERS.get(kind, {}), **({"function": f"{tmp_path}/keep.py:keep"} if kind == "function" else {})}
    check_filter(validate(SLOTS["filters"][kind], {"kind": kind, **settings}))
