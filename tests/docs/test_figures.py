"""Generated pictures match the code."""

import re

import pytest

from tests.docs.pages import ROOT


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import figures

    return figures


def test_the_pictures_are_what_the_script_draws(figures):
    for name, draw in figures.PICTURES.items():
        assert (figures.IMAGES / name).read_text() == draw(), "run python docs/figures.py"


def test_the_picture_shows_every_package_above_its_imports(figures):
    imports = figures.package_imports()
    assert set(imports) == {file.parent.name for file in ROOT.glob("packages/*/pyproject.toml")}
    boxes = re.findall(r'y="([\d.]+)"[^>]*font-weight="600"[^>]*>([\w-]+)<', figures.packages_picture())
    heights = {package: float(y) for y, package in boxes}
    for package, others in imports.items():
        assert all(heights[package] < heights[other] for other in others)


def test_an_import_is_drawn_unless_another_one_implies_it(figures):
    imports = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert figures.direct_imports(imports) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert figures.ranks(imports) == {"a": 2, "b": 1, "c": 0}
