"""Every block of every page works, in the order of the page, and transcripts show the real output."""

import re
import shlex
import subprocess
import tomllib

import pytest
import typer.main
from plasmid import load_config
from plasmid.components import SLOTS
from plasmid.config.load import validate
from plasmid.config.run import RunConfig
from plasmid.plugins.registry import find_components, load_plugins
from plasmid.settings.resume import find_changeable_settings
from plasmid_cli.commands.arguments import load
from plasmid_cli.main import cli
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_columns import SCHEMA

from tests.docs.pages import LANGUAGES, MAKE, PAGES, ROOT, Reader, blocks, matches

READ = [
    "README.md",
    "docs/quickstart.md",
    "docs/install.md",
    "docs/observability.md",
    "docs/checkpoints.md",
    "docs/clusters.md",
    "docs/converting.md",
    "docs/filters.md",
    "docs/data.md",
    "docs/debugging-rewards.md",
    "docs/evaluation.md",
    "docs/lora.md",
    "docs/megatron.md",
    "docs/sglang.md",
    "docs/python.md",
    "docs/vllm.md",
    "docs/tasks.md",
    "docs/plugins/index.md",
    "docs/plugins/data-sources.md",
    "docs/plugins/engines.md",
    "docs/plugins/filters.md",
    "docs/plugins/tools.md",
    "docs/plugins/trackers.md",
    "docs/plugins/trainers.md",
    "docs/plugins/workflows.md",
    "docs/workflows/single-turn.md",
    "docs/workflows/agents.md",
    "docs/workflows/tools.md",
    "docs/workflows/environments.md",
    "docs/workflows/functions.md",
]
LONG = set(READ) - {
    "docs/python.md",
    "docs/sglang.md",
    "docs/workflows/single-turn.md",
    "docs/workflows/functions.md",
}
"""Pages with several runs each, of parts that have quick tests of their own. A quick test checks their commands."""
FRAGMENT = "toml"
"""Languages that need no file name: parts of a recipe, whose settings are checked."""
ELSEWHERE = ("algorithms", "families", "hooks", "rewards")
READ_ELSEWHERE = {f"docs/plugins/{name}.md" for name in ELSEWHERE}
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in READ])
def test_a_page_works_from_top_to_bottom(name, checkout):
    reader = Reader(checkout, in_one_process=True)
    reader.read(ROOT / name)
    assert reader.printed


@pytest.mark.parametrize("name", READ)
def test_every_command_of_a_page_has_options_and_settings_that_there_are(name, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    parsers = typer.main.get_command(cli).commands
    for block in blocks(ROOT / name):
        if block.name and block.language != "text":
            path = checkout / block.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language in ("bash", "console"):
            for line, shown in block.commands():
                command, *arguments = shlex.split(MAKE.get(line, line).partition(" #")[0])
                arguments = ["--resume-auto" if a == "--resume=auto" else a for a in arguments]  # as `app` does
                if command == "pip":
                    return  # the plugins that it installs are unknown here
                if command != "rl" or arguments[0].startswith("-") or any(s.startswith("error: ") for s in shown):
                    continue
                if {"-h", "--help"} & set(arguments):
                    continue
                given = parsers[arguments[0]].make_context(arguments[0], arguments[1:]).params
                recipes = [item for item in given.get("items") or () if item.endswith(".toml")]
                if recipes and all((checkout / recipe).exists() for recipe in recipes):
                    load(given["items"], given["plugin"])


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", READ)
def test_a_page_works_exactly_as_written(name, checkout):
    Reader(checkout, in_one_process=False).read(ROOT / name)


def test_the_page_about_configuration_works(checkout):
    Reader(checkout, in_one_process=True).read(ROOT / "docs/configuration.md")


@pytest.mark.parametrize("name", NAMES)
def test_every_block_is_of_a_kind_that_is_run(name):
    page = ROOT / name
    found = blocks(page)
    assert len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) == 2 * len(found)
    assert all(block.name or block.language in {*LANGUAGES, FRAGMENT} for block in found)
    runs = [block for block in found if block.language not in ("text", FRAGMENT)]
    assert not runs or name in {*READ, *READ_ELSEWHERE, "docs/configuration.md"}, "add the page to READ"


@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_a_recipe_names_settings_that_there_are(name):
    slots = find_components(load_plugins())
    for block in blocks(ROOT / name):
        if block.language == FRAGMENT and not block.name:
            for table, settings in tomllib.loads(block.text).items():
                for item in settings if isinstance(settings, list) else [settings]:
                    cls = RunConfig.model_fields[table].annotation
                    if table in slots:
                        cls = slots[table][item.get("kind", SLOTS[table].default_kind)]
                    validate(cls, item, table)


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name):
    page = ROOT / name
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def anchors(text):
    """Return the anchors that GitHub creates for headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_every_picture_exists_with_title_and_description(name):
    for link in re.findall(r"!\[([^\]]+)\]\((\S+)\)", (ROOT / name).read_text()):
        text = ((ROOT / name).parent / link[1]).read_text()
        assert "<title" in text and "<desc" in text and "font-family" in text


def test_every_recipe_on_the_first_page_resolves(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    found = {block.name: block.text for block in blocks(ROOT / "README.md") if block.language == "toml"}
    for name, text in found.items():
        (checkout / name).write_text(text)
    for name in ("one-gpu.toml", "eight-gpus.toml"):
        config = load_config(["capitals.toml", name])
        assert config.placement.device == "cuda"
    assert config.placement.trainer_ranks + config.placement.engine_ranks == 8
    assert config.run.max_staleness == 1


def test_make_targets_run_the_commands_that_tests_assume():
    text = (ROOT / "Makefile").read_text()
    assert "@$(BIN)/rl train $(RECIPE) $(ARGS)" in text
    assert f"RECIPE ?= {MAKE['make train'].split()[-1]}\n" in text


def test_every_column_of_the_sample_store_is_explained_and_no_other():
    text = (ROOT / "docs/observability.md").read_text().partition("\n## Samples\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(SCHEMA.names)


def test_every_metric_of_a_run_is_explained(checkout):
    reader = Reader(checkout, in_one_process=True)
    reader.read(ROOT / "docs/observability.md", until="## Trackers")
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", (ROOT / "docs/observability.md").read_text(), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([\w/@<>.-]+)`", " ".join(row))} - {"train/<name>"}
    patterns = [re.sub(r"<\w+>", r"[\\w.@-]+", name) for name in names]
    folder = checkout / "runs/look"
    entries = [*read_journal(folder / "metrics.jsonl"), *read_journal(folder / "evaluations.jsonl")]
    unexplained = {
        name for e in entries for name in e.metrics if not any(re.fullmatch(pattern, name) for pattern in patterns)
    }
    assert not unexplained


def test_the_page_about_checkpoints_lists_what_may_change():
    text = (ROOT / "docs/checkpoints.md").read_text().partition("<!-- changeable -->")[2].partition("Any other")[0]
    found = find_components(load_plugins())
    kinds = [(slot, cls) for slot in ("trainer", "rollout", "teacher") for cls in found[slot].values()]
    keys = {
        *find_changeable_settings(RunConfig),
        *(key for slot, cls in kinds for key in find_changeable_settings(cls, f"{slot}.")),
    }
    assert sorted(re.findall(r"`([\w.]+)`", text)) == sorted(keys)


@pytest.mark.parametrize(
    ("shown", "alike"),
    [
        (["batch 1/3  reward 0.5"], True),
        (["batch 1/3  reward 0.5", "...", "done in 4:51"], True),
        (["...", "done in 1:00"], True),
        (["batch 1/3  reward 0.5", "done in 4:51"], False),
        (["batch 1/3  rewards 0.5"], False),
        (["done in 4:51", "...", "batch 1/3  reward 0.5"], False),
    ],
)
def test_a_transcript_is_compared_without_its_numbers(shown, alike):
    assert matches(shown, "batch 1/2 reward -0.25\n\nsaved x\ndone in 0:07\n") is alike


def test_design_pages_name_files_that_exist():
    """Except for the page of changes, which also names files that do not exist yet."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = {f"/{name}" for name in tracked}
    missing = []
    for page in sorted((ROOT / "docs" / "design").glob("*.md")):
        named = set(re.findall(r"`([\w/.-]+\.py)(?:::\w+)?`", page.read_text())) if page.name != "changes.md" else ()
        missing += [f"{page.name}: {name}" for name in named if not any(file.endswith(f"/{name}") for file in files)]
    assert not missing


def test_the_site_names_every_page_in_its_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", text.partition("\nnav:")[2]))
