"""`run.deterministic`: trainer and engine compute bitwise equal log-probabilities for every token."""

import pytest
from plasmid_cli.comparison.runs import compare_runs
from plasmid_cli.reports.run_data import load_run
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.observe.sample_store import read_samples

SETTINGS = {
    "run": {"batches": 2, "deterministic": True},
    "sampling": {"max_new_tokens": 16, "temperature": 1.3},
    "rollout": {"max_batch": 6, "canary_every": 1},  # samples join and leave the batch
    "eval": [],
}


def settings(folder, model, **run):
    return SETTINGS | {"model": {"path": str(model)}, "run": SETTINGS["run"] | {"dir": str(folder)} | run}


def mismatch(metrics):
    return [m["train/logprob_diff_max"] for m in metrics]


def families(quick):
    """Return the fixture `model` for these families; tests with all but the first are long."""
    names = [n if n == quick else pytest.param(n, marks=pytest.mark.long) for n in ("llama", "qwen3", "qwen2")]
    return pytest.mark.parametrize("model", names, indirect=True)


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """The width is not a multiple of vector or tile sizes."""
    path = tmp_path_factory.mktemp("models") / request.param
    return make_tiny_model(path, family=request.param, hidden_size=72, intermediate_size=50, head_dim=18)


@families("qwen2")
def test_trainer_and_engine_agree_to_the_bit_in_two_identical_runs(job, model):
    for name in ("first", "second"):
        job.run(settings(job.folder / name, model))
        assert mismatch(job.metrics(name)) == [0.0] * 2
        assert [m["train/mismatch_kl"] for m in job.metrics(name)] == [0.0] * 2
        assert [m["sync/canary_difference"] for m in job.metrics(name)] == [0.0] * 2
    found = compare_runs(*(load_run(job.folder / name) for name in ("first", "second")))
    assert (found.num_equal, found.difference) == (2, "")


@families("qwen3")
def test_log_probabilities_differ_without_the_setting(job, model):
    job.run(settings(job.folder / "plain", model, deterministic=False, batches=1))
    assert max(mismatch(job.metrics("plain"))) > 0


def drawn(folder):
    file = folder / "samples" / "batch-000001.parquet"
    return {s.id: (s.token_ids.tolist(), s.rollout_logprobs.tolist()) for g in read_samples(file) for s in g.samples}


@families("qwen3")
def test_samples_do_not_depend_on_the_batch(job, model):
    for name, size in (("alone", 1), ("together", 64)):
        job.run(settings(job.folder / name, model, batches=1, prompts_per_batch=2) | {"rollout": {"max_batch": size}})
    assert drawn(job.folder / "alone") == drawn(job.folder / "together")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        *(
            pytest.param(c, marks=pytest.mark.long)
            for c in ({"lora": {"rank": 4}}, {"activation_checkpointing": True}, {"microbatch_samples": 3})
        ),
    ],
)
def test_on_policy_training_is_exact_with_other_trainer_settings(job, tiny_model, changes):
    dtype = {"dtype": changes["dtype"]} if "dtype" in changes else {}
    found = settings(job.folder / "run", tiny_model, batches=1) | {"trainer": {"lr": 3e-3, **changes}}
    job.run(found | {"rollout": SETTINGS["rollout"] | dtype})
    assert mismatch(job.metrics()) == [0.0]
