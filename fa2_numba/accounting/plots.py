"""Figures from the traffic table.

In every figure filled markers are counted, lines and open shapes are predicted, dashes are theory;
axes name the level. Colours are those of Okabe and Ito, which colour-blind readers can tell apart;
methods also differ in marker.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from fa2_numba.accounting import levels, tables
from fa2_numba.accounting.fits import Fit, fit_exponent
from fa2_numba.accounting.sweep import MILLION, Plan
from fa2_numba.accounting.tables import DRAWN, Setting, Variant
from fa2_numba.problem import PORTABLE
from fa2_numba.tiling import DTYPE_BYTES
from fa2_numba.traffic import Traffic

Rows = Sequence[Traffic]

NAMES = ("growth", "growth_gpu_tiles", "arrays", "tiles", "causal")

INK, FAINT, BAND, PAPER = "#222222", "#d9d9d9", "#f0f0ee", "#ffffff"
COLOURS = {"standard": "#d55e00", "fa1": "#cc79a7", "fa2": "#0072b2"}
CAUSAL_COLOUR = "#009e73"
MARKERS = {"standard": "s", "fa1": "^", "fa2": "o"}
ARRAY_COLOURS = {
    "Q": "#0072b2",
    "K": "#56b4e9",
    "V": "#009e73",
    "O": "#f0e442",
    "S": "#d55e00",
    "P": "#e69f00",
    "l, m, L": "#999999",
}
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 7.8,
    "svg.fonttype": "path",
    "svg.hashsalt": "fa2_numba",
}


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, its file name and what to say of it.

    Attributes
    ----------
    name : str
        File name without suffix.
    title : str
    caption : str
        Level, source and machine included.
    figure : matplotlib.figure.Figure
    """

    name: str
    title: str
    caption: str
    figure: Figure


def draw(rows: Rows, plan: Plan) -> list[Drawing]:
    """Every figure the rows suffice for."""
    with matplotlib.rc_context(STYLE):
        found = [
            growth(rows, plan, plan.setting, "growth"),
            growth(rows, plan, plan.other, "growth_gpu_tiles") if plan.other else None,
            arrays(rows, plan),
            tile_sweep(rows, plan),
            causal_saving(rows, plan),
        ]
    return [drawing for drawing in found if drawing]


def save(drawing: Drawing, folder: Path) -> list[Path]:
    """Write ``name.svg`` and ``name.png`` (200 dots an inch) into `folder`, both on white."""
    paths = [folder / f"{drawing.name}{suffix}" for suffix in (".svg", ".png")]
    with matplotlib.rc_context(STYLE):
        drawing.figure.savefig(paths[0], facecolor=PAPER, metadata={"Date": None})
        drawing.figure.savefig(paths[1], facecolor=PAPER, dpi=200)
    return paths


# Small things -------------------------------------------------------------------------------------


DASHES = (0, (4, 3))


def _line(v: Variant) -> dict[str, Any]:
    """How a predicted line looks; FlashAttention-2's is wide, for its causal twin may lie on it."""
    return {"color": colour(v), "linewidth": 2.4 if v == Variant("fa2") else 1.2}


def _marks(v: Variant) -> dict[str, Any]:
    """How counted points look; causal ones are small, for they may lie on the others."""
    shape = {"marker": "D", "markersize": 3} if v.causal else {"marker": MARKERS[v.method]}
    return {"color": colour(v), "linestyle": "", "markersize": 5, "markeredgewidth": 0, **shape}


def colour(variant: Variant) -> str:
    """One colour a method; FlashAttention-2's causal line has its own."""
    return CAUSAL_COLOUR if variant.causal else COLOURS[variant.method]


def size(value: float) -> str:
    """Bytes in SI units, three digits: 512 B, 1.05 MB."""
    unit, power = _unit(value)
    digits = f"{value / power:#.3g}" if power > 1 else f"{value:.3g}"
    return f"{digits.rstrip('.')} {unit}"


def _tick(value: float) -> str:
    """Bytes in SI units, as few digits as they need: 1 kB, 4.1 kB."""
    unit, power = _unit(value)
    return f"{value / power:.3g} {unit}" if value else "0"


def _unit(value: float) -> tuple[str, int]:
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = next((n for n in range(len(units)) if abs(value) < 999.5 * 1000**n), len(units) - 1)
    return units[power], 1000**power


def length(N: float) -> str:
    """A sequence length: 512, 32k, 1M."""
    n = round(N)
    if n >= MILLION and n % MILLION == 0:
        return f"{n // MILLION}M"
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def _figure(columns: int, height: float, **kw: Any) -> tuple[Figure, Any]:
    engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05)
    figure = Figure(figsize=(9.6, height), layout=engine)
    return figure, figure.subplots(1, columns, **kw)


def _log2_axis(axis: Any, values: Sequence[int], text: Any = length) -> None:
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _bytes_axis(ax: Any) -> None:
    """A tick where the unit changes: 1 kB, 1 MB ..."""
    low, high = ax.get_ylim()
    ticks = [1000.0**n for n in range(7) if low <= 1000.0**n <= high]
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))


def _key(figure: Figure, *, counted: bool, theory: str) -> None:
    """The line under the panels that says what shapes mean."""
    handles = [
        Line2D([], [], color=INK, marker="o", linestyle="", markersize=5, label="counted"),
        Line2D([], [], color=INK, linewidth=1.2, label="predicted (closed form, exact integers)"),
        Line2D([], [], color=INK, linewidth=1, linestyle=DASHES, label=theory),
    ]
    figure.legend(handles=handles[0 if counted else 1 :], loc="outside lower center", ncols=3)


def _source(plan: Plan, counted: bool) -> str:
    if not counted:
        return "All of it is predicted; none of it was run here."
    return f"Filled markers were counted on {plan.machine}; lines are predicted."


# (a) growth ---------------------------------------------------------------------------------------

_PANELS = (
    ("total", "Loads and stores", "bytes issued to global memory", tables.TOTAL),
    ("writes", "Stores alone", "bytes issued to global memory", tables.WRITES),
    ("workspace", "Extra memory", "bytes beyond Q, K, V and O", tables.is_workspace),
)


def growth(rows: Rows, plan: Plan, setting: Setting, name: str) -> Drawing | None:
    """Bytes against N on log-log axes: everything, stores alone, and extra memory."""
    lines = {v: tables.curve(rows, v, setting, "predicted") for v in DRAWN}
    points = {v: tables.curve(rows, v, setting, "counted") for v in DRAWN}
    if not all(lines.values()):
        return None
    counted = any(points.values())
    figure, axes = _figure(3, 3.7)
    for ax, (quantity, title, label, choice) in zip(axes, _PANELS, strict=True):
        handles = []
        for v in DRAWN:
            N, y = tables.over_N(lines[v], choice)
            n, count = tables.over_N(points[v], choice)
            c, p = tables.leading(v, setting, quantity)
            ax.plot(N, y, **{**_line(v), "linewidth": 1.2} if choice is tables.TOTAL else _line(v))
            ax.plot(N, [c * m**p for m in N], color=colour(v), linewidth=0.9, linestyle=DASHES)
            ax.plot(n, count, **_marks(v))
            fits = (fit_exponent(n, count), fit_exponent(*_large(N, y)))
            handles.append(_legend_line(v, fits, counted))
        ax.set(xscale="log", yscale="log", title=title, xlabel="N", ylabel=label)
        every = (16, 256, 4096, 65536, MILLION) if min(N) <= 16 else (1024, 32768, MILLION)
        _log2_axis(ax.xaxis, every)
        _bytes_axis(ax)
        ax.set_ylim(top=ax.get_ylim()[1] * (300 if quantity == "total" else 30))
        if counted:
            ax.axvspan(min(plan.sizes), max(plan.sizes), color=BAND, linewidth=0)
        heading = "slope, counted → predicted" if counted else "slope, predicted"
        ax.legend(handles=handles, loc="upper left", title=heading, title_fontsize=7.8,
                  alignment="left", handlelength=1.2, borderpad=0, labelspacing=0.3)  # fmt: skip
    _key(figure, counted=counted, theory="leading term of the closed form")
    caption = (
        f"Bytes that warps issue to global memory (level: issued; not L2, not DRAM), one head, "
        f"{setting}. {_source(plan, counted)} Slopes are fitted. ± is half the 95 % interval, "
        f"which for exact counts says how far the points bend. Predicted slopes are over "
        f"N ≥ 4,096. Extra memory is the size of the arrays beyond Q, K, V and O."
    )
    return Drawing(name, f"Growth with N: {setting}", caption, figure)


def _large(N: Sequence[int], y: Sequence[int]) -> tuple[list[int], list[int]]:
    """The part of a curve where the leading term has won."""
    kept = [(n, value) for n, value in zip(N, y, strict=True) if n >= tables.LARGE_N]
    return [n for n, _ in kept], [value for _, value in kept]


def _legend_line(v: Variant, fits: tuple[Fit | None, Fit | None], counted: bool) -> Line2D:
    slopes = [
        str(fits[0]) if counted and fits[0] else "",
        f"{fits[1].slope:.2f}" if fits[1] else "",
    ]
    text = f"{v.label}: {' → '.join(s for s in slopes if s)}"
    marks = {k: x for k, x in _marks(v).items() if k != "linestyle"} if counted else {}
    return Line2D([], [], **{**marks, **_line(v)}, label=text)


# (b) by array -------------------------------------------------------------------------------------


def arrays(rows: Rows, plan: Plan) -> Drawing | None:
    """What each array moves, stacked, for each method, at a small and a large N."""
    panels = [(1024, plan.setting, "counted"), (plan.bars_N, plan.setting, "counted")]
    if plan.other:
        panels = [(plan.bars_N, plan.setting, "counted"), (16_384, plan.other, "predicted")]
    figure, axes = _figure(2, 2.7)
    for ax, (N, s, source) in zip(axes, panels, strict=True):
        found = {v: [r for r in tables.curve(rows, v, s, source) if r.n_q == N] for v in DRAWN}
        if not any(found.values()):
            return None
        _bars(ax, found, hollow=source == "predicted")
        tiles = f"{s.tiling.B_r} × {s.tiling.B_c}"
        ax.set_title(f"{source.capitalize()}: N = {N:,}, d = {s.d}, tiles {tiles}")
        ax.set_xlabel("bytes issued, loads and stores")
    handles = [Patch(facecolor=c, label=name) for name, c in ARRAY_COLOURS.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=7, handlelength=1, handleheight=1
    )
    caption = (
        f"Bytes issued to global memory (level: issued) by array, one head, fp32. "
        f"{'Left' if plan.other else 'Both'}: counted on {plan.machine}. "
        f"{'Right: predicted, drawn lighter. ' if plan.other else ''}"
        f"S and P vanish in both FlashAttentions. What FA1 spends on O and its statistics, FA2 "
        f"does not. What remains in FA2 is K and V, streamed once for every query tile."
    )
    return Drawing("arrays", "Traffic by array", caption, figure)


def _bars(ax: Any, found: dict[Variant, list[Traffic]], *, hollow: bool) -> None:
    largest = max(tables.total(r) for r in found.values())
    for place, rows in enumerate(found.values()):
        left = 0.0
        sums = tables.by_array(rows)
        stats = sum(sums.get(n, 0) for n in ("l", "m", "L"))
        for name, c in ARRAY_COLOURS.items():
            width = stats if name == "l, m, L" else sums.get(name, 0)
            ax.barh(place, width, left=left, height=0.66, color=c, alpha=0.6 if hollow else 1,
                    edgecolor=PAPER, linewidth=0.5)  # fmt: skip
            left += width
        ax.text(
            left + largest * 0.015,
            place,
            size(left) if rows else "not run",
            va="center",
            fontsize=8,
        )
    ax.set_yticks(range(len(found)), [v.label for v in found])
    ax.invert_yaxis()
    ax.set_xlim(0, largest * 1.17)
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    ax.xaxis.set_major_locator(MaxNLocator(4))


# (c) tiles ----------------------------------------------------------------------------------------


def tile_sweep(rows: Rows, plan: Plan) -> Drawing | None:
    """Loads of K and V against B_r, which divides them, and B_c, which does not matter."""
    N, d, base = plan.tile_N, plan.setting.d, plan.tile_tilings
    B_c, B_r = base[0].B_c, base[-1].B_r
    found = {
        source: tables.select(
            rows, method="fa2", mask="none", n_q=N, n_k=N, d=d, dtype="fp32", batch=1, heads=1,
            source=source, array=("K", "V"), op="load",
        )
        for source in ("predicted", "counted")
    }  # fmt: skip
    if not found["predicted"]:
        return None
    figure, axes = _figure(2, 3.0, sharey=True)
    for ax, moving, fixed in (
        (axes[0], "block_r", ("block_c", B_c)),
        (axes[1], "block_c", ("block_r", B_r)),
    ):
        for source, face in (("predicted", "none"), ("counted", COLOURS["fa2"])):
            sums: dict[int, int] = {}
            for r in tables.select(found[source], **{fixed[0]: fixed[1]}):
                x = getattr(r, moving)
                sums[x] = sums.get(x, 0) + r.bytes
            shape = {"markersize": 8, "mew": 1.2} if face == "none" else {"markersize": 4.5}
            xs = sorted(sums)
            ax.plot(xs, [sums[x] for x in xs], color=COLOURS["fa2"], marker="o", linestyle="",
                    markerfacecolor=face, **shape)  # fmt: skip
            if source == "predicted":
                theory = [2 * N * N * d * 4 / (x if moving == "block_r" else B_r) for x in xs]
                ax.plot(xs, theory, color=INK, linewidth=1, linestyle=DASHES)
        ax.set(xscale="log", yscale="log")
        _log2_axis(ax.xaxis, xs, lambda value: f"{value:.0f}")
    axes[0].set(title=f"$B_r$ divides it ($B_c$ = {B_c})", xlabel="$B_r$, rows of a query tile")
    axes[0].set_ylabel("K and V, bytes issued as loads")
    axes[1].set(
        title=f"$B_c$ does not matter ($B_r$ = {B_r})", xlabel="$B_c$, rows of a key/value tile"
    )
    axes[1].tick_params(labelleft=True)
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low / 1.4, high * 1.4)
    steps = sorted({r.bytes * 2 for r in found["predicted"]})
    axes[0].yaxis.set_major_locator(FixedLocator(steps))
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    dots: Any = {"color": COLOURS["fa2"], "marker": "o", "linestyle": ""}
    handles = [
        Line2D([], [], **dots, markersize=4.5, label="counted"),
        Line2D([], [], **dots, markersize=8, markerfacecolor="none", label="predicted"),
        Line2D([], [], color=INK, linewidth=1, linestyle=DASHES, label="2 N² d / $B_r$ elements"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    caption = (
        f"FlashAttention-2's K and V loads (level: issued) over tilings, one head, N = {N:,}, "
        f"d = {d}, fp32. Filled: counted on {plan.machine}. Open: predicted. Each of the N / B_r "
        f"query tiles loads all of K and V, 2 N² d / B_r elements together; how many keys it takes "
        f"at a time changes nothing."
    )
    return Drawing("tiles", "Tile sizes", caption, figure)


# (d) causal ---------------------------------------------------------------------------------------


def causal_saving(rows: Rows, plan: Plan) -> Drawing | None:
    """What the causal mask leaves: key tiles loaded, and bytes, as a share of the full ones."""
    if not tables.curve(rows, Variant("fa2", True), plan.setting, "predicted"):
        return None
    square = plan.setting.tiling.B_r % plan.setting.tiling.B_c == 0  # tiles end on the diagonal
    figure, axes = _figure(2, 3.1, sharey=True)
    _shares(axes[0], rows, plan, ("fa2",), tables.visited_tiles)
    _shares(axes[1], rows, plan, PORTABLE, lambda r: dict(zip(*tables.over_N(r), strict=True)))
    _tile_labels(axes[0], rows, plan)
    first = min(plan.sizes) // plan.setting.tiling.B_r
    for ax in axes:
        T = [first * 2 ** (n / 8) for n in range(8 * 13) if first * 2 ** (n / 8) <= MOST_TILES]
        if square:
            ax.plot(T, [(t + 1) / (2 * t) for t in T], color=INK, linewidth=1, linestyle=DASHES)
        ax.set(xscale="log", xlabel="T = N / $B_r$, query tiles", ylim=(0.42, 1.06))
        _log2_axis(ax.xaxis, [t for t in (1, 4, 16, 64, 256, 1024) if t >= first], "{:.0f}".format)
        ax.set_xlim(first / 1.3, MOST_TILES * 5)
    axes[0].set(title="Tiles visited", ylabel="causal / full, issued loads of K")
    axes[1].set(title="All bytes", ylabel="causal / full, bytes issued")
    axes[1].tick_params(labelleft=True)
    counted = bool(tables.curve(rows, Variant("fa2", True), plan.setting, "counted"))
    _key(figure, counted=counted, theory="T (T + 1) / 2 of T² tiles")
    caption = (
        f"What skipping the tiles above the diagonal leaves (level: issued), one head, "
        f"{plan.setting}. Left: B_r × B_r tiles of S for which FlashAttention-2 loads keys. "
        f"Right: all loads and stores. {_source(plan, counted)} The share nears one half as T "
        f"grows, and at T = 1 nothing is saved. Bytes lag behind tiles, because Q, O and L are "
        f"not saved. Standard attention computes and stores every masked score."
    )
    return Drawing("causal", "Causal saving", caption, figure)


MOST_TILES = 1024


def _shares(ax: Any, rows: Rows, plan: Plan, methods: Sequence[str], quantity: Any) -> None:
    """Causal over full of a quantity ``rows -> {N: number}``, against the number of tiles."""
    B_r = plan.setting.tiling.B_r
    for method in methods:
        v = Variant(method)
        for source, look in (("predicted", _line(v)), ("counted", _marks(v))):
            full, causal = (
                quantity(tables.curve(rows, Variant(method, c), plan.setting, source))
                for c in (False, True)
            )
            N = sorted(n for n in full if n in causal and n % B_r == 0 and n // B_r <= MOST_TILES)
            T, share = [n // B_r for n in N], [causal[n] / full[n] for n in N]
            ax.plot(T, share, **{**look, "linewidth": 2.4 if method == "fa1" else 1.2})
            if source == "predicted" and T:
                up = {"fa1": 5, "fa2": -5}.get(method, 0) if len(methods) > 1 else 0
                ax.annotate(v.label, (T[-1], share[-1]), xytext=(5, up), color=colour(v),
                            textcoords="offset points", va="center", fontsize=8)  # fmt: skip


def _tile_labels(ax: Any, rows: Rows, plan: Plan) -> None:
    """At the first counted points, the tiles themselves: 36 of 64."""
    full, causal = (
        tables.visited_tiles(tables.curve(rows, Variant("fa2", c), plan.setting, "counted"))
        for c in (False, True)
    )
    for N in sorted(n for n in full if n in causal):
        T = N // plan.setting.tiling.B_r
        if T in (1, 2, 4, 8):
            text, at = f"{causal[N]:.0f} of {full[N]:.0f}", (T, causal[N] / full[N])
            ax.annotate(text, at, xytext=(6, 2), textcoords="offset points", fontsize=7.5)


# Recorded benchmarks: levels, block sizes, Theorem 2 ----------------------------------------------

Record = dict[str, Any]  # what a benchmark wrote, or a row of it

LEVEL_COLOURS = {
    "issued": "#d55e00",
    "L2 to SM": "#e69f00",
    "L2 lookups": "#56b4e9",
    "DRAM": "#0072b2",
}
LEVEL_MARKERS = {"issued": "s", "L2 to SM": "^", "L2 lookups": "v", "DRAM": "o"}


def draw_recorded(
    swept: Record | None = None, blocks: Record | None = None, counted: Iterable[Record] = ()
) -> list[Drawing]:
    """Every figure that recorded results suffice for.

    Parameters
    ----------
    swept, blocks : dict, optional
        ``levels.json`` and ``fig2.json`` of `benchmarks`.
    counted : iterable of dict
        Rows of a report's ``traffic.json``.
    """
    with matplotlib.rc_context(STYLE):
        found = [
            four_levels(swept, 1) if swept else None,
            four_levels(swept, 8) if swept else None,
            residuals(swept) if swept else None,
            block_sizes(blocks) if blocks else None,
            theorem_2(levels.theorem_2_rows(counted)),
        ]
    return [drawing for drawing in found if drawing]


def four_levels(record: Record, heads: int) -> Drawing | None:
    """Bytes loaded against N at every level, a panel for each method with this many heads."""
    lines = levels.series(p for p in record["points"] if p["heads"] == heads)
    shown = [v for v in DRAWN if (v.method, v.causal, heads) in lines]
    if not shown:
        return None
    exponents: dict[Variant, list[Record]] = {}
    for fit in levels.fits(record["points"]):
        if fit["heads"] == heads:
            exponents.setdefault(Variant(fit["method"], fit["causal"]), []).append(fit)
    figure, axes = _figure(len(shown), 4.3, sharex=True, sharey=True, squeeze=False)
    for ax, v in zip(axes[0], shown, strict=True):
        line = lines[v.method, v.causal, heads]
        N = [p["n_q"] for p in line]
        handles = []
        for level in levels.LEVELS:
            y = [p["loads"][level] for p in line]
            known = [p["counted"] or level != "issued" for p in line]
            look: Any = {"color": LEVEL_COLOURS[level], "marker": LEVEL_MARKERS[level]}
            ax.plot(N, y, color=LEVEL_COLOURS[level], linewidth=1)
            _points(ax, N, y, known, look, 6 if level == "issued" else 4)
            label = f"{level}: {_slopes(exponents.get(v, []), level)}"
            handles.append(Line2D([], [], **look, markersize=4, linewidth=1, label=label))
        ax.plot(N, [p["model"]["loads"] for p in line], color=INK, linewidth=1, linestyle=DASHES)
        ax.set(xscale="log", yscale="log", title=v.label, xlabel="N")
        ax.legend(handles=handles, loc="upper left", handlelength=1.2, borderpad=0,
                  labelspacing=0.3, fontsize=7.2)  # fmt: skip
    every = sorted({p["n_q"] for line in lines.values() for p in line})
    first, last = every[0], every[-1]
    _log2_axis(axes[0][0].xaxis, [n for n in (1024, 8192, 65536, 524288) if first <= n <= last])
    axes[0][0].set_ylim(top=axes[0][0].get_ylim()[1] * 300)
    _bytes_axis(axes[0][0])
    axes[0][0].set_ylabel("bytes loaded")
    for ax, v in zip(axes[0], shown, strict=True):
        ax.tick_params(labelleft=ax is axes[0][0])
        _thresholds(ax, lines[v.method, v.causal, heads], record["l2_bytes"])
    dot: Any = {"color": INK, "marker": "o", "linestyle": "", "markersize": 4}
    handles = [
        Line2D([], [], **dot, label="counted, measured"),
        Line2D([], [], **dot, markerfacecolor=PAPER, label="predicted"),
        Line2D([], [], color=INK, linewidth=1, linestyle=DASHES, label="model of DRAM"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    p = lines[shown[0].method, shown[0].causal, heads][0]
    caption = (
        f"Bytes loaded at four levels by the same launches, {_heads(heads)}, {p['dtype']}, d = "
        f"{p['d']}. Issued: what warps ask for, predicted, and counted where filled. The others: "
        f"counters of {record['gpu']}, each kernel with empty caches. Numbers are fitted exponents "
        f"in N; ± is half the 95 % interval. For FA2's DRAM: over one wave → over more. Dashed: "
        f"the model. Vertical: N at which the row tiles of the heads fill one wave, and at which "
        f"their K and V fill L2. Loads alone, for dirty lines may stay in L2."
    )
    name = "levels" if heads == 1 else f"levels_{heads}_heads"
    return Drawing(name, f"Four levels, {_heads(heads)}", caption, figure)


def _heads(heads: int) -> str:
    return "one head" if heads == 1 else f"{heads} heads"


def _points(
    ax: Any,
    x: Sequence[float],
    y: Sequence[float],
    filled: Sequence[bool],
    look: Any,
    markersize: float = 4,
) -> None:
    """Points, filled or hollow one by one."""
    for face, kind in ((look["color"], True), (PAPER, False)):
        chosen = [n for n, f in enumerate(filled) if f is kind]
        ax.plot([x[n] for n in chosen], [y[n] for n in chosen], linestyle="", markersize=markersize,
                markerfacecolor=face, markeredgewidth=0.9, **look)  # fmt: skip


def _slopes(fits: Sequence[Record], level: str) -> str:
    """``1.99 ± 0.01``; of DRAM, where both parts were measured, ``1.00 → 1.97``."""
    found = {fit["part"]: fit for fit in fits if fit["level"] == level}
    if {"one wave", "more waves"} <= set(found):
        return " → ".join(_slope(found[part]) for part in ("one wave", "more waves"))
    return _slope(found["all"]) if found else "one N"


def _slope(fit: Record) -> str:
    width = fit["half_width"]
    return f"{fit['slope']:.2f}" if width is None else f"{fit['slope']:.2f} ± {width:.2f}"


def _thresholds(ax: Any, line: Sequence[Record], l2_bytes: int) -> None:
    """Lines where a level may bend: one wave of row tiles (FA2), K and V as large as L2."""
    p = line[0]
    marks = [(l2_bytes / (2 * p["d"] * DTYPE_BYTES[p["dtype"]] * p["heads"]), "K + V = L2")]
    if p["method"] == "fa2":
        marks.append((p["block_r"] * p["slots"]["fa2"] / p["heads"], "one wave"))
    for N, text in marks:
        if p["n_q"] <= N <= line[-1]["n_q"]:
            ax.axvline(N, ymax=0.74, color=INK, linewidth=0.7, linestyle=(0, (1, 2)))
            ax.annotate(text, (N, 0.74), xycoords=("data", "axes fraction"), rotation=90,
                        xytext=(-2, 0), textcoords="offset points", ha="right", va="top",
                        fontsize=6.8)  # fmt: skip


def residuals(record: Record) -> Drawing | None:
    """DRAM loads, measured over modelled, against N: all points, and near 1 those in the domain."""
    lines = levels.series(record["points"])
    if not lines:
        return None
    figure, axes = _figure(2, 3.4)
    for ax, everything in zip(axes, (True, False), strict=True):
        for (method, causal, heads), line in lines.items():
            v = Variant(method, causal)
            kept = [p for p in line if everything or p["in_domain"]]
            look = {"color": colour(v), "marker": MARKERS[method] if heads == 1 else "D"}
            _points(ax, [p["n_q"] for p in kept], [p["ratio"] for p in kept],
                    [p["in_domain"] for p in kept], look)  # fmt: skip
        ax.axhline(1, color=INK, linewidth=0.9)
        ax.set(xscale="log", xlabel="N", ylabel="DRAM loads, measured / model")
        _log2_axis(ax.xaxis, [1024, 8192, 65536, 524288])
        ax.set_xlim(800, 700_000)
    ratios = [p["ratio"] for line in lines.values() for p in line]
    span = max(1.25, 1.15 * max(*ratios, *(1 / r for r in ratios if r)))
    axes[0].set(yscale="log", ylim=(1 / span, span), title="All points")
    axes[0].yaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10]))
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    off = max((abs(p["ratio"] - 1) for line in lines.values() for p in line if p["in_domain"]),
              default=0)  # fmt: skip
    axes[1].set(ylim=(1 - max(0.01, 1.2 * off), 1 + max(0.01, 1.2 * off)), title="In the domain")
    handles = [
        Line2D([], [], linestyle="", markersize=4, color=colour(Variant(m, c)),
               marker=MARKERS[m] if heads == 1 else "D",
               label=f"{Variant(m, c).label}, {_heads(heads)}")
        for m, c, heads in lines
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    caption = (
        f"Bytes loaded from DRAM, counted by {record['gpu']}, over those of the model, fp32, each "
        f"kernel with empty caches. Filled: in the model's domain, where it does not depend on how "
        f"much of L2 keeps what is read again. Hollow: outside, where it says little. Right: the "
        f"filled ones, enlarged."
    )
    return Drawing("dram_residuals", "DRAM: measured over modelled", caption, figure)


def block_sizes(record: Record) -> Drawing | None:
    """The paper's Fig. 2: HBM accesses and time against the block size, for fa1 and fa2."""
    rows = sorted(record["rows"], key=lambda row: row["block"])
    shown = [m for m in ("fa1", "fa2") if any(row["method"] == m for row in rows)]
    if not shown:
        return None
    figure, axes = _figure(len(shown), 3.3, squeeze=False)
    quantities = (
        ("issued", "issued", lambda row: row["issued"] / 1e9),
        ("DRAM", "DRAM", lambda row: (row["dram_loads"] + row["dram_stores"]) / 1e9),
    )
    handles: list[Any] = []
    for ax, method in zip(axes[0], shown, strict=True):
        line = [row for row in rows if row["method"] == method]
        blocks = [row["block"] for row in line]
        time_axis = ax.twinx()
        handles = [
            *(
                ax.plot(blocks, [of(row) for row in line], color=LEVEL_COLOURS[level], label=label,
                        marker=LEVEL_MARKERS[level], markersize=4.5, linewidth=1.2)[0]
                for level, label, of in quantities
            ),
            time_axis.plot(blocks, [row["milliseconds"] for row in line], color=INK, marker="D",
                           markersize=4, linewidth=1.2, linestyle=DASHES, label="time")[0],
        ]  # fmt: skip
        time_axis.spines["right"].set_visible(True)
        time_axis.grid(False)
        ax.set(xscale="log", title=Variant(method).label, xlabel="block size $B_r = B_c$")
        ax.set_ylabel("bytes loaded and stored, GB")
        time_axis.set_ylabel("time, ms")
        ax.set_ylim(bottom=0)
        time_axis.set_ylim(bottom=0)
        _log2_axis(ax.xaxis, blocks, lambda value: f"{value:.0f}")
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    r = rows[0]
    caption = (
        f"After Fig. 2 of Dao et al. (2022): batch {r['batch']}, {r['heads']} heads, N = "
        f"{r['n']:,}, d = {r['d']}, here {r['dtype']}, forward, square tiles. Issued: what warps "
        f"ask for, predicted. DRAM: counters of {record['gpu']}, each kernel with empty caches; "
        f"stores that are still in L2 at a kernel's end are missing. Time: medians of "
        f"{record['rounds']} bursts."
    )
    return Drawing("block_sizes", "HBM accesses and time by block size", caption, figure)


def theorem_2(rows: Sequence[Record]) -> Drawing | None:
    """Elements issued against N^2 d^2 / M, and their ratio against M."""
    if not rows:
        return None
    figure, axes = _figure(2, 3.6)
    handles = []
    for method in ("fa1", "fa2"):
        mine = [r for r in rows if r["method"] == method]
        found = levels.order([r for r in mine if r["source"] == "predicted"])
        if found is None:
            continue
        look: Any = {"color": COLOURS[method], "marker": MARKERS[method]}
        for ax, x, y in (
            (axes[0], [r["order"] for r in mine], [r["elements"] for r in mine]),
            (axes[1], [r["M"] for r in mine], [r["elements"] / r["order"] for r in mine]),
        ):
            _points(ax, x, y, [r["source"] == "counted" for r in mine], look)
        ends = [min(r["order"] for r in mine), max(r["order"] for r in mine)]
        axes[0].plot(ends, [found.constant * x for x in ends], color=COLOURS[method], linewidth=1)
        label = (
            f"{Variant(method).label}: exponent {found.fit}, constant {found.constant:.1f} "
            f"({found.lowest:.1f} to {found.highest:.1f})"
        )
        handles.append(Line2D([], [], **look, markersize=4, linewidth=1, label=label))
    axes[0].set(xscale="log", yscale="log", title="Theorem 2", ylabel="elements issued")
    axes[0].set_xlabel("N² d² / M")
    for axis in (axes[0].xaxis, axes[0].yaxis):
        axis.set_minor_locator(NullLocator())
    axes[1].set(xscale="log", title="What Θ hides", ylabel="elements issued × M / (N² d²)")
    axes[1].set_xlabel("M, elements of the tiles of a block")
    axes[1].set_ylim(bottom=0)
    _log2_axis(axes[1].xaxis, [2048, 8192, 32768, 131072])
    figure.legend(handles=handles, loc="outside lower center", ncols=1)
    sizes = [sorted({r[name] for r in rows if r["source"] == "predicted"}) for name in ("n", "d")]
    caption = (
        f"Elements issued (level: issued) by FlashAttention over N = {length(sizes[0][0])} to "
        f"{length(sizes[0][-1])}, d = {sizes[1][0]} to {sizes[1][-1]} and square tiles, one head, "
        f"against the order of Theorem 2 of Dao et al. (2022). M: elements of the tiles Q_i, K_j, "
        f"V_j, O_i and S_ij. Hollow: predicted, to which the lines and numbers are fitted. Filled: "
        f"counted on a GPU, tiles of other shapes among them. The constant depends on the shape of "
        f"the tiles; S_ij takes room and saves nothing, which holds the exponent below 1."
    )
    return Drawing("theorem_2", "Theorem 2", caption, figure)


# Timeline ----------------------------------------------------------------------------------------

GANTT_PHASES = 60  # of a block, in a figure that can be read
PHASE_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"
)  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One block of a timeline.

    Attributes
    ----------
    sm, block : int
        Which block, and where it ran.
    begin, end : float
        Times.
    phases : tuple of (index, begin, end)
        Of its first warp, in order.
    """

    sm: int
    block: int
    begin: float
    end: float
    phases: tuple[tuple[int, float, float], ...]


def gantt(phases: Sequence[str], bars: Sequence[Bar], unit: str, caption: str) -> Drawing:
    """Blocks over time, a row each, grouped by SM, their phases in colour.

    Blocks of more than `GANTT_PHASES` phases are shown whole, and below them their begin.
    """
    zero = min((b.begin for b in bars), default=0.0)
    shown = [b.phases[:GANTT_PHASES][-1][2] for b in bars if b.phases]
    end = max(shown, default=zero)
    whole = all(len(b.phases) <= GANTT_PHASES for b in bars)
    with matplotlib.rc_context(STYLE):
        height = 1.4 + (1 if whole else 2) * max(1.0, 0.26 * len(bars))
        engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05)
        figure = Figure(figsize=(9.6, height), layout=engine)
        axes = figure.subplots(1 if whole else 2, 1, squeeze=False)[:, 0]
        for row, b in enumerate(bars):
            for index, left, right in b.phases:
                if right <= end:
                    axes[-1].barh(row, right - left, left=left - zero, height=0.8,
                                  **_phase_look(index))  # fmt: skip
            if not whole:
                axes[0].barh(row, b.end - b.begin, left=b.begin - zero, height=0.8, color=FAINT,
                             edgecolor=INK, linewidth=0.5)  # fmt: skip
                axes[0].text(b.begin - zero, row, f" block {b.block}", va="center", fontsize=7)
        if not whole:
            axes[0].axvspan(0, end - zero, color=PHASE_COLOURS[4], alpha=0.3, linewidth=0)
            axes[0].set_title("A wave of blocks")
            axes[1].set_title(f"Its first {GANTT_PHASES} phases")
        firsts = [n for n, b in enumerate(bars) if n == 0 or bars[n - 1].sm != b.sm]
        for ax in axes:
            ax.set_yticks(firsts, [f"SM {bars[n].sm}" for n in firsts])
            ax.set_ylim(len(bars) - 0.4, -0.6)
            ax.grid(False, axis="y")
        axes[-1].set_xlabel(unit)
        handles = [Patch(**_phase_look(n), label=name) for n, name in enumerate(phases)]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(8, len(phases)))
        figure.supxlabel(textwrap.fill(caption, 170), fontsize=7.5)
    return Drawing("timeline", "Timeline", caption, figure)


def save_svg(drawing: Drawing, path: Path) -> None:
    """Write one figure as SVG, with its title and caption as metadata."""
    about = {"Title": drawing.title, "Description": drawing.caption, "Date": None}
    with matplotlib.rc_context(STYLE):
        drawing.figure.savefig(path, format="svg", facecolor=PAPER, metadata=about)


def _phase_look(index: int) -> dict[str, Any]:
    """A colour for each of eight phases; then they come again, hatched."""
    hatch = "////" if index >= len(PHASE_COLOURS) else ""
    colour = PHASE_COLOURS[index % len(PHASE_COLOURS)]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": PAPER, "linewidth": 0}
