"""Writes packages.svg, make-train.svg and turn-credit.svg into docs/images: python docs/figures.py

The first is drawn from the imports in `packages/`, the second from the table in benchmarks/results/make-train-cpu.md,
the third from benchmarks/results/turn-credit-cpu.json. A test fails if a picture differs from what this script would
write.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, MUTED, LINE = "#3d444d", "#7d8590", "#c9ced6"
SERIES = ("#4b7fd6", "#3f9d63", "#d99a1c")
COLORS = {"core": "#e6e8ec", "training": "#dde8fb", "engine": "#dcefe3", "other": "#fff3d6"}
GROUPS = {
    "core": "core",
    "runtime": "core",
    "models": "core",
    "cli": "core",
    "training": "training",
    "backend-fsdp": "training",
    "backend-megatron": "training",
    "serving": "engine",
    "rollout-hf": "engine",
    "rollout-sglang": "engine",
}


@functools.cache
def package_imports() -> dict[str, set[str]]:
    """Map each folder of packages/ to the folders whose modules it imports."""
    sources = {source.name: source.parents[1].name for source in sorted((ROOT / "packages").glob("*/src/plasmid*"))}
    imports: dict[str, set[str]] = {package: set() for package in sources.values()}
    for module, package in sources.items():
        for file in sorted((ROOT / "packages" / package / "src" / module).rglob("*.py")):
            names = {name.partition(".")[0] for name in _imported_names(ast.parse(file.read_text(encoding="utf-8")))}
            imports[package] |= {sources[name] for name in names if name in sources} - {package}
    return imports


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            continue  # expressions, which are most of the nodes, contain no imports
        yield from _imported_names(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def direct_imports(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Drop each import that another one implies (transitive reduction)."""

    def reachable(package: str) -> set[str]:
        return set().union(*({other} | reachable(other) for other in imports[package]))

    return {
        package: others - set().union(*(reachable(other) for other in others)) for package, others in imports.items()
    }


def ranks(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """Longest chain of imports below each package."""

    def rank(package: str) -> int:
        return 1 + max(map(rank, imports[package]), default=-1)

    return {package: rank(package) for package in imports}


def svg(width: int, height: int, title: str, description: str, body: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="14" '
        'role="img" aria-labelledby="title description">'
    )
    names = f'  <title id="title">{title}</title>\n  <desc id="description">{description}</desc>'
    background = f'  <rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, names, background, *(f"  {line}" for line in body), "</svg>", ""])


def text(x: float, y: float, words: str, color: str = INK, anchor: str = "middle", **style: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}"{extra}>{words}</text>'


def packages_picture() -> str:
    """Packages as boxes, each above everything that it imports, with the imports that no other one implies."""
    imports = package_imports()
    level = ranks(imports)
    rows = [sorted(package for package in level if level[package] == rank) for rank in range(max(level.values()) + 1)]
    width, box, gap, row_height = 980, (140, 40), 16, 96
    direct = direct_imports(imports)
    place: dict[str, tuple[float, float]] = {}
    for rank, row in enumerate(rows):
        if rank:  # each package close to what it imports: fewer lines cross
            row.sort(key=lambda package: sum(place[other][0] for other in direct[package]) / len(direct[package]))
        left = (width - len(row) * box[0] - (len(row) - 1) * gap) / 2
        for column, package in enumerate(row):
            place[package] = (left + column * (box[0] + gap), 24 + (len(rows) - 1 - rank) * row_height)
    body = []
    for package, others in sorted(direct.items()):
        for other in sorted(others):
            x1, y1 = place[package][0] + box[0] / 2, place[package][1] + box[1]
            x2, y2 = place[other][0] + box[0] / 2, place[other][1]
            body.append(
                f'<path d="M{x1:g} {y1:g}C{x1:g} {y1 + 30:g} {x2:g} {y2 - 30:g} {x2:g} {y2:g}" fill="none" '
                f'stroke="{MUTED}" stroke-width="1.4"/>'
            )
    for package, (x, y) in sorted(place.items()):
        color = COLORS[GROUPS.get(package, "other")]
        body.append(
            f'<rect x="{x:g}" y="{y:g}" width="{box[0]}" height="{box[1]}" rx="8" fill="{color}" stroke="{MUTED}"/>'
        )
        body.append(text(x + box[0] / 2, y + 25, package, font_weight="600", font_size="13"))
    height = 24 + (len(rows) - 1) * row_height + box[1] + 24
    says = "; ".join(
        f"{package} imports {', '.join(sorted(others))}" for package, others in sorted(imports.items()) if others
    )
    return svg(width, height, "The packages of Plasmid and their imports", says, body)


def learning_curves() -> dict[int, list[float]]:
    """Map each seed to its held-out rewards after 0, 5, 10, ... batches."""
    page = (ROOT / "benchmarks/results/make-train-cpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| ([\d., ]+) \|", page, re.MULTILINE)
    return {int(seed): [float(value) for value in values.split(",")] for seed, values in rows}


def curve_picture() -> str:
    """Held-out reward of `make train` over batches, one line a seed."""
    curves = sorted(learning_curves().items())
    lines = [(f"seed {seed}", color, curve) for (seed, curve), color in zip(curves, SERIES, strict=True)]
    says = "; ".join(f"{label}: {', '.join(map(str, curve))}" for label, _, curve in lines)
    title = "Held-out reward of make train, three seeds"
    return reward_chart(title, f"Every 5 batches. {says}.", lines, samples=64)


def turn_picture() -> str:
    """Held-out reward of benchmarks/turn_credit.py over batches: three seeds by turn and three by sample."""
    report = json.loads((ROOT / "benchmarks/results/turn-credit-cpu.json").read_text(encoding="utf-8"))
    colors = dict(zip(("turn", "sample"), SERIES, strict=False))
    lines = [
        (f"by {baseline}", colors[baseline], curves[baseline])
        for curves in report["curves"].values()
        for baseline in colors
    ]
    says = "; ".join(f"{label}: {', '.join(map(str, curve))}" for label, _, curve in lines)
    title = "Held-out reward with credit by turn and by sample, three seeds each"
    return reward_chart(title, f"Every {report['every']} batches. {says}.", lines, samples=32)


def reward_chart(title: str, description: str, lines: Sequence[tuple[str, str, list[float]]], *, samples: int) -> str:
    """Rewards before training and after every 5 batches of so many samples, as lines with a label and a color."""
    width, height, left, right, top, bottom = 680, 300, 64, 150, 24, 52
    batches = 5 * (max(len(curve) for _, _, curve in lines) - 1)

    def at(batch: float, reward: float) -> tuple[float, float]:
        x = left + batch / batches * (width - left - right)
        return round(x, 1), round(top + (1 - reward) * (height - top - bottom), 1)

    body = []
    for reward in (0, 0.25, 0.5, 0.75, 1):
        (x1, y), (x2, _) = at(0, reward), at(batches, reward)
        body.append(f'<path d="M{x1:g} {y:g}H{x2:g}" stroke="{LINE}"/>')
        body.append(text(left - 10, y + 4, f"{reward:g}", MUTED, "end", font_size="12.5"))
    for batch in range(0, batches + 1, 5):
        body.append(text(at(batch, 0)[0], height - bottom + 20, f"{batch}", MUTED, font_size="12.5"))
    middle = (top + height - bottom) / 2
    body.append(text(at(batches / 2, 0)[0], height - 10, f"batches of {samples} samples"))
    body.append(text(18, middle, "held-out reward", transform=f"rotate(-90 18 {middle:g})"))
    labels: list[str] = []
    for label, color, curve in lines:
        points = " ".join("{:g},{:g}".format(*at(5 * i, reward)) for i, reward in enumerate(curve))
        body.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        if label in labels:
            continue
        y = top + 22 * len(labels) + 14
        labels.append(label)
        body.append(f'<path d="M{width - right + 24} {y - 4}h22" stroke="{color}" stroke-width="2.5"/>')
        body.append(text(width - right + 54, y, label, anchor="start"))
    return svg(width, height, title, description, body)


PICTURES = {"packages.svg": packages_picture, "make-train.svg": curve_picture, "turn-credit.svg": turn_picture}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
