"""A single rank trains without FSDP2, with the same results and checkpoints as with it."""

import asyncio
import weakref
from functools import partial

import pytest
import torch
from fsdp_cases import fit, largest_difference, make_batch, weights_of
from plasmid_fsdp.model import building, sharded
from plasmid_fsdp.model.compute_copies import ComputeCopies
from safetensors.torch import load_file
from torch import nn

BF16 = {"dtype": "bfloat16", "lr": 1e-2, "weight_decay": 0.01, "microbatch_tokens": 60}
REFERENCE = {"kl_coef": 0.1}
PPO = {"kind": "ppo", "kl_coef": 0.1}
CRITIC = {"critic": {"lr": 1e-2, "head_std": 0.1, "export": True}}
CASES = {
    "critic": {  # with frozen weights and a replaced reference
        "trainer": BF16 | CRITIC | {"freeze": ["mlp.down_proj", "norm"]},
        "algorithm": PPO,
        "reference": {"update_every": 1},
    },
    "adapter": {"trainer": BF16 | {"lora": {"rank": 4}}, "algorithm": REFERENCE},
    "sgd": {"trainer": BF16 | {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "activation_checkpointing": True}},
}


async def train(ranks, folder, saved, *, load=None, **case):
    """Train on batches of one and two steps, or load and train on the second; return metrics and exported weights."""
    trainer, config = await ranks.start(**case)
    batches = [make_batch(seed=i, index=i, num_groups=2, steps=i + 1) for i in range(2)]
    if load is None:
        await fit(trainer, config, batches[0])
        await trainer.save(saved)
    else:
        await trainer.load(load)
    reports = await fit(trainer, config, batches[1])
    weights = await weights_of(trainer, folder)
    critic = folder.with_name(f"{folder.name}-critic") / "model.safetensors"
    return reports, weights, load_file(critic) if critic.exists() else {}


@pytest.mark.parametrize("case", ["critic", "adapter", pytest.param("sgd", marks=pytest.mark.long)])
def test_results_and_checkpoints_equal_those_of_fsdp(one_rank, tmp_path, monkeypatch, case):
    """Results do not depend on whether the copies are kept between uses, either."""

    def run(name, *, fsdp, load=None):
        monkeypatch.setattr(building, "uses_fsdp", lambda settings, num_ranks: fsdp)
        load = None if load is None else tmp_path / f"{load}-saved"
        return asyncio.run(train(one_rank, tmp_path / name, tmp_path / f"{name}-saved", load=load, **CASES[case]))

    results = [
        run("fsdp", fsdp=True),
        run("whole", fsdp=False),
        run("whole-from-fsdp", fsdp=False, load="fsdp"),
        run("fsdp-from-whole", fsdp=True, load="whole"),
    ]
    monkeypatch.setattr(sharded, "ComputeCopies", partial(free_copies, sharded.ComputeCopies))
    results.append(run("freed", fsdp=False))
    reports, weights, critic = results[0]
    for others, other_weights, other_critic in results[1:]:
        assert others == reports
        assert largest_difference(other_weights, weights) == 0
        assert other_critic.keys() == critic.keys()
        assert all(torch.equal(critic[name], other_critic[name]) for name in critic)


def make_module():
    """Two tied layers, a frozen bias and a layer that computes in fp32."""
    torch.manual_seed(0)
    root = nn.ModuleDict({"first": nn.Linear(3, 3), "tied": nn.Linear(3, 3, bias=False), "exact": nn.Linear(3, 1)})
    root["tied"].weight = root["first"].weight
    root["first"].bias.requires_grad_(False)
    return root


@pytest.mark.parametrize("keep", [True, False])
def test_parameters_are_copies_only_while_in_use(keep):
    root = make_module()
    before = dict(root.named_parameters())
    copies = ComputeCopies(root, torch.bfloat16, exact=[root["exact"]], keep=keep)
    with pytest.raises(RuntimeError, match="failed"), copies.use():
        inside = dict(root.named_parameters())
        assert inside.keys() == before.keys()
        assert root["tied"].weight is root["first"].weight and root["tied"].weight.dtype == torch.bfloat16
        assert not root["first"].bias.requires_grad and root["first"].bias.dtype == torch.bfloat16
        assert root["exact"].weight is before["exact.weight"]
        assert all(torch.equal(inside[name], before[name].to(inside[name].dtype)) for name in before)
        raise RuntimeError("failed")
    assert dict(root.named_parameters()) == before and root["tied"].weight is before["first.weight"]


@pytest.mark.parametrize("keep", [True, False])
def test_gradients_are_summed_in_fp32(keep):
    root = make_module()
    weight = root["first"].weight
    with ComputeCopies(root, torch.bfloat16, exact=[root["exact"]], keep=keep).use():
        for factor in (1.0, 1 / 512):  # the sum needs more than the 8 bits of bfloat16
            (root["first"].weight.sum() * factor).backward()
            assert root["first"].weight.grad is None
    assert weight.grad.dtype == torch.float32 and torch.equal(weight.grad, torch.full((3, 3), 1 + 1 / 512))


def test_gradients_of_all_steps_use_the_same_memory():
    root = make_module()
    weight, places = root["first"].weight, []
    copies = ComputeCopies(root, torch.bfloat16, keep=True)
    for _ in range(2):
        with copies.use():
            root["first"].weight.sum().backward()
        assert torch.equal(weight.grad, torch.ones(3, 3))
        places.append(weight.grad.data_ptr())
        weight.grad = None
        other = torch.empty(3, 3)  # would get the memory if it had been freed
        places.append(other.data_ptr())
    assert places[0] == places[2] and places[0] not in places[1::2]


@pytest.mark.parametrize(("optimizer", "keep"), [("adamw", True), ("sgd", True), ("adamw", False)])
def test_copies_follow_every_change_of_the_weights(optimizer, keep):
    from plasmid_fsdp.optimizer import clip_and_step, make_optimizer
    from plasmid_fsdp.settings import OptimizerSettings

    root = make_module()
    copies, weight = ComputeCopies(root, torch.bfloat16, keep=keep), root["first"].weight
    inner = make_optimizer(OptimizerSettings(optimizer=optimizer, lr=0.1), list(root.parameters()))

    def step():
        weight.grad = torch.ones_like(weight)
        clip_and_step(inner, [weight], norm=1.0, max_norm=0.0)

    def set_detached():
        weight.detach().fill_(7.0)

    for change in (step, step, set_detached):
        with copies.use():
            before = root["first"].weight.clone()
        change()
        with copies.use():
            assert torch.equal(root["first"].weight, weight.bfloat16())
            assert not torch.equal(root["first"].weight, before)


def test_a_sync_in_the_compute_dtype_sends_the_copies():
    root = make_module()
    copies = ComputeCopies(root, torch.bfloat16, keep=True)
    named = dict(root.named_parameters())
    sent = copies.replace(named, torch.bfloat16)
    with copies.use():
        assert all(sent[name] is parameter for name, parameter in root.named_parameters())
    assert all(torch.equal(sent[name], named[name].bfloat16()) for name in named)
    assert copies.replace(named, torch.float32) == named


def test_a_gpu_frees_copies_and_gradients_between_uses():
    root = make_module()
    copies, weight = ComputeCopies(root, torch.bfloat16, keep=False), root["first"].weight
    for factor in (1, 2):
        with copies.use():
            copy, untrained = root["first"].weight, root["first"].bias
            assert torch.equal(copy, weight.bfloat16()) and torch.equal(untrained, root["first"].bias)
            (copy.sum() * factor).backward()
        assert copy.untyped_storage().nbytes() == untrained.untyped_storage().nbytes() == 0
        assert torch.equal(weight.grad, torch.full((3, 3), float(factor)))
        gradient = weakref.ref(weight.grad)
        weight.grad = None
        assert gradient() is None
    named = dict(root.named_parameters())
    assert copies.replace(named, torch.bfloat16) == named


def free_copies(made, *args, keep, **options):
    assert keep, "on a CPU"
    return made(*args, keep=False, **options)
