import json
import re
import shutil
import subprocess

import pytest
from plasmid_cli.reports import report
from plasmid_cli.reports.report import embed_json, report_data, thin_out, write_report
from plasmid_cli.reports.run_data import load_run

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)


def data_of(path):
    return json.loads(DATA.search(path.read_text()).group(1))


def test_the_page_holds_curves_evaluations_configuration_and_samples(run_dir, tmp_path):
    data = data_of(write_report(load_run(run_dir), tmp_path / "report.html"))
    assert data["steps"] == list(range(1, 61))
    assert len(data["metrics"]["train/kl"]) == 60
    assert data["metrics"]["train/grad_norm"][4] is None, "nan is a gap"
    assert data["evaluations"]["held-out"]["steps"] == [0, 20, 40, 60]
    assert data["config"]["algorithm"]["clip_low"] == 0.2
    sample = next(f for f in data["files"] if f["name"] == "batch-000060")["samples"][1]
    assert "".join(sample["tokens"][sample["promptTokens"] :]).endswith("<eos>")
    assert sample["components"]["format"] == 0.1
    assert len(sample["tokens"]) == len(sample["logprobs"]) == len(sample["versions"]) == len(sample["mask"])


def test_the_page_is_written_into_the_run_folder_unless_told_otherwise(make_run):
    path = make_run(batches=1)
    assert write_report(load_run(path)) == path / "report.html"


def test_the_page_needs_nothing_from_elsewhere(run_dir, tmp_path):
    page = write_report(load_run(run_dir), tmp_path / "report.html").read_text()
    code = DATA.sub("", page)
    assert re.findall(r"https?://[^\"']+", code) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"\b(src|href)\s*=|@import|url\(|fetch\(|innerHTML|outerHTML|insertAdjacentHTML|eval\(", code)
    assert "default-src 'none'" in code


def test_nothing_that_a_model_wrote_can_end_the_script_element(run_dir, tmp_path):
    page = write_report(load_run(run_dir), tmp_path / "report.html").read_text()
    assert page.count("</script>") == 2
    assert "onerror" in page, "the nasty sample is in the page"
    text = "</script><!-- <script> & \u2028"
    assert json.loads(embed_json({"a": text})) == {"a": text}
    assert not set("<>&\u2028") & set(embed_json({"a": text}))


def test_large_runs_are_subsampled_and_the_page_says_so(run_dir, monkeypatch):
    monkeypatch.setattr(report, "NUM_POINTS", 20)
    monkeypatch.setattr(report, "NUM_FILES", 8)
    monkeypatch.setattr(report, "NUM_SAMPLES_PER_FILE", 5)
    monkeypatch.setattr(report, "NUM_TOKENS", 30)
    data = report_data(load_run(run_dir))
    assert data["steps"][0] == 1 and data["steps"][-1] == 60 and len(data["steps"]) == 20
    names = [f["name"] for f in data["files"]]
    assert len(names) == 8 and names[0] == "batch-000001" and "batch-000060" in names
    assert {len(f["samples"]) for f in data["files"]} == {3, 5}
    assert data["notes"][0] == "curves show 20 of 60 batches"
    assert data["notes"][1] == "samples of 8 of 64 files"
    assert data["notes"][2] == "44 samples of the files shown are left out"
    assert data["notes"][3].endswith("samples show their first 30 tokens only")


def test_the_size_of_all_samples_is_bounded(run_dir, monkeypatch):
    monkeypatch.setattr(report, "NUM_BYTES", 150_000)
    data = report_data(load_run(run_dir))
    assert sum(len(embed_json(row)) for f in data["files"] for row in f["samples"]) < 1.1 * 150_000
    assert all(f["samples"] for f in data["files"]), "of every file at least one"


def test_thinning_keeps_both_ends():
    assert thin_out(range(5), 10) == [0, 1, 2, 3, 4]
    assert thin_out(range(101), 5) == [0, 25, 50, 75, 100]


def browse(page, script="", *, wait_ms=4000):
    """The page as a headless browser leaves it, after a script that a test appends."""
    if script:
        page.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--virtual-time-budget={wait_ms}", "--dump-dom"]
    done = subprocess.run([BROWSER, *flags, page.as_uri()], capture_output=True, text=True, timeout=120)
    return done.stdout


@pytest.mark.skipif(BROWSER is None, reason="needs chromium to look at the report")
def test_a_browser_draws_the_page_and_runs_nothing_that_a_model_wrote(run_dir, tmp_path):
    page = write_report(load_run(run_dir), tmp_path / "report.html")
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
