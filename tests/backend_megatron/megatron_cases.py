"""Configurations and trainers for the tests of this folder."""

import dataclasses

from fsdp_cases import fit, largest_difference, make_batch, weights_of
from fsdp_cases import make_config as fsdp_config
from plasmid.components import BuildContext
from plasmid.protocols import Bundle
from plasmid_models.testing import make_tiny_model
from routing_cases import force_experts

SGD = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0}, "distributed_optimizer": False}
ADAM = {"optimizer": {"adam_eps": 1e-3}}  # keeps rounding of near-zero gradients from being scaled up to whole steps
FSDP_ADAM = {"eps": 1e-3}


def make_config(model, *, kind="megatron", trainer=None, **options):
    return fsdp_config(model, trainer={"kind": kind, **(trainer or {})}, **options)


class Ranks:
    """Starts trainers with one process per rank."""

    def __init__(self, processes, model, run_dir, *, gpus=False):
        self.model, self.processes, self._run_dir, self._gpus = model, processes, run_dir, gpus
        self._trainer = None

    async def start(self, *, num_ranks=1, model=None, **options):
        """Close the previous trainer; return a new one and its configuration."""
        from fsdp_processes import ProcessCluster

        await self.close()
        config = make_config(model or self.model, ranks=num_ranks, **options)
        bundles = tuple(Bundle(gpu=rank if self._gpus else None) for rank in range(num_ranks))
        cluster = ProcessCluster(self.processes)
        context = BuildContext(cluster=cluster, config=config, run_dir=self._run_dir, bundles=bundles)
        self._trainer = await config.trainer.build(context)
        return self._trainer, config

    async def close(self):
        if self._trainer is not None:
            await self._trainer.close()
            self._trainer = None


def small_batch(**options):
    """Create a batch of eight samples, enough for every layout to split it."""
    return make_batch(num_groups=2, **options)


@dataclasses.dataclass
class Outcome:
    """Results of training on one batch."""

    reports: list
    logprobs: list
    weights: dict


async def outcome(ranks, folder, *, batch=None, **options):
    """Start a trainer and train on one batch. Returns metrics, log-probabilities before and weights after training."""
    return await outcome_of(*await ranks.start(**options), folder, batch=batch)


async def outcome_of(trainer, config, folder, *, batch=None):
    """The same with a trainer that has already been started."""
    batch = small_batch() if batch is None else batch
    before = [array.tolist() for array in await trainer.logprobs(batch)]
    reports = await fit(trainer, config, batch)
    return Outcome(reports, before, await weights_of(trainer, folder))


def plain_outcome(model, folder, *, batch=None, algorithm=None):
    """The same with transformers, one expert after another, and torch's AdamW, on one rank."""
    import numpy as np
    import torch
    from plasmid_training.batches.collate import collate
    from plasmid_training.batches.rank_batch import split
    from plasmid_training.batches.schedule import Microbatching
    from plasmid_training.head.logprobs import TokenScores
    from plasmid_training.objective.objective import compute_advantages, loss_inputs, microbatch_loss, step_weights
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    batch = small_batch() if batch is None else batch
    algorithm = make_config(model, algorithm=algorithm).algorithm
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")
    (part,) = split(batch, num_ranks=1, microbatching=Microbatching(unit="samples", size=1000))
    rows = part.fetch()

    ends = rows.offsets[1:-1]

    def logits_of(ids, places):
        if rows.experts is not None:
            force_experts(lm, rows.experts[places])
        return lm(ids[None]).logits[0]

    every = np.split(np.arange(len(rows.token_ids)), ends)
    whole = torch.cat([logits_of(torch.from_numpy(rows.token_ids[places]).long(), places) for places in every])

    def scores_of_tokens(only_masked):
        packed = collate(rows, range(rows.num_samples), table_index=part.samples, only_masked=only_masked)
        logits = whole[packed.source]
        logprobs = (logits / packed.temperatures[:, None]).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1).detach()
        return packed, TokenScores(logprobs.gather(-1, packed.targets[:, None])[:, 0], entropy)

    packed, found = scores_of_tokens(only_masked=False)
    before = np.zeros(len(rows.token_ids), np.float32)
    before[packed.token_index.numpy()] = found.logprobs.detach().numpy()
    scores = {role: torch.from_numpy(before) for role in algorithm.roles(steps=1)}
    advantages = compute_advantages(algorithm, part, rows, scores, all_reduce=torch.clone)
    packed, found = scores_of_tokens(only_masked=True)
    inputs = loss_inputs(part, packed, found, scores=scores, advantages=advantages)
    loss = microbatch_loss(algorithm, inputs, step_weights(algorithm, part, 0)[packed.table_index]).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in lm.parameters() if p.grad is not None]).norm()
    torch.optim.AdamW(lm.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, **FSDP_ADAM).step()
    lm.save_pretrained(folder)
    report = {"train/loss": float(loss), "train/grad_norm": float(norm)}
    logprobs = [part.tolist() for part in np.split(before, rows.offsets[1:-1])]
    return Outcome([report], logprobs, load_file(folder / "model.safetensors"))


def logprob_difference(ours, theirs):
    return max(abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))


OF_BACKENDS = {"train/graphs"}
"""Metrics that only one of the backends has: trainer 'fsdp' compiles on a GPU."""


def assert_alike(ours, theirs, tolerance):
    """Check that log-probabilities, losses, gradient norms and weights agree after training on one batch."""
    assert logprob_difference(ours.logprobs, theirs.logprobs) < tolerance
    assert len(ours.reports) == len(theirs.reports)
    for mine, yours in zip(ours.reports, theirs.reports, strict=True):
        assert mine.keys() >= yours.keys() - OF_BACKENDS
        assert abs(mine["train/loss"] - yours["train/loss"]) < tolerance
        assert abs(mine["train/grad_norm"] / yours["train/grad_norm"] - 1) < tolerance
    assert largest_difference(ours.weights, theirs.weights) < tolerance


def make_tiny_moe(path):
    return make_tiny_model(
        path,
        family="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


__all__ = [
    "ADAM",
    "FSDP_ADAM",
    "SGD",
    "Outcome",
    "Ranks",
    "assert_alike",
    "fit",
    "largest_difference",
    "logprob_difference",
    "make_batch",
    "make_config",
    "make_tiny_moe",
    "outcome",
    "outcome_of",
    "plain_outcome",
    "small_batch",
    "weights_of",
]
