"""The trainer takes the same steps if loss and gradient are computed in one pass over the logits, where this is
valid."""

import asyncio

import plasmid_fsdp.model.policy as policy_module
import pytest
from fsdp_cases import fit, largest_difference, make_batch, weights_of
from plasmid_training.algorithms.grpo import GRPO

SGD = {"optimizer": "sgd", "lr": 0.1, "logprob_chunk": 5}


@pytest.fixture
def fused(monkeypatch):
    """One entry for each microbatch whose loss was computed together with its logits."""
    calls, plain = [], policy_module.linear_token_loss

    def counting(*arguments, **options):
        calls.append(len(arguments[0]))
        return plain(*arguments, **options)

    monkeypatch.setattr(policy_module, "linear_token_loss", counting)
    return calls


def train(ranks, path, *, trainer=None, algorithm=None):
    async def run():
        handle, config = await ranks.start(trainer=SGD | (trainer or {}), algorithm=algorithm)
        options = {"num_groups": 2, "steps": 2, "temperature": 0.8}
        batches = [make_batch(seed=i, index=i, restricted=i == 1, **options) for i in range(2)]
        return await fit(handle, config, *batches), await weights_of(handle, path)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "trainer",
    [{"microbatch_tokens": 40, "activation_checkpointing": True}, pytest.param({}, marks=pytest.mark.long)],
    ids=str,
)
def test_steps_are_those_of_the_plain_loss(one_rank, tmp_path, fused, monkeypatch, trainer):
    algorithm = {"kl_coef": 0.1, "entropy_coef": 0.01}
    reports, weights = train(one_rank, tmp_path / "fused", trainer=trainer, algorithm=algorithm)
    count = len(fused)
    monkeypatch.setattr(GRPO, "is_tokenwise", lambda self: False)
    expected, plain_weights = train(one_rank, tmp_path / "plain", trainer=trainer, algorithm=algorithm)
    assert count > 0 and len(fused) == count
    assert largest_difference(weights, plain_weights) < 1e-6
    for report, plain in zip(reports, expected, strict=True):
        assert report == pytest.approx(plain, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("algorithm", [{"kind": "gspo"}, {"opsm": 0.1}], ids=str)
def test_losses_of_whole_samples_are_not_fused(one_rank, tmp_path, fused, algorithm):
    train(one_rank, tmp_path / "plain", algorithm=algorithm)
    assert not fused
