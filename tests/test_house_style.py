"""Style rules that a linter cannot check: sizes, documented settings and hooks, ASCII, no paths of one machine."""

import ast
import inspect
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import grimp
import pytest
from plasmid.components import Settings
from plasmid.config.run import RunConfig
from plasmid.plugins import hookspecs
from plasmid.plugins.registry import find_components, load_plugins
from plasmid.settings.field_docs import field_docs
from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
TRACKED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
).stdout
FILES = sorted(path for line in TRACKED.splitlines() if (path := ROOT / line).is_file())
SOURCES = [path for path in FILES if path.suffix == ".py" and path.is_relative_to(ROOT / "packages")]
TEXTS = [path for path in FILES if path.suffix not in {".png", ".parquet", ".safetensors", ".gz"}]
HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, "plasmid_spec")]
INSTALLED = [cls for slot in find_components(load_plugins()).values() for cls in slot.values()]
OURS = [cls for cls in INSTALLED if Path(inspect.getfile(cls)).is_relative_to(ROOT / "packages")]
MACHINE_PATH = re.compile(r"(^|[^a-zA-Z0-9_.])/(work|farm|root|home)/[a-z]")
HOSTS = re.compile(r"files\.pythonhosted|download\.pytorch|pypi\.org/simple|registry\.npmjs")


NOT_FUNCTIONS = re.compile(
    "advanced|again|alone|arrow|ask(ed)?|conclude|described|dropped(_by)?|explained|failed|finished|gone|guarded|"
    "heard|held|hidden|installed|kept|labelled|learned|leave|limited|located|lost|mapped|meet|misfits|mistakes|"
    "named|opened|opening(_cluster)?|polling|printable|queued|quoted|raised|ready|received|recognised|recomputed|"
    "recording|relocated|reporting_hangs|said|saved|shifted|shortened|shown|switched_off|timed|together|told|trained|"
    "truth|unstarted|untrained|vacate|written"
)
"""Participles, adjectives and metaphors that were names of functions; functions are verbs, or name what they return."""
NOT_CLASSES = re.compile(
    "Asking|Begun|Closed|Kept|Lane|Late|Moved|Offloaded|Running|Started|Taken|TooLong|Upstream|Writing"
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def models_in(cls: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a settings class and all settings classes inside it."""
    yield cls
    for field in cls.model_fields.values():
        for inner in classes_in(field.annotation):
            if inner is not cls:
                yield from models_in(inner)


def classes_in(annotation: object) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from classes_in(argument)


SETTINGS = sorted({m for cls in (RunConfig, *OURS) for m in models_in(cls)}, key=lambda m: (m.__module__, m.__name__))


def test_there_is_something_to_check():
    assert len(SOURCES) > 40
    assert len(OURS) > 10
    assert {"LoopConfig", "SamplingParams", "EvalConfig", "GGUF"} <= {cls.__name__ for cls in SETTINGS}
    assert len(HOOKS) > 9


def test_a_file_is_one_concept_and_a_function_fits_the_screen():
    assert not [line for path in SOURCES for line in wrong_shapes(path)]


def wrong_shapes(path: Path) -> Iterator[str]:
    """Yield what is too large or undocumented in a source file."""
    text = path.read_text()
    tree = ast.parse(text)
    if text.count("\n") > 400:
        yield f"{name(path)}: split this file: one concept per file"
    if path.stem in {"utils", "helpers", "misc", "common"}:
        yield f"{name(path)}: name the file after what it holds"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 60:
            yield f"{name(path)}: split {node.name}"
    if path.name == "__init__.py":
        kinds = ast.Import | ast.ImportFrom | ast.Assign | ast.Expr
        for_types = [
            node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        nodes = [*(node for node in tree.body if node not in for_types), *chain(*(node.body for node in for_types))]
        if not all(isinstance(node, kinds) for node in nodes):
            yield f"{name(path)}: an __init__.py only re-exports"
    elif tree.body and not ast.get_docstring(tree):
        yield f"{name(path)}: say in one or two sentences what the file is for"


def test_no_folder_of_source_has_more_than_a_dozen_files():
    files = Counter(path.parent for path in SOURCES)
    assert not {name(folder): count for folder, count in files.items() if count > 12}, "group them by subject"


def test_no_cycle_between_the_folders_of_a_package():
    packages = sorted(path.name for path in (ROOT / "packages").glob("*/src/*") if (path / "__init__.py").is_file())
    assert "plasmid" in packages and len(packages) > 10
    for package in packages:
        list(TopologicalSorter(folder_imports(package)).static_order())  # raises CycleError with the folders


def folder_imports(package: str) -> dict[str, set[str]]:
    """Return which folders of a package each of its folders imports. Leaves out imports for type checkers."""
    graph = grimp.build_graph(package, cache_dir=None, exclude_type_checking_imports=True)
    folders = {child for child in graph.find_children(package) if graph.find_children(child)}
    for folder in folders:
        graph.squash_module(folder)
    return {folder: folders & graph.find_modules_directly_imported_by(folder) - {folder} for folder in folders}


def test_every_setting_is_documented():
    found = {cls: field_docs(cls) for cls in SETTINGS}
    undocumented = [
        f"{cls.__name__}.{n}"
        for cls, docs in found.items()
        for n in cls.model_fields
        if n != "kind" and not docs.get(n)
    ]
    assert not undocumented, "add a docstring under these"
    assert not [cls.__name__ for cls in SETTINGS if not cls.__doc__], "say in one sentence what they are"


def test_settings_are_closed_and_immutable():
    for cls in SETTINGS:
        assert cls.model_config.get("extra") == "forbid", cls
        assert cls.model_config.get("frozen") is True, cls
        mutable = [n for n, f in cls.model_fields.items() if isinstance(f.default, list | dict | set)]
        assert not mutable, f"use tuples in {cls}"


def test_components_are_settings():
    assert all(issubclass(cls, Settings) for cls in OURS)


def test_hooks_call_the_number_of_a_batch_batch():
    assert not [hook for hook in HOOKS if "step" in inspect.signature(getattr(hookspecs, hook)).parameters]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented(hook):
    assert inspect.getdoc(getattr(hookspecs, hook))
    signature = f"{hook}({', '.join(inspect.signature(getattr(hookspecs, hook)).parameters)})"
    assert f"## `{signature}`" in (ROOT / "docs/plugins/hooks.md").read_text(), f"document {signature}"


def test_no_hook_is_documented_that_does_not_exist():
    documented = re.findall(r"^## `(\w+)\(", (ROOT / "docs/plugins/hooks.md").read_text(), flags=re.MULTILINE)
    assert documented == HOOKS


def test_text_is_ascii():
    found = [
        name(p) for p in TEXTS if p.suffix in {".py", ".toml", ".md", ".yaml", ".cfg"} and not p.read_bytes().isascii()
    ]
    assert not found, "write it with ASCII, or as an escape"


def test_no_file_names_a_path_or_host_of_one_machine():
    found = []
    for path in TEXTS:
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line) or HOSTS.search(line):
                found.append(f"{name(path)}:{number}: {line.strip()[:100]}")
    assert not found


def test_every_package_carries_its_types_and_its_entry_point():
    import tomllib

    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        (package,) = (p for p in (file.parent / "src").iterdir() if p.is_dir() and p.name.startswith("plasmid"))
        assert (package / "py.typed").is_file()
        assert project["description"] and project["requires-python"] == ">=3.11"
        for target in project.get("entry-points", {}).get("plasmid", {}).values():
            assert (file.parent / "src" / Path(*target.split("."))).with_suffix(".py").is_file()


@pytest.mark.parametrize("package", sorted(path.name for path in (ROOT / "packages").iterdir()))
def test_functions_are_named_by_verbs_and_classes_by_nouns(package):
    found = []
    for path in (path for path in SOURCES if path.is_relative_to(ROOT / "packages" / package)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                denied = NOT_CLASSES if isinstance(node, ast.ClassDef) else NOT_FUNCTIONS
                is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
                if denied.fullmatch(node.name.lstrip("_")) and not is_property:
                    found.append(f"{name(path)}:{node.lineno}: {node.name}")
    assert found == []
