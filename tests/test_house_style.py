"""The house style that a linter cannot check: sizes, documented settings and hooks, ASCII, no paths of one machine."""

import ast
import inspect
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from plasmid.components import Settings
from plasmid.config.run import RunConfig
from plasmid.plugins import hookspecs
from plasmid.plugins.registry import installed, load_plugins
from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
TRACKED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
).stdout
FILES = sorted(path for line in TRACKED.splitlines() if (path := ROOT / line).is_file())
SOURCES = [path for path in FILES if path.suffix == ".py" and path.is_relative_to(ROOT / "packages")]
TEXTS = [path for path in FILES if path.suffix not in {".png", ".parquet", ".safetensors", ".gz"}]
HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, "plasmid_spec")]
INSTALLED = [cls for slot in installed(load_plugins()).values() for cls in slot.values()]
OURS = [cls for cls in INSTALLED if Path(inspect.getfile(cls)).is_relative_to(ROOT / "packages")]
MACHINE_PATH = re.compile(r"(^|[^a-zA-Z0-9_.])/(work|farm|root|home)/[a-z]")
HOSTS = re.compile(r"files\.pythonhosted|download\.pytorch|pypi\.org/simple|registry\.npmjs")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def models_in(cls: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A settings class and all settings classes inside it."""
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


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_is_one_concept_and_a_function_fits_the_screen(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert text.count("\n") <= 400, "split this file: one concept per file"
    assert path.stem not in {"utils", "helpers", "misc", "common"}, "name the file after what it holds"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"split {node.name}"
    if path.name == "__init__.py":
        kinds = ast.Import | ast.ImportFrom | ast.Assign | ast.Expr
        assert all(isinstance(node, kinds) for node in tree.body), "an __init__.py only re-exports"
    elif tree.body:
        assert ast.get_docstring(tree), "say in one or two sentences what the file is for"


def test_no_folder_of_source_has_more_than_a_dozen_modules():
    modules = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert not {name(folder): count for folder, count in modules.items() if count > 12}, "group them by subject"


@pytest.mark.parametrize("cls", SETTINGS, ids=lambda cls: cls.__name__)
def test_every_setting_is_documented(cls):
    undocumented = [n for n, field in cls.model_fields.items() if n != "kind" and not field.description]
    assert not undocumented, f"add a docstring under {undocumented}"
    assert cls.__doc__, f"say in one sentence what {cls.__name__} is"


@pytest.mark.parametrize("cls", SETTINGS, ids=lambda cls: cls.__name__)
def test_settings_are_closed_and_immutable(cls):
    assert cls.model_config.get("extra") == "forbid"
    assert cls.model_config.get("frozen") is True
    mutable = (list, dict, set)
    assert not [n for n, f in cls.model_fields.items() if isinstance(f.default, mutable)], "use tuples"


def test_components_are_settings():
    assert all(issubclass(cls, Settings) for cls in OURS)


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
