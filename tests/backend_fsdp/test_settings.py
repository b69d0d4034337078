"""Settings, the learning rate, and recipes that are refused before a rank is started."""

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsdp_cases import make_config
from plasmid.components import BuildContext
from plasmid.config.load import validate
from plasmid.errors import ConfigError, ModelError
from plasmid.protocols import Bundle
from plasmid_fsdp.settings import FSDP
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_training.rank.learner import learning_rate
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR


def rates(total, **settings):
    config = FSDP(lr=0.5, **settings)
    return [learning_rate(config, step=step, total_steps=total) for step in range(total + 3)]


def test_constant_after_warmup():
    assert rates(5, warmup_steps=4) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 0.5])


def torch_rates(make, steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler, seen = make(optimizer), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_linear_equals_torch():
    expected = torch_rates(lambda o: LinearLR(o, start_factor=1.0, end_factor=0.2, total_iters=10), 13)
    assert rates(10, schedule="linear", min_lr_fraction=0.2) == pytest.approx(expected)


def test_cosine_equals_torch():
    expected = torch_rates(lambda o: CosineAnnealingLR(o, T_max=10, eta_min=0.05), 11)
    assert rates(10, schedule="cosine", min_lr_fraction=0.1)[:11] == pytest.approx(expected)
    assert rates(10, schedule="cosine", min_lr_fraction=0.1)[10:] == pytest.approx([0.05] * 3)


def test_warmup_then_decay_to_a_given_step():
    def factor(step):
        return (step + 1) / 2 if step < 2 else max(0.0, 1 - (step - 2) / 4)

    expected = torch_rates(lambda o: LambdaLR(o, factor), 9)
    assert rates(6, schedule="linear", warmup_steps=2) == pytest.approx(expected)
    assert rates(6, schedule="linear", warmup_steps=2, decay_steps=6) == pytest.approx(expected)
    assert rates(100, schedule="linear", warmup_steps=2, decay_steps=6)[:9] == pytest.approx(expected)


def test_a_run_no_longer_than_its_warmup_is_fine():
    assert rates(2, schedule="cosine", warmup_steps=5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 0.9}, "momentum has no effect with optimizer = 'adamw'; remove it"),
        ({"nesterov": True}, "nesterov has no effect with optimizer = 'adamw'; remove it"),
        ({"optimizer": "sgd", "betas": [0.5, 0.5]}, "betas has no effect with optimizer = 'sgd'; remove it"),
        ({"optimizer": "sgd", "eps": 1e-3}, "eps has no effect with optimizer = 'sgd'; remove it"),
        ({"optimizer": "sgd", "nesterov": True}, "nesterov needs momentum above 0, got 0.0; set momentum"),
        (
            {"min_lr_fraction": 0.1},
            "min_lr_fraction has no effect with schedule = 'constant'; remove it or change schedule",
        ),
        ({"decay_steps": 10}, "decay_steps has no effect with schedule = 'constant'; remove it or change schedule"),
        (
            {"schedule": "linear", "decay_steps": 5, "warmup_steps": 5},
            "decay_steps = 5 must be more than warmup_steps = 5",
        ),
        ({"microbatch_samples": 0}, "microbatch_samples must be 'auto' or at least 1, got 0"),
        (
            {"microbatch_samples": 2, "microbatch_tokens": 99},
            "microbatch_tokens has no effect if microbatch_samples is set; remove one of them",
        ),
        (
            {"activation_memory_budget": 0.5, "activation_checkpointing": True},
            "activation_memory_budget has no effect with activation_checkpointing = true; remove one of them",
        ),
        (
            {"activation_memory_budget": 0.5, "compile": False},
            "activation_memory_budget needs compiled layers; remove it, or compile = false",
        ),
        ({"betas": [0.9, 1.0]}, "both must be at least 0 and below 1, got [0.9, 1.0]"),
        ({"freeze": ["("]}, "'(' is not a valid regular expression: missing ), unterminated subpattern at position 0"),
    ],
)
def test_settings_that_contradict_are_errors(settings, message):
    with pytest.raises(ConfigError) as error:
        validate(FSDP, settings, "trainer")
    assert str(error.value).endswith(message) and str(error.value).startswith("trainer")


def test_the_plugin_imports_no_torch():
    code = "import sys, plasmid_fsdp.plugin as p; print(p.register_components(), 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[<class 'plasmid_fsdp.settings.FSDP'>] False"


def build_error(config, *, error=ModelError):
    async def run():
        cluster = LocalCluster()
        try:
            context = BuildContext(cluster=cluster, config=config, run_dir=Path("unused"), bundles=(Bundle(),))
            await config.trainer.build(context)
        finally:
            await cluster.close()

    with pytest.raises(error) as caught:
        asyncio.run(run())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_cpu_offload_needs_a_gpu(tiny_model):
    message = build_error(make_config(tiny_model, trainer={"cpu_offload": True}), error=ConfigError)
    assert message == "trainer.cpu_offload: requires GPUs, but the trainer is placed on the CPU; remove the setting"


def test_model_folders_that_cannot_be_used(tmp_path):
    path = tmp_path / "model"
    assert build_error(make_config(path)) == f"model.path: no such folder: {path}"
    path.mkdir()
    assert build_error(make_config(path)) == (
        f"model.path: {path} has no config.json; it must be a Hugging Face model folder"
    )
    make_tiny_model(path)
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    assert build_error(make_config(path)) == (
        f"model.path: {path} has no weights: model.safetensors is missing; the folder is incomplete"
    )
    (path / "pytorch_model.bin").write_bytes(b"")
    assert build_error(make_config(path)).endswith("is missing; convert the folder with `rl convert`")
    (path / "model.safetensors").write_bytes(b"garbage")
    assert build_error(make_config(path)).startswith(f"model.path: {path}/model.safetensors cannot be read: ")
    misfit = f"model.path: the weights in {path} do not fit its model: it "
    save_file({n: t for n, t in weights.items() if "layers.1" not in n}, path / "model.safetensors")
    assert build_error(make_config(path)).startswith(misfit + "lacks model.layers.1.")
    assert build_error(make_config(path)).endswith("and 6 more")
    save_file(weights | {"model.extra": torch.zeros(1)}, path / "model.safetensors")
    assert build_error(make_config(path)) == misfit + "has unknown model.extra"
    save_file(weights | {"model.norm.weight": torch.zeros(3)}, path / "model.safetensors")
    assert build_error(make_config(path)) == misfit + "has different shapes: model.norm.weight is [3] instead of [64]"
    (path / "config.json").write_text("{")
    assert build_error(make_config(path)).startswith(f"model.path: {path}/config.json cannot be read: ")
    (path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert build_error(make_config(path)).startswith(f"model.path: cannot build a causal language model from {path}: ")


def test_transformed_logits_are_refused_rather_than_ignored(tmp_path):
    path = make_tiny_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    assert build_error(make_config(path)) == (
        f"model.path: {path} sets final_logit_softcapping = 30.0, which trainer 'fsdp' does not support"
    )


def test_freezing_nothing_or_everything_is_an_error(tiny_model):
    assert build_error(make_config(tiny_model, trainer={"freeze": ["layer.9"]})).startswith(
        "trainer.freeze: 'layer.9' matches no parameter; parameters are named like model."
    )
    assert build_error(make_config(tiny_model, trainer={"freeze": ["."]})) == (
        "trainer.freeze: ['.'] freezes all parameters; at least one must be trained"
    )


def check_error(config):
    with pytest.raises(ModelError) as caught:
        config.trainer.check(config.view("trainer"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"freeze": ["embed", "layer.9"]},
            "trainer.freeze: 'layer.9' matches no parameter; parameters are named like ",
        ),
        ({"freeze": ["."]}, "trainer.freeze: ['.'] freezes all parameters; at least one must be trained"),
        ({"freeze": [r"^model\.", "head"]}, r"trainer.freeze: ['^model\\.', 'head'] freezes all parameters; at least "),
        (
            {"lora": {"targets": ["q_proj", "q_prj"]}},
            "trainer.lora.targets: 'q_prj' matches no linear layer; a name is",
        ),
        (
            {"lora": {"targets": ["lm_head"]}},
            "trainer.lora.targets: 'lm_head' matches lm_head.weight, but only linear ",
        ),
        (
            {"lora": {"targets": ["norm"]}},
            "trainer.lora.targets: 'norm' matches model.layers.0.input_layernorm.weight, ",
        ),
        (
            {"lora": {"targets": ["embed"]}},
            "trainer.lora.targets: 'embed' matches model.embed_tokens.weight, but only ",
        ),
    ],
    ids=str,
)
def test_patterns_that_match_nothing_or_everything_are_found_before_processes_start(tiny_model, settings, message):
    config = make_config(tiny_model, trainer=settings)
    assert check_error(config).startswith(message)
    assert build_error(config).startswith(message)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["layer.9"], "trainer.critic.freeze: 'layer.9' matches no parameter; parameters are named like model."),
        (["lm_head"], "trainer.critic.freeze: 'lm_head' matches no parameter; parameters are named like model."),
        (["model", "score"], "trainer.critic.freeze: ['model', 'score'] freezes all parameters; at least one must be"),
    ],
    ids=str,
)
def test_patterns_of_the_critic_are_found_too(tiny_model, patterns, message):
    config = make_config(tiny_model, algorithm={"kind": "ppo"}, trainer={"critic": {"freeze": patterns}})
    assert check_error(config).startswith(message)
    assert build_error(config).startswith(message)


@pytest.mark.parametrize(
    "settings",
    [{"freeze": ["embed", r"layers\.0\."]}, {"freeze": [r"^model\."]}, {"lora": {"targets": [r"[qkv]_proj$", "mlp"]}}],
    ids=str,
)
def test_patterns_that_match_are_accepted(tiny_model, settings):
    config = make_config(tiny_model, trainer=settings)
    config.trainer.check(config.view("trainer"))


def test_a_head_that_shares_its_weights_is_no_parameter(tmp_path):
    path = make_tiny_model(tmp_path / "model", tied=True)
    config = make_config(path, trainer={"freeze": ["lm_head"]})
    assert "'lm_head' matches no parameter" in check_error(config)
    assert "'lm_head' matches no parameter" in build_error(config)
    assert "freezes all" in check_error(make_config(path, trainer={"freeze": [r"^model\."]}))


def test_a_missing_reference_is_named(tiny_model, tmp_path):
    config = make_config(tiny_model, algorithm={"kl_coef": 0.1}, reference=tmp_path / "none")
    assert build_error(config) == f"reference.path: no such folder: {tmp_path / 'none'}"


def test_rates_are_finite_over_a_long_run():
    config = FSDP(lr=1e-3, schedule="cosine", warmup_steps=10)
    seen = [learning_rate(config, step=s, total_steps=1000) for s in range(1000)]
    assert all(math.isfinite(r) and 0 <= r <= 1e-3 for r in seen) and max(seen) == pytest.approx(1e-3)


def test_the_driver_imports_no_torch():
    code = "import sys, plasmid_fsdp.trainer; print('torch' in sys.modules, 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False False"
