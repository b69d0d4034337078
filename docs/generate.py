"""Writes docs/configuration.md and tables of docs/plugins/algorithms.md out of docstrings: python docs/generate.py"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from plasmid import AdvantageInputs, BatchTable, LossInputs, Needs, TokenLoss, ValueInputs
from plasmid.config.run import RunConfig
from plasmid.plugins.registry import Classes, installed, load_plugins, origin
from plasmid_cli.display.settings_help import recipe_tables, setting_rows
from plasmid_training.head.kept_tokens import KeptTokens
from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "configuration.md"
ALGORITHMS_PAGE = ROOT / "docs" / "plugins" / "algorithms.md"
FIELDS_BEGIN = "<!-- The tables up to the next comment are written by `python docs/generate.py` out of docstrings. -->"
FIELDS_END = "<!-- end of the tables -->"
ALGORITHM_DATA = (AdvantageInputs, LossInputs, BatchTable, KeptTokens, TokenLoss, ValueInputs, Needs)
HEAD = """\
# Configuration

<!-- Written by `python docs/generate.py` out of the docstrings in the code; edit those. -->

A recipe is a TOML file. It is resolved in four steps:

1. Recipes are merged from left to right. Tables are merged key by key; lists are replaced; a table with another `kind`
   starts anew. The first one names the run, unless `recipe` is set.
2. `key=value` overrides are applied. The value is TOML; what is no TOML is taken as text. A number reaches into a list.
   Integers have at most 64 bits, and tables and lists lie at most 40 deep within each other, here as in files.
3. The component of each slot is looked up by its `kind`. What is installed is listed by `rl plugins`.
4. Everything is checked, before any process is started. All mistakes are told at once, one line each.

```bash
rl train recipes/smollm2-sums-cpu.toml trainer.lr=2e-6 'filters=[{kind="nonzero-spread"}]' --dry-run
rl train recipes/smollm2-sums-cpu.toml rewards.0.pick=first --dry-run
```

`--dry-run` goes through everything that `rl train` checks before it starts a process (files, data, packages, the run's
folder, the checkpoint of `--resume`), then prints the resolved configuration as a recipe, and what its numbers come to.
Where the command would be refused, so is the dry run, with the same line. `rl options run` and `rl options fsdp` print
a part of this page, for what you have installed. Every run writes its resolved configuration into `config.json`.

Whatever `rl` prints, in its own lines and in those of libraries, control characters and invisible ones (escape
sequences, bidirectional overrides, zero width) are written out as `\\x1b` or `\\u202e`: names and texts of other
people's files cannot command a terminal.

A minimal recipe; everything else has a default:

```toml minimal.toml
model.path = "models/SmolLM2-135M-Instruct"
data.path = "recipes/data/sums-train.jsonl"
trainer.kind = "fsdp"
rollout.kind = "hf"
algorithm.kind = "grpo"
rewards = [{ kind = "number" }]
```

```bash
rl train minimal.toml --dry-run
```
"""
SHOWN_TWICE = {"sampling": "The keys are those of [`[sampling]`](#sampling)."}
"""Tables inside tables that are told once."""


def page() -> str:
    """The text of the page. Components of packages outside of this repository are left out."""
    slots = {slot: _ours(classes) for slot, classes in installed(load_plugins()).items()}
    parts = [HEAD, *_tables(slots), *_converters(slots)]
    return "\n".join(parts)


def algorithms_page() -> str:
    """The page about algorithms of one's own, with the fields of what they get and return."""
    head, _, rest = ALGORITHMS_PAGE.read_text(encoding="utf-8").partition(FIELDS_BEGIN)
    parts = [f"### {cls.__name__}\n\n{_doc(cls)}\n\n{_fields(cls)}" for cls in ALGORITHM_DATA]
    return f"{head}{FIELDS_BEGIN}\n\n" + "\n".join(parts) + f"\n{FIELDS_END}{rest.partition(FIELDS_END)[2]}"


def _fields(cls: type) -> str:
    """A table of the fields, properties and methods of a dataclass, from its source."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    lines = ["| name | type | meaning |", "|---|---|---|"]
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            text = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
            name, type_ = ast.unparse(node.target), ast.unparse(node.annotation)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.returns is not None:
            if any(ast.unparse(one) == "staticmethod" for one in node.decorator_list):
                continue
            given = ", ".join(arg.arg for arg in node.args.args[1:])
            name = node.name if node.decorator_list else f"{node.name}({given})"
            text, type_ = ast.get_docstring(node) or "", ast.unparse(node.returns)
        else:
            continue
        if not text.startswith("Gives `"):
            lines.append(f"| `{name}` | {_code(type_)} | {_text(text).replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _ours(classes: Classes) -> Classes:
    packages = ROOT / "packages"
    return {kind: cls for kind, cls in sorted(classes.items()) if Path(inspect.getfile(cls)).is_relative_to(packages)}


def _tables(slots: Mapping[str, Classes]) -> Iterator[str]:
    """One section for each table, in the order of `RunConfig`; the keys outside of tables come first."""
    plain = recipe_tables()
    yield "## Keys outside of tables\n"
    keys = [name for name in RunConfig.model_fields if name not in plain and name not in slots]
    yield _table(row for row in setting_rows(RunConfig) if row[0] in keys)
    for name, field in RunConfig.model_fields.items():
        if name in keys:
            continue
        many = "tuple" in str(field.annotation)
        yield f"## {name}\n"
        yield f"`{'[[' if many else '['}{name}{']]' if many else ']'}` {_text(field.description or '')}\n"
        if name in plain:
            yield _settings(plain[name])
        else:
            yield from _components(name, slots[name])
        if name == "workflow":
            yield "## tools\n"
            yield "What a policy may call, listed under `[[workflow.tools]]`.\n"
            yield from _components("tools", slots["tools"])
            yield "## environments\n"
            yield "Where a policy may act, chosen by `[workflow.environment] kind = ...`.\n"
            yield from _components("environments", slots["environments"])


def _converters(slots: Mapping[str, Classes]) -> Iterator[str]:
    yield "## converters\n"
    yield "Layouts of `rl convert`. Their settings are given as `from.key=value` and `to.key=value`.\n"
    yield from _components("converters", slots["converters"])


def _components(slot: str, classes: Classes) -> Iterator[str]:
    for kind, cls in classes.items():
        yield f"### {slot}/{kind}\n"
        yield f"{_doc(cls)} (From {origin(cls).split(' ')[0]}.)\n"
        yield _settings(cls)


def _settings(cls: type[BaseModel]) -> str:
    shown = [row for row in setting_rows(cls) if not any(row[0].startswith(f"{key}.") for key in SHOWN_TWICE)]
    return _table((key, *row, f"{meaning} {SHOWN_TWICE.get(key, '')}") for key, *row, meaning in shown)


def _table(lines: Iterator[tuple[str, str, str, str]]) -> str:
    text = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, type_, default, meaning in lines:
        text.append(f"| `{key}` | {_code(type_)} | {_code(default)} | {_text(meaning).replace('|', chr(92) + '|')} |")
    return "\n".join(text) + "\n"


def _code(text: str) -> str:
    """Code in a cell of a table; words that are no value stay words."""
    return text if text in ("required", "none", "table") else f"`{text}`".replace("|", "\\|").replace("\n", "\\n")


def _doc(cls: type[BaseModel]) -> str:
    return _text((inspect.getdoc(cls) or "").split("\n")[0])


def _text(docstring: str) -> str:
    """A docstring as Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(docstring.split()))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8", newline="\n")
    ALGORITHMS_PAGE.write_text(algorithms_page(), encoding="utf-8", newline="\n")
