"""The generated page of settings is up to date and has a section for every table of a recipe."""

from pathlib import Path

from plasmid.config.run import RunConfig

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_matches_the_code(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import generate

    page = generate.page()
    assert generate.PAGE.read_text() == page, "run python docs/generate.py"
    assert all(f"\n## {table}\n" in page for table in RunConfig.model_fields if table not in ("plugins", "recipe"))
