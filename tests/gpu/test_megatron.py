"""Megatron on one, two and four GPUs agrees with FSDP on one, up to bfloat16 rounding, for a random Qwen3-0.6B.

Names begin with the number of GPUs that a layout needs: `pytest -m gpu tests/gpu/test_megatron.py -k "1gpu or 2gpus"`.
"""

import asyncio
import sys
from pathlib import Path

import pytest

for name in ("backend_fsdp", "backend_megatron"):
    FOLDER = str(Path(__file__).parents[1] / name)
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)

from fsdp_cases import fit  # noqa: E402
from megatron_cases import ADAM, FSDP_ADAM, Ranks, assert_alike, make_batch, make_tiny_moe, outcome  # noqa: E402
from overlap_cases import OVERLAP, assert_reduced_during_backward, plain_and_overlapped  # noqa: E402
from plasmid.testing.contracts import check_trainer  # noqa: E402
from plasmid.types import Role  # noqa: E402
from plasmid_models.testing import make_tiny_model  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
LAYOUTS = {
    "1gpu": (1, {}),
    "2gpus-tp2": (2, {"tensor_parallel": 2}),
    "2gpus-pp2": (2, {"pipeline_parallel": 2}),
    "2gpus-cp2": (2, {"context_parallel": 2}),
    "2gpus-dp2": (2, {}),
    "4gpus-dp2-tp2": (4, {"tensor_parallel": 2}),
}
MOE_LAYOUTS = {
    "2gpus-ep2": (2, {"expert_parallel": 2}),
    "2gpus-ep2-tp2": (2, {"expert_parallel": 2, "tensor_parallel": 2, "expert_tensor_parallel": 1}),
    "4gpus-ep2-etp2": (4, {"expert_parallel": 2, "tensor_parallel": 2}),
}
SIZE = {"hidden_size": 1024, "num_layers": 28, "intermediate_size": 3072, "head_dim": 128, "initializer_range": 0.02}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tied": True}
BF16 = {"dtype": "bfloat16", "lr": 1e-4}


@pytest.fixture(scope="module")
def processes():
    from fsdp_processes import Processes

    processes = Processes.on_gpus(4)
    yield processes
    processes.shutdown()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3-0.6b", family="qwen3", **SIZE, **HEADS)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small"
    return make_tiny_model(path, family="qwen3", hidden_size=128, num_layers=4)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return make_tiny_moe(tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture(scope="module")
def fsdp_curve(processes, qwen, tmp_path_factory):
    ranks = ranks_for(processes, qwen, tmp_path_factory.mktemp("fsdp"))
    return asyncio.run(curve(ranks, (1, {}), kind="fsdp", **BF16))


@pytest.fixture(scope="module")
def fsdp_outcome(processes, small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    ranks = ranks_for(processes, small, folder)

    async def run():
        found = await outcome(ranks, folder / "out", kind="fsdp", trainer=FSDP_ADAM)
        await ranks.close()
        return found

    return asyncio.run(run())


@pytest.fixture(scope="module")
def experts_curve(processes, moe, tmp_path_factory):
    return asyncio.run(curve(ranks_for(processes, moe, tmp_path_factory.mktemp("one")), (1, {})))


def ranks_for(processes, model, folder):
    return Ranks(processes, model, folder, gpus=True)


async def curve(ranks, layout, *, kind="megatron", steps=10, **trainer):
    """Return losses and gradient norms of ten batches."""
    try:
        settings = (FSDP_ADAM if kind == "fsdp" else ADAM) | trainer | layout[1]
        handle, config = await ranks.start(num_ranks=layout[0], kind=kind, trainer=settings)
        batches = [make_batch(seed=i, index=i, longest=128) for i in range(steps)]
        reports = await fit(handle, config, *batches)
        return [(r["train/loss"], r["train/grad_norm"]) for r in reports]
    finally:
        await ranks.close()


def show(layout, ours, theirs):
    """Print the differences of both curves, and the losses and norms themselves (shown with ``-s``)."""
    pairs = list(zip(ours, theirs, strict=True))
    apart = [max(abs(one[i] - other[i]) for one, other in pairs) for i in range(2)]
    print(f"{layout}: losses differ by at most {apart[0]:.2g}, norms by {apart[1]:.2g}")
    for name, numbers in (("ours", ours), ("expected", theirs)):
        print(f"  {name}: " + "  ".join(f"{loss:.4f}/{norm:.3f}" for loss, norm in numbers))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_on_gpus_gives_what_fsdp_gives(layout, processes, small, fsdp_outcome, tmp_path):
    ranks = ranks_for(processes, small, tmp_path)

    async def run():
        num_ranks, trainer = LAYOUTS[layout]
        ours = await outcome(ranks, tmp_path / "out", num_ranks=num_ranks, trainer=ADAM | trainer)
        await ranks.close()
        assert_alike(ours, fsdp_outcome, 1e-4)  # tf32 is off; sums have a different order

    asyncio.run(run())


@pytest.mark.parametrize("layout", ["2gpus-dp2", "4gpus-dp2-tp2"])
def test_overlap_changes_nothing_on_gpus(layout, processes, small, tmp_path):
    ranks = ranks_for(processes, small, tmp_path)

    async def run():
        found = await plain_and_overlapped(ranks, tmp_path, LAYOUTS[layout], bucket=100_000)
        await ranks.close()
        return found

    plain, overlapped, buckets = asyncio.run(run())
    assert_alike(overlapped, plain, 1e-5)  # in fp32; backward passes may sum in another order
    assert_reduced_during_backward(buckets)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_in_bf16_follow_the_curve_of_fsdp(layout, processes, qwen, fsdp_curve, tmp_path):
    ours = asyncio.run(curve(ranks_for(processes, qwen, tmp_path), LAYOUTS[layout], **BF16))
    show(layout, ours, fsdp_curve)
    for (loss, norm), (expected_loss, expected_norm) in zip(ours, fsdp_curve, strict=True):
        assert loss == pytest.approx(expected_loss, abs=0.03)
        assert norm == pytest.approx(expected_norm, rel=0.1)


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_ten_steps_with_experts_follow_the_curve_of_one_gpu(layout, processes, moe, experts_curve, tmp_path):
    ours = asyncio.run(curve(ranks_for(processes, moe, tmp_path), MOE_LAYOUTS[layout]))
    show(layout, ours, experts_curve)
    for (loss, norm), (expected_loss, expected_norm) in zip(ours, experts_curve, strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-3)
        assert norm == pytest.approx(expected_norm, rel=1e-2)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        *(
            (layout, {"distributed_optimizer": on})
            for layout in ("1gpu", "2gpus-tp2", "2gpus-pp2")
            for on in (True, False)
        ),
        ("2gpus-dp2", OVERLAP),
    ],
)
def test_the_trainer_satisfies_its_contract_on_gpus(layout, settings, processes, small, tmp_path):
    """Including offloading; sequences are short, so that the packed kernel's backward pass is reproducible."""
    ranks = ranks_for(processes, small, tmp_path)

    async def run():
        trainer = LAYOUTS[layout][1] | settings
        handle, _ = await ranks.start(num_ranks=LAYOUTS[layout][0], trainer=trainer)
        await check_trainer(handle, folder=tmp_path, roles=(Role.POLICY,))
        await ranks.close()

    asyncio.run(run())
