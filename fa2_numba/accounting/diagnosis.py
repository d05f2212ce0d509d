"""The doctor's findings as a table: rich alone, since NumPy and Numba may be what is missing."""

from rich.table import Table
from rich.text import Text

from fa2_numba.doctor import Finding

STYLE = {"ok": "green", "warn": "yellow", "fail": "red", "info": "dim"}


def findings(found: list[Finding]) -> Table:
    """One line for each finding."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header in ("", "item", "found", "what to do"):
        table.add_column(header, overflow="fold")
    for f in found:
        table.add_row(
            Text(f.status, style=STYLE[f.status]), Text(f.item), Text(f.found), Text(f.advice)
        )
    return table
