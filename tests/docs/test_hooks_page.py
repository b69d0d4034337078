"""The plugin on the page about hooks is complete: it loads, is listed, and its reward and filter work."""

import asyncio
import re
import tomllib
from pathlib import Path

import numpy as np
from plasmid import Prompt, PromptGroup, Sample, SamplingParams, StopReason
from plasmid.config.load import validate
from plasmid.plugins.registry import find_components, load_plugins

PAGE = (Path(__file__).parents[2] / "docs/plugins/hooks.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language} \S+\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return found


def sample(text: str) -> Sample:
    one = np.ones(1)
    return Sample(
        id="0/0",
        rollout_id="0/0",
        group_id=0,
        prompt_id="p",
        token_ids=one.astype(np.int32),
        loss_mask=one.astype(bool),
        rollout_logprobs=one.astype(np.float32),
        versions=(),
        sampling=SamplingParams(),
        text=text,
        stop_reason=StopReason.STOP,
    )


def test_the_plugin_of_the_page_works(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(block("python"))
    manager = load_plugins(files=[file])
    slots, recipe = find_components(manager), tomllib.loads(block("toml"))
    (settings,) = recipe["rewards"]
    reward = validate(slots["rewards"]["short"], settings)
    prompt = Prompt(id="p", token_ids=np.ones(1, np.int32), text="?")
    assert reward.max_characters == 60
    assert asyncio.run(reward(prompt, sample("x" * 60))) == 1.0
    assert asyncio.run(reward(prompt, sample("x" * 61))) == 0.0
    keep = validate(slots["filters"]["different"], recipe["filters"][0])
    assert keep(PromptGroup(id=0, prompt=prompt, samples=[sample("a"), sample("b")]))
    assert not keep(PromptGroup(id=0, prompt=prompt, samples=[sample("a"), sample("a")]))
    for value in (0.25, 0.5, 0.375):
        manager.hook.batch_finished(batch=1, metrics={"reward/mean": value})
    assert manager.get_plugin(str(file)).best == [0.25, 0.5, 0.5]
