"""Regenerate what the README and docs/counting.md show from the recorded results.

``python -m benchmarks.figures`` rewrites their tables (between ``<!-- name -->`` and
``<!-- /name -->``) from ``benchmarks/results/<gpu>/*.json``, copies the report's figures to
``docs/figures`` and draws those of ``levels.json``, ``fig2.json``, ``forward.json``,
``backward.json`` and ``training.json`` there.
``--check`` only says whether both pages are up to date (exit code 1 if not).
"""

import argparse
import json
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import loss_curves, speed, speed_backward
from benchmarks.environment import RESULTS
from benchmarks.markdown import machine, provenance, table
from benchmarks.report import stamp
from fa2_numba.accounting.plots import draw_recorded, save, size

ROOT = RESULTS.parent.parent
README = ROOT / "README.md"
COUNTING = ROOT / "docs" / "counting.md"
FIGURES = ROOT / "docs" / "figures"
PEER = "torch mem-efficient"
METHODS = {"standard": 0, "fa1": 1, "fa2": 2}  # in the order of the papers


def load(folder: Path, name: str) -> Any:
    """A recorded result, or None where this GPU has none."""
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


def speed_table(record: dict[str, Any]) -> str:
    """Median TFLOP/s per cell, with the two ratios that matter."""
    cells: dict[Any, dict[str, Any]] = defaultdict(dict)
    for row in record["rows"]:
        cells[row["d"], row["causal"], row["n"]][row["implementation"]] = row
    lines = [
        "| d | mask | N | fa2 | standard | fa1 | torch mem-efficient | torch math "
        "| fa2 / standard | fa2 / mem-efficient |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (d, causal, n), cell in cells.items():
        speed = {name: row["tflops"] for name, row in cell.items()}
        shown = [f"{speed[m]:.1f}" for m in ("fa2", "standard", "fa1", PEER, "torch math")]
        ratios = [f"{speed['fa2'] / speed[m]:.2f}" for m in ("standard", PEER)]
        columns = [str(d), "causal" if causal else "full", f"{n:,}", *shown, *ratios]
        lines.append("| " + " | ".join(columns) + " |")
    lines += [
        "",
        f"fp32, TFLOP/s, medians of {record['rows'][0]['rounds']} turns in one process; batch x N "
        f"= {record['setting']['tokens']:,}, hidden size {record['setting']['hidden']:,}, TF32 "
        f"off. An 8192^3 fp32 matrix product ran at {record['matrix_product_tflops']:.1f} there. "
        f"{provenance(record)}.",
    ]
    return "\n".join(lines)


def equal_rows(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How many counted rows have an equal predicted row, and how many counted rows there are."""
    numbers = ("elements", "bytes", "requests", "sectors")
    other = ("cycles", "source", *numbers)

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(value for name, value in row.items() if name not in other)

    counted = [row for row in rows if row["source"] == "counted"]
    predicted = {(key(r), *(r[n] for n in numbers)) for r in rows if r["source"] == "predicted"}
    equal = sum((key(r), *(r[n] for n in numbers)) in predicted for r in counted)
    return equal, len(counted)


def counts_table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Counted against predicted, added up per method at the largest counted N."""
    numbers = ("elements", "requests", "sectors")
    sums: dict[Any, dict[str, Any]] = defaultdict(dict)
    counted_keys = set()
    for row in rows:
        if row["source"] == "counted":
            counted_keys.add((row["method"], row["mask"], row["n_q"], row["heads"], row["d"]))
    for row in rows:
        key = (row["method"], row["mask"], row["n_q"], row["heads"], row["d"])
        if key in counted_keys and row["source"] in ("counted", "predicted"):
            entry = sums[key].setdefault(row["source"], dict.fromkeys(numbers, 0))
            for name in numbers:
                entry[name] += row[name]
    plain = [k for k in counted_keys if k[1] in ("none", "causal")]
    largest = max(k[2] for k in plain)
    lines = [
        "| method | mask | N | elements | warp requests | 32-byte sectors | counted - predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in sorted((k for k in plain if k[2] == largest), key=lambda k: (METHODS[k[0]], k[1])):
        counted, predicted = sums[key]["counted"], sums[key]["predicted"]
        shown = " | ".join(f"{counted[n]:,}" for n in numbers)
        off = ", ".join(f"{counted[n] - predicted[n]:,}" for n in numbers)
        lines.append(f"| {key[0]} | {key[1]} | {key[2]:,} | {shown} | {off} |")
    equal, all_rows = equal_rows(rows)
    d = plain[0][4]
    lines += [
        "",
        f"One head, d = {d}, fp32, loads and stores of all arrays and phases. In the whole sweep "
        f"{equal} of {all_rows} counted rows (an array in a phase of a problem) equal their "
        f"prediction. {provenance(about)}.",
    ]
    return "\n".join(lines)


def tests_table(records: list[dict[str, Any]]) -> str:
    """What `make test-gpu` ran, a record a row, the oldest day first."""
    records = sorted(records, key=lambda record: record["date"])
    rows = []
    for record in records:
        files = ", ".join(f"`{Path(file).name}`" for file in record.get("files", ()))
        chosen = re.search(r" -k ('[^']*'|\S+)", record["command"])
        left = record.get("examples_left_out", 0)  # for lack of time
        where = files or (f"part {record['part']} of all" if record.get("part") else "all")
        rows.append(
            (
                where + (f", -k {chosen[1]}" if chosen else ""),
                *(f"{record[outcome]:,}" for outcome in ("passed", "failed", "skipped")),
                f"{record['not_reached']:,}",
                f"{record['examples']:,}" + (f", {left:,} left out" if left else ""),
                f"{record['seconds']:.0f} s",
                record["commit"][:7],
            )
        )
    last = records[-1]
    failed = "; ".join(
        f"{', '.join(name.removeprefix('tests/') for name in record['failures'])} "
        f"(commit {record['commit'][:7]})"
        for record in records
        if record["failures"]
    )
    below = f"Failed: {failed}. " if failed else ""
    header = ("tests marked gpu", "passed", "failed", "skipped", "of these not reached")
    return table(
        (*header, "hypothesis examples", "time", "commit"),
        rows,
        f"{below}{records[0]['date']} to {last['date']}, the last day on {machine(last)}.",
    )


def differs(row: dict[str, Any]) -> bool:
    """Whether a row of a verification has numbers that are not the same."""
    return bool(row["difference"]) or row.get("predicted", row["counted"]) != row["counted"]


def verify_table(record: dict[str, Any]) -> str:
    """Predicted, where that was done, and counted against hardware numbers, by counter."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    shown: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for row in record["rows"]:
        if row.get("exact", True):
            groups[row["quantity"], row["op"]].append(row)
        else:
            shown[row["quantity"], row["op"]].append(row["difference"] != 0)
    with_model = any("predicted" in row for row in record["rows"])

    def predicted(launches: list[dict[str, Any]]) -> str:
        said = [row for row in launches if "predicted" in row]
        if len(said) == len(launches):
            return f"{sum(row['predicted'] for row in said):,}"
        equal = sum(row["predicted"] == row["counted"] for row in said)
        return f"{equal:,} of {len(said):,} launches as counted" if said else ""

    rows = [
        (
            f"{quantity}, {op}",
            f"`{record['metrics'][f'{quantity} ({op})']}`",
            f"{len(launches):,}",
            *([predicted(launches)] if with_model else []),
            f"{sum(row['counted'] for row in launches):,}",
            f"{sum(row['hardware'] for row in launches):,}",
            f"{sum(map(differs, launches)):,}",
        )
        for (quantity, op), launches in groups.items()
    ]
    equal = record["numbers"] - record["differences"]
    below = (
        f"{equal:,} of {record['numbers']:,} numbers of {record['launches']:,} kernel launches "
        f"({len(record['cases']):,} cases) are the same integers, "
        f"{'predicted where the model speaks of them, ' if with_model else ''}counted and read by "
        f"ncu {record['ncu']}. "
    )
    if shown:
        told = (
            f"{quantity} ({op}), other than counted in {sum(differ)} of {len(differ)} launches"
            for (quantity, op), differ in shown.items()
        )
        below += f"Read and not compared, since addresses alone do not decide: {'; '.join(told)}. "
    if record["not_compared"]:
        below += f"Not compared: {', '.join(record['not_compared'])}. "
    header = ("", "counter", "launches", "counted", "hardware", "launches that differ")
    if with_model:
        header = (*header[:3], "predicted", *header[3:])
    return table(header, rows, f"{below}{provenance(record)}.")


# What `benchmarks.verify` records, by file.
PROVEN = {
    "verify.json": "readable kernels, forward",
    "verify_backward.json": "readable kernels, backward",
    "verify_fa3.json": "`fa3`, forward",
    "verify_fa3_backward.json": "`fa3`, backward",
}
UNRECORDED = "Not recorded yet."


def proof_table(folder: Path) -> str:
    """Which kernels were compared with the hardware's counters, and which not yet."""
    rows = []
    for file, what in PROVEN.items():
        record = load(folder, file)
        if record is None:
            rows.append((what, UNRECORDED, "", "", "", ""))
            continue
        kernels = sorted({row["kernel"] for row in record["rows"]})
        numbers = (record[name] for name in ("launches", "numbers", "differences"))
        counts = (f"{n:,}" for n in numbers)
        when = f"{record['gpu']}, commit {record['commit']}, {record['date']}"
        rows.append((what, ", ".join(f"`{kernel}`" for kernel in kernels), *counts, when))
    header = ("", "kernels", "launches", "numbers compared", "that differ", "recorded")
    return table(header, rows, "A kernel that is not named here was not compared.")


def levels_table(record: dict[str, Any]) -> str:
    """Bytes that fa2 loads at four memory levels, one head without a mask, over N."""
    chosen = {"method": "fa2", "causal": False, "heads": 1}

    def mine(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if chosen.items() <= row.items()]

    points = sorted(mine(record["points"]), key=lambda p: p["n_q"])
    rows = [
        (
            f"{p['n_q']:,}",
            *(size(n) for n in p["loads"].values()),
            size(p["model"]["loads"]),
            f"{p['ratio']:.3f}",
            "yes" if p["in_domain"] else "no",
        )
        for p in points
    ]
    exponents = []
    for fit in mine(record["fits"]):
        part = "" if fit["part"] == "all" else f" ({fit['part']})"
        exponents.append(f"{fit['level']}{part} {fit['slope']:.2f}")
    p = points[0]
    return table(
        ("N", *p["loads"], "model of DRAM", "DRAM / model", "in its domain"),
        rows,
        f"Bytes loaded by fa2, one head, {p['dtype']}, d = {p['d']}, no mask, caches empty before "
        f"each kernel. Fitted exponents in N: {', '.join(exponents)}. {provenance(record)}.",
    )


TILE_PHASE = "S = Q K^T"  # closed once for each tile


def phases_table(record: dict[str, Any]) -> str:
    """Where the cycles of full fa2 go at the largest N, and what timing them costs."""
    full = [
        found
        for found in record["tables"]
        if found["problem"]["method"] == "fa2" and not found["problem"]["causal"]
    ]
    largest = max(found["problem"]["n_q"] for found in full)
    timed = [found for found in full if found["problem"]["n_q"] == largest]
    phases = dict.fromkeys(row["phase"] for found in timed for row in found["rows"])
    header, costs = [""], []
    cells: dict[str, list[str]] = {phase: [] for phase in phases}
    for found in timed:
        p, kernel = found["problem"], found["kernels"][0]
        name = f"d = {p['d']}"
        header += [f"{name}: share", "cycles"]
        by_phase = {row["phase"]: row for row in found["rows"]}
        tiles = by_phase[TILE_PHASE]["visits"]
        for phase, line in cells.items():
            row = by_phase[phase]
            each = "tile" if row["visits"] >= tiles else "block"
            cycles = row["cycles"] / (tiles if each == "tile" else 1)
            line += [f"{row['share']:.1%}", f"{cycles:,.0f} a {each}"]
        sizes = f"batch {p['batch']}, {p['heads']} heads, N = {p['n_q']:,}, {p['dtype']}"
        costs.append(
            f"{name} ({sizes}): the phases cover {kernel['covered']:.1%} of a block's time, a mark "
            f"takes {kernel['mark_cycles']:.0f} cycles, and the timed kernel takes "
            f"{found['overhead']['ratio']['timed']:+.1%} of the plain one's time more"
            f"{''.join(f'; {warning}' for warning in found['warnings'])}."
        )
    rows = [(phase, *line) for phase, line in cells.items()]
    return table(header, rows, " ".join([*costs, f"{provenance(record)}."]))


def ablation_table(record: dict[str, Any]) -> str:
    """One idea of FlashAttention-2 a row: what it changes, and how much faster it is."""

    def change(row: dict[str, Any], name: str) -> str:
        numbers = (row[side][name] for side in ("before", "after"))
        before, after = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in numbers)
        return before if before == after else f"{before} → {after}"

    rows = [
        (
            row["idea"],
            f"{row['batch']} × {row['heads']}, {row['n']:,}",
            change(row, "blocks"),
            change(row, "tiles_computed"),
            change(row, "rescaling_multiplications"),
            change(row, "shared_wavefronts_a_tile"),
            change(row, "exchanged_bytes_a_tile"),
            change(row, "milliseconds"),
            f"{row['speedup']:.2f}",
        )
        for row in record["rows"]
    ]
    header = ["idea", "batch × heads, N", "blocks", "tiles computed", "products that rescale O"]
    header += ["passes over the banks a tile", "bytes exchanged a tile", "ms", "times faster"]
    return table(
        header,
        rows,
        f"fp32, d = {record['rows'][0]['d']}. Each pair of kernels differs in one idea and what "
        f"comes with it, absent → present, and takes turns on the same data. {provenance(record)}.",
    )


def cycles_table(record: dict[str, Any]) -> str:
    """How far the cycle model's times are from the measured ones."""
    rows = [
        (method, sum(row["method"] == method for row in record["rows"]), f"{error:.1%}")
        for method, error in record["by_method"].items()
    ]
    rows.append(("all", record["configurations"], f"{record['mean_absolute_error']:.1%}"))
    return table(
        ("method", "configurations", "mean absolute error"),
        rows,
        f"{record['setting']}; predicted from one calibration a method and head dimension. The "
        f"predicted / measured that is farthest from 1 is {record['largest_ratio']:.2f}. "
        f"{provenance(record)}.",
    )


def sanitizer_table(record: dict[str, Any]) -> str:
    """What each tool of compute-sanitizer said of fa3, and which planted faults it saw."""
    rows = []
    for tool in record["tools"]:
        faults = [fault for fault in record["faults"] if fault["tool"] == tool["tool"]]
        seen, missed = (
            "; ".join(fault["fault"] for fault in faults if bool(fault["errors"]) is which)
            for which in (True, False)
        )
        rows.append((tool["tool"], tool["cases_right"], tool["errors"], seen, missed))
    header = ("tool", "cases of fa3 that are right", "errors", "planted faults seen", "not seen")
    return table(
        header,
        rows,
        f"compute-sanitizer {record['compute_sanitizer']}. {provenance(record)}.",
    )


# Part of the README to the record that fills it. Without the record the part stays as it is.
GENERATED: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "speed": ("readable.json", speed_table),
    "verify": ("verify.json", verify_table),
    "levels": ("levels.json", levels_table),
    "phases": ("phases.json", phases_table),
    "ablation": ("ablation.json", ablation_table),
    "cycles": ("cycles.json", cycles_table),
    "forward": ("forward.json", speed.forward_part),
    "backward": ("backward.json", speed_backward.backward_part),
    "training": ("training.json", loss_curves.training_part),
    "long_context": ("long_context.json", speed.long_context_part),
    "sanitizer": ("sanitizer.json", sanitizer_table),
}


# The same of docs/counting.md. Without the record the part says so.
COUNTED = {
    name: f"{name}.json" for name in ("verify_fa3", "verify_fa3_backward", "verify_backward")
}


def fill(text: str, name: str, content: str) -> str:
    """Replace what stands between the markers of `name`."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if start not in text or end not in text:
        raise SystemExit(f"README.md or docs/counting.md has no {start} ... {end}")
    head, rest = text.split(start)
    return f"{head}{start}\n{content}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Rewrite the generated parts of the README and of docs/counting.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="nvidia-h200")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    folder = RESULTS / options.gpu
    before = text = README.read_text()
    counting_before = counting = COUNTING.read_text()
    text = fill(text, "proof", proof_table(folder))
    for name, file in COUNTED.items():
        record = load(folder, file)
        counting = fill(counting, name, verify_table(record) if record else UNRECORDED)
    for name, (file, written) in GENERATED.items():
        if record := load(folder, file):
            text = fill(text, name, written(record))
    if tests := [load(folder, path.name) for path in sorted(folder.glob("tests*.json"))]:
        text = fill(text, "tests", tests_table(tests))
    if (rows := load(folder, "report/traffic.json")) and (
        about := load(folder, "report/about.json")
    ):
        if about["traffic_sha256"] != stamp(folder / "report" / "traffic.json"):
            sys.exit("report/about.json is of another report: run python -m benchmarks.report")
        text = fill(text, "counts", counts_table(rows, about))
    if options.check:
        pages = (("README.md", text == before), ("docs/counting.md", counting == counting_before))
        old = [page for page, current in pages if not current]
        sys.exit(f"{' and '.join(old)}: out of date; run make figures" if old else 0)
    README.write_text(text)
    COUNTING.write_text(counting)
    FIGURES.mkdir(parents=True, exist_ok=True)
    for figure in sorted((folder / "report" / "figures").glob("*.svg")):
        shutil.copy(figure, FIGURES / figure.name)
    rows = load(folder, "report/traffic.json") or []
    drawings = draw_recorded(load(folder, "levels.json"), load(folder, "fig2.json"), rows)
    drawings += speed.draw(load(folder, "forward.json"))
    drawings += speed_backward.draw(load(folder, "backward.json"))
    drawings += loss_curves.draw(load(folder, "training.json"))
    for drawing in drawings:
        _, png = save(drawing, FIGURES)
        png.unlink()  # the docs show the SVG


if __name__ == "__main__":
    main()
