"""Compiled layers, the fused loss and the fused optimizer take the same steps as Megatron's own computation."""

import asyncio

import pytest
from megatron_cases import ADAM, assert_alike, fit, make_batch, outcome
from megatron_patches import (
    capture_graphs,
    compile_graphs,
    compile_nothing,
    count_fused,
    fuse_losses,
    optimizer_settings,
    unfuse_optimizer,
)

RECOMPUTED = {
    "kept": {},
    "attention": {"transformer": {"recompute_granularity": "selective"}},
    "modules": {
        "transformer": {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "mlp"],
        }
    },
    "layers": {
        "transformer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    },
}
LONG = ("kept", "attention", "layers")
SCORED = {"kl_coef": 0.1}
"""An algorithm that requires scores of the reference."""
ONE_OF_EACH = ((1, {}), (2, {"context_parallel": 2}), (2, {"pipeline_parallel": 2}))
SPLIT = {
    "tp2": ({"tensor_parallel": 2}, False),
    "tp2 with whole sequences": ({"tensor_parallel": 2, "sequence_parallel": False}, False),
    "cp2": ({"context_parallel": 2}, True),
}


@pytest.fixture(scope="session")
def tiny_glm(tmp_path_factory):
    """A random GLM-4: output norms, and half of each head rotated in adjacent pairs."""
    from plasmid_models.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-glm4", family="glm4", num_layers=2)


@pytest.fixture
def tiny_qwen(shallow_qwen):
    """Two layers instead of four, because no test here depends on several layers in a pipeline rank."""
    return shallow_qwen


async def on_all(ranks, count, function, *args):
    return [await ranks.processes.run(place, function, *args) for place in range(count)]


async def plain_and_compiled(ranks, folder, *, whole=True, num_ranks=1, trainer=None, **options):
    """Return the results of scoring and training on a batch, with and without captured layers."""
    options = {"algorithm": SCORED} | options
    await on_all(ranks, num_ranks, capture_graphs, whole)
    try:
        found = [
            await outcome(
                ranks, folder / name, num_ranks=num_ranks, trainer=ADAM | {"compile": on} | (trainer or {}), **options
            )
            for name, on in (("plain", False), ("compiled", True))
        ]
    finally:
        await on_all(ranks, num_ranks, compile_graphs)
    assert not any("train/graphs" in report for report in found[0].reports)
    return found


@pytest.mark.parametrize("recomputed", ["modules", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_layers_are_captured_whole_and_compute_the_same(recomputed, ranks, tmp_path):
    trainer = RECOMPUTED[recomputed]
    plain, compiled = asyncio.run(plain_and_compiled(ranks, tmp_path, trainer=trainer))
    assert_alike(compiled, plain, 1e-6)
    assert compiled.reports[-1]["train/graphs"] == 2  # of the policy and of the frozen reference


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny_glm", "tiny_tied"])
def test_layers_of_other_families_are_captured_whole(model, ranks, tmp_path, request):
    model = request.getfixturevalue(model)
    plain, compiled = asyncio.run(plain_and_compiled(ranks, tmp_path, model=model))
    assert_alike(compiled, plain, 1e-6)


@pytest.mark.long
def test_samples_of_equal_length_use_a_separate_compiled_graph(ranks, tmp_path):
    plain, compiled = asyncio.run(plain_and_compiled(ranks, tmp_path, batch=make_batch(longest=6)))
    assert_alike(compiled, plain, 1e-6)
    assert compiled.reports[-1]["train/graphs"] == 2


def test_replacements_for_compiled_communicating_layers_compute_the_same(ranks, tmp_path):
    """Layers are not even captured: on two ranks, TorchDynamo needs minutes of CPU time."""

    async def run():
        await on_all(ranks, 2, compile_nothing)
        try:
            layout = {"tensor_parallel": 2, "transformer": {"recompute_granularity": "selective"}}
            return [
                await outcome(ranks, tmp_path / str(on), num_ranks=2, trainer=ADAM | {"compile": on} | layout)
                for on in (False, True)
            ]
        finally:
            await on_all(ranks, 2, compile_graphs)

    plain, replaced = asyncio.run(run())
    assert_alike(replaced, plain, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("split", SPLIT)
def test_layers_that_communicate_compute_the_same(split, ranks, tmp_path):
    trainer, whole = SPLIT[split]
    options = {"whole": whole, "num_ranks": 2, "trainer": trainer}
    plain, compiled = asyncio.run(plain_and_compiled(ranks, tmp_path, **options))
    assert_alike(compiled, plain, 1e-6)
    assert (compiled.reports[-1]["train/graphs"] == 2) is whole


@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_layers_compute_the_same_in_any_number_of_batches(ranks):
    async def run(on):
        handle, config = await ranks.start(trainer=ADAM | {"compile": on}, algorithm=SCORED)
        reports = []
        for index in range(3):  # batches of other lengths, scored and trained
            batch = make_batch(seed=index, index=index, longest=20 + 10 * index)
            reports += await fit(handle, config, batch)
        return reports

    plain, compiled = asyncio.run(run(False)), asyncio.run(run(True))
    for mine, yours in zip(compiled, plain, strict=True):
        assert mine["train/loss"] == pytest.approx(yours["train/loss"], abs=1e-5)
        assert mine["train/grad_norm"] == pytest.approx(yours["train/grad_norm"], rel=1e-5)
    assert compiled[-1]["train/graphs"] == 2


@pytest.mark.parametrize(
    ("num_ranks", "trainer"),
    [
        (2, {"tensor_parallel": 2}),
        *(pytest.param(*layout, marks=pytest.mark.long) for layout in ONE_OF_EACH),
    ],
    ids=["tp2", "one", "cp2", "pp2"],
)
def test_the_loss_is_computed_with_the_logits_and_steps_are_those_of_the_plain_loss(
    num_ranks, trainer, ranks, tmp_path
):
    options = {
        "num_ranks": num_ranks,
        "trainer": ADAM | {"logprob_chunk": 16, "microbatch_tokens": 60} | trainer,
        "batch": make_batch(steps=2, num_groups=2, restricted=True, temperature=0.8),
        "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01},
    }

    async def run():
        found = []
        for on in (False, True):
            await on_all(ranks, num_ranks, fuse_losses, on)
            found.append(await outcome(ranks, tmp_path / str(on), **options))
            counts = await on_all(ranks, num_ranks, count_fused)
            assert (counts[-1] > 0) is on
        return found

    plain, fused = asyncio.run(run())
    assert_alike(fused, plain, 1e-6)


def test_the_optimizer_is_fused_also_after_loading(ranks, tmp_path):
    async def run():
        handle, config = await ranks.start(trainer=ADAM)
        await fit(handle, config, make_batch())
        before = await ranks.processes.run(0, optimizer_settings)
        await ranks.processes.run(0, unfuse_optimizer)
        await handle.save(tmp_path / "state")
        await handle.load(tmp_path / "state")
        return before, await ranks.processes.run(0, optimizer_settings)

    for groups, devices in asyncio.run(run()):
        assert set(groups) == {(True, False)}
        assert devices == {("cpu", "cpu")}
