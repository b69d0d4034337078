"""The FSDP trainer computes the same on GPUs as on the CPU."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch

FOLDER = str(Path(__file__).parents[1] / "backend_fsdp")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)

from fsdp_cases import OneRank, fit, largest_difference, make_batch, weights_of  # noqa: E402
from fsdp_gpu import ALGORITHM, SGD, alike, trained  # noqa: E402
from plasmid_models.sync import checksum  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"activation_checkpointing": True}], ids=str)
def test_one_gpu_equals_the_cpu(tiny_model, tmp_path, options):
    cpu = asyncio.run(trained(OneRank(tiny_model, tmp_path), tmp_path / "cpu"))
    gpu = asyncio.run(trained(OneRank(tiny_model, tmp_path, gpus=True), tmp_path / "gpu", **options))
    alike(gpu, cpu, tolerance=1e-4)
    assert gpu[2]["memory/trainer-0/gpu_peak_gb"] > 0
    assert {"gpu/trainer-0/utilization", "gpu/trainer-0/power_w"} <= gpu[2].keys()


def test_bf16_on_a_gpu_stays_close(tiny_model, tmp_path):
    exact = asyncio.run(trained(OneRank(tiny_model, tmp_path, gpus=True), tmp_path / "a"))
    rough = asyncio.run(trained(OneRank(tiny_model, tmp_path, gpus=True), tmp_path / "b", dtype="bfloat16"))
    assert rough[0][0]["train/grad_norm"] == pytest.approx(exact[0][0]["train/grad_norm"], rel=3e-2)


def test_offloading_frees_the_gpu_and_changes_nothing(tiny_model, tmp_path):
    async def run(offloads):
        ranks = OneRank(tiny_model, tmp_path, gpus=True)
        handle, config = await ranks.start(trainer={"lr": 1e-2}, algorithm=ALGORITHM)
        reports = await fit(handle, config, make_batch())
        held = torch.cuda.memory_allocated()
        if offloads:
            await handle.offload()
            freed = held - torch.cuda.memory_allocated()
            parameters = sum(tensor.nbytes for tensor in load_file(tiny_model / "model.safetensors").values())
            assert freed >= 3 * parameters  # the weights and both averages of AdamW
            await handle.onload()
        reports += await fit(handle, config, make_batch(seed=1, index=1))
        weights = await weights_of(handle, tmp_path / str(offloads))
        await ranks.close()
        return reports, weights

    plain, moved = asyncio.run(run(False)), asyncio.run(run(True))
    alike(moved, plain, tolerance=1e-6)


def test_a_checkpoint_continues_on_the_gpu_and_on_the_cpu(tiny_model, tmp_path):
    async def run(gpus, saves):
        ranks = OneRank(tiny_model, tmp_path, gpus=gpus)
        handle, config = await ranks.start(trainer=SGD)
        if saves:
            await fit(handle, config, make_batch())
            await handle.save(tmp_path / "saved")
        else:
            await handle.load(tmp_path / "saved")
        weights = await weights_of(handle, tmp_path / f"{gpus}{saves}")
        await ranks.close()
        return weights

    saved = asyncio.run(run(True, True))
    for gpus in (True, False):
        assert largest_difference(asyncio.run(run(gpus, False)), saved) == 0


def test_checksums_agree_with_the_cpu():
    for tensor in (torch.randn(3_000_001), torch.randn(70, 90).to(torch.bfloat16), torch.arange(40_000_000)):
        assert checksum(tensor.cuda()) == checksum(tensor)
