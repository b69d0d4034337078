"""Pages about writing a component: there is one for each slot, and the messages that they quote are real."""

import asyncio
import re

import pytest
from plasmid import load_config
from plasmid.components import SLOTS
from plasmid.errors import PlasmidError
from plasmid.testing.source_contracts import encode_bytes
from plasmid_serving.remote.apis import ServerApi
from plasmid_workflows.tools.signatures import arguments_of
from plasmid_workflows.tools.toolset import run_tool

from tests.docs.pages import ROOT, blocks

PAGES = ROOT / "docs" / "plugins"
ROWS = re.findall(r"^\| .+? \| (.+?) \| .+? \|(.*?)\|$", (PAGES / "index.md").read_text(), re.MULTILINE)
WITHOUT_PAGE = {"TeacherConfig", "ServerApi"}
"""Base classes that the index names without an example."""


def test_the_index_has_a_row_with_a_page_for_every_base_class():
    found = {re.sub(r".*\.", "", name.strip("`")): link for name, link in ROWS if name.startswith("`")}
    assert found.keys() == {slot.base.__name__ for slot in SLOTS.values()} | {ServerApi.__name__}
    assert {name for name, link in found.items() if not link.strip()} == WITHOUT_PAGE


@pytest.mark.parametrize("name", ["data-sources", "filters", "tools", "trackers", "workflows", "engines", "trainers"])
def test_a_page_calls_the_contract_test_that_the_index_names(name):
    text, index = (PAGES / f"{name}.md").read_text(), (PAGES / "index.md").read_text()
    (call,) = set(re.findall(r"`(?:await )?(check_\w+)\(", index)) & set(re.findall(r"\b(check_\w+)\b", text))
    assert call.removeprefix("check_").replace("_", "-") in name.removesuffix("s")


def write(page, folder):
    """Write the files of a page."""
    for block in blocks(PAGES / f"{page}.md"):
        if block.name:
            (folder / block.name).write_text(block.text)


def quoted(page, message):
    """Return whether the table or the list of mistakes on a page has this message, up to its ``...``."""
    quotes = re.findall(r"^(?:\| |- )`(.+?)`[ :]", (PAGES / f"{page}.md").read_text().partition("## Mistakes")[2], re.M)
    return any(re.fullmatch(re.escape(quote).replace(re.escape("..."), ".*"), message) for quote in quotes)


@pytest.mark.parametrize(
    ("page", "override"),
    [
        ("data-sources", "data.kind='equatons'"),
        ("trackers", "trackers.0.metrics=[]"),
    ],
)
def test_a_page_quotes_the_message_of_a_wrong_setting(page, override, tmp_path, monkeypatch):
    write(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlasmidError) as caught:
        load_config(["train.toml"], [override])
    assert quoted(page, str(caught.value)), caught.value


def test_the_page_about_data_sources_quotes_the_messages_of_wrong_sources(tmp_path, monkeypatch):
    write("data-sources", tmp_path)
    monkeypatch.chdir(tmp_path)
    source = load_config(["train.toml"]).data
    (tmp_path / "equations.txt").write_text("1+1=2\n1+2\n")
    with pytest.raises(PlasmidError) as caught:
        source.stream(encode_bytes, seed=0)
    assert quoted("data-sources", str(caught.value)), caught.value
    code = (tmp_path / "equations.py").read_text()
    opened = "    async def open(self, context):\n        pass\n\n    def stream("
    (tmp_path / "equations.py").write_text(code.replace("    def stream(", opened, 1))
    with pytest.raises(PlasmidError) as caught:
        load_config(["train.toml"])
    assert quoted("data-sources", str(caught.value)), caught.value


def test_the_page_about_tools_quotes_the_messages_of_wrong_tools_and_calls(tmp_path, monkeypatch):
    write("tools", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tool,) = load_config(["train.toml"]).workflow.tools
    _, text = run_tool(tool, {"value": "far", "source": "km", "target": "m"})
    assert quoted("tools", text), text

    def convert(value, source: str):
        """Convert."""

    with pytest.raises(ValueError) as caught:
        arguments_of(convert)
    assert quoted("tools", str(caught.value)), caught.value


def test_the_state_of_the_filter_is_restored(tmp_path, monkeypatch):
    write("filters", tmp_path)
    monkeypatch.chdir(tmp_path)
    (keep,) = load_config(["train.toml"]).filters
    asyncio.run(keep.open(None))
    keep.restore({"dropped": 2})
    assert keep.state() == {"dropped": 2}
