"""The report's folder: the table, the checks, the figures, what the hardware saw, and the page."""

import csv
import json
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

from fa2_numba.accounting import plots, tables, trace
from fa2_numba.accounting.page import TRACE, VERIFY, page
from fa2_numba.accounting.proof import Proof
from fa2_numba.accounting.sweep import Sweep
from fa2_numba.clock import Timeline
from fa2_numba.traffic import COLUMNS, Traffic

TRACE_MARKS = 60_000  # of all warps in ``trace.json``, which is then about 10 MB


def write(sweep: Sweep, folder: Path, proof: Proof | None = None) -> Path:
    """Write everything a sweep found, finished or not.

    ::

        traffic.json, traffic.csv   the tidy table
        checks.json                 machine, exactness, comparisons, fits, what was left out
        verify.json                 counted against hardware numbers, where that was possible
        trace.json                  the phases of one launch, for Perfetto
        figures/NAME.svg, .png
        index.html                  the page, which needs none of the others

    Parameters
    ----------
    sweep : Sweep
    folder : Path
        Made if it does not exist; files of an earlier report in it are replaced.
    proof : Proof, optional
        What stands beside the sweep; default: one that was not run.

    Returns
    -------
    Path
        The page.
    """
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    proof = proof or Proof(sweep)
    rows = table(sweep, proof)
    write_json(rows, folder / "traffic.json")
    write_csv(rows, folder / "traffic.csv")
    growth = tables.growth(rows, sweep.plan.setting)
    found = checks(sweep, growth) | {"hardware": proof.as_dict()}
    (folder / "checks.json").write_text(json.dumps(found, indent=1) + "\n")
    write_proof(proof, folder)
    drawings = [*plots.draw(rows, sweep.plan), *timeline(proof)]
    for name in (*plots.NAMES, "timeline"):
        for suffix in (".svg", ".png"):
            (figures / f"{name}{suffix}").unlink(missing_ok=True)
    svgs = [plots.save(drawing, figures)[0].read_text() for drawing in drawings]
    index = folder / "index.html"
    index.write_text(page(sweep, proof, drawings, svgs, growth), encoding="utf-8")
    return index


def table(sweep: Sweep, proof: Proof) -> list[Traffic]:
    """The tidy table: predicted, counted and hardware rows."""
    return [*sweep.table, *proof.rows]


def timeline(proof: Proof) -> list[plots.Drawing]:
    """The Gantt chart of the longest timed kernel, if one was timed."""
    if not proof.phases:
        return []
    drawing = trace.gantt(max(proof.phases.timelines, key=lambda t: int(t.cycles.sum())))
    drawing.figure.supxlabel("")  # the page has the caption as text
    return [drawing]


def write_proof(proof: Proof, folder: Path) -> None:
    """``verify.json`` and ``trace.json``, each if there is something in it, else none."""
    for name in (VERIFY, TRACE):
        (folder / name).unlink(missing_ok=True)
    if proof.verification:
        rows = [row.as_dict() for row in proof.verification.rows]
        about = {"ncu": proof.ncu_version, **(proof.as_dict()["verified"] or {})}
        record = {**about, "cases": [asdict(case) for case in proof.cases], "rows": rows}
        (folder / VERIFY).write_text(_by_line(record))
    if proof.phases:
        found = trace.chrome_trace([_cut(t) for t in proof.phases.timelines])
        (folder / TRACE).write_text(json.dumps(found) + "\n")


def _cut(timeline: Timeline) -> Timeline:
    """The first marks of each warp, so that all of them are not many more than `TRACE_MARKS`."""
    marks = TRACE_MARKS // max(timeline.count.size, 1) + 1
    return replace(timeline, events=timeline.events[:, :, :marks])


def _by_line(record: dict[str, Any]) -> str:
    """A JSON object, an item of its lists a line."""

    def text(value: Any) -> str:
        if not isinstance(value, list) or not value:
            return json.dumps(value)
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"

    lines = ",\n ".join(f"{json.dumps(name)}: {text(value)}" for name, value in record.items())
    return f"{{\n {lines}\n}}\n"


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
