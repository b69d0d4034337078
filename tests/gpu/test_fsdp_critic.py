"""Critics and models of other architectures compute the same on a GPU as on the CPU."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch

FOLDER = str(Path(__file__).parents[1] / "backend_fsdp")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)

from critic_cases import CRITIC, PPO, SGD, make_critic, trained  # noqa: E402
from fsdp_cases import OneRank, fit, largest_difference, make_batch  # noqa: E402
from plasmid.types import Role  # noqa: E402
from plasmid_models.testing import make_tiny_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"activation_checkpointing": True}], ids=str)
def test_a_critic_on_a_gpu_equals_one_on_the_cpu(tiny_model, tmp_path, options):
    critic = make_critic(tmp_path / "critic", tiny_model)
    batches = [make_batch(), make_batch(seed=1, steps=2, index=1)]

    async def run(name, *, gpus, **trainer):
        ranks = OneRank(tiny_model, tmp_path, gpus=gpus)
        try:
            return await trained(ranks, tmp_path / name, batches, critic=critic, trainer=trainer)
        finally:
            await ranks.close()

    cpu, gpu = asyncio.run(run("cpu", gpus=False)), asyncio.run(run("gpu", gpus=True, **options))
    for ours, theirs in zip(gpu[0], cpu[0], strict=True):
        for name in ("value_loss", "explained_variance", "critic_grad_norm", "grad_norm"):
            assert ours[f"train/{name}"] == pytest.approx(theirs[f"train/{name}"], rel=1e-3, abs=1e-4), name
    assert largest_difference(gpu[1], cpu[1]) < 1e-4
    assert largest_difference(gpu[2], cpu[2]) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_takes_critic_and_teacher_along(tiny_model, tmp_path, dtype):
    other, batch = make_tiny_model(tmp_path / "other", hidden_size=128, num_layers=4), make_batch()
    model_bytes = sum(tensor.nbytes for tensor in load_file(tiny_model / "model.safetensors").values())

    async def run(offloads):
        ranks = OneRank(tiny_model, tmp_path, gpus=True)
        try:
            trainer = SGD | {"critic": CRITIC | {"head_std": 0.1}, "dtype": dtype}
            algorithm = PPO | {"reward_kl_coef": 0.1}
            handle, config = await ranks.start(trainer=trainer, algorithm=algorithm, reference=other)
            reports = await fit(handle, config, batch)
            if offloads:
                held = torch.cuda.memory_allocated()
                await handle.offload()
                assert held - torch.cuda.memory_allocated() > 1.5 * model_bytes  # the policy's and the critic's weights
                await handle.onload()
            await handle.score(make_batch(seed=5, index=7), (Role.REFERENCE,))
            return reports + await fit(handle, config, make_batch(seed=1, index=1))
        finally:
            await ranks.close()

    plain, moved = asyncio.run(run(False)), asyncio.run(run(True))
    for ours, theirs in zip(moved, plain, strict=True):
        for name in ("value_loss", "critic_grad_norm", "grad_norm"):
            assert ours[f"train/{name}"] == pytest.approx(theirs[f"train/{name}"], rel=1e-5), name
