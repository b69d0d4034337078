"""Requirements of algorithms: greedy rollouts, demonstrations, unrestricted sampling."""

import json
import shutil

import pytest
from plasmid.components import RecipeView
from plasmid.config.load import merge
from plasmid.errors import ConfigError
from plasmid.plugins.hookspecs import hookimpl
from plasmid_runtime.lifecycle.validation import check
from plasmid_runtime.observe.sample_store import read_samples

RESTRICTED = (
    "restricts sampling, and rollout engine 'fake' does not report the tokens that remain, so the algorithm's ratios "
    "to its log-probabilities would be wrong; remove it, use another engine, or set "
    'algorithm.old_policy = "trainer" and algorithm.opsm = "off"'
)


class Groups:
    def __init__(self):
        self.seen = []

    @hookimpl
    def group_scored(self, group):
        self.seen.append(group)


def test_one_greedy_rollout_of_each_prompt_is_compared_with_and_not_trained_on(runner):
    groups = Groups()
    runner.run({"algorithm": {"kind": "remax"}, "run": {"batches": 2}}, observers=[groups])
    assert [g.num_samples for g in groups.seen] == [3] * 8
    for group in groups.seen:
        *sampled, greedy = group.whole.get().samples
        assert greedy.id == f"{group.id}/greedy" and greedy.is_baseline and greedy.sampling.temperature == 0
        assert group.baseline == greedy.reward
        assert not any(sample.is_baseline for sample in sampled)
        assert group.rows.get().sample_ids == group.sample_ids == tuple(s.id for s in sampled)


def test_greedy_rollouts_are_stored_and_replayed(runner):
    runner.run({"algorithm": {"kind": "remax"}, "run": {"batches": 2}})
    stored = read_samples(runner.folder / "run" / "samples" / "batch-000001.parquet")
    assert [sum(s.is_baseline for s in group.samples) for group in stored] == [1] * 4
    result = runner.run(
        {"algorithm": {"kind": "remax"}, "run": {"dir": str(runner.folder / "again")}}, replay=runner.folder / "run"
    )
    assert result.steps == 2


def test_filters_do_not_see_greedy_rollouts_and_a_failed_one_drops_its_group(runner):
    groups = Groups()
    changes = {"algorithm": {"kind": "remax"}, "rollout": {"fail": ["1/greedy"]}, "run": {"batches": 2}}
    runner.run(changes | {"filters": [{"kind": "even-group"}]}, observers=[groups])
    failed = {group.id: group.dropped_by for group in groups.seen}
    assert failed[1] == "failed"
    assert set(failed.values()) <= {"", "even-group", "failed"} and list(failed.values()).count("failed") == 1


@pytest.fixture
def sft(runner):
    """Return the changes that turn the run into supervised fine-tuning."""
    rows = [{"q": f"say {i}", "a": "x" * (1 + i % 3)} for i in range(40)]
    path = runner.folder / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "algorithm": {"kind": "sft"},
        "data": {"kind": "demonstrations", "path": str(path), "prompt_key": "q", "completion_key": "a"},
        "rollout": None,
        "rewards": [],
        "run": {"samples_per_prompt": 1},
    }


def test_demonstrations_are_trained_on_without_an_engine(runner, sft):
    result = runner.run(merge(sft, {"run": {"batches": 3}}))
    assert result.steps == 3
    first = runner.metrics()[0]
    assert 2 <= first["rollout/length_mean"] <= 4  # one to three letters and the end
    assert not any(name.startswith(("reward/", "sync/")) for name in first)


def test_a_resumed_run_goes_on_with_the_rows_that_come_next(make_runner, sft):
    whole, cut = make_runner("whole"), make_runner("cut")
    whole.run(merge(sft, {"run": {"batches": 6}, "checkpoint": {"every": 3}}))
    cut.run(merge(sft, {"run": {"batches": 3}}))
    cut.run(merge(sft, {"run": {"batches": 6}}), resume=True)
    assert [m["rollout/tokens"] for m in cut.metrics()] == [m["rollout/tokens"] for m in whole.metrics()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rewards": [{"kind": "digits"}]},
            "rewards: algorithm 'sft' never samples; remove the tables",
        ),
        (
            {"filters": [{"kind": "nothing"}]},
            "filters: algorithm 'sft' never samples; remove the tables",
        ),
        ({"rollout": {"kind": "fake"}}, "rollout: algorithm 'sft' never samples; remove the [rollout] table"),
        ({"sampling": {"top_p": 0.9}}, "sampling: algorithm 'sft' never samples; remove the table"),
        (
            {"run": {"max_staleness": 1}},
            "run.max_staleness: 1 has no effect, because algorithm 'sft' never samples; remove it",
        ),
        (
            {"run": {"samples_per_prompt": 5}},
            "run.samples_per_prompt: 5 has no effect, because algorithm 'sft' never samples; remove it",
        ),
        *(
            (
                {table: {name: value}},
                f"{table}.{name}: {value} has no effect, because algorithm 'sft' never samples; remove it",
            )
            for table, name, value in (
                ("run", "sync_every", 2),
                ("run", "max_dropped", 5),
                ("run", "max_failed", 0.25),
                ("run", "rollout_timeout_s", 5.0),
                ("run", "sync_timeout_s", 5.0),
                ("run", "warn_mismatch", 0.5),
                ("run", "pass_threshold", 0.5),
                ("placement", "engine_ranks", 2),
                ("placement", "rollout_workers", 2),
                ("placement", "colocated", True),
            )
        ),
        (
            {"algorithm": {"kind": "ppo"}, "rollout": {"kind": "fake"}, "rewards": [{"kind": "digits"}]},
            "data.kind: algorithm 'ppo' samples completions and cannot train on demonstrations; "
            'set it to "files", or algorithm.kind to "sft"',
        ),
    ],
)
def test_settings_unused_by_supervised_fine_tuning_are_refused(runner, sft, changes, message):
    with pytest.raises(ConfigError) as error:
        runner.config(merge(sft, changes))
    assert str(error.value) == message


def test_supervised_fine_tuning_needs_demonstrations(runner, sft):
    with pytest.raises(ConfigError) as error:
        runner.config({**sft, "data": {}})
    assert str(error.value) == "data.kind: algorithm 'sft' trains on demonstrations; set it to \"demonstrations\""


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "grpo", "old_policy": "rollout"},
        {"kind": "rloo", "old_policy": "decoupled"},
        {"kind": "cispo", "opsm": 0.1},
    ],
    ids=["rollout", "decoupled", "opsm"],
)
@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.1)])
def test_restricted_sampling_is_refused_where_ratios_to_the_engine_would_be_wrong(runner, algorithm, name, value):
    with pytest.raises(ConfigError) as error:
        runner.config({"algorithm": algorithm, "sampling": {name: value}})
    assert str(error.value) == f"sampling.{name}: {value} {RESTRICTED}"
    runner.config({"algorithm": {"kind": algorithm["kind"]}, "sampling": {name: value}})


def test_restricted_sampling_is_accepted_with_an_engine_that_returns_kept_sets(runner):
    algorithm = {"kind": "grpo", "old_policy": "decoupled"}
    config = runner.config({"algorithm": algorithm, "sampling": {"top_p": 0.9}, "rollout": {"kind": "hf"}})
    assert config.replays_kept_sets
    assert not runner.config({"rollout": {"kind": "hf"}}).replays_kept_sets
    assert not runner.config({"sampling": {"top_p": 0.9}}).replays_kept_sets


ALTERED = {
    "min_new_tokens": 2,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "regex": "[a-z]+",
    "json_schema": {"type": "object"},
    "ebnf": 'root ::= "a"',
}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(("name", "value"), ALTERED.items(), ids=str)
def test_settings_that_alter_probabilities_are_for_evaluation(runner, engine, name, value):
    with pytest.raises(ConfigError) as error:
        runner.config({"sampling": {name: value}, "rollout": {"kind": engine}})
    assert str(error.value) == (
        f"sampling.{name}: {value!r} changes the probabilities that tokens are sampled with, which the trainer "
        "cannot reproduce; set it only in the sampling table of an evaluation set"
    )
    sets = [{"name": "held", "data": {"path": "none.jsonl"}, "sampling": {name: value}}]
    config = runner.config({"eval": sets, "rollout": {"kind": engine}})
    assert config.eval[0].sampling.is_altered and not config.sampling.is_altered
    with pytest.raises(ConfigError) as error:
        runner.config({"eval": sets, "rollout": {"kind": "hf"}})
    assert str(error.value) == (
        f"eval.0.sampling.{name}: rollout engine 'hf' does not support it; remove it or change engines"
    )


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"regex": "a", "ebnf": "b"}, "sampling: regex and ebnf both constrain the completion; remove one"),
        ({"logit_bias": {"five": 1.0}}, "sampling: logit_bias must have token ids as keys, got 'five'"),
        ({"stop_regex": [""]}, "sampling: stop_regex contains an empty expression, which would end every completion; "),
        ({"min_new_tokens": 300}, "sampling.min_new_tokens: must be at most max_new_tokens = 256, got 300"),
    ],
    ids=["grammars", "logit_bias", "stop_regex", "min_new_tokens"],
)
def test_optional_settings_that_contradict_are_refused(runner, sampling, message):
    with pytest.raises(ConfigError) as error:
        runner.config({"sampling": sampling, "rollout": {"kind": "server", "url": "http://127.0.0.1:1"}})
    assert message in str(error.value)


def test_all_errors_of_a_sampling_table_are_reported_together(runner):
    with pytest.raises(ConfigError) as error:
        runner.config({"sampling": {"top_k": 0, "stop": [""], "stop_token_ids": [-1]}})
    assert str(error.value).splitlines() == [
        "sampling: top_k must be 'all' or at least 1, got 0",
        "sampling: stop contains an empty string, which would end every completion; remove it",
        "sampling: stop_token_ids must be at least 0, got -1",
    ]


def test_trainer_and_engine_check_a_view_of_the_recipe(runner, monkeypatch):
    other, seen = str(shutil.copytree(runner.config({}).model.path, runner.folder / "reference")), []
    config = runner.config({"algorithm": {"kind": "grpo", "kl_coef": 0.1}, "reference": {"path": other}})
    for component in (config.trainer, config.rollout):
        monkeypatch.setattr(type(component), "check", lambda self, recipe: seen.append(recipe))
    check(config)
    assert [type(recipe) for recipe in seen] == [RecipeView, RecipeView]
    assert [recipe.key for recipe in seen] == ["rollout", "trainer"]
    assert seen[1].needed_models == {"model": config.model.path, "reference": other}
    assert (seen[1].engine_kind, seen[1].engine_reads_quantized, seen[1].replays_kept_sets) == ("fake", False, False)
    assert seen[1].model == config.model and seen[1].placement == config.placement


def test_restrictions_that_greedy_sampling_never_reads_are_refused(runner):
    with pytest.raises(ConfigError) as error:
        runner.config({"sampling": {"temperature": 0.0, "top_k": 3}})
    assert str(error.value) == "sampling.top_k: 3 has no effect at temperature 0; remove it"


def test_an_error_about_a_restriction_names_the_table_that_sets_it(runner):
    greedy = {"sampling": {"temperature": 0.0, "top_p": 0.9}}
    data = {"path": str(runner.folder / "prompts.jsonl")}
    sets = [{"name": "a", "data": data, "sampling": {"temperature": 0.0}}, {"name": "b", "data": data, **greedy}]
    profiles = {"p": {"sampling": {"temperature": 0.0}}, "q": greedy}
    with pytest.raises(ConfigError) as error:
        runner.config({"sampling": {"top_k": 3}, "eval": sets, "profiles": profiles})
    assert str(error.value).splitlines() == [
        "profiles.q.sampling.top_p: 0.9 has no effect at temperature 0; remove it",
        "eval.1.sampling.top_p: 0.9 has no effect at temperature 0; remove it",
    ]


@pytest.mark.parametrize("kind", ["grpo", "dapo", "gspo", "cispo", "rloo", "reinforce-plus-plus-baseline"])
def test_a_group_of_one_rollout_is_refused_where_advantages_would_all_be_zero(runner, kind):
    with pytest.raises(ConfigError) as error:
        runner.config({"algorithm": {"kind": kind}, "run": {"samples_per_prompt": 1}})
    assert str(error.value) == (
        f"run.samples_per_prompt: must be at least 2 for algorithm {kind!r}, got 1: a single rollout has no baseline"
    )
    runner.config({"algorithm": {"kind": "reinforce-plus-plus"}, "run": {"samples_per_prompt": 1}})
