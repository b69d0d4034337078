import io

import pytest
from plasmid.errors import ConfigError
from plasmid.utils.printable import escape_unprintable
from plasmid_cli.main import app
from plasmid_cli.reports.run_data import load_run
from plasmid_cli.reports.tokens import TokenTexts
from plasmid_cli.reports.view import ShownSample, color_tokens, read_samples_of, select_samples, view_run, view_samples
from plasmid_runtime.observe.journal import Journal
from plasmid_runtime.observe.sample_store import write_samples
from rich.console import Console


def printed(run, *, action=view_samples, width=100, color=False, **options):
    console = Console(file=io.StringIO(), width=width, force_terminal=color, color_system="256" if color else None)
    action(run, console, **options)
    return console.file.getvalue()


def squeezed(text):
    """Return the text without the frames and line breaks that panels add."""
    return "".join(line.strip("\u2502 \n") for line in text.splitlines())


def test_a_folder_without_a_run_is_a_plain_error(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_run(tmp_path)
    where = f"{tmp_path}: not a run: it has no config.json and no metrics.jsonl"
    assert str(error.value) == f"{where}; give the folder of a run"


def test_the_best_sample_of_the_last_step_comes_first(run_dir):
    run = load_run(run_dir)
    text = printed(run, count=2)
    assert "batch-000060" in text and "1 of 2 (best)" in text and "reward 1.1 = right 1, format 0.1" in text
    assert "target " in text and "by version 58-59" in text
    assert "reward 0.1" in printed(run, order="worst", count=1, step=1)


def test_samples_are_found_by_step_evaluation_and_prompt(run_dir):
    run = load_run(run_dir)
    assert "sample 32/" in printed(run, step=3, prompt="sums.jsonl:32", count=1)
    assert "eval-held-out-000040" in printed(run, evaluation="held-out", step=40, count=1)
    assert "dropped by filter no-spread" in printed(run, step=3, prompt="sums.jsonl:33", count=1)


def test_errors_list_the_available_steps_and_samples(run_dir, tmp_path):
    run = load_run(run_dir)
    with pytest.raises(ConfigError, match=r"no samples of step 99; stored steps are 1-60$"):
        printed(run, step=99)
    with pytest.raises(ConfigError, match=r"no samples of step 3; stored steps are 0, 20, 40, 60$"):
        printed(run, step=3, evaluation="held-out")
    with pytest.raises(ConfigError, match="has a prompt with 'zebra' in its id or text"):
        printed(run, prompt="zebra")
    with pytest.raises(ConfigError, match=r"no samples \(eval-other-\*.parquet\)"):
        printed(run, evaluation="other")
    with pytest.raises(ConfigError, match=r"no metric 'train/los'; metrics are .*train/loss"):
        printed(run, action=view_run, metrics=["train/los"])


def test_every_metric_is_in_the_table_and_a_named_one_is_a_chart(run_dir):
    run = load_run(run_dir)
    table = printed(run, action=view_run, width=80)
    assert "train/logprob_diff_mean" in table and "rollout/dropped/no-spread" in table
    charted = printed(run, action=view_run, metrics=["train/entropy"])
    assert "train/entropy" in charted and "train/grad_norm" not in charted


def test_unlikely_tokens_and_other_versions_are_coloured(run_dir):
    run = load_run(run_dir)
    shown = select_samples(read_samples_of(run, "batch-000060"), order="worst", count=1)[0]
    texts = TokenTexts.of(run)
    by_logprob, by_version = color_tokens(shown, texts, "logprob"), color_tokens(shown, texts, "version")
    assert by_logprob.plain == by_version.plain == shown.sample.text + "<eos>"
    assert {span.style for span in by_version.spans} == {"blue", "red"}, "versions 58 and 59"
    start = len(shown.prompt.token_ids)
    logprobs = shown.sample.rollout_logprobs[start:]
    worst = by_logprob.spans[int(logprobs.argmin())] if len(by_logprob.spans) == len(logprobs) else None
    red = [span for span in by_logprob.spans if span.style == "bold red"]
    assert len(red) == int((logprobs < -5).sum())
    assert worst is None or worst.style != ""


def test_a_random_choice_is_the_same_every_time_and_samples_without_reward_come_last(run_dir):
    found = read_samples_of(load_run(run_dir), "batch-000010")
    names = [s.sample.id for s in select_samples(found, order="random", count=5)]
    assert names == [s.sample.id for s in select_samples(found, order="random", count=5)]
    from dataclasses import replace

    failed = ShownSample(file="x", prompt=found[0].prompt, sample=replace(found[0].sample, score=None))
    assert select_samples([failed, *found], order="worst", count=99)[-1] is failed
    assert select_samples([failed, *found], order="best", count=99)[-1] is failed


def test_text_of_a_policy_is_neither_markup_nor_a_command_to_the_terminal(make_run):
    path = make_run(batches=2, with_tokenizer=False)
    run = load_run(path)
    shown = read_samples_of(run, "batch-000001")[1]
    from dataclasses import replace

    from plasmid.types import PromptGroup

    text = "[bold]x[/bold] \x1b]0;owned\x07 \x9b2J\r[/nonsense]"
    sample = replace(shown.sample, text=text, error="\x1b[2J", metadata={})
    group = PromptGroup(id=sample.group_id, prompt=replace(shown.prompt, text=text, target=text), samples=(sample,))
    write_samples(path / "samples/batch-000003.parquet", [group], step=3)
    out = printed(run, step=3)
    assert "\x1b" not in out and "\x9b" not in out and "\x07" not in out and "\r" not in out
    assert out.count("[bold]x[/bold] \\x1b]0;owned\\x07 \\u009b2J\\x0d[/nonsense]") == 3


def test_printable_text_is_unchanged():
    assert escape_unprintable("caf\u00e9 \U0001f9ec\n\tx") == "caf\u00e9 \U0001f9ec\n\tx"


def test_token_texts_join_to_the_whole_text_also_where_characters_take_several_tokens():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = "caf\u00e9 na\u00efve \U0001f9ec end"
    parts = TokenTexts(tokenizer).split(tokenizer.encode(text).ids)
    assert len(parts) == len(text.encode())
    assert "".join(parts) == text
    broken = TokenTexts(tokenizer).split(tokenizer.encode("a\u00e9").ids[:2])
    assert broken == ["a", "\ufffd"], "a character that is cut off is shown as such"


def test_without_a_tokenizer_tokens_are_their_ids():
    assert TokenTexts(None).split([5, 6]) == ["[5]", "[6]"]


def test_the_last_result_of_every_set_stands_in_one_table(make_run):
    run = make_run(batches=2, every=1)
    journal = Journal(run / "evaluations.jsonl")
    split = {"reward": 0.5, "stderr/reward": 0.1, "level=hard/reward": 0.25, "level=hard/prompts": 4.0}
    journal.append(2, metrics={f"eval/hard-ones/{name}": value for name, value in split.items()}, name="hard-ones")
    journal.append(2, metrics={"eval/mean/reward": 0.4, "eval/mean/stderr/reward": 0.05}, name="mean")
    journal.close()
    lines = [line.split() for line in printed(load_run(run), action=view_run, width=200).splitlines()]
    assert ["hard-ones", "0.5000", "+-", "0.1960"] in lines
    assert ["hard-ones,", "level=hard", "0.25", "4"] in lines
    assert ["mean", "0.4000", "+-", "0.0980"] in lines


def test_a_run_that_only_evaluated_shows_the_samples_of_its_first_set(make_run, capsys):
    run = make_run(batches=0)
    with pytest.raises(SystemExit) as end:
        app(["view", str(run), "--count", "1", "--no-report"])
    assert not end.value.code
    assert "eval-held-out-000000, sample" in capsys.readouterr().out


def test_metrics_of_evaluations_are_charted(run_dir):
    run = load_run(run_dir)
    text = printed(run, action=view_run, metrics=["eval/held-out/reward"])
    assert "eval/held-out/reward" in text
    steps, values = run.curve("eval/held-out/reward")
    assert (steps, values) == run.evaluation_curve("held-out") and len(steps) > 1
    with pytest.raises(
        ConfigError, match=r"metrics are .*eval/held-out/reward.*; did you mean 'eval/held-out/reward'\?$"
    ):
        printed(run, action=view_run, metrics=["eval/held-out/rewrd"])


def test_files_that_were_swapped_under_each_others_name_are_refused(make_run):
    run = make_run(batches=2, every=1)
    first, second = sorted((run / "samples").glob("batch-*.parquet"))[:2]
    first.rename(aside := first.with_name("aside"))
    second.rename(first)
    aside.rename(second)
    steps = [int(file.stem.rpartition("-")[2]) for file in (first, second)]
    for step, other in (steps, reversed(steps)):
        with pytest.raises(
            ConfigError, match=f"must contain samples of step {step}, but contains samples of step {other}:"
        ):
            printed(load_run(run), step=step)
