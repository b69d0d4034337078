"""A low-rank adapter learns the same with Megatron as with FSDP, in every layout."""

import asyncio
import json
from math import prod

import pytest
from megatron_cases import ADAM, FSDP_ADAM, Ranks, assert_alike, largest_difference, make_batch, outcome, weights_of
from megatron_families import make_family
from megatron_layouts import LAYOUTS, MOE_LAYOUTS, MORE_LAYOUTS, MORE_MOE_LAYOUTS
from megatron_patches import adapter_memory, capture_graphs, compile_graphs, describe_gathering
from plasmid.errors import ModelError
from plasmid_megatron import shapes
from plasmid_models.testing import make_tiny_model
from safetensors.torch import load_file
from torch import float32

LORA = {"rank": 3, "alpha": 6.0}
STEPS = {"batch": make_batch(steps=2), "algorithm": {"kl_coef": 0.1}}
TP2 = LAYOUTS["tp2"]


def adapter_of(folder):
    return load_file(folder.with_name(f"{folder.name}-adapter") / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def by_fsdp(rank_processes, tmp_path_factory):
    """Return the outcome with FSDP on one rank and the folder of its adapter, by model and targets."""
    known = {}

    async def run(model, folder, targets):
        ranks = Ranks(rank_processes, model, folder)
        trainer = FSDP_ADAM | {"lora": LORA | {"targets": targets}}
        found = await outcome(ranks, folder / "out", kind="fsdp", trainer=trainer, **STEPS)
        await ranks.close()
        return found, folder / "out-adapter"

    def give(model, targets=()):
        if (model, targets) not in known:
            known[model, targets] = asyncio.run(run(model, tmp_path_factory.mktemp("fsdp"), targets))
        return known[model, targets]

    return give


@pytest.fixture(scope="session")
def tiny_glm(tmp_path_factory):
    """A random GLM-4: output norms, biases, and gate and up projection in one tensor of the folder."""
    path = tmp_path_factory.mktemp("models") / "tiny-glm4"
    return make_tiny_model(path, family="glm4", num_layers=2, attention_bias=True)


def check(ranks, folder, layout, expected, *, targets=(), trainer=None, **options):
    """Compare losses, gradients and scores of two steps, merged weights, A and B, and the adapter's configuration."""
    num_ranks, of_layout = layout
    trainer = ADAM | of_layout | (trainer or {}) | {"lora": LORA | {"targets": targets}}
    found = asyncio.run(outcome(ranks, folder / "out", num_ranks=num_ranks, trainer=trainer, **STEPS, **options))
    theirs, their_folder = expected
    assert_alike(found, theirs, 1e-5)
    assert found.reports[0]["train/kl"] == 0
    assert found.reports[1]["train/kl"] == pytest.approx(theirs.reports[1]["train/kl"], rel=1e-3)
    ours, configs = adapter_of(folder / "out"), []
    assert all(tensor.any() for tensor in ours.values())
    assert largest_difference(ours, load_file(their_folder / "adapter_model.safetensors")) < 1e-5
    for path in (folder / "out-adapter", their_folder):
        configs.append(json.loads((path / "adapter_config.json").read_text()))
    assert configs[0] == configs[1]


@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(n, marks=pytest.mark.long) for n in LAYOUTS if n != "tp2")])
def test_training_an_adapter_matches_fsdp(layout, ranks, by_fsdp, tiny_qwen, tmp_path):
    check(ranks, tmp_path, LAYOUTS[layout], by_fsdp(tiny_qwen))


@pytest.mark.parametrize(
    "layout",
    ["recomputed", *(pytest.param(name, marks=pytest.mark.long) for name in MORE_LAYOUTS if name != "recomputed")],
)
def test_training_an_adapter_matches_fsdp_in_other_layouts(layout, ranks, by_fsdp, tiny_qwen, tmp_path):
    check(ranks, tmp_path, MORE_LAYOUTS[layout], by_fsdp(tiny_qwen))


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.long)])
def test_a_head_that_is_the_embedding_stays(layout, ranks, by_fsdp, tiny_tied, tmp_path):
    check(ranks, tmp_path, LAYOUTS[layout], by_fsdp(tiny_tied), model=tiny_tied)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(TP2, marks=pytest.mark.long), MORE_LAYOUTS["tp2 with whole sequences"]],
    ids=["tp2", "whole sequences"],
)
def test_the_norms_of_glm_4_follow_the_adapter(layout, ranks, by_fsdp, tiny_glm, tmp_path):
    check(ranks, tmp_path, layout, by_fsdp(tiny_glm), model=tiny_glm)


PARTS = ("q_proj", "v_proj", "up_proj")
"""Only some of the tensors that Megatron fuses."""
LAST_LAYER = (r"layers\.3\..*o_proj",)


@pytest.mark.parametrize(
    ("layout", "targets"),
    [("pp2", PARTS), *(pytest.param("tp2", targets, marks=pytest.mark.long) for targets in (PARTS, LAST_LAYER))],
    ids=["pp2 parts", "tp2 parts", "tp2 last layer"],
)
def test_targets_choose_layers_as_with_fsdp(layout, targets, ranks, by_fsdp, tiny_qwen, tmp_path):
    check(ranks, tmp_path, LAYOUTS[layout], by_fsdp(tiny_qwen, targets), targets=targets)


def test_every_pipeline_rank_needs_an_adapter(ranks):
    with pytest.raises(
        ModelError, match=r"trainer\.lora\.targets: some pipeline ranks have no layer with an adapter; "
    ):
        asyncio.run(ranks.start(num_ranks=2, trainer={"pipeline_parallel": 2, "lora": LORA | {"targets": LAST_LAYER}}))


@pytest.mark.long
def test_captured_layers_have_one_graph_more_with_the_adapter_off(ranks, by_fsdp, tiny_qwen, tmp_path):
    async def on_rank(function, *args):
        await ranks.processes.run(0, function, *args)

    asyncio.run(on_rank(capture_graphs, True))
    try:
        check(ranks, tmp_path, LAYOUTS["one"], by_fsdp(tiny_qwen), trainer={"compile": True})
    finally:
        asyncio.run(on_rank(compile_graphs))


def test_only_the_adapter_has_gradients_and_optimizer_state(ranks, tiny_qwen, tmp_path):
    async def run():
        trainer, _ = await ranks.start(trainer={"lora": LORA}, algorithm={"kl_coef": 0.1})
        await weights_of(trainer, tmp_path / "out")
        return await ranks.processes.run(0, adapter_memory)

    found = asyncio.run(run())
    size = sum(tensor.numel() for tensor in adapter_of(tmp_path / "out").values())
    total = sum(tensor.numel() for tensor in load_file(tiny_qwen / "model.safetensors").values())
    assert found["parameters"] == total + size
    assert size <= found["gradients"] < 1.1 * size + 64  # padded
    assert 2 * size <= found["state"] < 2.2 * size + 256
    assert found["reference"] == "AdapterBase"


def test_the_time_of_gathering_grows_with_the_number_of_matrices(ranks):
    """A search for the layer of each matrix took 300 of 350 ms for 288 matrices."""

    async def run():
        await ranks.start(trainer={"lora": LORA})
        return await ranks.processes.run(0, describe_gathering)

    matrices, described = asyncio.run(run())
    assert matrices >= 16
    assert described <= 2 * matrices


@pytest.mark.parametrize(
    "layout",
    [TP2, *(pytest.param(one, marks=pytest.mark.long) for one in (LAYOUTS["one"], MORE_LAYOUTS["tp2 pp2"]))],
    ids=["tp2", "one", "tp2 pp2"],
)
def test_an_adapter_of_others_can_be_started_from(layout, ranks, by_fsdp, tiny_qwen, tmp_path):
    """FSDP trained it, so the matrices A of fused tensors differ."""
    trained, folder = by_fsdp(tiny_qwen, PARTS)
    num_ranks, trainer = layout

    async def run():
        lora = LORA | {"targets": PARTS, "start_from": str(folder)}
        handle, _ = await ranks.start(num_ranks=num_ranks, trainer=trainer | {"lora": lora})
        return await weights_of(handle, tmp_path / "out")

    assert largest_difference(asyncio.run(run()), trained.weights) < 1e-6
    assert largest_difference(adapter_of(tmp_path / "out"), load_file(folder / "adapter_model.safetensors")) == 0


def test_a_critic_is_trained_whole_beside_the_adapter(ranks, tmp_path):
    trainer = ADAM | {"lora": LORA, "tensor_parallel": 2, "critic": {"lr": 1e-2, "head_std": 0.1}}
    found = asyncio.run(outcome(ranks, tmp_path / "out", num_ranks=2, trainer=trainer, algorithm={"kind": "ppo"}))
    assert all(report["train/critic_grad_norm"] > 0 for report in found.reports)


BAD_TARGETS = [
    (["q_prj"], "'q_prj' matches no linear layer; a name is, for example, model.layers.0.mlp.down_proj"),
    (["lm_head"], "'lm_head' matches lm_head.weight, but only linear layers of the decoder can have an adapter"),
    (["q_norm"], "'q_norm' matches model.layers.0.self_attn.q_norm.weight, "),
]


@pytest.mark.parametrize(("targets", "message"), BAD_TARGETS, ids=str)
def test_targets_that_are_no_linear_layers_are_named(targets, message, ranks):
    with pytest.raises(ModelError) as error:
        asyncio.run(ranks.start(trainer={"lora": LORA | {"targets": targets}}))
    assert str(error.value).startswith(f"trainer.lora.targets: {message}")


def test_an_adapter_that_does_not_fit_is_named(ranks, by_fsdp, tiny_qwen):
    _, folder = by_fsdp(tiny_qwen, PARTS)

    def error(**lora):
        with pytest.raises(ModelError) as found:
            asyncio.run(ranks.start(trainer={"lora": LORA | {"start_from": str(folder)} | lora}))
        return str(found.value)

    assert error(rank=4, targets=PARTS) == f"trainer.lora.rank: the adapter in {folder} has 3, got 4"
    assert "the adapter in " in error() and "it lacks model.layers.0.mlp.down_proj.lora_A.weight" in error()


MOE = MOE_LAYOUTS | MORE_MOE_LAYOUTS | {"recomputed": MORE_LAYOUTS["recomputed"]}
LONG_MOE = ("one", "ep2 tp2", "ep2 pp2", "etp2")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ep2", *LONG_MOE])
def test_training_attention_of_an_expert_model_matches_fsdp(layout, ranks, by_fsdp, tiny_moe, tmp_path):
    check(ranks, tmp_path, MOE[layout], by_fsdp(tiny_moe), model=tiny_moe)


@pytest.fixture(scope="module")
def tiny_glm_moe(tmp_path_factory):
    """A random GLM-4.5 with a dense layer and shared experts."""
    return make_family(tmp_path_factory.mktemp("models") / "tiny-glm-4.5", "GLM-4.5")


@pytest.mark.long
@pytest.mark.parametrize("targets", [(), ("proj",)], ids=["without routed experts", "all layers"])
@pytest.mark.parametrize("layout", ["ep2", "ep2 tp2"])
def test_training_shared_experts_matches_fsdp(layout, targets, ranks, by_fsdp, tiny_glm_moe, tmp_path):
    check(ranks, tmp_path, MOE[layout], by_fsdp(tiny_glm_moe, targets), targets=targets, model=tiny_glm_moe)


@pytest.fixture(scope="module")
def tiny_gpt_oss(tmp_path_factory):
    """A random gpt-oss with sinks, and biases in attention, routers and experts."""
    return make_family(tmp_path_factory.mktemp("models") / "tiny-gpt-oss", "gpt-oss")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ep2", "ep2 tp2"])
def test_training_attention_with_sinks_matches_fsdp(layout, ranks, by_fsdp, tiny_gpt_oss, tmp_path):
    check(ranks, tmp_path, MOE[layout], by_fsdp(tiny_gpt_oss), model=tiny_gpt_oss)


EXPERTS = (r"experts\.\d+\.(gate|up|down)_proj",)
EXPERT_LAYOUTS = [("ep2", EXPERTS), ("ep2", ("q_proj", r"layers\.1\..*experts.*(up|down)_proj"))]
LONG_EXPERT_LAYOUTS = [
    *((name, EXPERTS) for name in ("one", "recomputed", "ep2 tp2", "ep4 tp2 dp2", "ep2 pp2", "ep2 cp2")),
    *((name, ("proj",)) for name in ("one", "ep2 tp2", "ep2 pp2")),
]


@pytest.mark.parametrize(
    ("layout", "targets"),
    [*EXPERT_LAYOUTS, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_EXPERT_LAYOUTS)],
    ids=str,
)
def test_training_routed_experts_matches_fsdp(layout, targets, ranks, by_fsdp, tiny_moe, tmp_path):
    check(ranks, tmp_path, MOE[layout], by_fsdp(tiny_moe, targets), targets=targets, model=tiny_moe)


@pytest.mark.parametrize("layout", ["ep2", *(pytest.param(n, marks=pytest.mark.long) for n in ("one", "ep2 pp2"))])
def test_an_adapter_of_experts_of_others_can_be_started_from(layout, ranks, by_fsdp, tiny_moe, tmp_path):
    """Merged into the weights it is what FSDP trained, and its folder is the same."""
    trained, folder = by_fsdp(tiny_moe, EXPERTS)
    num_ranks, trainer = MOE[layout]

    async def run():
        lora = LORA | {"targets": EXPERTS, "start_from": str(folder)}
        handle, _ = await ranks.start(model=tiny_moe, num_ranks=num_ranks, trainer=trainer | {"lora": lora})
        return await weights_of(handle, tmp_path / "out")

    assert largest_difference(asyncio.run(run()), trained.weights) < 1e-6
    assert largest_difference(adapter_of(tmp_path / "out"), load_file(folder / "adapter_model.safetensors")) == 0


def test_exports_are_the_base_and_the_product_of_each_expert(ranks, tiny_moe, tmp_path):
    """In bfloat16 with rank 8, the products of all experts are computed together."""

    async def run():
        lora = {"rank": 8, "alpha": 6.0, "targets": [r"layers\.1\.mlp\.experts\.\d+\.(up|down)_proj"]}
        trainer = {"dtype": "bfloat16", "lr": 1e-4, "expert_parallel": 2, "lora": lora}
        return await outcome(ranks, tmp_path / "out", model=tiny_moe, num_ranks=2, trainer=trainer)

    found, adapter = asyncio.run(run()), adapter_of(tmp_path / "out")
    assert found.reports[0]["train/skipped"] == 0
    layers = {f"model.layers.1.mlp.experts.{e}.{kind}" for e in range(4) for kind in ("up_proj", "down_proj")}
    prefix, base = "base_model.model.", load_file(tiny_moe / "model.safetensors")
    assert {name.removeprefix(prefix).partition(".lora_")[0] for name in adapter} == layers
    for name, weight in base.items():
        layer, expected = name.removesuffix(".weight"), weight.bfloat16().float()
        if layer in layers:
            a, b = (adapter[f"{prefix}{layer}.lora_{matrix}.weight"] for matrix in "AB")
            assert a.dtype == b.dtype == float32 and b.any()
            expected = expected + 0.75 * b @ a
        assert (found.weights[name] - expected).abs().max() < 1e-6, name


def test_experts_that_cannot_be_adapted_are_named(ranks, tiny_moe, tiny_gpt_oss, monkeypatch):
    monkeypatch.setattr(shapes, "_adapts_experts", lambda *_: False)  # as for families of plugins

    def error(model, *targets, **trainer):
        lora, num_ranks = LORA | {"targets": targets}, prod(trainer.values())
        with pytest.raises(ModelError) as found:
            asyncio.run(ranks.start(model=model, num_ranks=num_ranks, trainer={"lora": lora} | trainer))
        return str(found.value)

    assert error(tiny_moe, r"experts\.[12]\.down_proj") == (
        "trainer.lora.targets: must match all experts of a layer or none, but do not match "
        "model.layers.0.mlp.experts.0.down_proj, model.layers.0.mlp.experts.3.down_proj"
    )
    assert error(tiny_gpt_oss, "experts").endswith(
        "not routed experts of this family with this trainer; narrow the pattern"
    )
    assert error(tiny_moe, *EXPERTS, tensor_parallel=2) == (
        "trainer rank 0: trainer.expert_tensor_parallel: must be 1 for adapters of routed experts, got 2; set it to 1, "
        "and split experts with expert_parallel"
    )
    apart = (r"layers\.0\..*q_proj", r"layers\.1\..*experts.*proj")
    assert "some pipeline ranks have no layer with an adapter" in error(
        tiny_moe, *apart, pipeline_parallel=2, expert_parallel=2
    )


def test_the_base_may_be_bfloat16(ranks, tiny_qwen, tmp_path):
    async def run():
        trainer = {"dtype": "bfloat16", "lr": 1e-4, "lora": LORA}
        return await outcome(ranks, tmp_path / "out", trainer=trainer)

    found, adapter = asyncio.run(run()), adapter_of(tmp_path / "out")
    assert found.reports[0]["train/skipped"] == 0
    base = load_file(tiny_qwen / "model.safetensors")
    for layer in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
        a, b = (adapter[f"base_model.model.model.layers.2.{layer}.lora_{m}.weight"] for m in "AB")
        assert a.dtype == b.dtype and str(a.dtype) == "torch.float32" and prod(b.shape) and b.any()
        name = f"model.layers.2.{layer}.weight"
        assert (found.weights[name] - (base[name].bfloat16().float() + 2.0 * b @ a)).abs().max() < 1e-6
