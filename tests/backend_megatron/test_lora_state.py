"""The checkpoint of an adapter contains only A and B, and resumes exactly, also in another layout."""

import asyncio
import json

import pytest
from megatron_cases import fit, largest_difference, make_batch, weights_of
from megatron_layouts import LAYOUTS, MOE_LAYOUTS, MORE_LAYOUTS, MORE_MOE_LAYOUTS
from plasmid.errors import CheckpointError, ModelError
from plasmid_megatron.conversion import TorchDistFolder
from plasmid_models.testing import make_tiny_model
from torch.distributed.checkpoint.filesystem import FileSystemReader

LORA = {"rank": 3, "alpha": 6.0}
ADAM = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.01, "optimizer": {"adam_eps": 1e-3}}
SGD = {"lr": 0.1, "distributed_optimizer": False, "optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9}}
ONE, DP2, TP2, PP2 = (LAYOUTS[name] for name in ("one", "dp2", "tp2", "pp2"))
EP2 = MOE_LAYOUTS["ep2"]
EXPERTS, BOTH = LORA | {"targets": ["experts.*proj"]}, LORA | {"targets": ["proj"]}
BATCHES = [make_batch(seed=i, index=i) for i in range(3)]
KL = {"kl_coef": 0.1}


def continues(ranks, before, after, folder, *, trainer, lora=LORA, **options):
    """Save after two batches and train on one more; load in another trainer and train on the same one."""

    async def start(layout):
        settings = trainer | layout[1] | {"lora": lora}
        return await ranks.start(num_ranks=layout[0], trainer=settings, algorithm=KL, **options)

    async def uninterrupted():
        handle, config = await start(before)
        await fit(handle, config, *BATCHES[:2])
        await handle.save(folder / "saved")
        return await fit(handle, config, *BATCHES[2:]), await weights_of(handle, folder / "a")

    async def resumed():
        handle, config = await start(after)
        await fit(handle, config, make_batch(seed=99, index=99))
        await handle.load(folder / "saved")
        assert handle.step == 2
        return await fit(handle, config, *BATCHES[2:]), await weights_of(handle, folder / "b")

    expected, weights = asyncio.run(uninterrupted())
    reports, again = asyncio.run(resumed())
    if before == after:
        assert reports == expected and largest_difference(again, weights) == 0
    assert [r["train/lr"] for r in reports] == [r["train/lr"] for r in expected]
    assert [r["train/grad_norm"] for r in reports] == pytest.approx([r["train/grad_norm"] for r in expected], rel=1e-5)
    assert largest_difference(again, weights) < 2e-6


@pytest.mark.long
@pytest.mark.parametrize("layout", [TP2, ONE, DP2, PP2], ids=["tp2", "one", "dp2", "pp2"])
def test_a_resumed_adapter_continues_bit_by_bit(layout, ranks, tiny_qwen, tmp_path):
    continues(ranks, layout, layout, tmp_path, trainer=ADAM)
    saved = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    weights = {name for name in saved if "decoder." in name}
    assert len({name for name in weights if name.startswith("adapter.")}) == 4 * 4 * 2
    assert all(name.endswith((".lora_A", ".lora_B")) for name in weights)
    assert not any("embedding" in name or "output_layer" in name for name in saved)
    assert json.loads((tmp_path / "saved" / "base.json").read_text())["path"] == str(tiny_qwen)


@pytest.mark.parametrize("is_mixture", [False, pytest.param(True, marks=pytest.mark.long)])
def test_one_without_megatrons_distributed_optimizer_continues_bit_by_bit(is_mixture, ranks, tiny_moe, tmp_path):
    options = {"lora": EXPERTS, "model": tiny_moe} if is_mixture else {}
    layout = EP2 if is_mixture else ONE
    continues(ranks, layout, layout, tmp_path, trainer=SGD, **options)


@pytest.mark.parametrize(
    ("before", "after"),
    [(TP2, PP2), *(pytest.param(*p, marks=pytest.mark.long) for p in ((ONE, TP2), (PP2, ONE), (DP2, TP2)))],
    ids=["tp2-pp2", "one-tp2", "pp2-one", "dp2-tp2"],
)
def test_an_adapter_continues_in_another_layout(before, after, ranks, tmp_path):
    continues(ranks, before, after, tmp_path, trainer=ADAM)


@pytest.mark.long
@pytest.mark.parametrize("targets", [("q_proj", "up_proj"), (r"layers\.[13]\.",)], ids=["parts", "odd layers"])
def test_targets_need_not_be_in_every_layer(targets, ranks, tmp_path):
    lora = LORA | {"targets": targets}
    continues(ranks, PP2, PP2, tmp_path, trainer=ADAM, lora=lora)
    continues(ranks, MORE_LAYOUTS["tp2 pp2"], ONE, tmp_path, trainer=ADAM, lora=lora)


@pytest.mark.long
@pytest.mark.parametrize("before", [EP2, ONE], ids=["ep2", "one"])
def test_an_adapter_beside_experts_continues(before, ranks, tiny_moe, tmp_path):
    continues(ranks, before, EP2, tmp_path, trainer=ADAM, model=tiny_moe)


EXPERT_CASES = [(EXPERTS, EP2, ONE)]
LONG_EXPERT_CASES = [
    (EXPERTS, EP2, EP2),
    (BOTH, EP2, EP2),
    (BOTH, ONE, EP2),
    (EXPERTS, ONE, ONE),
    (BOTH, EP2, ONE),
    (EXPERTS, MORE_MOE_LAYOUTS["ep2 tp2"], MORE_MOE_LAYOUTS["ep2 pp2"]),
    (BOTH, MORE_MOE_LAYOUTS["ep2 pp2"], MORE_MOE_LAYOUTS["ep2 tp2"]),
]


@pytest.mark.parametrize(
    ("lora", "before", "after"),
    [*EXPERT_CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_EXPERT_CASES)],
)
def test_an_adapter_of_experts_continues(lora, before, after, ranks, tiny_moe, tmp_path):
    continues(ranks, before, after, tmp_path, trainer=ADAM, lora=lora, model=tiny_moe)


def test_a_checkpoint_that_does_not_fit_is_named(ranks, tiny_qwen, tmp_path):
    async def save(path, trainer):
        handle, _ = await ranks.start(trainer=trainer)
        await handle.save(path)

    def load_error(path, **options):
        async def run():
            handle, _ = await ranks.start(**options)
            await handle.load(path)

        with pytest.raises(CheckpointError) as error:
            asyncio.run(run())
        assert "\n" not in str(error.value)
        return str(error.value)

    lora, whole, trainer = tmp_path / "lora", tmp_path / "whole", {"lora": LORA}
    asyncio.run(save(lora, trainer))
    asyncio.run(save(whole, {}))
    assert load_error(lora) == f"{lora}: the checkpoint has an adapter; set trainer.lora to resume from it"
    assert load_error(whole, trainer=trainer) == (
        f"{whole}: the checkpoint has full weights; remove trainer.lora to resume from it"
    )
    other = make_tiny_model(tmp_path / "other", family="qwen3", num_layers=4, seed=7)
    assert load_error(lora, model=other, trainer=trainer) == (
        f"{lora}: the adapter was trained on another base model ({str(tiny_qwen)!r}); the weights in "
        f"model.path = {str(other)!r} differ"
    )
    assert load_error(lora, trainer={"lora": LORA | {"rank": 4}}).startswith(f"{lora}: cannot read the trainer state: ")
    with pytest.raises(ModelError) as error:
        next(TorchDistFolder(model=str(tiny_qwen)).read(lora))
    assert str(error.value) == (
        f"{lora}: contains an adapter instead of model weights; rl export merges the adapter of a run"
    )
    (lora / "base.json").unlink()
    assert load_error(lora, trainer=trainer).startswith(f"{lora}/base.json: cannot be read: ")
