"""A low-rank adapter trains as its formula says, and does not change the base."""

import asyncio
import json
from functools import partial

import pytest
import torch
from fsdp_cases import fit, largest_difference, make_batch, plain_logprobs, weights_of, whole_rows
from plasmid.components import AdapterSpec
from plasmid.errors import CheckpointError, ModelError
from plasmid_models.lora.insertion import insert_adapter
from plasmid_models.lora.layers import merge
from plasmid_models.testing import make_tiny_model
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

SPEC = AdapterSpec(rank=3, alpha=6.0, targets=())
LORA = {"rank": 3, "alpha": 6.0}
SGD = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
TWO = [make_batch(num_groups=2), make_batch(seed=1, num_groups=2, steps=2, index=1)]


def load(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def adapted(path, spec=SPEC, *, seed=0):
    """Return the model in fp64 with random matrices, and its adapted layers."""
    lm, draw = load(path, torch.float64), torch.Generator().manual_seed(seed)
    lm.requires_grad_(False)
    layers = insert_adapter(lm, spec, dtype=torch.float64)
    for layer in layers.values():
        layer.lora_A.data.normal_(generator=draw)
        layer.lora_B.data.normal_(std=0.1, generator=draw)
    return lm, layers


def merged(path, layers):
    lm = load(path, torch.float64)
    for name, layer in layers.items():
        weight = lm.get_parameter(f"{name}.weight")
        weight.data = merge(weight.data, layer.lora_A.data, layer.lora_B.data, layer.scale)
    return lm


IDS = torch.randint(7, 50, (2, 12), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_model_with_the_adapter_is_the_model_of_merged_weights(tiny_model):
    lm, layers = adapted(tiny_model)
    whole = merged(tiny_model, layers)
    assert len(layers) == 14
    assert float((lm(IDS).logits - whole(IDS).logits).abs().max()) < 1e-10
    assert float((lm(IDS).logits - load(tiny_model, torch.float64)(IDS).logits).abs().max()) > 0.1


def test_gradients_are_those_of_the_merged_weight_through_the_product(tiny_model):
    """With W = W0 + s B A: dA = s B^T dW and dB = s dW A^T, where dW is the gradient of the merged weight."""
    lm, layers = adapted(tiny_model)
    whole = merged(tiny_model, layers)
    for model in (lm, whole):
        model(IDS).logits.log_softmax(-1)[..., 7].sum().backward()
    for name, layer in layers.items():
        gradient, scale = whole.get_parameter(f"{name}.weight").grad, SPEC.alpha / SPEC.rank
        for ours, theirs in (
            (layer.lora_A.grad, scale * layer.lora_B.data.T @ gradient),
            (layer.lora_B.grad, scale * gradient @ layer.lora_A.data.T),
        ):
            assert float((ours - theirs).abs().max()) < 1e-10 * max(1.0, float(theirs.abs().max())), name
    assert all(p.grad is None for name, p in lm.named_parameters() if "lora" not in name)


def train(ranks, path, trainer, *, lora=LORA, batches=None, algorithm=None):
    """Return the metrics of every step, the merged weights, and the adapter's folder afterwards."""

    async def run():
        handle, config = await ranks.start(trainer=trainer | {"lora": lora}, algorithm=algorithm)
        reports = await fit(handle, config, *(batches or TWO))
        return reports, await weights_of(handle, path)

    reports, weights = asyncio.run(run())
    return reports, weights, load_file(path.with_name(f"{path.name}-adapter") / "adapter_model.safetensors")


def factors(adapter, name):
    start = f"base_model.model.{name.removesuffix('.weight')}"
    return adapter[f"{start}.lora_A.weight"], adapter[f"{start}.lora_B.weight"]


def test_exported_weights_are_the_base_and_the_product(one_rank, tiny_model, tmp_path):
    _, weights, adapter = train(one_rank, tmp_path / "out", SGD)
    base = load(tiny_model).state_dict()
    assert len(adapter) == 28
    changed = {name for name in weights if not torch.equal(weights[name], base[name])}
    assert changed == {name for name in base if name.endswith("proj.weight")}
    for name in changed:
        a, b = factors(adapter, name)
        assert torch.allclose(weights[name], base[name] + 2.0 * b @ a, atol=1e-7)


def test_a_step_equals_that_of_a_plain_loop(one_rank, tiny_model, tmp_path):
    """The matrices drawn by the trainer are trained by PyTorch on merged weights, one sample at a time."""

    async def start():
        handle, _ = await one_rank.start(trainer={"lora": LORA})
        await weights_of(handle, tmp_path / "start")

    asyncio.run(start())
    first = load_file(tmp_path / "start-adapter" / "adapter_model.safetensors")
    assert all(not tensor.any() for name, tensor in first.items() if "lora_B" in name)
    base, batch = load(tiny_model), make_batch()
    pairs = {n: factors(first, n) for n in base.state_dict() if n.endswith("proj.weight")}
    trained = [matrix.clone().requires_grad_() for pair in pairs.values() for matrix in pair]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    whole = dict(base.state_dict())
    for index, name in enumerate(pairs):
        a, b = trained[2 * index : 2 * index + 2]
        whole[name] = whole[name] + 2.0 * b @ a
    model = lambda **kwargs: torch.func.functional_call(base, whole, kwargs=kwargs)  # noqa: E731
    rows, loss = whole_rows(batch), 0.0
    for i, logprobs in enumerate(plain_logprobs(model, rows)):
        group, of_group = batch.groups[i // 4], i % 4
        advantage = (group.rewards - group.rewards.mean())[of_group] / (group.rewards.std(ddof=1) + 1e-6)
        mask = torch.from_numpy(rows.loss_mask[rows.offsets[i] : rows.offsets[i + 1]])
        loss = loss - ((logprobs - logprobs.detach()).exp() * advantage)[mask].mean() / rows.num_samples
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([matrix.grad for matrix in trained]))
    optimizer.step()
    reports, _, adapter = train(one_rank, tmp_path / "out", {"optimizer": "sgd", "lr": 0.1}, batches=[batch])
    assert reports[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for index, name in enumerate(pairs):
        for ours, theirs in zip(factors(adapter, name), trained[2 * index : 2 * index + 2], strict=True):
            assert torch.allclose(ours, theirs.detach(), atol=1e-6), name


RECOMPUTED = {"microbatch_tokens": 40, "activation_checkpointing": True}
SPLITS = [
    ("two_ranks", RECOMPUTED),
    pytest.param("one_rank", RECOMPUTED, marks=pytest.mark.long),
    pytest.param("one_rank", {"attention": "eager", "microbatch_samples": 5}, marks=pytest.mark.long),
    pytest.param("two_ranks", {}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("kind", "split"), SPLITS, ids=str)
def test_steps_do_not_depend_on_the_split(kind, split, one_rank, request, tmp_path):
    algorithm = {"kl_coef": 0.1, "entropy_coef": 0.01}
    expected, weights, adapter = train(one_rank, tmp_path / "whole", SGD, algorithm=algorithm)
    reports, split_weights, split_adapter = train(
        request.getfixturevalue(kind), tmp_path / "split", SGD | split, algorithm=algorithm
    )
    for ours, theirs in zip(reports, expected, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6)
    assert largest_difference(split_weights, weights) < 1e-6
    assert largest_difference(split_adapter, adapter) < 1e-6


@pytest.mark.long
def test_compiled_layers_have_one_graph_more_with_the_adapter_off(one_rank, tmp_path, monkeypatch):
    """Only the graphs captured by TorchDynamo are counted; the adapter does not depend on how they are compiled."""
    algorithm = {"kl_coef": 0.1}
    expected, weights, _ = train(one_rank, tmp_path / "plain", SGD, algorithm=algorithm)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    reports, captured, _ = train(one_rank, tmp_path / "captured", SGD | {"compile": True}, algorithm=algorithm)
    assert reports[-1]["train/kl"] == pytest.approx(expected[-1]["train/kl"], rel=1e-4)
    assert largest_difference(captured, weights) < 1e-6
    assert reports[0]["train/graphs"] == 2
    assert reports[-1]["train/graphs"] <= 5  # of equal rows, packed rows, both without a gradient, and without adapter


@pytest.mark.parametrize("kind", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.long)])
def test_the_reference_is_the_base_without_a_copy(kind, request, tiny_model, tmp_path, monkeypatch):
    from plasmid_training.rank import frozen

    if kind == "one_rank":  # a thread of this process
        for kept in ("HostWeights", "SecondModel"):
            monkeypatch.setattr(frozen, kept, None)

    last = make_batch(seed=2, index=2)

    async def run():
        handle, config = await request.getfixturevalue(kind).start(
            trainer=SGD | {"lora": LORA}, algorithm={"kl_coef": 0.1, "kl_estimator": "k1", "reduction": "per-token"}
        )
        first = await fit(handle, config, *TWO)
        await weights_of(handle, tmp_path / "out")
        return first + await fit(handle, config, last)

    reports = asyncio.run(run())
    assert reports[0]["train/kl"] == 0
    rows = whole_rows(last)
    with torch.no_grad():
        policy, base = (torch.cat(plain_logprobs(load(path), rows)) for path in (tmp_path / "out", tiny_model))
    apart = (policy - base)[torch.from_numpy(rows.loss_mask)].mean()
    assert abs(apart) > 1e-3
    assert reports[-1]["train/kl"] == pytest.approx(float(apart), abs=1e-5)


def test_a_different_reference_is_a_separate_model(one_rank, tmp_path):
    other = make_tiny_model(tmp_path / "other", seed=5)

    async def run():
        handle, config = await one_rank.start(trainer=SGD | {"lora": LORA}, algorithm={"kl_coef": 0.1}, reference=other)
        return await fit(handle, config, make_batch())

    assert asyncio.run(run())[0]["train/kl"] > 0.01


ADAMW = {"lr": 1e-2, "schedule": "cosine", "weight_decay": 0.01}
CONTINUED = [
    ("two_ranks", "two_ranks", SGD),
    ("one_rank", "one_rank", ADAMW),
    ("two_ranks", "two_ranks", ADAMW),
    ("two_ranks", "one_rank", SGD),
]


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        ("two_ranks", "one_rank", ADAMW),
        ("one_rank", "one_rank", SGD),
        *(pytest.param(*case, marks=pytest.mark.long) for case in CONTINUED),
    ],
    ids=["2-1-adamw", "1-1-sgd", "2-2-sgd", "1-1-adamw", "2-2-adamw", "2-1-sgd"],
)
def test_a_checkpoint_of_the_adapter_alone_continues(before, after, optimizer, request, tiny_model, tmp_path):
    settings = optimizer | {"lora": LORA, "eps": 1e-3} if "schedule" in optimizer else optimizer | {"lora": LORA}
    more = [make_batch(seed=i, index=i) for i in range(2, 4)]

    async def uninterrupted():
        handle, config = await request.getfixturevalue(before).start(trainer=settings)
        await fit(handle, config, *TWO)
        await handle.save(tmp_path / "saved")
        reports = await fit(handle, config, *more)
        return reports, await weights_of(handle, tmp_path / "a")

    async def resumed():
        handle, config = await request.getfixturevalue(after).start(trainer=settings)
        await fit(handle, config, make_batch(seed=99, index=99))
        await handle.load(tmp_path / "saved")
        assert handle.step == 3
        reports = await fit(handle, config, *more)
        return reports, await weights_of(handle, tmp_path / "b")

    expected, weights = asyncio.run(uninterrupted())
    reports, again = asyncio.run(resumed())
    if before == after:
        assert reports == expected and largest_difference(again, weights) == 0
    assert largest_difference(again, weights) < 2e-6
    saved = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    weights = [name for name in saved if name.startswith(("weights.", "optimizer."))]
    assert weights and all(".lora_" in name for name in weights)
    assert json.loads((tmp_path / "saved" / "base.json").read_text())["path"] == str(tiny_model)


def load_error(ranks, path, **options):
    async def run():
        handle, _ = await ranks.start(**options)
        await handle.load(path)

    with pytest.raises(CheckpointError) as error:
        asyncio.run(run())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_checkpoint_that_does_not_fit_is_named(one_rank, tiny_model, tmp_path):
    async def save(path, trainer):
        handle, _ = await one_rank.start(trainer=trainer)
        await handle.save(path)

    lora, whole = tmp_path / "lora", tmp_path / "whole"
    asyncio.run(save(lora, {"lora": LORA}))
    asyncio.run(save(whole, {}))
    assert load_error(one_rank, lora) == f"{lora}: the checkpoint has an adapter; set trainer.lora to resume from it"
    assert load_error(one_rank, whole, trainer={"lora": LORA}) == (
        f"{whole}: the checkpoint has full weights; remove trainer.lora to resume from it"
    )
    other = make_tiny_model(tmp_path / "other", seed=7)
    assert load_error(one_rank, lora, model=other, trainer={"lora": LORA}) == (
        f"{lora}: the adapter was trained on another base model ({str(tiny_model)!r}); the weights in "
        f"model.path = {str(other)!r} differ"
    )
    assert "is [3, 64] instead of [4, 64]" in load_error(one_rank, lora, trainer={"lora": LORA | {"rank": 4}})
    (lora / "base.json").unlink()
    assert load_error(one_rank, lora, trainer={"lora": LORA}).startswith(f"{lora}/base.json: cannot be read: ")


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_an_exported_adapter_can_be_started_from(kind, one_rank, request, tmp_path):
    _, weights, adapter = train(one_rank, tmp_path / "first", SGD)
    lora = LORA | {"start_from": str(tmp_path / "first-adapter")}

    async def run():
        handle, _ = await request.getfixturevalue(kind).start(trainer={"lora": lora})
        return await weights_of(handle, tmp_path / "again")

    assert largest_difference(asyncio.run(run()), weights) == 0
    assert largest_difference(load_file(tmp_path / "again-adapter" / "adapter_model.safetensors"), adapter) == 0


def test_the_base_is_stored_in_the_compute_dtype(one_rank, tiny_model, tmp_path):
    reports, weights, adapter = train(one_rank, tmp_path / "out", {"dtype": "bfloat16", "lr": 1e-4})
    base = load(tiny_model).state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in adapter.values())
    a, b = factors(adapter, "model.layers.0.mlp.up_proj.weight")
    expected = base["model.layers.0.mlp.up_proj.weight"].bfloat16().float() + 2.0 * b @ a
    assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], expected)
    assert float(b.abs().max()) > 0 and reports[0]["train/skipped"] == 0


def test_a_critic_is_trained_whole_beside_the_adapter(one_rank, tmp_path):
    async def run():
        handle, config = await one_rank.start(trainer=SGD | {"lora": LORA}, algorithm={"kind": "ppo"})
        reports = await fit(handle, config, *TWO)
        await handle.save(tmp_path / "saved")
        await handle.load(tmp_path / "saved")
        return reports

    assert all(report["train/critic_grad_norm"] > 0 for report in asyncio.run(run()))


BAD_TARGETS = [
    (["q_prj"], "'q_prj' matches no linear layer; a name is, for example, model.layers.0.self_attn.q_proj"),
    (["lm_head"], "'lm_head' matches lm_head.weight, but only linear layers of the decoder can have an adapter"),
    (["norm"], "'norm' matches model.layers.0.input_layernorm.weight, "),
]


@pytest.mark.parametrize(("targets", "message"), BAD_TARGETS, ids=str)
def test_targets_that_are_no_linear_layers_are_named(one_rank, targets, message):
    with pytest.raises(ModelError) as error:
        asyncio.run(one_rank.start(trainer={"lora": LORA | {"targets": targets}}))
    assert str(error.value).startswith(f"trainer.lora.targets: {message}")


def test_targets_choose_layers(one_rank, tmp_path):
    lora = LORA | {"targets": [r"layers\.1\..*q_proj", "down_proj"]}
    _, _, adapter = train(one_rank, tmp_path / "out", SGD, lora=lora)
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in adapter}
    assert modules == {
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    }
    config = json.loads((tmp_path / "out-adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(modules)


def write_adapter_folder(folder, shapes, **config):
    """Write the folder as `peft` 0.21 does."""
    folder.mkdir()
    plain = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}
    plain |= {"use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "modules_to_save": None}
    plain |= {"rank_pattern": {}, "alpha_pattern": {}, "lora_dropout": 0.05, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    draw = torch.Generator().manual_seed(0)
    tensors = {f"base_model.model.{name}": torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


SHAPES = {
    f"model.layers.{layer}.self_attn.q_proj.lora_{m}.weight": (3, 64) if m == "A" else (64, 3)
    for layer in (0, 1)
    for m in "AB"
}


def test_an_adapter_of_others_is_read(one_rank, tmp_path):
    folder = write_adapter_folder(tmp_path / "theirs", SHAPES)

    async def run():
        lora = LORA | {"targets": ["q_proj"], "start_from": str(folder)}
        handle, _ = await one_rank.start(trainer={"lora": lora})
        await weights_of(handle, tmp_path / "out")

    asyncio.run(run())
    ours, theirs = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "out-adapter", folder))
    assert largest_difference(ours, theirs) == 0


BAD_FOLDERS = [
    ({"use_dora": True}, SHAPES, "adapter_config.json has use_dora = True, but only False is supported"),
    ({"r": 8}, SHAPES, "trainer.lora.rank: the adapter in {folder} has 8, got 3"),
    ({"lora_alpha": 16}, SHAPES, "trainer.lora.alpha: the adapter in {folder} has 16, got 6.0"),
    ({"peft_type": "IA3"}, SHAPES, "adapter_config.json has peft_type = 'IA3', but only 'LORA' is supported"),
    ({}, dict(list(SHAPES.items())[:3]), "it lacks model.layers.1.self_attn.q_proj.lora_B.weight"),
    ({}, SHAPES | {"model.norm.lora_A.weight": (3, 64)}, "it has unknown model.norm.lora_A.weight"),
    (
        {},
        SHAPES | {"model.layers.0.self_attn.q_proj.lora_A.weight": (3, 32)},
        "it has different shapes: model.layers.0.self_attn.q_proj.lora_A.weight is [3, 32] instead of [3, 64]",
    ),
]


@pytest.mark.parametrize(("config", "shapes", "message"), BAD_FOLDERS, ids=[case[2][:40] for case in BAD_FOLDERS])
def test_an_adapter_that_does_not_fit_is_named(one_rank, tmp_path, config, shapes, message):
    folder = write_adapter_folder(tmp_path / "theirs", shapes, **config)
    lora = LORA | {"targets": ["q_proj"], "start_from": str(folder)}

    async def run():
        await one_rank.start(trainer={"lora": lora})

    with pytest.raises(ModelError) as error:
        from fsdp_cases import make_config

        made = make_config(one_rank.model, trainer={"lora": lora})
        made.trainer.check(made.view("trainer"))
        asyncio.run(run())
    assert message.format(folder=folder) in str(error.value) and "\n" not in str(error.value)
