"""What the README shows of backward.json: tables, sentences and a figure."""

from collections.abc import Sequence

import matplotlib

from benchmarks import summary
from benchmarks.backward import DETERMINISTIC, FP32, OURS
from benchmarks.markdown import provenance, table
from benchmarks.speed import LABELS, Record, bars, comparison_table, host_sentence, memory_sentence
from benchmarks.summary import GRADIENTS
from fa2_numba.accounting.plots import STYLE, Drawing

READABLE, PEER = FP32


def backward_part(record: Record) -> str:
    """The section of backward.json: figure, comparison, errors, equal bits, fp32, memory, host."""
    parts = ["## Speed of the gradients on tensor cores"]
    if record.get("rows"):
        parts.append(
            "![TFLOP/s of each implementation's backward pass by N, a panel for each head "
            "dimension and mask](docs/figures/backward.svg)"
        )
        parts.append(comparison_table(record, OURS))
    if record.get("accuracy"):
        parts.append(accuracy_table(record))
    if cost := slower(record.get("deterministic", ())):
        parts.append(deterministic_sentence(record["deterministic"], cost))
    if record.get("fp32"):
        parts.append(fp32_table(record))
    if record.get("memory"):
        parts.append(memory_sentence(record["memory"], "the gradients are"))
    if record.get("host"):
        parts.append(host_sentence(record["host"]))
    return "\n\n".join(parts)


def accuracy_table(record: Record) -> str:
    """The largest error of each gradient and implementation over head dimensions and masks."""
    rows = record["accuracy"]
    names = dict.fromkeys(row["implementation"] for row in rows)
    lines = []
    for name in names:
        own = [row for row in rows if row["implementation"] == name]
        errors = (f"{max(row[f'{x}_rms'] for row in own):.2e}" for x in GRADIENTS)
        lines.append((LABELS[name], ", ".join(str(d) for d in _dims(own)), *errors))
    return table(
        ("", "d", *(f"{x}: rms error, relative" for x in GRADIENTS)),
        lines,
        f"The largest of the d named and both masks, N = {rows[0]['n']:,}, {rows[0]['rows']:,} "
        f"rows against float64, the same inputs for all. {provenance(record)}.",
    )


def _dims(rows: Sequence[Record]) -> list[int]:
    return sorted({row["d"] for row in rows})


def slower(rows: Sequence[Record]) -> list[float]:
    """Time of the deterministic form over that of the other, one for each cell that has both."""
    return summary.ratios(summary.cells(rows), DETERMINISTIC, OURS)


def deterministic_sentence(rows: Sequence[Record], cost: Sequence[float]) -> str:
    """What equal bits cost, and whether they were equal."""
    repeats = [row["equal_bits"] for row in rows if row["implementation"] == DETERMINISTIC]
    return (
        f"With `deterministic=True` the backward pass takes {summary.geometric_mean(cost):.2f} "
        f"times as long (geometric mean of {len(cost)} cells, {min(cost):.2f} to {max(cost):.2f}; "
        f"d = {', '.join(map(str, _dims(rows)))}); two calls gave the same bits in "
        f"{sum(repeats)} of {len(repeats)}."
    )


def fp32_table(record: Record) -> str:
    """The readable kernel beside torch's in single precision."""
    found = summary.cells(record["fp32"])
    lines = []
    for (d, causal, n), speed in found.items():
        both = {READABLE, PEER} <= set(speed)
        lines.append(
            (
                d,
                "causal" if causal else "full",
                f"{n:,}",
                *(f"{speed[name]:.1f}" if name in speed else "" for name in (READABLE, PEER)),
                f"{speed[READABLE] / speed[PEER]:.2f}" if both else "",
            )
        )
    header = ("d", "mask", "N", LABELS[READABLE], LABELS[PEER])
    return table(
        (*header, f"{LABELS[READABLE]} / {LABELS[PEER]}"),
        lines,
        f"The readable kernel's gradients, fp32, TFLOP/s, TF32 off. {provenance(record)}.",
    )


def draw(record: Record | None) -> list[Drawing]:
    """The figure, where the record has its rows."""
    if not record or not record.get("rows"):
        return []
    with matplotlib.rc_context(STYLE):
        return [bars(record, "backward", "Backward speed")]
