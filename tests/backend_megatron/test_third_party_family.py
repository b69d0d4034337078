"""The model family in docs/plugins/families.md: a plugin file adds it, and Megatron computes the same as
transformers."""

import asyncio
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from fsdp_cases import HERE as FSDP_TESTS
from fsdp_cases import whole_rows
from megatron_cases import ADAM, assert_alike, largest_difference, outcome, plain_outcome, small_batch
from megatron_families import assert_identical, network_logits, perturb_vectors, plain_logits
from plasmid.errors import ConfigError, ModelError
from plasmid.plugins.module_file import load_file
from plasmid_megatron.settings import Megatron
from plasmid_megatron.shapes import check_split
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.observe.journal import read_journal
from safetensors.torch import load_file as load_tensors

PAGE = Path(__file__).parents[2] / "docs/plugins/families.md"
RECIPE = """
plugins = ["{plugin}", "digits.py"]
model.path = "{model}"
rollout.kind = "hf"
rewards = [{{ kind = "digits-of-glm" }}]
sampling.max_new_tokens = 4
data.path = "train.jsonl"
placement = {{ trainer_ranks = 1, start_timeout_s = 900 }}
trainer = {{ kind = "megatron", lr = 3e-3 }}
algorithm.kind = "grpo"
run = {{ batches = 2, prompts_per_batch = 2, samples_per_prompt = 4 }}
"""
REWARD = """
from typing import Literal
from plasmid import Reward, hookimpl

class Digits(Reward):
    kind: Literal["digits-of-glm"] = "digits-of-glm"
    async def __call__(self, prompt, sample):
        return float(sum(c.isdigit() for c in sample.text))

@hookimpl
def register_components():
    return [Digits]
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    (code,) = re.findall(r"```python glm\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path_factory.mktemp("plugin") / "glm.py"
    path.write_text(code)
    return path


@pytest.fixture(scope="module", autouse=True)
def unload_afterwards():
    """Let tests of other files in this process not find the family."""
    yield
    sys.modules.pop("plasmid_plugin_glm", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("glm") / "model"
    make_tiny_model(path, family="glm", attention_bias=True, attention_dropout=0.0)
    return perturb_vectors(path)


def options(plugin):
    return {"plugins": [str(FSDP_TESTS / "fsdp_plugin.py"), str(plugin)]}


@pytest.mark.parametrize(
    "layout", [pytest.param((1, {}), marks=pytest.mark.long), (2, {"tensor_parallel": 2})], ids=["one", "tp2"]
)
def test_logits_and_an_optimizer_step_are_those_of_transformers(layout, ranks, plugin, model, tmp_path):
    num_ranks, trainer = layout
    rows, common = whole_rows(small_batch()), {"num_ranks": num_ranks, **options(plugin)}
    found = asyncio.run(network_logits(ranks, model, rows, folder=tmp_path / "out", trainer=trainer, **common))
    assert_identical(*(load_tensors(path / "model.safetensors") for path in (tmp_path / "out", model)))
    expected = plain_logits(model, rows)
    assert np.abs(expected).max() > 0.5 and np.abs(found - expected).max() < 1e-5
    learned = asyncio.run(outcome(ranks, tmp_path / "learned", model=model, trainer=ADAM | trainer, **common))
    assert_alike(learned, plain_outcome(model, tmp_path / "plain"), 1e-5)
    assert largest_difference(learned.weights, load_tensors(model / "model.safetensors")) > 1e-3


def test_a_setting_that_the_plugin_refuses_is_named(ranks, plugin, tmp_path):
    make_tiny_model(tmp_path / "model", family="glm", attention_dropout=0.5)
    with pytest.raises(ModelError, match=r"has attention_dropout = 0\.5, which trainer 'megatron' cannot compute"):
        asyncio.run(ranks.start(model=tmp_path / "model", **options(plugin)))


def test_the_type_is_known_once_the_file_is_loaded(plugin):
    unknown = r"model type 'gpt2' is not supported by trainer 'megatron'; supported types are deepseek_v3, .*glm, glm4"
    load_file(plugin)
    check_split(Megatron(), {"model_type": "glm"})
    with pytest.raises(ConfigError, match=unknown):
        check_split(Megatron(), {"model_type": "gpt2"})


@pytest.mark.long
def test_rl_train_trains_the_third_party_family(plugin, model, tmp_path):
    from tests.forked_rl import run_rl

    (tmp_path / "digits.py").write_text(REWARD)
    (tmp_path / "train.jsonl").write_text('{"prompt": "say 1: ", "target": 1}\n' * 8)
    (tmp_path / "glm.toml").write_text(RECIPE.format(plugin=plugin, model=model))
    done = run_rl("train", "glm.toml", "run.dir=out", cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    metrics = [dict(entry.metrics) for entry in read_journal(tmp_path / "out/metrics.jsonl")]
    assert max(m["train/logprob_diff_max"] for m in metrics if "train/logprob_diff_max" in m) < 2e-5
    ours, theirs = (load_tensors(path / "model.safetensors") for path in (tmp_path / "out/final", model))
    assert ours.keys() == theirs.keys()
    assert largest_difference(ours, theirs) > 1e-4
