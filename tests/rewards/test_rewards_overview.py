"""docs/rewards.md lists every reward, and its recipes resolve."""

import re
import tomllib
from pathlib import Path

from plasmid.config.load import resolve
from plasmid.plugins.registry import find_components, load_plugins

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
BASE = {
    "model": {"path": "model"},
    "trainer": {"kind": "fsdp"},
    "rollout": {"kind": "hf"},
    "algorithm": {"kind": "grpo"},
    "data": {"path": "x.jsonl"},
}


def test_the_table_has_every_reward_with_its_extra():
    rewards = find_components(load_plugins())["rewards"]
    rows = dict(re.findall(r"^\| \[`([\w-]+)`\].*\| (?:`([\w-]+)` )?\|$", PAGE, re.MULTILINE))
    assert list(rows) == sorted(rewards)
    project = tomllib.loads((Path(__file__).parents[2] / "packages/rewards/pyproject.toml").read_text())["project"]
    assert {extra for extra in rows.values() if extra} | {"all"} == set(project["optional-dependencies"])


def test_every_recipe_on_the_page_resolves():
    blocks = re.findall(r"^```toml.*?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        config = resolve({"rewards": [{"kind": "number"}], **BASE, **tomllib.loads(block)})
        assert config.rewards
