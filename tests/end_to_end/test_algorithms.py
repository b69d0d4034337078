"""Algorithms other than GRPO with the real trainer and engine: rewards rise, and demonstrations are learned."""

import json

import pytest
from plasmid.config.load import resolve
from plasmid.errors import PlasmidError
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.evaluate import evaluate
from plasmid_runtime.lifecycle.session import run

ALGORITHMS = {
    "dapo": {},
    "dr-grpo": {"constant_length": 4},
    "rloo": {"reward_kl_coef": 0.01},
    "remax": {},
    "reinforce-plus-plus": {},
    "reinforce-plus-plus-baseline": {},
    "gspo": {},
    "cispo": {"old_policy": "decoupled", "correction": {"mode": "truncate"}, "opsm": 1.0},
}


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_the_held_out_reward_rises(job, kind, seed):
    loop = {"seed": seed, "batches": 30, "prompts_per_batch": 4, "samples_per_prompt": 8}
    result = job.run({"run": loop, "algorithm": {"kind": kind, **ALGORITHMS[kind]}})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert before < 0.45
    assert after > 0.9


def test_the_mismatch_between_trainer_and_engine_is_reported(job, caplog):
    job.run({"run": {"batches": 2}, "eval": []})
    assert "far apart" not in caplog.text
    for metrics in job.metrics():
        assert 0 <= metrics["train/mismatch_kl"] < 1e-9
        assert metrics["train/mismatch_ess"] == pytest.approx(1, abs=1e-6)
        assert metrics["train/mismatch_chi2"] == pytest.approx(0, abs=1e-5)
        quantiles = [metrics[f"train/mismatch_ratio_{p}"] for p in ("p1", "p50", "p99")]
        assert quantiles == sorted(quantiles) == pytest.approx([1, 1, 1], abs=1e-4)


def test_a_warning_names_the_batches_with_large_mismatch(job, caplog):
    job.run({"run": {"batches": 4, "max_staleness": 1, "warn_mismatch": 1e-6}, "eval": []})
    far = [batch for batch, m in enumerate(job.metrics(), 1) if m["train/mismatch_kl"] > 1e-6]
    warned = [r.getMessage() for r in caplog.records if "trainer and engine disagree" in r.getMessage()]
    assert far and [f"batch {batch}" for batch in far] == [text.split(":")[0] for text in warned]


DECOUPLED = {"old_policy": "decoupled"}
VARIANTS = {
    "truncated": {**DECOUPLED, "correction": {"mode": "truncate"}},
    "icepop": {**DECOUPLED, "correction": {"mode": "mask", "low": 0.5, "high": 5.0, "veto": 1e-4, "renormalize": True}},
    "masked sequences": {**DECOUPLED, "correction": {"mode": "mask", "level": "sequence"}},
    "rejected sequences": {**DECOUPLED, "correction": {"mode": "reject", "level": "geometric"}},
    "engine as old policy": {"old_policy": "rollout", "opsm": 0.5, "dual_clip": 3.0},
    "unbiased kl": {"kl_coef": 0.01, "kl_estimator": "k1", "unbiased_kl": True, "entropy_coef": 0.001},
    "kl in the reward": {"kind": "gspo", "reward_kl_coef": 0.01, "reward_kl_estimator": "low_var_kl"},
    "per prompt": {"kind": "cispo", "reduction": "per-prompt"},
    "constant length": {"reduction": "constant", "constant_length": 4, "normalize_std": False},
}


@pytest.mark.parametrize("name", [n if n == "icepop" else pytest.param(n, marks=pytest.mark.long) for n in VARIANTS])
def test_every_variant_trains_behind_the_policy_in_several_steps(job, name):
    loop = {"batches": 3, "max_staleness": 1, "steps_per_batch": 2}
    job.run({"run": loop, "algorithm": {"kind": "grpo", **VARIANTS[name]}, "eval": [], "trainer": {"lr": 1e-3}})
    metrics = job.metrics()
    assert [m["train/step"] for m in metrics] == [2, 4, 6]
    for m in metrics:
        assert m["train/grad_norm"] > 0 and m["train/clip_fraction"] >= 0
        assert ("train/correction_weight" in m) == ("correction" in VARIANTS[name])
        assert ("train/kl" in m) == ("kl_coef" in VARIANTS[name])
        assert ("train/opsm_masked" in m) == ("opsm" in VARIANTS[name])
    assert max(m["train/approx_kl"] for m in metrics) > 0


def demonstrations(job, seed):
    """A recipe of supervised fine-tuning in which every question is answered with 777."""
    recipe = job.plain()
    ask = [{"role": "user", "content": ""}, {"role": "assistant", "content": "777"}]
    rows = [{"messages": [{**ask[0], "content": f"say {i}: "}, ask[1]]} for i in range(40)]
    path = job.folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loop = {"batches": 15, "prompts_per_batch": 8, "samples_per_prompt": 1, "seed": seed}
    kept = {name: recipe[name] for name in ("recipe", "model", "plugins")}
    return kept | {
        "algorithm": {"kind": "sft"},
        "data": {"kind": "demonstrations", "path": str(path)},
        "trainer": {"kind": "fsdp", "lr": 2e-2},
        "run": {"dir": str(job.folder / "run"), **loop},
    }


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_demonstrations_are_learned_and_then_written(job, seed):
    result = run(resolve(demonstrations(job, seed)), make_cluster=lambda _: LocalCluster())
    losses = [metrics["train/loss"] for metrics in job.metrics()]
    assert losses[0] > 2.0
    assert losses[-1] < 0.05
    assert all(metrics["rollout/length_mean"] == 4 for metrics in job.metrics())  # 777 and the end of the turn
    asked = {"path": str(job.folder / "test.jsonl"), "prompt_as": "chat"}
    greedy = [{"name": "asked", "data": asked, "sampling": {"temperature": 0.0, "max_new_tokens": 8}}]
    settings = {"model": {"path": str(result.final)}, "run": {"dir": str(job.folder / "e")}, "eval": greedy}
    metrics = evaluate(job.config(settings), make_cluster=lambda _: LocalCluster())
    assert metrics["asked"]["eval/asked/reward"] == 0.75  # three digits, then the end
    assert metrics["asked"]["eval/asked/length_mean"] == 4


LATE = """
from typing import Literal
from plasmid import Algorithm, Needs, TokenLoss, hookimpl

class Late(Algorithm):
    kind: Literal["late"] = "late"
    def needs(self):
        return Needs()
    def roles(self, *, steps):
        return ()
    def advantages(self, inputs):
        return inputs.spread(inputs.table.rewards)
    def loss(self, inputs):
        if inputs.table.sample_ids[0].startswith("4/"):
            raise RuntimeError("group 4\\nis not wanted")
        return TokenLoss(loss=-inputs.advantages * inputs.logprobs, metrics={})

@hookimpl
def register_components():
    return [Late]
"""


def test_an_algorithm_error_during_a_run_is_one_line_with_traceback_in_the_log(job, caplog):
    recipe = job.plain()
    (job.folder / "late.py").write_text(LATE)
    changes = {"plugins": [*recipe["plugins"], str(job.folder / "late.py")], "algorithm": {"kind": "late"}, "eval": []}
    with pytest.raises(PlasmidError) as caught:
        job.run(changes)
    assert str(caught.value) == "algorithm (late): loss raised RuntimeError: group 4 is not wanted (late.py:15)"
    assert len(job.metrics()) == 1, "the batch before is kept"
    (record,) = [record for record in caplog.records if record.getMessage() == str(caught.value)]
    assert "late.py" in caplog.text and record.exc_info is not None


def test_a_warning_names_the_batches_whose_steps_were_skipped(job, caplog):
    recipe = job.plain()
    raises = 'raise RuntimeError("group 4\\nis not wanted")'
    assert raises in LATE
    is_nan = "return TokenLoss(loss=inputs.logprobs * float('nan'), metrics={})"
    (job.folder / "late.py").write_text(LATE.replace(raises, is_nan))
    changes = {"plugins": [*recipe["plugins"], str(job.folder / "late.py")], "algorithm": {"kind": "late"}, "eval": []}
    job.run({**changes, "run": {"batches": 3}})
    skipped = [metrics["train/skipped"] for metrics in job.metrics()]
    warned = [r.getMessage() for r in caplog.records if "gradients were not finite" in r.getMessage()]
    assert skipped == [0, 1, 0] and [text.split(":")[0] for text in warned] == ["batch 2"]
