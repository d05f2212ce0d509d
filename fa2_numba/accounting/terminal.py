"""What the commands print: tables for rich, and the worked example as text."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from fa2_numba.accounting import tables
from fa2_numba.accounting.exactness import Exactness
from fa2_numba.accounting.inputs import short
from fa2_numba.accounting.plots import size
from fa2_numba.accounting.sweep import Comparison, Sweep
from fa2_numba.accounting.tables import Growth, Variant
from fa2_numba.reference import InnerStep, RowTile
from fa2_numba.traffic import Traffic


def new_table(title: str, header: Sequence[str], text: int, gap: int = 2) -> Table:
    """A table whose first `text` columns are left-aligned, `gap` blanks between columns."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, gap, 0, 0)
    )
    for n, name in enumerate(header):
        table.add_column(name, justify="left" if n < text else "right", overflow="fold")
    return table


def _ratio(found: Iterable[Exactness]) -> Text:
    """The largest error / allowed, red where one is not exact."""
    found = list(found)
    if not found:
        return Text("")
    good = all(e.exact for e in found)
    return Text(f"{max(e.used for e in found):.2f}", style="green" if good else "red")


def _difference(counted: int, predicted: int, rows: int) -> Text:
    """Bytes apart, and rows that differ where bytes alone do not tell."""
    text = f"{counted - predicted:+,}" if counted != predicted else "0"
    return Text(f"{text} ({rows} rows)" if rows else text, style="red" if rows else "green")


def summary(sweep: Sweep, growth: list[Growth]) -> Table:
    """One line for each method and mask: counts at the largest N, exponent, error."""
    header = ["input", "method, mask", "N", "bytes\ncounted", "bytes\npredicted", "differ"]
    header += ["slope", "error /\nallowed"]
    table = new_table("Bytes issued to global memory, at the largest N of each", header, 2, gap=1)
    for column in table.columns[1:]:
        column.no_wrap = True
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for c in sweep.comparisons:
        groups.setdefault((c.experiment, c.method, c.mask), []).append(c)
    slopes = {
        (g.method, "causal" if g.causal else "none"): str(g.fit)
        for g in growth
        if g.quantity == "loads and stores" and g.source == "counted" and g.fit
    }
    setting = sweep.plan.setting.tiling
    for (name, method, mask), runs in groups.items():
        same = [c for c in runs if (c.block_r, c.block_c) == (setting.B_r, setting.B_c)] or runs
        last = max(same, key=lambda c: c.n_q)
        exact = [e for e in sweep.exactness if (e.input, e.method, e.mask) == (name, method, mask)]
        table.add_row(
            short(name),
            Variant(method).label + ("" if mask == "none" else f", {mask}"),
            f"{last.n_q:,}",
            f"{last.counted_bytes:,}",
            f"{last.predicted_bytes:,}",
            _difference(last.counted_bytes, last.predicted_bytes, sum(c.differences for c in runs)),
            slopes.get((method, mask), "") if name == "random" else "",
            _ratio(exact),
        )
    return table


def exactness(found: list[Exactness]) -> Table:
    """One line for each output checked."""
    header = ["input", "method", "mask", "dtype", "rows"]
    header += ["error\nof O", "\nallowed", "error\nof L", "\nallowed", ""]
    table = new_table("Largest absolute error against the float64 reference", header, 4)
    for e in found:
        numbers = (e.out_error, e.out_allowed, e.lse_error, e.lse_allowed)
        table.add_row(
            short(e.input),
            e.method,
            e.mask,
            e.dtype,
            str(e.rows_checked),
            *("" if x is None else f"{x:.2e}" for x in numbers),
            Text("exact" if e.exact else "not exact", style="green" if e.exact else "red"),
        )
    return table


def traffic(title: str, predicted: list[Traffic], counted: list[Traffic] | None) -> Table:
    """Predicted and, if it ran, counted rows of one problem side by side."""
    sides = ("predicted", "counted") if counted is not None else ("predicted",)
    header = ["array", "phase", "op"]
    header += [f"{what}\n{side}" for what in ("bytes", "requests", "sectors") for side in sides]
    table = new_table(title, header, 3)
    found = {
        "predicted": {r.key: r for r in predicted},
        "counted": {r.key: r for r in counted or ()},
    }
    rows = {**found["predicted"], **found["counted"]}

    def numbers(pick: Any) -> list[Text]:
        out = []
        for what in ("bytes", "requests", "sectors"):
            values = [pick(side, what) for side in sides]
            style = "" if len(set(values)) == 1 else "red"
            out += [Text(f"{value:,}", style=style) for value in values]
        return out

    for key, row in rows.items():
        table.add_row(
            row.array,
            row.phase,
            row.op,
            *numbers(lambda side, what, key=key: getattr(found[side].get(key), what, 0)),
        )
    total = numbers(lambda side, what: tables.total(found[side].values(), what=what))
    table.add_section()
    table.add_row("all", "", "", *total, style="bold")
    table.caption = f"{size(tables.total(predicted))} issued to global memory, as predicted"
    table.caption_justify = "left"
    return table


# The worked example -------------------------------------------------------------------------------


def _matrix(name: str, array: Any, digits: int = 4) -> list[str]:
    """``name = `` and the rows of an array, aligned."""
    rows = [" ".join(f"{x:>{digits + 6}.{digits}f}" for x in row) for row in np.atleast_2d(array)]
    return [f"    {name:>4} = {rows[0]}", *(f"    {'':>4}   {row}" for row in rows[1:])]


def step(found: InnerStep | RowTile) -> str:
    """One step of the worked example."""
    if isinstance(found, RowTile):
        lines = [f"  row tile {found.i} is written"]
        return "\n".join([*lines, *_matrix("O_i", found.O_i), *_matrix("L_i", found.L_i), ""])
    names = ("S_ij", "m_i", "P_ij", "l_i", "acc")
    lines = [f"  i = {found.i}, j = {found.j}"]
    for name in names:
        lines += _matrix(name, getattr(found, name))
    return "\n".join(lines)


def step_row(found: InnerStep | RowTile) -> dict[str, Any]:
    """The same step as JSON takes it."""
    return {
        "step": "row tile" if isinstance(found, RowTile) else "inner",
        **{name: value.tolist() if isinstance(value, np.ndarray) else value
           for name, value in vars(found).items()},
    }  # fmt: skip
