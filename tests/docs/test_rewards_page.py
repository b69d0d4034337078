"""Every block of docs/plugins/rewards.md works, in the order of the page."""

import re

import pytest
from plasmid import load_config
from plasmid.errors import ConfigError, PlasmidError

from tests.docs.pages import ROOT, Reader
from tests.docs.pages import blocks as blocks_of

PAGE = ROOT / "docs" / "plugins" / "rewards.md"


def blocks() -> dict[str, str]:
    """Return the text of the blocks that have a name."""
    return {block.name: block.text for block in blocks_of(PAGE) if block.name}


def check(printed: dict[str, str]) -> None:
    """Check that the outputs match the page."""
    assert "6 passed" in printed["python -m pytest test_my_reward.py"]
    assert "Difference to the target at which half" in printed["rl options closeness --plugin ./my_reward.py"]
    assert "closeness.difference" in printed["rl view runs/look --order best"]
    assert len(printed["python rescore.py"].splitlines()) == 2 * 2 * 4  # batches, prompts, samples of `SMALL`
    assert "plasmid-reward-closeness 0.1.0" in printed["rl plugins"]


@pytest.mark.long
def test_the_page_works_from_top_to_bottom(checkout):
    reader = Reader(checkout, in_one_process=True)
    reader.read(PAGE)
    check(reader.printed)


@pytest.mark.long
def test_the_page_works_exactly_as_written(checkout):
    reader = Reader(checkout, in_one_process=False)
    reader.read(PAGE)
    check(reader.printed)


def test_the_error_on_the_page_matches_the_code(checkout, monkeypatch):
    found = blocks()
    for name in ("my_reward.py", "closeness.toml"):
        (checkout / name).write_text(found[name])
    monkeypatch.chdir(checkout)
    with pytest.raises(ConfigError) as caught:
        load_config(["recipes/smollm2-sums-cpu.toml", "closeness.toml"], ["rewards.1.scal=3"])
    assert str(caught.value) + "\n" == found["error"]


@pytest.mark.parametrize(
    ("overrides", "row"),
    [
        (["rewards.1.kind='closenes'"], "`{}` | `rl plugins` lists"),
        (["plugins=['my_reward.py','other.py']"], "`{}` | paths are relative"),
        (["plugins=['./my_reward.py','./again.py']"], "`{}: ...` | uninstall one, or remove the file from `plugins`"),
    ],
)
def test_the_table_of_errors_quotes_real_messages(checkout, monkeypatch, overrides, row):
    found = blocks()
    for name, source in (("my_reward.py", "my_reward.py"), ("again.py", "my_reward.py"), ("closeness.toml",) * 2):
        (checkout / name).write_text(found[source])
    monkeypatch.chdir(checkout)
    with pytest.raises(PlasmidError) as caught:
        load_config(["recipes/smollm2-sums-cpu.toml", "closeness.toml"], overrides)
    said = re.split("; installed are|: plasmid_plugin", str(caught.value))[0].replace("other.py", "my_reward.py")
    assert row.format(said) in PAGE.read_text()
