"""Charts: braille dots in a terminal, sparklines, and PNG files.

rich has no charts, and these hundred lines avoid another dependency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from plasmid.errors import CheckpointError
from plasmid.utils.printable import escape_unprintable
from plasmid.utils.safe_files import replace_file
from rich.text import Text

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character by column and row of its 2 x 4 dots."""
COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red")
PNG_AXES = (0.12, 0.12, 0.86, 0.8)
"""Left, bottom, width and height of the plot, as fractions of the picture."""
DIGEST = "Plasmid data"
"""Keyword of the PNG text with the digest of the drawn data."""
HEADER_BYTES = 1024
"""Number of bytes at the start of a picture that contain its texts."""
PNG_COLORS = ("#2a78d6", "#eb6834", "#1baf7a", "#8f5bd6", "#d64b8a", "#7a7a7a")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A curve of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    marked: bool = False
    """True to mark every point, for curves with few points."""

    def points(self) -> list[tuple[float, float]]:
        """Return the points with finite values."""
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(y)]


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Format values as blocks of different heights, averaged to at most ``width`` blocks."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return ""
    cells = min(width, len(known))
    edges = [round(i * len(known) / cells) for i in range(cells + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    top = len(BLOCKS) - 1
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # averaging equal values leaves rounding errors
        return BLOCKS[top // 2] * cells
    return "".join(BLOCKS[round((v - low) / (high - low) * top)] for v in means)


def chart(series: Sequence[Series], *, width: int = 78, height: int = 12, x_label: str = "batch") -> Text:
    """Draw a line chart with a legend, ``width`` characters wide; empty if no series has points."""
    points = [point for s in series for point in s.points()]
    if not points:
        return Text()
    x_range = _widen(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = ticks(min(y for _, y in points), max(y for _, y in points))
    y_range = (y_ticks[0], y_ticks[-1])
    labels = {_row(tick, y_range, height): f"{tick:g}" for tick in y_ticks}
    margin = max(map(len, labels.values())) + 2
    canvas = _Canvas(width - margin, height, x_range, y_range)
    for index, one in enumerate(series):
        canvas.draw(one, COLORS[index % len(COLORS)])
    text = _legend(series, margin, width)
    for row, line in enumerate(canvas.lines()):
        label = labels.get(row, "")
        text.append(f"{label:>{margin - 2}} ", style="dim").append("\u2524" if label else "\u2502", style="dim")
        text.append_text(line).append("\n")
    return text.append(_x_axis(x_range, width, margin, x_label), style="dim")


def ticks(low: float, high: float, *, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers that enclose the range."""
    low, high = _widen(low, high)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def write_png(path: Path, series: Sequence[Series], *, title: str) -> None:
    """Write the chart as a PNG file, unless the file already shows the same data. Raises `CheckpointError`.

    Escapes unprintable characters in names, about which matplotlib would warn.
    """
    digest = sha256(repr((title, series)).encode(errors="surrogatepass")).hexdigest()
    if _is_drawn(path, digest):  # importing matplotlib and drawing take half a second
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes(PNG_AXES)  # fixed, because a computed layout draws everything twice
    for index, one in enumerate(series):
        x, y = [p[0] for p in one.points()], [p[1] for p in one.points()]
        color, name = PNG_COLORS[index % len(PNG_COLORS)], escape_unprintable(one.name)
        if one.marked:
            axes.plot(x, y, "o-", color=color, linewidth=2, markersize=6, label=name, zorder=3)
        else:
            axes.plot(x, y, color=color, linewidth=1, alpha=0.35)
            axes.plot(x, smooth(y), color=color, linewidth=2, label=f"{name} (smoothed)")
    axes.set_xlabel("batch")
    axes.set_ylabel("mean reward")
    axes.set_title(escape_unprintable(title), loc="left", fontsize=11, parse_math=False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if series:
        for label in axes.legend(frameon=False, loc="best").get_texts():
            label.set_parse_math(False)  # names may contain dollar signs
    try:
        # the default compression, 6, takes three times as long
        with replace_file(path) as file:
            figure.savefig(file, format="png", metadata={DIGEST: digest}, pil_kwargs={"compress_level": 1})
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write the picture: {(error.strerror or str(error)).lower()}") from error


def _is_drawn(path: Path, digest: str) -> bool:
    """Return True if the picture contains this digest of its data."""
    if not path.is_file():  # a named pipe would block
        return False
    try:
        with path.open("rb") as file:
            return f"{DIGEST}\0{digest}".encode() in file.read(HEADER_BYTES)
    except OSError:
        return False


def smooth(values: Sequence[float], *, window: int = 9) -> list[float]:
    """Return the centered moving average; the window shrinks toward the ends."""
    half = min(window, max(1, len(values) // 4)) // 2
    spans = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [sum(values[a:b]) / (b - a) for a, b in spans]


class _Canvas:
    def __init__(self, width: int, height: int, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self._width, self._height = width, height
        self._x_range, self._y_range = x_range, y_range
        self._bits = [[0] * width for _ in range(height)]
        self._marks: dict[tuple[int, int], str] = {}
        self._styles: dict[tuple[int, int], str] = {}

    def draw(self, series: Series, style: str) -> None:
        dots = [self._dot(x, y) for x, y in series.points()]
        for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False):
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(steps + 1):
                self._set(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps), style)
        if series.marked:
            self._marks |= {(y // 4, x // 2): style for x, y in dots}

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        columns, rows = 2 * self._width - 1, 4 * self._height - 1
        (x0, x1), (y0, y1) = self._x_range, self._y_range
        return round((x - x0) / (x1 - x0) * columns), round((y1 - y) / (y1 - y0) * rows)

    def _set(self, x: int, y: int, style: str) -> None:
        self._bits[y // 4][x // 2] |= DOTS[x % 2][y % 4]
        self._styles[y // 4, x // 2] = style

    def lines(self) -> list[Text]:
        return [self._line(row) for row in range(self._height)]

    def _line(self, row: int) -> Text:
        text = Text()
        for column, bits in enumerate(self._bits[row]):
            if (row, column) in self._marks:
                text.append("\u25cf", style=self._marks[row, column])
            else:
                text.append(chr(0x2800 + bits) if bits else " ", style=self._styles.get((row, column), ""))
        return text


def _legend(series: Sequence[Series], margin: int, width: int) -> Text:
    """Return marks and names of all series, wrapped into lines. Names longer than a line are cut in the middle."""
    text, room = Text(" " * margin), width - margin
    for index, one in enumerate(series):
        surplus = len(one.name) - (width - margin - 2)
        half = (len(one.name) - surplus - 3) // 2
        name = one.name if surplus <= 0 else f"{one.name[:half]}...{one.name[-half:]}"
        if room < len(name) + 2:
            text.append("\n" + " " * margin)
            room = width - margin
        text.append("\u25cf " if one.marked else "\u2500 ", style=COLORS[index % len(COLORS)]).append(f"{name}   ")
        room -= len(name) + 5
    text.rstrip()
    return text.append("\n")


def _x_axis(x_range: tuple[float, float], width: int, margin: int, label: str) -> str:
    left, right = f"{x_range[0]:g}", f"{x_range[1]:g}"
    line = " " * (margin - 1) + "\u2514" + "\u2500" * (width - margin) + "\n"
    inner = width - margin - len(left) - len(right)
    return line + " " * margin + left + f"{label:^{max(inner, len(label))}}" + right


def _row(value: float, y_range: tuple[float, float], height: int) -> int:
    return round((y_range[1] - value) / (y_range[1] - y_range[0]) * (4 * height - 1)) // 4


def _widen(low: float, high: float) -> tuple[float, float]:
    if high - low > max(1e-9 * max(abs(low), abs(high)), 1e-290):
        return low, high
    by = abs(low) * 0.1 if abs(low) > 1e-280 else 0.5
    return low - by, high + by
