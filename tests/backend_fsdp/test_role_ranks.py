"""Reference, teacher and critic on dedicated ranks give the same numbers, bit for bit, as on the trainer's ranks."""

import asyncio
from itertools import product

import pytest
from fsdp_cases import fit, largest_difference, make_batch, make_config, weights_of
from fsdp_processes import ProcessCluster, Processes
from megatron_cases import make_config as megatron_config
from plasmid.components import BuildContext
from plasmid.errors import ActorDiedError, CheckpointError, ModelError
from plasmid.protocols import Bundle
from plasmid_models.testing import make_tiny_model
from safetensors.torch import load_file

MONITOR = {"algorithm": {"monitor_kl": True, "kl_estimator": "k1", "kl_coef": 0.1}}


class RoleRanks:
    """Starts trainers with one rank, and other models with one rank each."""

    def __init__(self, model, run_dir, processes, make=make_config):
        self.model, self.run_dir, self.processes, self._make = model, run_dir, processes, make
        self._trainer = None

    async def start(self, *, num_ranks=1, **options):
        """Return a trainer and its configuration; ``<model>_ranks`` among the options is a number of ranks."""
        await self.close()
        place = {name: options.pop(name) for name in [*options] if name.endswith("_ranks")}
        config = self._make(self.model, placement={"trainer_ranks": num_ranks, **place}, **options)
        self._trainer = await config.trainer.build(
            BuildContext(
                cluster=ProcessCluster(self.processes),
                config=config,
                run_dir=self.run_dir,
                bundles=(Bundle(),) * num_ranks,
                role_bundles={role: (Bundle(),) * count for role, count in config.placement.role_ranks.items()},
            )
        )
        return self._trainer, config

    async def close(self):
        if self._trainer is not None:
            await self._trainer.close()
            self._trainer = None


@pytest.fixture
def role_ranks(request, two_processes, tiny_model, tmp_path):
    make = getattr(request, "param", make_config)
    ranks = RoleRanks(tiny_model, tmp_path, two_processes, make)
    yield ranks
    asyncio.run(ranks.close())


BOTH = pytest.mark.parametrize("role_ranks", [make_config, megatron_config], ids=["fsdp", "megatron"], indirect=True)


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize("role_ranks", [make_config, long(megatron_config)], ids=["fsdp", "megatron"], indirect=True)
def test_the_policy_replaces_a_reference_on_dedicated_ranks(role_ranks, tmp_path):
    """Metrics and weights equal those with shared ranks; either checkpoint can be resumed exactly with the other
    placement."""
    batches = [make_batch(index=index, steps=2) for index in range(5)]
    options = MONITOR | {"reference": {"update_every": 2}}

    async def run(name, alone):
        trainer, config = await role_ranks.start(reference_ranks=alone, **options)
        reports = await fit(trainer, config, *batches[:3])
        await trainer.save(tmp_path / f"{name}-saved")
        reports += await fit(trainer, config, *batches[3:])
        return reports, await weights_of(trainer, tmp_path / name)

    async def resume(saved, alone):
        trainer, config = await role_ranks.start(reference_ranks=alone, **options)
        await trainer.load(tmp_path / f"{saved}-saved")
        return await fit(trainer, config, *batches[3:])

    shared, shared_weights = asyncio.run(run("shared", 0))
    apart, apart_weights = asyncio.run(run("apart", 1))
    assert apart == shared and largest_difference(apart_weights, shared_weights) == 0
    assert apart[2]["train/kl"] != 0 and apart[4]["train/kl"] == 0
    assert asyncio.run(resume("apart", 1)) == asyncio.run(resume("shared", 1)) == shared[6:]
    assert asyncio.run(resume("apart", 0)) == shared[6:]
    assert not (tmp_path / "new-reference").exists()


TEACHERS = {"same": {"seed": 7}, "other": {"seed": 7, "hidden_size": 32, "num_layers": 3}}
DISTILLATIONS = {"opd": {"kind": "opd"}, "gkd": {"kind": "gkd", "top_k": 6}}
EVERY_PAIR = {
    ("opd", "same", "fsdp"),
    ("opd", "other", "megatron"),
    ("gkd", "same", "megatron"),
    ("gkd", "other", "fsdp"),
}
TEACHER_CASES = [
    pytest.param(make, algorithm, teacher, id="-".join(names), marks=[pytest.mark.long] * (names not in EVERY_PAIR))
    for names, algorithm, teacher, make in (
        ((a, t, m), DISTILLATIONS[a], TEACHERS[t], make)
        for a, t, (m, make) in product(
            DISTILLATIONS, TEACHERS, {"fsdp": make_config, "megatron": megatron_config}.items()
        )
    )
]


@pytest.mark.parametrize(("role_ranks", "algorithm", "options"), TEACHER_CASES, indirect=["role_ranks"])
def test_a_teacher_on_dedicated_ranks_gives_the_same_training(role_ranks, algorithm, options, tmp_path):
    teacher = make_tiny_model(tmp_path / "teacher", **options)
    opd = {"algorithm": algorithm, "teacher": {"path": str(teacher)}, "rewards": []}
    batches = [make_batch(index=index, temperature=0.7) for index in range(2)]

    async def run(alone):
        trainer, config = await role_ranks.start(teacher_ranks=alone, **opd)
        reports = await fit(trainer, config, *batches)
        names = {name.split("/")[1] for name in await trainer.metrics()}
        return reports, names

    shared, apart = asyncio.run(run(0)), asyncio.run(run(1))
    assert apart[0] == shared[0]
    assert (shared[1], apart[1]) == ({"trainer-0"}, {"trainer-0", "teacher-0"})


PPO = {
    "algorithm": {"kind": "ppo", "critic_warmup": 1, "reward_kl_coef": 0.1, "value_clip": 0.05},
    "trainer": {"lr": 0.02, "critic": {"lr": 0.03, "export": True, "head_std": 0.1}},
}


@pytest.mark.parametrize(
    ("role_ranks", "in_background"),
    [(make_config, True), (megatron_config, False), long(make_config, False), long(megatron_config, True)],
    ids=["fsdp-async_save", "megatron-save", "fsdp-save", "megatron-async_save"],
    indirect=["role_ranks"],
)
def test_a_critic_on_dedicated_ranks_is_trained_the_same(role_ranks, in_background, tmp_path):
    """Metrics and both models equal those with shared ranks; either checkpoint can be resumed exactly with the other
    placement."""
    batches = [make_batch(index=index, num_groups=2, steps=2) for index in range(4)]
    options = PPO | {"trainer": PPO["trainer"] | {"async_save": in_background}}

    async def start(alone):
        return await role_ranks.start(critic_ranks=alone, **options)

    async def finish(trainer, config, name):
        reports = await fit(trainer, config, *batches[2:])
        await trainer.export(tmp_path / name)
        return reports, [load_file(tmp_path / folder / "model.safetensors") for folder in (name, f"{name}-critic")]

    async def run(name, alone):
        trainer, config = await start(alone)
        reports = await fit(trainer, config, *batches[:2])
        write_rest = await trainer.save(tmp_path / name / "trainer")
        later, weights = await finish(trainer, config, f"{name}-final")
        assert (write_rest is not None) == in_background
        if write_rest is not None:
            await write_rest()
        return reports + later, weights

    async def resume(saved, alone):
        trainer, config = await start(alone)
        await trainer.load(tmp_path / saved / "trainer")
        assert trainer.step == 2
        return await finish(trainer, config, f"{saved}-again-{alone}")

    shared, apart = asyncio.run(run("shared", 0)), asyncio.run(run("apart", 1))
    assert apart[0] == shared[0]
    assert [report["train/step"] for report in apart[0]] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert all(report["train/critic_grad_norm"] > 0 and "train/value_loss" in report for report in apart[0])
    assert {folder.name for folder in (tmp_path / "apart").iterdir()} == {"trainer", "trainer-critic"}
    assert not (tmp_path / "shared/trainer-critic").exists()
    resumed = [asyncio.run(resume(saved, alone)) for saved, alone in (("shared", 1), ("apart", 0))]
    for reports, weights in [*resumed, (apart[0][4:], apart[1])]:
        assert reports == shared[0][4:]
        assert [largest_difference(*both) for both in zip(weights, shared[1], strict=True)] == [0, 0]


@BOTH
def test_a_checkpoint_with_a_critic_is_refused_without_a_critic(role_ranks, tmp_path):
    without = {"algorithm": {"kind": "grpo"}}

    async def save(name, **options):
        trainer, _ = await role_ranks.start(**options)
        await trainer.save(tmp_path / name / "trainer")

    async def load(name, **options):
        trainer, _ = await role_ranks.start(**options)
        await trainer.load(tmp_path / name / "trainer")

    asyncio.run(save("apart", critic_ranks=1, **PPO))
    with pytest.raises(CheckpointError, match=r"trainer: the checkpoint belongs to a different algorithm: it has a cr"):
        asyncio.run(load("apart", **without))
    asyncio.run(save("plain", **without))
    with pytest.raises(CheckpointError, match=r"trainer: the checkpoint belongs to a different algorithm: it has no c"):
        asyncio.run(load("plain", critic_ranks=1, **PPO))


@pytest.mark.parametrize("counts", [(1, 2), long((2, 1))])
def test_a_critic_may_have_another_number_of_ranks(counts, tiny_model, tmp_path):
    processes, batches = Processes(3), [make_batch(index=index, num_groups=3, steps=3) for index in range(3)]
    ranks = RoleRanks(tiny_model, tmp_path, processes)

    async def run(num_ranks, critic_ranks):
        trainer, config = await ranks.start(num_ranks=num_ranks, critic_ranks=critic_ranks, **PPO)
        return await fit(trainer, config, *batches), {name.split("/")[1] for name in await trainer.metrics()}

    try:
        expected, _ = asyncio.run(run(1, 0))
        found, names = asyncio.run(run(*counts))
        asyncio.run(ranks.close())
    finally:
        processes.shutdown()
    assert names == {f"{part}-{i}" for part, n in zip(("trainer", "critic"), counts, strict=True) for i in range(n)}
    compared = ("value_loss", "critic_grad_norm", "return_mean", "explained_variance", "loss", "grad_norm")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in (f"train/{name}" for name in compared if f"train/{name}" in theirs):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.long
def test_pipeline_ranks_without_a_loss_pass_returns_on(tiny_model, tmp_path):
    """Only the last rank of a pipeline computes returns and values, and the driver reads them from it."""
    processes, batches = Processes(4), [make_batch(index=index) for index in range(3)]
    ranks = RoleRanks(tiny_model, tmp_path, processes, megatron_config)
    trainer = PPO["trainer"] | {"pipeline_parallel": 2}

    async def run(critic_ranks):
        handle, config = await ranks.start(num_ranks=2, critic_ranks=critic_ranks, **PPO | {"trainer": trainer})
        return await fit(handle, config, *batches)

    try:
        shared, apart = asyncio.run(run(0)), asyncio.run(run(2))
        asyncio.run(ranks.close())
    finally:
        processes.shutdown()
    assert apart == shared and apart[-1]["train/critic_grad_norm"] > 0


@pytest.mark.parametrize("counts", [long((1, 2)), (2, 1)])
def test_groups_may_have_different_numbers_of_ranks(counts, tiny_model, tmp_path):
    """Every rank of the trainer gets the scores of its own samples: the KL equals that of one rank, up to rounding."""
    processes, batches = Processes(3), [make_batch(index=index, num_groups=3, steps=3) for index in range(2)]
    ranks = RoleRanks(tiny_model, tmp_path, processes)
    options = MONITOR | {"reference": {"path": str(make_tiny_model(tmp_path / "other", seed=7))}}

    async def run(num_ranks, reference_ranks):
        trainer, config = await ranks.start(num_ranks=num_ranks, reference_ranks=reference_ranks, **options)
        return await fit(trainer, config, *batches)

    try:
        expected = asyncio.run(run(1, 0))
        found = asyncio.run(run(*counts))
        asyncio.run(ranks.close())
    finally:
        processes.shutdown()
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("train/kl", "train/loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_a_reference_process_that_died_is_named(role_ranks):
    async def run():
        trainer, config = await role_ranks.start(reference_ranks=1, **MONITOR)
        await fit(trainer, config, make_batch())
        for process in role_ranks.processes._executors[1]._processes.values():
            process.kill()
        await fit(trainer, config, make_batch(index=1))

    with pytest.raises(ActorDiedError, match="reference-0 died during score"):
        asyncio.run(run())


def test_a_reference_of_another_architecture_cannot_be_replaced(role_ranks, tmp_path):
    other = make_tiny_model(tmp_path / "other", hidden_size=32)
    with pytest.raises(ModelError, match=r"reference\.update_every: .*/other has a different architecture"):
        asyncio.run(role_ranks.start(reference_ranks=1, **MONITOR, reference={"path": str(other), "update_every": 1}))
