"""Two GPUs that split the tokens of every microbatch compute the same as one, over NCCL. Needs two GPUs."""

import asyncio

import pytest
from fsdp_cases import OneRank, fit, make_batch
from fsdp_gpu import alike, trained
from plasmid_models.testing import make_tiny_model

pytestmark = pytest.mark.gpu
SPLIT = {"context_parallel": 2}


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"shard_ranks": 1}, {"cpu_offload": True}], ids=str)
def test_two_gpus_that_split_samples_equal_one(two_gpus, one_gpu, tmp_path, options):
    two = asyncio.run(trained(two_gpus, tmp_path / "two", **SPLIT, **options))
    alike(two, one_gpu, tolerance=1e-4)


@pytest.mark.parametrize("options", [{}, {"compile": True}], ids=str)
def test_bf16_stays_close(two_gpus, one_gpu, tmp_path, options):
    rough = asyncio.run(trained(two_gpus, tmp_path / "two", dtype="bfloat16", **SPLIT, **options))
    assert rough[0][0]["train/grad_norm"] == pytest.approx(one_gpu[0][0]["train/grad_norm"], rel=3e-2)


@pytest.mark.parametrize("options", [{}, {"compile": True}], ids=str)
def test_long_samples_need_less_memory_on_each_gpu(two_gpus, tmp_path, options):
    """With ragged samples of up to 8,000 tokens, packed in bf16."""
    model = make_tiny_model(tmp_path / "model", family="qwen3", hidden_size=512, num_layers=4)
    batch = make_batch(num_groups=1, longest=8000)

    async def run(ranks, **trainer):
        handle, config = await ranks.start(model=model, trainer={"dtype": "bfloat16"} | options | trainer)
        reports = await fit(handle, config, batch)
        metrics = await handle.metrics()
        await ranks.close()
        return reports[0]["train/grad_norm"], metrics["memory/trainer-0/gpu_peak_train_gb"]

    norm, whole = asyncio.run(run(OneRank(model, tmp_path, gpus=True)))
    split_norm, split = asyncio.run(run(two_gpus, **SPLIT))
    assert split_norm == pytest.approx(norm, rel=3e-2)
    assert split < 0.75 * whole
