"""Tables that fit terminals of any width."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

TEXT_WIDTH = 40
"""Minimum width of a last column with text, in characters, unless its texts are shorter."""
WIDEST = 10_000


class FittingTable:
    """A table if the console is wide enough, otherwise a block of lines for each row.

    rich would narrow columns until the table fits, which truncates names and numbers. With ``wraps_last``, text in the
    last column is wrapped. The first ``num_heads`` cells name the row.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str | Text]],
        *,
        num_heads: int = 1,
        numbers: Collection[str] = (),
        wraps_last: bool = False,
        title: str = "",
    ) -> None:
        """Columns named in ``numbers`` are right-aligned."""
        self._columns, self._rows, self._title = columns, rows, title
        self._heads, self._wraps_last = num_heads, wraps_last
        self._numbers = frozenset(numbers)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        natural = Measurement.get(console, options.update(max_width=WIDEST), table).maximum
        if self._wraps_last:
            last = max((Text(str(row[-1])).cell_len for row in self._rows), default=0)
            natural -= max(0, last - TEXT_WIDTH)
        if natural <= options.max_width:
            yield table
        else:
            yield from self._blocks()

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=self._title or None)
        table.title_justify = "left"
        for number, name in enumerate(self._columns):
            wraps = self._wraps_last and number == len(self._columns) - 1
            table.add_column(name, justify="right" if name in self._numbers else "left", no_wrap=not wraps)
        for row in self._rows:
            table.add_row(*row)
        return table

    def _blocks(self) -> RenderResult:
        if self._title:
            yield Text(self._title, style="italic")
        for row in self._rows:
            yield Text(" ").join(Text(str(cell), style="bold") for cell in row[: self._heads])
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(overflow="fold")
            for name, cell in zip(self._columns[self._heads :], row[self._heads :], strict=True):
                if str(cell):
                    grid.add_row(f"  {name}", cell)
            yield grid
