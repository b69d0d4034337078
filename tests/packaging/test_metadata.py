"""What a package index shows of every distribution, and that plasmid[all] requires all of them."""

import re
import tomllib
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, *sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))]
PROJECTS = {
    project["name"]: project
    for project in (tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS)
}


def wanted(name: str, extras: set[str]) -> list[Requirement]:
    """Return what a distribution of this repository requires with some extras."""
    project = PROJECTS[name]
    optional = project.get("optional-dependencies", {})
    texts = [*project.get("dependencies", ()), *(text for extra in extras for text in optional[extra])]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_package_metadata_describes_the_package(folder):
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert 10 <= len(project["description"]) <= 120 and project["description"].endswith(".")
    assert project["license"] == "Apache-2.0" and project["requires-python"] == ">=3.11"
    assert len(project["keywords"]) >= 3
    kinds = {classifier.partition(" :: ")[0] for classifier in project["classifiers"]}
    assert kinds >= {"Development Status", "Intended Audience", "Programming Language", "Topic", "Typing"}


def published_readme(folder: Path, urls: dict[str, str] | None = None) -> str:
    """Return the README in the metadata of a distribution."""
    metadata = ProjectMetadata(str(folder), PluginManager())
    if urls is not None:
        metadata.config["project"]["urls"] = urls
    return metadata.core.readme


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_published_readmes_have_no_relative_links(folder):
    """An index shows the page alone: relative links would be broken."""
    text = published_readme(folder)
    name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
    assert text.startswith("# ") and name in text.splitlines()[0].lower()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert all(link.startswith(("https://", "#")) for link in links)


def test_the_readme_on_an_index_shows_pictures_of_the_repository():
    text = published_readme(ROOT, {"Repository": "https://example.org/plasmid"})
    for kind, path in re.findall(r"https://example\.org/plasmid/(blob|raw)/main/([^)#]+)", text):
        assert (ROOT / path).exists() and (kind == "raw") == path.endswith(".svg")
    written = (ROOT / "README.md").read_text()
    assert text.count("![") == written.count("![") == 3
    assert text.count("](") == written.count("](")


ALONE = {"plasmid-vllm"}
"""vLLM pins another torch than SGLang, so that no environment can have both."""
LEFT_OUT = {"vllm", "mlflow", "trackio"}
"""Extras that are not part of `all`: both trackers require web servers and pin their dependencies."""


def test_all_is_all():
    found: dict[str, set[str]] = {}
    todo = [("plasmid", {"all"})]
    while todo:
        name, extras = todo.pop()
        if name in found and extras <= found[name]:
            continue
        found.setdefault(name, set()).update(extras)
        todo += [(r.name, set(r.extras)) for r in wanted(name, extras) if r.name in PROJECTS]
    assert found.keys() == PROJECTS.keys() - ALONE
    lacking = {
        name: extras
        for name, project in PROJECTS.items()
        if name in found and (extras := set(project.get("optional-dependencies", {})) - found[name] - LEFT_OUT)
    }
    assert lacking == {}


def test_packages_of_this_repository_pin_each_other():
    for name, project in PROJECTS.items():
        for requirement in wanted(name, set(project.get("optional-dependencies", {}))):
            if requirement.name in PROJECTS and requirement.name != name:
                assert str(requirement.specifier) in ("", f"=={PROJECTS[requirement.name]['version']}"), requirement
