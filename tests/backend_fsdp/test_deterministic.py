"""Settings that `run.deterministic` does not support are refused before any process starts."""

import asyncio
from pathlib import Path

import pytest
import torch
from fsdp_cases import make_config
from plasmid.components import BuildContext
from plasmid.config.deterministic import find_deterministic_errors
from plasmid.errors import ConfigError, ModelError
from plasmid.protocols import Bundle
from plasmid.testing.fakes import FakeTrainerConfig
from plasmid_fsdp.model.invariant_attention import invariant_attention
from plasmid_models.kernels.invariant import Spans
from plasmid_models.kernels.invariant_modules import InvariantOps, check_attention
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.cluster.local import LocalCluster

RUN = {"batches": 1, "deterministic": True}


def deterministic(model, **tables):
    tables["run"] = RUN | tables.get("run", {})
    return make_config(model, **{"rollout": {"kind": "hf"}, **tables})


RESTRICTED = "the trainer normalizes over the remaining tokens in a different order than the engine; remove it"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"trainer": {"compile": True}},
            "trainer.compile: must be 'auto' or false with run.deterministic, got true; remove it",
        ),
        (
            {"trainer": {"share_prefixes": True}},
            "trainer.share_prefixes: must be 'auto' or false with run.deterministic, got true; remove it",
        ),
        (
            {"trainer": {"attention": "sdpa"}},
            "trainer.attention: must be 'auto' with run.deterministic, got 'sdpa'; remove it",
        ),
        (
            {"trainer": {"attention": "eager"}},
            "trainer.attention: must be 'auto' with run.deterministic, got 'eager'; remove it",
        ),
        (
            {"trainer": {"context_parallel": 2}, "ranks": 2},
            "trainer.context_parallel: must be 1 with run.deterministic, got 2; remove it",
        ),
        (
            {"rollout": {"kind": "hf", "canary_tolerance": 0.1}},
            "rollout.canary_tolerance: must be 'auto' with run.deterministic, which tolerates no difference, got 0.1; "
            "remove it",
        ),
        (
            {"rollout": {"kind": "never-started"}},
            "run.deterministic: engine 'never-started' does not compute with the trainer's kernels; use one that does, "
            "or remove the setting",
        ),
        (
            {"run": {"max_staleness": 2}},
            "run.max_staleness: must be 0 with run.deterministic, got 2: timing would determine which policy version "
            "samples a token",
        ),
        ({"placement": {"threads": 4}}, "placement.threads: must be 1 with run.deterministic, got 4; remove it"),
        (
            {"sampling": {"top_p": 0.9}},
            f"sampling.top_p: must not restrict sampling with run.deterministic, got 0.9: {RESTRICTED}",
        ),
        (
            {"sampling": {"top_k": 20}},
            f"sampling.top_k: must not restrict sampling with run.deterministic, got 20: {RESTRICTED}",
        ),
        (
            {"profiles": {"hot": {"sampling": {"min_p": 0.1}}}},
            f"profiles.hot.sampling.min_p: must not restrict sampling with run.deterministic, got 0.1: {RESTRICTED}",
        ),
    ],
)
def test_settings_that_depend_on_the_batch_are_refused(tiny_model, tables, message):
    with pytest.raises(ConfigError) as caught:
        deterministic(tiny_model, **tables)
    assert str(caught.value) == message


def test_other_trainers_are_refused(tiny_model):
    config = deterministic(tiny_model).model_copy(update={"trainer": FakeTrainerConfig()})
    assert list(find_deterministic_errors(config)) == [
        "run.deterministic: trainer 'fake' has no batch-invariant kernels; use another, or remove the setting"
    ]


def test_settings_that_do_not_depend_on_the_batch_are_accepted(tiny_model):
    trainer = {"compile": False, "share_prefixes": False, "attention": "auto"}
    config = deterministic(tiny_model, trainer=trainer, placement={"threads": 1}, sampling={"temperature": 0.7})
    config.trainer.check(config.view("trainer"))


def test_engine_and_trainer_have_one_dtype(tiny_model):
    config = deterministic(tiny_model, rollout={"kind": "hf", "dtype": "bfloat16"})

    async def build():
        cluster, bundles = LocalCluster(), (Bundle(),)
        try:
            await config.rollout.build(
                BuildContext(cluster=cluster, config=config, run_dir=Path(), bundles=bundles, threads=1)
            )
        finally:
            await cluster.close()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(build())
    assert str(caught.value) == (
        "rollout.dtype: must equal trainer.dtype = 'float32' with run.deterministic, got 'bfloat16'; set it to "
        "'float32'"
    )


LAYERS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4},
    "mistral": {"sliding_window": 16},
    "qwen2": {"sliding_window": 16},
}
"""Model settings by family; qwen2 has a window only with `use_sliding_window`."""


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3_moe", "4 experts per layer"),
        ("glm4_moe", "4 experts per layer"),
        ("gpt_oss", "4 experts per layer"),
        ("gemma3_text", "layers of kind 'sliding_attention'"),
        ("qwen3_5_text", "layers of kind 'linear_attention'"),
        ("mistral", "sliding-window attention (window 16)"),
        ("llama", None),
        ("qwen2", None),
        ("qwen3", None),
        ("glm4", None),
    ],
)
def test_models_with_other_layers_are_refused(tmp_path, family, kind):
    model = make_tiny_model(tmp_path / family, family=family, **LAYERS.get(family, {}))
    config = deterministic(model)
    if kind is None:
        config.trainer.check(config.view("trainer"))
        return
    with pytest.raises(ModelError) as caught:
        config.trainer.check(config.view("trainer"))
    assert str(caught.value) == (
        f"run.deterministic: model.path = {model} has {kind}, for which there are no batch-invariant kernels; choose a "
        "dense model with full attention, or remove the setting"
    )
    config = make_config(model, rollout={"kind": "hf"}, run={"batches": 1})
    config.trainer.check(config.view("trainer"))


def test_models_of_other_roles_are_checked(tmp_path, tiny_model):
    reference = make_tiny_model(tmp_path / "reference", family="qwen3_moe", **LAYERS["qwen3_moe"])
    config = deterministic(tiny_model, reference=reference, algorithm={"kl_coef": 0.1})
    with pytest.raises(ModelError, match=r"run\.deterministic: reference\.path = .* has 4 experts per layer"):
        config.trainer.check(config.view("trainer"))


@pytest.mark.parametrize("name", ["matmul", "bmm", "softmax", "log_softmax", "sum", "cumsum", "index_add"])
def test_sums_over_rows_without_such_a_kernel_are_refused(name):
    x, index = torch.ones(2, 2), torch.tensor([0, 1])
    calls = {
        "matmul": lambda: torch.matmul(x, x),
        "bmm": lambda: torch.bmm(x[None], x[None]),
        "index_add": lambda: torch.index_add(x, 0, index, x),
    }
    with InvariantOps(), pytest.raises(ModelError) as caught:
        calls.get(name, lambda: getattr(torch, name)(x, dim=-1))()
    assert str(caught.value) == (
        f"run.deterministic: the model's layers use torch's {name!r}, which has no batch-invariant kernel here; remove "
        "the setting"
    )


def test_a_mean_over_another_dimension_is_refused():
    with InvariantOps(), pytest.raises(ModelError) as caught:
        torch.ones(2, 3).mean(0)
    assert str(caught.value) == (
        "run.deterministic: the model's layers compute a mean over dimension 0, which has no batch-invariant kernel "
        "here; remove the setting"
    )


@pytest.mark.parametrize(
    ("window", "sinks", "kind"),
    [(4, None, "sliding-window attention (window 4)"), (None, torch.zeros(2), "attention sinks")],
)
def test_attention_without_such_a_kernel_is_refused(window, sinks, kind):
    message = (
        f"run.deterministic: the model has {kind}, for which there is no batch-invariant kernel; remove the setting"
    )
    with pytest.raises(ModelError) as caught:
        check_attention(window, sinks)
    assert str(caught.value) == message
    rows = torch.ones(1, 2, 3, 4)
    spans, bounds = Spans.packed([3], torch.device("cpu")), torch.tensor([0, 3])
    with pytest.raises(ModelError) as caught:
        invariant_attention(
            torch.nn.Identity(), rows, rows, rows, spans=spans, bounds=bounds, sliding_window=window, s_aux=sinks
        )
    assert str(caught.value) == message
