"""gpt-oss: sinks, windows and experts with biases learn the same as with transformers, in every layout."""

import asyncio
import json

import pytest
import torch
from fsdp_cases import weights_of
from megatron_cases import ADAM, assert_alike, fit, largest_difference, make_batch, outcome, plain_outcome
from megatron_families import make_family
from megatron_resume import assert_continues, resumed, saved
from plasmid.errors import CheckpointError, ConfigError, ModelError
from plasmid.protocols import SyncPlan
from plasmid_megatron.settings import Megatron
from plasmid_megatron.shapes import check_split
from plasmid_models.source import Source
from routing_cases import with_experts
from share_cases import FolderWire, check_shares

from tests.lazy_module import LazyModule
from tests.mxfp4_folders import make_mxfp4_folder, make_plain_folder

bridge = LazyModule("plasmid_megatron.weights.bridge")  # imports Megatron

TP2 = {"tensor_parallel": 2, "expert_tensor_parallel": 1}
EP2 = {"expert_parallel": 2}
LAYOUTS = {
    "ep2 tp2": (2, TP2 | EP2),
    "tp2": (2, TP2),
    "pp2": (2, {"pipeline_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "ep2": (2, EP2),
    "ep2, optimizer on every rank": (2, EP2 | {"distributed_optimizer": False}),
    "tp2, optimizer on every rank": (2, TP2 | {"distributed_optimizer": False}),
    "ep2 pp2": (4, EP2 | {"pipeline_parallel": 2}),
    "ep2 tp2 dp2": (4, TP2 | EP2),
    "tp2 cp2": (4, TP2 | {"context_parallel": 2}),
    "recomputed": (1, {"transformer": {"recompute_granularity": "selective"}}),
    "small microbatches": (1, {"microbatch_tokens": 30}),
}
FAST = ("ep2 tp2",)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("gpt-oss") / "model", "gpt-oss")


@pytest.fixture(scope="module")
def unclamped(tmp_path_factory):
    """Without clamping. For several steps in different layouts, which round differently: at a clamp, the gradient
    jumps."""
    return make_family(tmp_path_factory.mktemp("gpt-oss") / "unclamped", "gpt-oss", swiglu_limit=7.0)


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    return plain_outcome(model, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("layout", ["ep2 tp2", pytest.param("pp2", marks=pytest.mark.long)])
def test_training_mxfp4_weights_matches_plain_weights(layout, ranks, model, tmp_path):
    packed = make_mxfp4_folder(model, tmp_path / "mxfp4", dtype=torch.float32)
    expected = plain_outcome(make_plain_folder(packed, tmp_path / "decoded"), tmp_path / "plain")
    num_ranks, trainer = LAYOUTS[layout]
    found = asyncio.run(outcome(ranks, tmp_path / "out", model=packed, num_ranks=num_ranks, trainer=ADAM | trainer))
    assert_alike(found, expected, 1e-5)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize(
    "layout", [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_training_matches_transformers(layout, ranks, model, expected, tmp_path):
    num_ranks, trainer = LAYOUTS[layout]
    found = asyncio.run(outcome(ranks, tmp_path / "out", model=model, num_ranks=num_ranks, trainer=ADAM | trainer))
    assert_alike(found, expected, 1e-5)
    assert all(not found.weights[name].equal(tensor) for name, tensor in _weights(model).items() if "embed" not in name)


def _weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


COUNTS = {"all": [5, 9, 2, 4], "some without tokens": [0, 13, 0, 3], "none with tokens": [0, 0, 0, 0]}


def _compare(counts, model):
    """Run in the process of a rank: return the largest differences of outputs and gradients from transformers."""
    from fsdp_processes import _held
    from transformers import AutoModelForCausalLM

    (own,) = _held["object"]._learner.policy.model.bare
    ours = own.decoder.layers[0].mlp.experts
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")
    theirs = lm.model.layers[0].mlp.experts
    draw = torch.Generator().manual_seed(0)
    tokens, probs = torch.randn(sum(counts), 64, generator=draw), torch.rand(sum(counts), generator=draw)
    chosen = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    found = []
    for experts, run in (
        (ours, lambda x, p: ours(x, torch.tensor(counts), p)[0]),
        (theirs, lambda x, p: theirs(x, chosen[:, None], p[:, None])),
    ):
        inputs = [tokens.clone().requires_grad_(), probs.clone().requires_grad_()]
        out = run(*inputs)
        wanted = [*inputs, *dict(sorted(experts.named_parameters())).values()]
        loss = (out * out).sum() + 0 * inputs[0].sum()  # in transformers, experts without tokens have no gradient
        found.append([out, *torch.autograd.grad(loss, wanted, materialize_grads=True, allow_unused=True)])
    return ours._is_grouped, max(float((a - b).abs().amax()) if a.numel() else 0.0 for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("counts", COUNTS)
def test_outputs_and_gradients_of_experts_are_those_of_transformers(counts, ranks, model):
    async def run():
        await ranks.start(model=model)
        return await ranks.processes.run(0, _compare, COUNTS[counts], model)

    is_grouped, difference = asyncio.run(run())
    assert is_grouped and difference < 1e-5


@pytest.mark.long
def test_sizes_that_grouped_products_refuse_are_computed_one_by_one(ranks, tmp_path):
    model = make_family(tmp_path / "model", "gpt-oss", intermediate_size=10)

    async def run():
        found = await outcome(ranks, tmp_path / "out", model=model, trainer=ADAM)
        return found, await ranks.processes.run(0, _compare, COUNTS["some without tokens"], model)

    found, (is_grouped, _) = asyncio.run(run())
    assert not is_grouped
    assert_alike(found, plain_outcome(model, tmp_path / "plain"), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [(2, TP2 | EP2), (2, EP2 | {"distributed_optimizer": False})],
    ids=["ep2 tp2", "ep2, optimizer on every rank"],
)
def test_a_resumed_trainer_continues_bit_by_bit(layout, ranks, model, tmp_path):
    reports, weights = asyncio.run(saved(ranks, layout, tmp_path, model=model))
    again, same = asyncio.run(resumed(ranks, layout, tmp_path, model=model))
    assert again == reports
    assert largest_difference(weights, same) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, {}), (2, TP2 | EP2)),
        pytest.param((1, {}), (2, EP2), marks=pytest.mark.long),
        pytest.param((2, TP2 | EP2), (1, {}), marks=pytest.mark.long),
        pytest.param((2, TP2), (2, EP2), marks=pytest.mark.long),
        pytest.param((2, TP2), (2, {"pipeline_parallel": 2}), marks=pytest.mark.long),
        pytest.param((2, EP2), (4, EP2 | {"pipeline_parallel": 2}), marks=pytest.mark.long),
    ],
    ids=["one-ep2tp2", "one-ep2", "ep2tp2-one", "tp2-ep2", "tp2-pp2", "ep2-ep2pp2"],
)
def test_a_checkpoint_continues_in_another_layout(before, after, ranks, unclamped, tmp_path):
    assert_continues(ranks, before, after, tmp_path, model=unclamped)


@pytest.mark.long
def test_without_the_distributed_optimizer_another_split_of_experts_is_refused(ranks, model, tmp_path):
    one, split = ({"distributed_optimizer": False} | trainer for trainer in ({}, EP2))
    with pytest.raises(CheckpointError, match=r"restore the old trainer\.expert_parallel"):
        assert_continues(ranks, (1, one), (2, split), tmp_path, model=model)


@pytest.mark.parametrize(
    ("num_ranks", "trainer"),
    [(2, TP2 | EP2), pytest.param(4, EP2 | {"pipeline_parallel": 2}, marks=pytest.mark.long)],
    ids=["ep2 tp2", "ep2 pp2"],
)
def test_every_rank_sends_a_share_of_the_weights(num_ranks, trainer, ranks, model, tmp_path):
    plan = SyncPlan(wire=FolderWire(str(tmp_path), "divided"), dtype="bfloat16", bucket_bytes=8_000)

    async def run():
        started, config = await ranks.start(num_ranks=num_ranks, model=model, trainer=ADAM | trainer)
        await fit(started, config, make_batch())
        return await started.send(plan, 3), await weights_of(started, tmp_path / "out")

    sent, weights = asyncio.run(run())
    check_shares(sent, tmp_path, 3, {n: t.to(torch.bfloat16) for n, t in weights.items()}, num_ranks=num_ranks)


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "trainer"), [(1, {}), (2, TP2 | EP2)], ids=["one", "ep2 tp2"])
def test_given_experts_are_replayed(num_ranks, trainer, ranks, model, tmp_path):
    batch = with_experts(make_batch(shared=3), shared=3)
    trainer = ADAM | {"routing_replay": True} | trainer
    found = asyncio.run(
        outcome(ranks, tmp_path / "out", batch=batch, num_ranks=num_ranks, trainer=trainer, model=model)
    )
    assert_alike(found, plain_outcome(model, tmp_path / "plain", batch=batch), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "trainer"), [(1, {}), (2, TP2 | EP2)], ids=["one", "ep2 tp2"])
def test_shared_prefixes_give_the_same(num_ranks, trainer, ranks, model, tmp_path):
    options = {"batch": make_batch(shared=5, steps=2), "algorithm": {"kl_coef": 0.1}, "num_ranks": num_ranks}
    shared, plain = (
        asyncio.run(
            outcome(ranks, tmp_path / str(on), model=model, trainer=ADAM | {"share_prefixes": on} | trainer, **options)
        )
        for on in (True, False)
    )
    assert_alike(shared, plain, 1e-5)


@pytest.mark.parametrize(
    ("settings", "trainer", "message"),
    [
        ({"attention_bias": False}, {}, r"has attention_bias = false, which trainer 'megatron' cannot"),
        ({"hidden_act": "gelu"}, {}, r"has hidden_act = 'gelu', which trainer 'megatron' cannot"),
        ({}, {"transformer_engine": True, "dtype": "bfloat16"}, r"would compute model type 'gpt_oss' differently"),
    ],
)
def test_settings_that_would_change_the_outputs_are_refused(settings, trainer, message, tmp_path):
    model = make_family(tmp_path / "model", "gpt-oss", **settings)
    with pytest.raises(ModelError, match=message):
        bridge.read_architecture(Source(where="model", path=model, trust_remote_code=False), Megatron(**trainer))


def test_parts_of_experts_with_biases_are_refused():
    described = {"model_type": "gpt_oss", "num_local_experts": 32}
    check_split(Megatron(**TP2), described)
    with pytest.raises(ConfigError) as error:
        check_split(Megatron(tensor_parallel=2), described)
    assert str(error.value) == (
        "trainer.expert_tensor_parallel: must be 1 for model type 'gpt_oss', whose experts have biases, got 2; set it "
        "to 1, and split experts with expert_parallel"
    )
