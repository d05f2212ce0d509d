"""What the README shows of forward.json and long_context.json: tables, sentences and figures.

`benchmarks.speed_backward` does so for backward.json, with the same pieces.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks import summary
from benchmarks.markdown import provenance, table
from fa2_numba.accounting.plots import DASHES, INK, STYLE, Drawing, length, size

Record = dict[str, Any]

LABELS = {
    "fa3": "fa3",
    "fa3_backward": "fa3",
    "fa3_backward_deterministic": "fa3, deterministic",
    "fa3_autograd": "fa3 through autograd",
    "cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
    "torch-fa2": "FlashAttention-2 (torch)",
    "torch-efficient": "mem-efficient (torch)",
    "flex": "FlexAttention",
    "fa2": "fa2",
    "fa2_backward": "fa2",
    "fa1": "fa1",
    "standard": "standard",
    "torch-math": "math (torch)",
}
COLOURS = {
    "fa3": "#0072b2",
    "fa3_backward": "#0072b2",
    "cudnn": "#009e73",
    "fa4": "#e69f00",
    "torch-fa2": "#cc79a7",
    "torch-efficient": "#56b4e9",
    "flex": "#f0e442",
    "fa2": "#999999",
    "fa2_backward": "#999999",
    "fa1": "#bbbbbb",
    "standard": "#d55e00",
    "torch-math": INK,
}


def first_regime(record: Record) -> str:
    """The regime whose numbers are shown."""
    return next(iter(record["setting"]["regimes"]))


def peak(record: Record, regime: str) -> float:
    """The fastest matrix product of the run, TFLOP/s."""
    return max(row["tflops"] for row in record["matrix_product"] if row["regime"] == regime)


def setting(record: Record) -> str:
    """What was timed, and how fast a matrix product was in the same run."""
    given, regime = record["setting"], first_regime(record)
    return (
        f"{given['dtype']}, batch x N = {given['tokens']:,}, hidden size "
        f"{given['hidden']:,}, {regime}; medians of turns in one process. A large "
        f"{given['dtype']} matrix product ran at {peak(record, regime):.0f} TFLOP/s there"
    )


# The README ---------------------------------------------------------------------------------------


def forward_part(record: Record) -> str:
    """The section of forward.json: figures, headline, comparison, crossover, host cost."""
    parts = ["## Speed on tensor cores"]
    rows = record.get("rows") or []
    if rows:
        parts.append(
            "![TFLOP/s of each implementation by N, a panel for each head dimension and mask]"
            "(docs/figures/forward.svg)"
        )
    if record.get("headline"):
        parts.append(headline_table(record))
    if rows:
        parts.append(comparison_table(record))
    if record.get("crossover"):
        parts.append(
            "![Milliseconds of tiled and standard attention against N, and how many times faster "
            "each is than standard](docs/figures/crossover.svg)"
        )
        parts.append(crossover_sentence(record["crossover"]))
    if record.get("memory"):
        parts.append(memory_sentence(record["memory"]))
    if record.get("host"):
        parts.append(host_sentence(record["host"]))
    return "\n\n".join(parts)


def headline_table(record: Record) -> str:
    """Every method and peer at one size: speed, share of the peak, memory, error."""
    rows, best = record["headline"], peak(record, first_regime(record))
    lines = [
        (
            row["d"],
            LABELS[row["implementation"]],
            f"{row['tflops']:.1f}",
            f"{row['tflops'] / best:.0%}",
            size(row["extra_bytes"]),
            f"{row['max_error']:.1e}",
            f"{row['rms_relative']:.2e}",
        )
        for row in rows
    ]
    header = ("d", "", "TFLOP/s", "of a matrix product", "extra memory, output included")
    header += ("largest error", "rms error, relative")
    return table(
        header,
        lines,
        f"N = {rows[0]['n']:,}, no mask; the table below times some of it again, in other turns. "
        f"{setting(record)}. Errors: {rows[0]['rows_compared']} "
        f"rows against float64. {provenance(record)}.",
    )


def comparison_table(record: Record, ours: str = summary.OURS) -> str:
    """TFLOP/s of each cell, the ratios, and their geometric means."""
    found, names = summary.cells(record["rows"], first_regime(record)), (ours, *summary.SHOWN)
    lines = []
    for (d, causal, n), speed in found.items():
        cells = [f"{speed[name]:.0f}" if name in speed else "" for name in names]
        for rival in summary.RIVALS:
            both = {ours, rival} <= set(speed)
            cells.append(f"{speed[ours] / speed[rival]:.2f}" if both else "")
        lines.append((d, "causal" if causal else "full", f"{n:,}", *cells))
    header = ["d", "mask", "N", *(LABELS[name] for name in names)]
    header += [f"{LABELS[ours]} / {LABELS[rival]}" for rival in summary.RIVALS]
    said = [f"{sentence}. " for sentence in summary.means(found, LABELS, ours)]
    return table(header, lines, f"TFLOP/s. {''.join(said)}{setting(record)}. {provenance(record)}.")


def crossover_sentence(rows: Sequence[Record]) -> str:
    """From which N on each tiled method is faster than one that keeps S and P in memory."""
    said = []
    for ours in ("fa3", "fa2"):
        for other in ("standard", "torch-math"):
            n = summary.faster_from(rows, ours, other)
            if n is not None:
                said.append(f"{ours} is faster than {LABELS[other]} from N = {n:,} on")
    smallest = min(row["n"] for row in rows)
    told = "; ".join(said) or "no tiled method was faster throughout"
    return f"Of N = {smallest:,} and more (d = {rows[0]['d']}, no mask): {told}."


def memory_sentence(memory: Record, returned: str = "the output is") -> str:
    """What one call allocates."""
    used = (f"{LABELS[r['implementation']]} {size(r['extra_bytes'])}" for r in memory["rows"])
    return (
        f"Peak memory of one call beyond its inputs, of which {returned} "
        f"{size(memory['output_bytes'])}: {', '.join(used)} ({memory['problem']})."
    )


def host_sentence(host: Record) -> str:
    """Host microseconds of a call."""
    costs = (f"{LABELS[r['implementation']]} {r['microseconds']:.0f}" for r in host["rows"])
    return f"Host microseconds of one call: {', '.join(costs)} ({host['problem']})."


def long_context_part(record: Record) -> str:
    """The section of long_context.json."""
    rows = [
        (
            f"{row['n']:,}",
            row["heads"],
            f"{row['milliseconds']:,.4g}",
            f"{row['tflops']:.0f}",
            f"{row['extra_bytes']:,}",
            f"{row['extra_bytes'] - row['out_lse_bytes']:,}",
            f"{row['max_error']:.1e}",
            f"{row['rms_relative']:.2e}",
            "yes" if row["right"] else "no",
        )
        for row in record["rows"]
    ]
    header = ("N", "heads", "ms", "TFLOP/s", "extra bytes", "of them not O and LSE")
    header += ("largest error", "rms error, relative", "within the bounds")
    setting = record["setting"]
    below = (
        f"{record['rows'][0]['implementation']}, {setting['dtype']}, d = {setting['d']}, causal. "
        f"Errors: the first, the last and random rows of every head against float64. "
        f"{provenance(record)}."
    )
    return f"### Long sequences\n\n{table(header, rows, below)}"


# Figures ------------------------------------------------------------------------------------------


def draw(record: Record | None) -> list[Drawing]:
    """The figures that a forward.json suffices for."""
    with matplotlib.rc_context(STYLE):
        found = []
        if record and record.get("rows"):
            found.append(bars(record, "forward", "Forward speed"))
        if record and record.get("crossover"):
            found.append(crossover(record))
    return found


def _in_order(names: Iterable[str]) -> list[str]:
    found = set(names)
    return [name for name in LABELS if name in found]


def bars(record: Record, name: str, title: str) -> Drawing:
    """TFLOP/s over N, grouped by implementation, a panel for each d and mask; % of the peak."""
    regime = first_regime(record)
    found, best = summary.cells(record["rows"], regime), peak(record, regime)
    names = _in_order(each for speed in found.values() for each in speed)
    dims, masks = sorted({d for d, _, _ in found}), sorted({causal for _, causal, _ in found})
    engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(9.6, 1.2 + 2.6 * len(masks)), layout=engine)
    axes = figure.subplots(len(masks), len(dims), sharey=True, squeeze=False)
    for line, causal in zip(axes, masks, strict=True):
        for ax, d in zip(line, dims, strict=True):
            sizes = [n for (e, c, n) in found if (e, c) == (d, causal)]
            width = 0.84 / len(names)
            for place, each in enumerate(names):
                x = [i + (place - (len(names) - 1) / 2) * width for i in range(len(sizes))]
                heights = [found[d, causal, n].get(each, 0.0) for n in sizes]
                ax.bar(x, heights, width, color=COLOURS[each])
            ax.axhline(best, color=INK, linewidth=0.9, linestyle=DASHES)
            ax.set_xticks(range(len(sizes)), [length(n) for n in sizes])
            ax.set_title(f"d = {d}, {'causal' if causal else 'full'}")
            ax.grid(False, axis="x")
            share = ax.secondary_yaxis(
                "right", functions=(lambda y: 100 * y / best, lambda y: y * best / 100)
            )
            share.tick_params(labelright=ax is line[-1])
            if ax is line[-1]:
                share.set_ylabel("% of the matrix product")
        line[0].set_ylabel("TFLOP/s")
    for ax in axes[-1]:
        ax.set_xlabel("N")
    handles: list[Any] = [Patch(facecolor=COLOURS[each], label=LABELS[each]) for each in names]
    handles.append(
        Line2D([], [], color=INK, linewidth=0.9, linestyle=DASHES, label="matrix product, measured")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=5, handlelength=1.2)
    return Drawing(name, title, f"TFLOP/s. {setting(record)}.", figure)


def crossover(record: Record) -> Drawing:
    """Time against N, and the same over the time of standard attention."""
    rows = record["crossover"]
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        times.setdefault(row["implementation"], {})[row["n"]] = row["milliseconds"]
    sizes = sorted({row["n"] for row in rows})
    figure = Figure(figsize=(9.6, 3.4), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05))
    left, right = figure.subplots(1, 2)
    standard = times.get("standard", {})
    for name in _in_order(times):
        own = times[name]
        look: Any = {"color": COLOURS[name], "marker": "o", "markersize": 4, "linewidth": 1.2}
        left.plot(list(own), list(own.values()), label=LABELS[name], **look)
        both = [n for n in own if n in standard]
        right.plot(both, [standard[n] / own[n] for n in both], **look)
    right.axhline(1, color=INK, linewidth=0.9, linestyle=DASHES)
    for ax, label in ((left, "ms"), (right, "times faster than standard")):
        ax.set(xscale="log", yscale="log", xlabel="N", ylabel=label)
        ax.xaxis.set_major_locator(FixedLocator(sizes))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: length(value)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.legend(loc="outside lower center", ncols=4)
    caption = f"d = {rows[0]['d']}, no mask. {setting(record)}."
    return Drawing("crossover", "Tiled against standard attention", caption, figure)
