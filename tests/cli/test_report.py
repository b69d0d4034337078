import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from plasmid.errors import CheckpointError
from plasmid.types import Prompt, Sample, SamplingParams, Score, StopReason
from plasmid.types.token_values import TokenValues, token_values_file
from plasmid_cli.reports import report
from plasmid_cli.reports.report import embed_json, rank_samples, report_data, subsample, write_report
from plasmid_cli.reports.run_data import load_run
from plasmid_cli.reports.view import ShownSample

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)


def halves(text):
    return np.frombuffer(base64.b64decode(text), "<f2")


def data_of(path):
    return json.loads(DATA.search(path.read_text()).group(1))


@pytest.fixture(scope="module")
def page(run_dir, tmp_path_factory):
    """The report of a finished run."""
    return write_report(load_run(run_dir), tmp_path_factory.mktemp("report") / "report.html")


def test_the_page_holds_curves_evaluations_configuration_and_samples(page):
    data = data_of(page)
    assert data["steps"] == list(range(1, 61))
    assert len(data["metrics"]["train/kl"]) == 60
    assert data["metrics"]["train/grad_norm"][4] is None, "nan is a gap"
    assert data["evaluations"]["held-out"]["steps"] == [0, 20, 40, 60]
    assert data["config"]["algorithm"]["clip_low"] == 0.2
    sample = next(f for f in data["files"] if f["name"] == "batch-000060")["samples"][1]
    assert sample["text"].endswith("<eos>") and sum(sample["sizes"]) == len(sample["text"])
    assert data["prompts"][sample["prompt"]]["text"].startswith("what is ")
    assert sample["components"]["format"] == 0.1
    assert len(sample["sizes"]) == len(halves(sample["logprobs"]))
    assert (
        sum(count for _, count in sample["versions"])
        == sum(count for _, count in sample["mask"])
        == len(sample["sizes"])
    )


def test_the_report_is_written_into_the_run_folder_by_default(make_run):
    path = make_run(batches=1)
    assert write_report(load_run(path)) == path / "report.html"


def test_the_page_needs_nothing_from_elsewhere(page):
    code = DATA.sub("", page.read_text())
    assert re.findall(r"https?://[^\"']+", code) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"\b(src|href)\s*=|@import|url\(|fetch\(|innerHTML|outerHTML|insertAdjacentHTML|eval\(", code)
    assert "default-src 'none'" in code


def test_nothing_that_a_model_wrote_can_end_the_script_element(page):
    written = page.read_text()
    assert written.count("</script>") == 2
    assert "onerror" in written, "the nasty sample is in the page"
    text = "</script><!-- <script> & \u2028"
    assert json.loads(embed_json({"a": text})) == {"a": text}
    assert not set("<>&\u2028") & set(embed_json({"a": text}))


def test_reports_of_large_runs_are_subsampled_with_a_note(run_dir, monkeypatch):
    monkeypatch.setattr(report, "NUM_POINTS", 20)
    monkeypatch.setattr(report, "NUM_FILES", 8)
    monkeypatch.setattr(report, "NUM_SAMPLES", 40)
    monkeypatch.setattr(report, "NUM_TOKENS", 10)
    data = report_data(load_run(run_dir))
    assert data["steps"][0] == 1 and data["steps"][-1] == 60 and len(data["steps"]) == 20
    names = [f["name"] for f in data["files"]]
    assert len(names) == 8 and names[0] == "batch-000001" and "batch-000060" in names
    assert {len(f["samples"]) for f in data["files"]} == {3, 5}
    assert data["notes"][0] == "curves show 20 of 60 batches"
    assert data["notes"][1] == "samples of 8 of 64 files"
    assert data["notes"][2] == "44 samples of these files are omitted: neither best, worst, median nor failed"
    assert data["notes"][3].endswith("completions only show their first and last 5 tokens")
    long = next(s for f in data["files"] for s in f["samples"] if s["cut"])
    assert len(long["sizes"]) == len(halves(long["logprobs"])) == 10 and long["text"].endswith("<eos>")


def scored(*rewards):
    prompt = Prompt(id="p", token_ids=np.zeros(1, np.int32))
    arrays = {"token_ids": np.zeros(2, np.int32), "loss_mask": np.ones(2, bool), "rollout_logprobs": np.zeros(2)}
    facts = {
        "rollout_id": "0",
        "group_id": 0,
        "prompt_id": "p",
        "text": "",
        "versions": (),
        "sampling": SamplingParams(),
    }
    made = [
        Sample(
            id=str(i),
            **arrays,
            **facts,
            stop_reason=StopReason.STOP,
            score=None if r is None else Score(value=r),
        )
        for i, r in enumerate(rewards)
    ]
    return [ShownSample(file="f", prompt=prompt, sample=sample) for sample in made]


def test_the_best_worst_median_and_failed_samples_of_a_batch_come_before_all_others():
    samples = scored(*[0.5 + i / 1000 for i in range(100)], 9.0, -3.0, None)
    chosen = rank_samples(samples)
    assert chosen[:4] == [(100, "best"), (101, "worst"), (49, "median"), (102, "failed")]
    assert chosen[4:6] == [(99, "best"), (0, "worst")]
    assert sorted(place for place, _ in chosen) == list(range(103)), "of a small batch all are shown"


def test_the_page_has_what_training_made_of_each_token(make_run):
    path = make_run(batches=2)
    run = load_run(path)
    one = report.read_samples_of(run, "batch-000002")[0].sample
    start, length = int(one.loss_mask.argmax()), len(one.token_ids)
    ratio = np.where(one.loss_mask, np.linspace(0.5, 1.5, length), 0).astype(np.float32)
    columns = {"advantage": one.loss_mask * np.float32(1.25), "ratio": ratio, "clipped": (ratio > 1.2) * np.float32(1)}
    values = TokenValues(sample_ids=(one.id,), offsets=np.array([0, length]), columns=columns)
    values.write(token_values_file(path, 2, 0))
    found = next(f for f in report_data(run)["files"] if f["name"] == "batch-000002")["samples"]
    assert found[0]["advantage"] == 1.25, "one number where all tokens have the same"
    assert halves(found[0]["ratio"]) == pytest.approx(ratio[start:], rel=1e-3)
    assert sum(value * count for value, count in found[0]["clipped"]) == sum(ratio > 1.2)
    assert "advantage" not in found[1], "of other samples nothing is stored"


@pytest.mark.parametrize("damage", ["compressed", "cut", "pickle", "length"])
def test_a_file_of_token_values_of_others_is_refused(make_run, damage):
    path = make_run(batches=1)
    file = token_values_file(path, 1, 0)
    file.parent.mkdir()
    good = {"sample_ids": np.array(["a"]), "offsets": np.array([0, 2]), "ratio": np.ones(2, np.float32)}
    if damage == "compressed":
        np.savez_compressed(file, **good)
    elif damage == "pickle":
        np.savez(file, **(good | {"sample_ids": np.array([print], object)}), allow_pickle=True)
    else:
        np.savez(file, **(good | ({"ratio": np.ones(3, np.float32)} if damage == "length" else {})))
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"batch-000001-trainer-0.npz: not a file of token values: "):
        report_data(load_run(path))


def test_the_size_of_all_samples_is_bounded(run_dir, monkeypatch):
    monkeypatch.setattr(report, "NUM_BYTES", 150_000)
    data = report_data(load_run(run_dir))
    assert sum(len(embed_json(row)) for f in data["files"] for row in f["samples"]) < 1.1 * 150_000
    assert all(f["samples"] for f in data["files"]), "of every file at least one"


def test_thinning_keeps_both_ends():
    assert subsample(range(5), 10) == [0, 1, 2, 3, 4]
    assert subsample(range(101), 5) == [0, 25, 50, 75, 100]


def browse(page, script="", *, wait_ms=4000):
    """Return the page as a headless browser leaves it, after a script that a test appends."""
    if script:
        page.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--virtual-time-budget={wait_ms}", "--dump-dom"]
    done = subprocess.run([BROWSER, *flags, page.as_uri()], capture_output=True, text=True, timeout=120)
    return done.stdout


@pytest.mark.skipif(BROWSER is None, reason="needs chromium to look at the report")
def test_a_browser_draws_the_page_and_runs_nothing_that_a_model_wrote(page):
    dom = browse(
        page,
        "addEventListener('error', event => document.body.dataset.error = event.message);"
        "document.querySelectorAll('select')[2].value = 'version';"
        "document.querySelectorAll('select')[2].dispatchEvent(new Event('change'));"
        "const s = document.querySelector('svg'), b = s.getBoundingClientRect();"
        "s.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + b.width / 2, clientY: b.top + 9}));"
        "document.body.dataset.done = '1';",
    )
    assert 'data-done="1"' in dom and "data-error" not in dom
    assert "<title>sums-grpo-cpu - Plasmid run</title>" in dom
    assert dom.count("<svg") >= 14
    assert 'class="cross"' in dom and "batch 29" in dom
    assert "version 58" in dom
    assert "&lt;/script&gt;&lt;script&gt;document.title=" in dom
    assert "<img" not in DATA.sub("", dom)


SCROLL = """
addEventListener('error', event => document.body.dataset.error = event.message);
const [file] = document.querySelectorAll('select'), list = document.querySelector('.list');
file.value = 'all'; file.dispatchEvent(new Event('change'));
document.body.dataset.height = document.querySelector('.rows').offsetHeight;
list.scrollTop = 1e9;
setTimeout(() => {
  document.body.dataset.drawn = document.querySelectorAll('.row').length;
  document.body.dataset.last = [...document.querySelectorAll('.row')].at(-1).dataset.at;
  document.querySelector('.row:last-child .what').click();
  document.body.dataset.chosen = document.querySelectorAll('[aria-current=true]').length;
}, 300);
"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium to look at the report")
def test_a_browser_scrolls_through_ten_thousand_samples_and_draws_only_those_in_sight(make_run, tmp_path):
    data = report_data(load_run(make_run(batches=1)))
    shown = next(f for f in data["files"] if f["name"].startswith("batch-"))
    shown["samples"] = [{**shown["samples"][i % 16], "id": str(i)} for i in range(10_000)]
    data["files"] = [shown | {"total": 10_000}]
    page = tmp_path / "large.html"
    template = Path(report.__file__).with_name("report.html").read_text()
    page.write_text(template.replace(report.PLACEHOLDER, embed_json(data)))
    dom = browse(page, SCROLL)
    found = dict(re.findall(r'data-(error|height|drawn|last|chosen)="([^"]*)"', dom[dom.index("<body") :][:400]))
    assert found["height"] == "560000" and found["last"] == "9999" and found["chosen"] == "1"
    assert int(found["drawn"]) < 40 and "error" not in found
