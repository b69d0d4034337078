"""Teachers and references, with the policy's architecture and with others, give the same scores as transformers."""

import asyncio
import json
from functools import partial

import pytest
import torch
from fsdp_cases import fit, largest_difference, make_batch, plain_logprobs, weights_of, whole_rows
from plasmid.errors import ModelError
from plasmid.types import Role
from plasmid_models.testing import make_tiny_model
from transformers import AutoModelForCausalLM

OTHERS = [
    {"seed": 7},
    {"seed": 7, "hidden_size": 32, "num_layers": 3},
    {"seed": 7, "family": "qwen3", "tied": True, "hidden_size": 96},
    {"seed": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    {"seed": 7, "vocab_size": 64},
]
IDS = ["same", "smaller", "qwen3", "rope", "padded"]
OPD = {"kind": "opd", "old_policy": "trainer"}
small_batch = partial(make_batch, num_groups=2)


def plain_difference(ours, theirs, batch):
    """Return the mean over the loss tokens of log p(ours) - log p(theirs), computed by transformers alone."""
    rows = whole_rows(batch)
    with torch.no_grad():
        first, second = (
            torch.cat(plain_logprobs(AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32), rows))
            for p in (ours, theirs)
        )
    return float((first - second)[torch.from_numpy(rows.loss_mask)].double().mean())


FAST = [("two_ranks", "smaller"), ("one_rank", "padded"), ("one_rank", "rope")]
TEACHERS = FAST + [
    pytest.param(kind, name, marks=pytest.mark.long)
    for kind in ("one_rank", "two_ranks")
    for name in IDS
    if (kind, name) not in FAST
]


@pytest.mark.parametrize(("kind", "name"), TEACHERS)
def test_a_teachers_logprobs_equal_transformers(kind, name, request, tiny_model, tmp_path):
    options = OTHERS[IDS.index(name)]
    teacher, batch = make_tiny_model(tmp_path / "teacher", **options), small_batch(temperature=0.7)

    async def run():
        trainer, config = await request.getfixturevalue(kind).start(
            algorithm=OPD, teacher={"path": str(teacher)}, rewards=[], trainer={"optimizer": "sgd", "lr": 0.1}
        )
        before = await weights_of(trainer, tmp_path / "before")
        await trainer.score(batch, (Role.TEACHER,))
        after = await weights_of(trainer, tmp_path / "after")
        first = await fit(trainer, config, batch)
        await weights_of(trainer, tmp_path / "moved")
        return before, after, first + await fit(trainer, config, small_batch(temperature=0.7, index=1))

    before, after, reports = asyncio.run(run())
    assert largest_difference(before, after) == 0
    expected = plain_difference(teacher, tiny_model, batch)
    assert reports[0]["train/advantage_mean"] == pytest.approx(expected, abs=1e-5)
    expected = plain_difference(teacher, tmp_path / "moved", batch)  # the teacher has not moved with the policy
    assert reports[1]["train/advantage_mean"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("two_ranks", OTHERS[2]),
        pytest.param("two_ranks", OTHERS[1], marks=pytest.mark.long),
        *(pytest.param("one_rank", other, marks=pytest.mark.long) for other in OTHERS[1:3]),
    ],
    ids=["2-qwen3", "2-smaller", "1-smaller", "1-qwen3"],
)
def test_a_reference_may_have_another_architecture(kind, options, request, tiny_model, tmp_path):
    other, batch = make_tiny_model(tmp_path / "other", **options), small_batch()

    async def run():
        trainer, config = await request.getfixturevalue(kind).start(
            algorithm={"monitor_kl": True, "kl_estimator": "k1"}, reference=other
        )
        return await fit(trainer, config, batch)

    expected = plain_difference(tiny_model, other, batch)
    assert asyncio.run(run())[0]["train/kl"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_the_policy_replaces_the_reference(kind, request, tiny_model, tmp_path):
    """Every two batches, the KL is computed against the current weights, also after a resume in between."""
    ranks, batches = request.getfixturevalue(kind), [small_batch(index=index) for index in range(5)]
    options = {"algorithm": {"monitor_kl": True, "kl_estimator": "k1"}, "reference": {"update_every": 2}}

    async def run():
        trainer, config = await ranks.start(**options)
        reports = await fit(trainer, config, *batches[:2])
        await weights_of(trainer, tmp_path / "two")
        reports += await fit(trainer, config, batches[2])
        await weights_of(trainer, tmp_path / "three")
        await trainer.save(tmp_path / "saved")
        return reports + await fit(trainer, config, *batches[3:])

    async def resume():
        trainer, config = await ranks.start(**options)
        await trainer.load(tmp_path / "saved")
        return await fit(trainer, config, *batches[3:])

    reports = asyncio.run(run())
    kls = [report["train/kl"] for report in reports]
    assert kls[0] == kls[2] == kls[4] == 0
    expected = plain_difference(tmp_path / "three", tmp_path / "two", batches[3])
    assert kls[3] == pytest.approx(expected, abs=1e-5) and abs(expected) > 1e-3
    assert asyncio.run(resume()) == reports[3:]


def test_a_moving_reference_starts_from_its_own_folder(one_rank, tiny_model, tmp_path):
    """It shares the policy's module, whose weights it replaces only while it scores."""
    other, batch = make_tiny_model(tmp_path / "other", seed=7), small_batch()

    async def run():
        trainer, config = await one_rank.start(
            algorithm={"monitor_kl": True, "kl_estimator": "k1"}, reference={"path": str(other), "update_every": 9}
        )
        before = await weights_of(trainer, tmp_path / "before")
        await trainer.score(batch, (Role.REFERENCE,))
        after = await weights_of(trainer, tmp_path / "after")
        return before, after, await fit(trainer, config, batch)

    before, after, reports = asyncio.run(run())
    assert largest_difference(before, after) == 0
    assert reports[0]["train/kl"] == pytest.approx(plain_difference(tiny_model, other, batch), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_separate_reference_computes_as_the_policy(dtype, one_rank, tmp_path, monkeypatch):
    """On a CPU it is a separate model, also with a tied head, and equals the policy bit by bit before training."""
    from plasmid_training.rank import frozen

    monkeypatch.setattr(frozen, "HostWeights", None)
    model = make_tiny_model(tmp_path / "tied", family="qwen3", tied=True)

    async def run():
        trainer, config = await one_rank.start(
            model=model, algorithm={"monitor_kl": True}, trainer={"dtype": dtype, "lr": 1e-3}
        )
        return await fit(trainer, config, small_batch(), small_batch(index=1))

    first, second = asyncio.run(run())
    assert first["train/kl"] == 0 and second["train/kl"] > 0


def test_a_reference_that_the_policy_cannot_replace_is_refused(one_rank, tmp_path):
    other = make_tiny_model(tmp_path / "other", hidden_size=32)
    with pytest.raises(ModelError, match=r"reference\.update_every: .*/other has a different architecture"):
        asyncio.run(one_rank.start(algorithm={"monitor_kl": True}, reference={"path": str(other), "update_every": 1}))


def test_reference_and_teacher_are_held_at_once(one_rank, tiny_model, tmp_path):
    teacher, batch = make_tiny_model(tmp_path / "teacher", hidden_size=32), small_batch()

    async def run():
        trainer, config = await one_rank.start(
            algorithm=OPD | {"monitor_kl": True}, teacher={"path": str(teacher)}, rewards=[]
        )
        return await fit(trainer, config, batch, small_batch(index=1))

    first, second = asyncio.run(run())
    assert first["train/kl"] == 0 and second["train/kl"] > 0
    assert first["train/advantage_mean"] == pytest.approx(plain_difference(teacher, tiny_model, batch), abs=1e-5)


def start_error(ranks, path, **options):
    with pytest.raises(ModelError) as error:
        asyncio.run(ranks.start(algorithm=OPD, teacher={"path": str(path)}, rewards=[], **options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_teachers_that_cannot_be_used(one_rank, tmp_path):
    assert start_error(one_rank, tmp_path / "none") == f"teacher.path: no such folder: {tmp_path / 'none'}"
    small = make_tiny_model(tmp_path / "small", vocab_size=50)
    assert start_error(one_rank, small) == (
        f"teacher.path: must have the policy's vocabulary of 57 tokens, but {small} has 50"
    )
    other = make_tiny_model(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert start_error(one_rank, other) == (
        f"teacher.path: {other} has a different vocabulary than the policy: '0' has id 7 in the policy, but id 8 there"
    )
    del vocabulary["0"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert start_error(one_rank, other).endswith("'0' has id 7 in the policy, but is missing there")
    (other / "tokenizer.json").write_text("{")
    assert start_error(one_rank, other).startswith(f"teacher.path: {other / 'tokenizer.json'} cannot be read: ")
    damaged = make_tiny_model(tmp_path / "damaged", num_layers=1)
    (damaged / "model.safetensors").write_bytes(b"garbage")
    assert start_error(one_rank, damaged).startswith(f"teacher.path: {damaged / 'model.safetensors'} cannot be read: ")
    capped = make_tiny_model(tmp_path / "capped", num_layers=1)
    config = json.loads((capped / "config.json").read_text())
    (capped / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    assert start_error(one_rank, capped) == (
        f"teacher.path: {capped} sets final_logit_softcapping = 30.0, which trainer 'fsdp' does not support"
    )


def test_a_teacher_without_a_tokenizer_is_checked_by_vocabulary_size(one_rank, tmp_path):
    path = make_tiny_model(tmp_path / "teacher", num_layers=1)
    (path / "tokenizer.json").unlink()
    trainer, _ = asyncio.run(one_rank.start(algorithm=OPD, teacher={"path": str(path)}, rewards=[]))
    assert trainer.step == 0
