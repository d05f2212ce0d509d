"""The report's folder: the table, the checks, the figures and the page."""

import csv
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

from fa2_numba.accounting import plots, tables
from fa2_numba.accounting.page import page
from fa2_numba.accounting.sweep import Sweep
from fa2_numba.traffic import COLUMNS, Traffic


def write(sweep: Sweep, folder: Path) -> Path:
    """Write everything a sweep found, finished or not.

    ::

        traffic.json, traffic.csv   the tidy table
        checks.json                 machine, exactness, comparisons, fits, what was left out
        figures/NAME.svg, .png
        index.html                  the page, which needs none of the others

    Parameters
    ----------
    sweep : Sweep
    folder : Path
        Made if it does not exist; files of an earlier report in it are replaced.

    Returns
    -------
    Path
        The page.
    """
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    rows = sweep.table
    write_json(rows, folder / "traffic.json")
    write_csv(rows, folder / "traffic.csv")
    growth = tables.growth(rows, sweep.plan.setting)
    (folder / "checks.json").write_text(json.dumps(checks(sweep, growth), indent=1) + "\n")
    drawings = plots.draw(rows, sweep.plan)
    for name in plots.NAMES:
        for suffix in (".svg", ".png"):
            (figures / f"{name}{suffix}").unlink(missing_ok=True)
    svgs = [plots.save(drawing, figures)[0].read_text() for drawing in drawings]
    index = folder / "index.html"
    index.write_text(page(sweep, drawings, svgs, growth), encoding="utf-8")
    return index


def write_json(rows: list[Traffic], path: Path) -> None:
    """The table as a JSON list of objects, one a line."""
    lines = ",\n".join(json.dumps(row.as_dict()) for row in rows)
    path.write_text(f"[\n{lines}\n]\n" if rows else "[]\n")


def write_csv(rows: list[Traffic], path: Path) -> None:
    """The table as CSV with a header; what was not measured is empty."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(astuple(row) for row in rows)


def checks(sweep: Sweep, growth: list[tables.Growth]) -> dict[str, Any]:
    """Everything that is not a traffic row, as JSON takes it."""
    return {
        "machine": sweep.plan.machine,
        "backend": sweep.plan.backend,
        "versions": versions(),
        "finished": not sweep.stopped,
        "stopped": sweep.stopped,
        "experiments": {"done": sweep.done, "planned": sweep.total},
        "seconds": round(sweep.seconds, 2),
        "all_exact": sweep.all_exact,
        "all_equal": sweep.all_equal,
        "exactness": [e.as_dict() for e in sweep.exactness],
        "comparisons": [c.as_dict() for c in sweep.comparisons],
        "growth": [g.as_dict() for g in growth],
        "notes": sweep.notes,
    }


def versions() -> dict[str, str]:
    """Of Python and the packages that decide a result."""
    from fa2_numba.doctor import probe

    machine = probe(import_numba=False)
    return {"python": ".".join(map(str, machine.python)), **machine.versions}
