"""Configurations, batches and trainers for the tests of this folder."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from plasmid.components import BuildContext
from plasmid.config.load import resolve
from plasmid.protocols import Bundle
from plasmid.types.batch import BatchRef, GroupRef, Rows
from plasmid.types.kept_sets import KeptSet
from plasmid.types.shared_groups import LocalRef
from plasmid_runtime.cluster.local import LocalCluster

HERE = Path(__file__).parent


def make_config(model, *, trainer=None, algorithm=None, ranks=1, reference=None, **tables):
    data = {
        "model": {"path": str(model)},
        "data": {"kind": "files", "path": "unused.jsonl"},
        "trainer": {"kind": "fsdp", "lr": 1e-2, "max_grad_norm": 0.0, "dtype": "float32", **(trainer or {})},
        "algorithm": {"kind": "grpo", **(algorithm or {})},
        "rollout": {"kind": "never-started"},
        "rewards": [{"kind": "never-asked"}],
        "placement": {"trainer_ranks": ranks},
        "run": {"batches": 10, "prompts_per_batch": 4, "samples_per_prompt": 4, "train_timeout_s": 120.0},
        "plugins": [str(HERE / "fsdp_plugin.py")],
        **tables,
    }
    if reference is not None:
        data["reference"] = reference if isinstance(reference, dict) else {"path": str(reference)}
    return resolve(data)


def make_batch(
    *,
    seed=0,
    num_groups=4,
    group_size=4,
    steps=1,
    index=0,
    longest=24,
    temperature=1.0,
    restricted=False,
    shared=0,
):
    """Create a batch with random tokens, different lengths and random rewards. If restricted, every other sampled
    token has a kept set of 5 around it. The samples of a group begin with the same ``shared`` tokens, at most 5."""
    draw = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        lengths = draw.integers(6, longest + 1, group_size)
        ids = tuple(f"{index}.{g}/{i}" for i in range(group_size))
        tokens = int(lengths.sum())
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        mask = np.ones(tokens, np.bool_)
        for start in offsets[:-1]:
            mask[start : start + 4] = False
        rows = Rows(
            sample_ids=ids,
            offsets=offsets.astype(np.int64),
            token_ids=draw.integers(7, 50, tokens).astype(np.int32),
            loss_mask=mask,
            rollout_logprobs=np.where(mask, draw.normal(-3, 1, tokens), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            temperatures=np.full(group_size, temperature, np.float32),
        )
        for start in offsets[1:-1]:
            rows.token_ids[start : start + shared] = rows.token_ids[:shared]
        if restricted:
            rows = replace(rows, kept=_kept(rows))
        groups.append(replace(_group(g, rows, lengths, draw.normal(size=group_size)), shared_prefix=shared))
    return BatchRef(index=index, groups=tuple(groups), steps=steps)


def _kept(rows):
    chosen = rows.loss_mask & (np.arange(len(rows.token_ids)) % 2 == 0)
    sets = [t + np.arange(-2, 3, dtype=np.int32) if c else [] for t, c in zip(rows.token_ids, chosen, strict=True)]
    return KeptSet.of(sets, np.where(chosen, rows.rollout_logprobs / 2, 0))


def _group(number, rows, lengths, rewards):
    return GroupRef(
        id=number,
        prompt_id=f"row:{number}",
        sample_ids=rows.sample_ids,
        rollout_ids=rows.sample_ids,
        lengths=lengths.astype(np.int64),
        prompt_lengths=np.full(len(lengths), 4, np.int64),
        loss_tokens=(lengths - 4).astype(np.int64),
        rewards=rewards,
        components={},
        truncated=np.zeros(len(lengths), np.bool_),
        errors=(),
        oldest_version=0,
        rows=LocalRef(rows),
        whole=LocalRef(None),
    )


def whole_rows(batch):
    """Return all samples of a batch in its order."""
    return Rows.concat([group.rows.get() for group in batch.groups])


async def fit(trainer, config, *batches):
    """Score the roles of the algorithm and train; return the metrics of every optimizer step."""
    reports = []
    for batch in batches:
        scores = await trainer.score(batch, config.algorithm.roles(steps=batch.steps))
        reports += (await trainer.train(batch, scores)).steps
    return reports


class OneRank:
    """Starts trainers whose only rank is a thread of this process."""

    num_ranks = 1

    def __init__(self, model, run_dir, *, gpus=False):
        self.model, self._run_dir = model, run_dir
        self.bundles = tuple(Bundle(gpu=rank if gpus else None) for rank in range(self.num_ranks))
        self._trainer = None

    def cluster(self):
        return LocalCluster()

    async def start(self, *, model=None, **options):
        """Return a trainer and its configuration; closes the previous trainer."""
        await self.close()
        config = make_config(model or self.model, ranks=self.num_ranks, **options)
        context = BuildContext(cluster=self.cluster(), config=config, run_dir=self._run_dir, bundles=self.bundles)
        self._trainer = await config.trainer.build(context)
        return self._trainer, config

    async def close(self):
        if self._trainer is not None:
            await self._trainer.close()
            self._trainer = None


class TwoRanks(OneRank):
    """Starts trainers with two ranks in separate processes."""

    num_ranks = 2

    def __init__(self, model, run_dir, processes, *, gpus=False):
        super().__init__(model, run_dir, gpus=gpus)
        self.processes = processes

    def cluster(self):
        from fsdp_processes import ProcessCluster

        return ProcessCluster(self.processes)


class FourRanks(TwoRanks):
    """Starts trainers with four ranks in separate processes."""

    num_ranks = 4


async def weights_of(trainer, path):
    """Return every weight by name, read from an exported folder."""
    from safetensors.torch import load_file

    await trainer.export(path)
    return load_file(path / "model.safetensors")


def largest_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def plain_logprobs(model, rows):
    """Return [L] for each sample, computed one sample at a time by transformers alone; differentiable."""
    import torch

    results = []
    for i in range(rows.num_samples):
        ids = torch.from_numpy(rows.token_ids[rows.offsets[i] : rows.offsets[i + 1]]).long()
        logits = model(input_ids=ids[None]).logits[0, :-1] / float(rows.temperatures[i])
        chosen = logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        results.append(torch.cat([chosen.new_zeros(1), chosen]))
    return results
