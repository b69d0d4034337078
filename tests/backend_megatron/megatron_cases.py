"""Configurations and trainers that the tests of this folder are made of."""

import dataclasses

from fsdp_cases import fit, largest_difference, make_batch, weights_of
from fsdp_cases import make_config as fsdp_config
from plasmid.components import BuildContext
from plasmid.testing.tiny import make_tiny_model

SGD = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0}, "distributed_optimizer": False}
ADAM = {"optimizer": {"adam_eps": 1e-3}}  # keeps rounding of near-zero gradients from being scaled up to whole steps
FSDP_ADAM = {"eps": 1e-3}


def make_config(model, *, kind="megatron", trainer=None, **options):
    return fsdp_config(model, trainer={"kind": kind, **(trainer or {})}, **options)


class Ranks:
    """Starts trainers whose ranks are processes of their own."""

    def __init__(self, processes, model, run_dir, *, gpus=False):
        self.model, self._processes, self._run_dir, self._gpus = model, processes, run_dir, gpus
        self._trainer = None

    async def start(self, *, num_ranks=1, model=None, **options):
        """A trainer and its configuration; the one before is closed."""
        from fsdp_processes import ProcessCluster

        await self.close()
        config = make_config(model or self.model, ranks=num_ranks, **options)
        bundles = tuple(rank if self._gpus else None for rank in range(num_ranks))
        cluster = ProcessCluster(self._processes)
        context = BuildContext(cluster=cluster, config=config, run_dir=self._run_dir, bundles=bundles)
        self._trainer = await config.trainer.build(context)
        return self._trainer, config

    async def close(self):
        if self._trainer is not None:
            await self._trainer.close()
            self._trainer = None


@dataclasses.dataclass
class Outcome:
    """What training on a batch gave."""

    reports: list
    logprobs: list
    weights: dict


async def outcome(ranks, folder, *, batch=None, **options):
    """Train on one batch from the start: metrics, log-probabilities before, weights after."""
    batch = make_batch() if batch is None else batch
    trainer, config = await ranks.start(**options)
    before = [array.tolist() for array in await trainer.logprobs(batch)]
    reports = await fit(trainer, config, batch)
    return Outcome(reports, before, await weights_of(trainer, folder))


def logprob_difference(ours, theirs):
    return max(abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))


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
    "fit",
    "largest_difference",
    "logprob_difference",
    "make_batch",
    "make_config",
    "make_tiny_moe",
    "outcome",
    "weights_of",
]
