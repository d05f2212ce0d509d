"""One HTML page that tells what a sweep found; every number in it is read from the sweep.

The page stands alone: figures are inline SVG in the page's own colours, so that they follow its
light and dark mode, and nothing is loaded from anywhere.
"""

import html
import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from fa2_numba.accounting import levels, tables, timing, verify
from fa2_numba.accounting.exactness import Exactness
from fa2_numba.accounting.inputs import short
from fa2_numba.accounting.plots import Drawing, length, size
from fa2_numba.accounting.proof import COUNTERS, LEVELS, PHASES, SHARED, Proof
from fa2_numba.accounting.sweep import (
    CHECK_ALL_UP_TO,
    ROWS_CHECKED,
    Comparison,
    Sweep,
    problem,
)
from fa2_numba.accounting.tables import Growth, Variant
from fa2_numba.accounting.timing import PhaseTable
from fa2_numba.io_model import closed_form
from fa2_numba.tiling import Tiling, acc_bytes

FILES = ("traffic.csv", "traffic.json", "checks.json")
VERIFY, TRACE = "verify.json", "trace.json"
_SHOWN = tuple(
    (quantity, op) for quantity in ("bytes", "requests", "sectors") for op in verify.ISSUED
)


def files(proof: Proof) -> list[str]:
    """The files beside the page."""
    return [*FILES, *[VERIFY] * (proof.verification is not None), *[TRACE] * bool(proof.phases)]


_CSS = """
:root{color-scheme:light dark;--page:#fdfdfc;--ink:#222;--soft:#666;--faint:#d9d9d9;--band:#f0f0ee;
--blue:#0072b2;--good:#00734f;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--page:#16181c;--ink:#e4e4e2;--soft:#a0a0a0;--faint:#3a3d43;
--band:#22252b;--blue:#2a7fc2;--good:#4cc79a;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:64rem;padding:2rem 1rem 4rem;background:var(--page);color:var(--ink);
font:1rem/1.55 system-ui,sans-serif}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .3rem}
h2{font-size:1.25rem;margin:2.8rem 0 .6rem}
h3{font-size:1.05rem;margin:2rem 0 .4rem}
p,li{max-width:46rem}
.above{margin:1.2rem 0 0}.above+.wide{margin-top:.3rem}
.soft,figcaption{color:var(--soft);font-size:.9rem}
.verdict{font-size:1.1rem;border-left:.25rem solid var(--good);padding-left:.8rem}
.verdict.no,.stopped{border-left:.25rem solid var(--bad);padding-left:.8rem}
.yes{color:var(--good)}.no{color:var(--bad)}
.wide{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .8rem .25rem 0;text-align:right;vertical-align:top;white-space:nowrap}
td:first-child{white-space:normal}
details{margin:1rem 0}summary{cursor:pointer}
th{font-weight:600;border-bottom:1px solid var(--faint)}
td{border-bottom:1px solid var(--faint)}
.text{text-align:left}
figure{margin:1.5rem 0}
figure svg{width:100%;min-width:38rem;height:auto;display:block}
sub{line-height:0;font-size:.75em}
"""

# Colours of plots.py that follow the page.
_COLOURS = {
    "#222222": "var(--ink)",
    "#d9d9d9": "var(--faint)",
    "#f0f0ee": "var(--band)",
    "#0072b2": "var(--blue)",
}


def page(
    sweep: Sweep,
    proof: Proof,
    drawings: Sequence[Drawing],
    svgs: Sequence[str],
    growth: list[Growth],
) -> str:
    """The page.

    Parameters
    ----------
    sweep : Sweep
    proof : Proof
        Run or not.
    drawings : list of Drawing
    svgs : list of str
        The text of each drawing's SVG file.
    growth : list of Growth
        Of the plan's setting.

    Returns
    -------
    str
        HTML, with no address in it but those of the files in its folder.
    """
    figures = {d.name: _figure(d, svg) for d, svg in zip(drawings, svgs, strict=True)}
    body = [
        _head(sweep, proof),
        _exact(sweep),
        _counted(sweep, figures),
        _hardware(proof, figures),
        _theory(sweep, growth, figures),
        _linear(sweep, proof, growth),
        _limits(sweep, proof),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>What attention moves</title><style>{_CSS}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


# Pieces of HTML -----------------------------------------------------------------------------------


def _text(value: object) -> str:
    """Escaped, with the papers' subscripts."""
    return _subscripts(html.escape(str(value)))


def _subscripts(text: str) -> str:
    return re.sub(r"\b([BTN])_([rcqk])\b", r"\1<sub>\2</sub>", text)


def _p(text: str, kind: str = "") -> str:
    """A paragraph of HTML, to which the papers' subscripts are added."""
    text = _subscripts(" ".join(text.split()))
    return f'<p class="{kind}">{text}</p>' if kind else f"<p>{text}</p>"


def _table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]], text: int) -> str:
    """A table whose first `text` columns hold text; cells that start with "<" are HTML already."""

    def cells(values: Sequence[object], tag: str) -> str:
        out = []
        for n, value in enumerate(values):
            kind = ' class="text"' if n < text else ""
            shown = value if str(value).startswith("<") else _text(value)
            out.append(f"<{tag}{kind}>{shown}</{tag}>")
        return f"<tr>{''.join(out)}</tr>"

    body = "".join(cells(row, "td") for row in rows)
    return (
        f'<p class="soft above">{_text(caption)}</p><div class="wide"><table>'
        f"<thead>{cells(header, 'th')}</thead><tbody>{body}</tbody></table></div>"
    )


def _verdict(good: bool, yes: str, no: str) -> str:
    return f'<span class="yes">{yes}</span>' if good else f'<span class="no">{no}</span>'


def _figure(drawing: Drawing, svg: str) -> str:
    return (
        f'<figure id="{drawing.name}"><div class="wide">{inline(svg, drawing)}</div>'
        f"<figcaption><b>{_text(drawing.title)}.</b> {_text(drawing.caption)}</figcaption></figure>"
    )


def inline(svg: str, drawing: Drawing) -> str:
    """An SVG file as an element of the page: no prolog, own ids, the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'\bid="', f'id="{drawing.name}-', svg)
    svg = re.sub(r'href="#', f'href="#{drawing.name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{drawing.name}-", svg)
    svg = svg.replace("fill: #ffffff", "fill: none").replace(
        "stroke: #ffffff", "stroke: var(--page)"
    )
    for fixed, variable in _COLOURS.items():
        svg = svg.replace(fixed, variable)
    # Glyphs have no colour of their own: black is SVG's default, not the page's.
    label = html.escape(f"{drawing.title}. {drawing.caption}", quote=True)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}" fill="var(--ink)"', 1).strip()


def _integer(n: int) -> str:
    return f"{n:,}"


def _small(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}" if x else "0"


# The story ----------------------------------------------------------------------------------------


def _head(sweep: Sweep, proof: Proof) -> str:
    rows = sum(c.rows for c in sweep.comparisons)
    wrong = sum(c.differences for c in sweep.comparisons)
    exact = sum(e.exact for e in sweep.exactness)
    stopped = ""
    if sweep.stopped:
        stopped = _p(
            f"""<b>{_text(sweep.stopped)}.</b> {sweep.done} of {sweep.total} experiments were
            finished. This page shows those, and lacks what was to come.""",
            "stopped",
        )
    links = ", ".join(f'<a href="{name}">{name}</a>' for name in files(proof))
    about = _p(
        f"""Standard attention, FlashAttention (FA1) and FlashAttention-2 (FA2): counted on
        {_text(sweep.plan.machine)} by the kernels that computed the outputs, and predicted by
        closed forms. {sweep.seconds:.0f} s. Data: {links}.""",
        "soft",
    )
    verdict = _p(
        f"""{exact} of {len(sweep.exactness)} outputs are within the error of their own precision.
        {_integer(rows - wrong)} of {_integer(rows)} counted rows equal their prediction, as
        integers.{_witness(proof)}""",
        "verdict" if sweep.all_exact and sweep.all_equal and proof.all_equal else "verdict no",
    )
    return f"<h1>What attention moves through global memory</h1>{about}{stopped}{verdict}"


def _witness(proof: Proof) -> str:
    return f" {_text(verify.summary(proof.verification)[-1])}" if proof.verification else ""


def worst(found: Iterable[Exactness]) -> list[Exactness]:
    """The check that used most of its allowance, for each input, method and mask."""
    groups: dict[tuple[str, str, str], Exactness] = {}
    for e in found:
        key = (e.input, e.method, e.mask)
        if key not in groups or (not e.exact, e.used) > (not groups[key].exact, groups[key].used):
            groups[key] = e
    return list(groups.values())


def _exact(sweep: Sweep) -> str:
    rows = [
        (
            short(e.input),
            Variant(e.method).label,
            e.mask,
            e.dtype,
            f"{e.n_q} × {e.n_k}",
            e.d,
            _small(e.out_error),
            _small(e.out_allowed),
            _small(e.lse_error),
            _small(e.lse_allowed),
            _verdict(e.exact, "exact", _text(e.message) or "not exact"),
        )
        for e in worst(sweep.exactness)
    ]
    header = ("input", "method", "mask", "dtype", "N_q × N_k", "d", "error of O", "allowed")
    intro = _p(
        """Tiling changes the order of a sum and nothing else. So an output may be off by what its
        precision costs, and by no more: twice the error of the same precision in NumPy, one
        rounding, and what rounding does inside for these inputs. Errors are the largest absolute
        differences from a float64 reference. L is the log-sum-exp of each row."""
    )
    table = _table(
        "The check that came closest to its limit, for each input, method and mask",
        (*header, "error of L", "allowed", ""),
        rows,
        4,
    )
    return f"<h2>1. The outputs are exact</h2>{intro}{table}"


def _counted(sweep: Sweep, figures: dict[str, str]) -> str:
    intro = _p(
        """The kernels that computed these outputs ran with arrays that count each access: elements,
        bytes, warp requests and 32-byte sectors, of every array in every phase. A row is one array
        in one phase, loaded or stored. It differs from its prediction if any of its four integers
        does."""
    )
    runs = f"<details><summary>All {len(sweep.comparisons)} runs</summary>{_runs(sweep)}</details>"
    return f"<h2>2. What was counted</h2>{intro}{_groups(sweep)}{runs}{figures.get('arrays', '')}"


def _groups(sweep: Sweep) -> str:
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for c in sweep.comparisons:
        groups.setdefault((c.experiment, c.method, c.mask), []).append(c)
    rows = []
    for (name, method, mask), runs in groups.items():
        last = max(runs, key=lambda c: (c.n_q, c.counted_bytes))
        first = min(c.n_q for c in runs)
        rows.append(
            (
                short(name),
                Variant(method).label,
                mask,
                len(runs),
                str(first) if first == last.n_q else f"{first} to {last.n_q}",
                sum(c.rows for c in runs),
                _differences(runs),
                _integer(last.counted_bytes),
                _integer(last.predicted_bytes),
            )
        )
    header = ("input", "method", "mask", "runs", "N", "rows", "differ")
    return _table(
        "Rows compared, rows that differ, and the bytes issued by the largest run",
        (*header, "bytes counted", "bytes predicted"),
        rows,
        3,
    )


def _differences(runs: Sequence[Comparison]) -> str:
    wrong = sum(c.differences for c in runs)
    first = next((c.first for c in runs if c.first), "")
    return _verdict(not wrong, "0", f"{wrong}: {_text(first)}")


def _runs(sweep: Sweep) -> str:
    rows = [
        (
            short(c.experiment),
            Variant(c.method).label,
            c.mask,
            c.n_q,
            f"{c.block_r} × {c.block_c}",
            c.rows,
            _differences([c]),
            _integer(c.counted_bytes),
            _integer(c.predicted_bytes),
        )
        for c in sweep.comparisons
    ]
    header = ("input", "method", "mask", "N", "B_r × B_c", "rows", "differ")
    return _table("", (*header, "bytes counted", "bytes predicted"), rows, 3)


# The hardware ------------------------------------------------------------------------------------


def _hardware(proof: Proof, figures: dict[str, str]) -> str:
    parts = (_verified(proof), _levels(proof), _shared(proof), _phases(proof, figures))
    return f"<h2>3. What the hardware saw</h2>{''.join(parts)}"


def _missing(proof: Proof, part: str, what: str) -> str:
    """Why a part is not here."""
    why = _text(proof.missing.get(part, "the report ended before"))
    return _p(f"""<b>{what}</b>: {why}.""", "stopped")


def _verified(proof: Proof) -> str:
    intro = _p(
        """Counting is code of this package, in kernels that are not the ones you run. The GPU's own
        counters are a witness that is neither: NVIDIA's Nsight Compute (ncu) reads them while the
        plain kernels run, and launch by launch they must be the same integers."""
    )
    found = proof.verification
    if found is None:
        advice = "" if COUNTERS not in proof.missing else _p(
            """Where a GPU and ncu can be used, <code>fa2-numba report</code> does this, and
            <code>fa2-numba verify</code> does it alone."""
        )  # fmt: skip
        return intro + _missing(proof, COUNTERS, "Not compared with the hardware") + advice
    told = "".join(
        _p(_text(line), "" if proof.all_equal else "no") for line in verify.summary(found)
    )
    rows, differing = [], found.differing
    for _, group in groupby(found.rows, lambda row: row.launch):
        launch = list(group)
        p, read = launch[0].problem, {(r.quantity, r.op): r.hardware for r in launch}
        wrong, compared = sum(r in differing for r in launch), sum(r.exact for r in launch)
        rows.append(
            (
                Variant(p["method"]).label,
                p["mask"],
                verify.sizes(p),
                launch[0].kernel,
                _verdict(not wrong, f"0 of {compared}", f"{wrong} of {compared}"),
                *(f"{read[key]:,}" if key in read else "" for key in _SHOWN),
            )
        )
    header = ["method", "mask", "B × H × N_q × N_k", "kernel", "differ"]
    header += [f"{quantity}, {op}s" for quantity, op in _SHOWN]
    table = _table(
        f"Read by ncu {proof.ncu_version}, and how many numbers of a launch differ from the count",
        header,
        rows,
        4,
    )
    return intro + told + table


def _levels(proof: Proof) -> str:
    title = "<h3>Below the warps: L2 and DRAM</h3>"
    if not proof.points:
        why = proof.missing.get(LEVELS)
        if why is not None and why == proof.missing.get(COUNTERS):
            return title + _p("Not read, for the same reason.")
        return title + _missing(proof, LEVELS, "Not read")
    intro = _p(
        """What warps issue is one level. Part of it hits in L1, part of the rest in L2, and DRAM
        sends what is left. Each kernel started with empty caches. The model of DRAM supposes that
        blocks run in waves, and that those of a wave read a tile of K and V together. A point is in
        its domain where the model has one answer, however much of L2 keeps what is read again, and
        blocks need not keep in step for it. Loads alone: of the stores a part stays in L2."""
    )
    rows = [
        (
            f"{p['n_q']:,}",
            *(size(p["loads"][level]) for level in levels.LEVELS),
            size(p["model"]["loads"]),
            f"{p['ratio']:.3f}",
            "yes" if p["in_domain"] else "no",
            size(p["compulsory"]),
        )
        for p in proof.points
    ]
    s = proof.sweep.plan.setting
    table = _table(
        f"Bytes loaded by FA2, one head, {s}; issued: "
        f"{'counted' if all(p['counted'] for p in proof.points) else 'predicted'}, the other "
        f"levels: read by ncu",
        ("N", *levels.LEVELS, "model of DRAM", "DRAM / model", "in domain", "Q, K, V once"),
        rows,
        0,
    )
    return title + intro + table


def _shared(proof: Proof) -> str:
    title = "<h3>On chip: shared memory</h3>"
    if not proof.shared:
        return title + _missing(proof, SHARED, "Not counted")
    intro = _p(
        """Each score is a sum of d products of elements of Q_i and K_j, which come from shared
        memory. The same kernels count that, too. Elements are those of all lanes; bytes those of
        the distinct words that a warp instruction asks for; a wavefront is one pass over the 32
        banks, and a conflict is one that better places of the words would save."""
    )
    rows = [
        (r.tile, f"{r.op}s", *map(_integer, (r.elements, r.requests, r.bytes, r.wavefronts)),
         _integer(r.conflicts))
        for r in proof.shared
    ]  # fmt: skip
    plan = proof.sweep.plan
    table = _table(
        f"Level: shared memory. Counted on {plan.machine}: FA2, one head, N = {plan.small_N}, "
        f"{plan.setting}",
        ("tile", "", "elements", "warp requests", "bytes", "wavefronts", "conflicts"),
        rows,
        2,
    )
    return title + intro + table


def _phases(proof: Proof, figures: dict[str, str]) -> str:
    title, found = "<h3>Where the cycles go</h3>", proof.phases
    if found is None:
        return title + _missing(proof, PHASES, "Not timed")
    numbers: list[tuple[str, ...]]
    if found.emulated:
        intro = _p(
            """There is no clock here. The timeline is made of emulated steps, no time: the
            simulator's clock steps each time that a thread reads it. It shows the order of the
            phases, and nothing of how long they take."""
        )
        header = ["steps of a block", "share", "visits"]
        numbers = [(_number(r.cycles), f"{r.share:.1%}", _number(r.visits)) for r in found.rows]
    else:
        intro = _p(
            f"""The same kernel, compiled with a clock: each warp reads its SM's cycle counter where
            a phase ends. Cycles are those of a block, the mean of its warps. {_cost(found)}"""
        )
        intro += "".join(_p(_text(warning) + ".", "stopped") for warning in found.warnings)
        header = ["cycles of a block", "IQR", "less marks", "share", "visits", "cycles per visit"]
        header += ["ns"]
        numbers = [
            (
                *map(_number, (r.cycles, r.iqr, r.corrected)),
                f"{r.share:.1%}",
                *map(_number, (r.visits, r.cycles_per_visit, r.ns)),
            )
            for r in found.rows
        ]
    heads, N = proof.sweep.plan.timed
    table = _table(
        f"FA2, {'one head' if heads == 1 else f'{heads} heads'}, N = {N:,}, "
        f"{proof.sweep.plan.setting}"
        + ("" if found.emulated else f"; medians of {found.repeats} launches"),
        ("kernel", "phase", *header),
        [(r.kernel, r.phase, *n) for r, n in zip(found.rows, numbers, strict=True)],
        2,
    )
    opened = _p(
        f"""{TRACE} holds the launch for Perfetto (ui.perfetto.dev): of each warp all marks, or the
        first of them where they are many.""",
        "soft",
    )
    return title + intro + table + figures.get("timeline", "") + opened


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:,.0f}"


def _cost(found: PhaseTable) -> str:
    """What the phases cover, and what timing them costs."""
    covered = min((k.covered for k in found.kernels), default=0)
    cost = f" {timing.summary(found.overhead)}." if found.overhead else ""
    return f"The phases cover {covered:.1%} of the time that a block is on its SM.{cost}"


def _theory(sweep: Sweep, growth: list[Growth], figures: dict[str, str]) -> str:
    intro = _p(
        """For one head with N queries and N keys, in elements, with T_r = N / B_r query tiles and
        T_c = N / B_c key tiles where these divide N:"""
    )
    theorem = _p(
        f"""Theorem 2 of the FlashAttention paper puts standard attention at Θ(Nd + N²) accesses and
        FlashAttention at Θ(N²d²/M), with room for M elements on chip. For a fixed M both are
        quadratic in N. FlashAttention wins by d²/M, a constant: hence the largest query tiles that
        fit. {_theorem_2(sweep)}"""
    )
    names = ("growth", "growth_gpu_tiles", "tiles", "causal")
    shown = "".join(figures.get(name, "") for name in names)
    slopes = f"<details><summary>All fitted exponents</summary>{_slopes(growth)}</details>"
    return f"<h2>4. What theory says</h2>{intro}{_forms(sweep)}{theorem}{shown}{slopes}"


def formulas(variant: Variant, tiling: Tiling) -> tuple[str, str]:
    """Loads and stores of one head in elements, for tiles that divide N; see `closed_form`."""
    if variant.method == "standard":
        return "T_c N d + 2 T_r N d + 3 N²", "2 N² + N d + N"
    if variant.method == "fa1":
        return "2 N d + T_c (2 N d + 2 N) + 2 N", "(T_c + 1) (N d + 2 N) + N"
    if not variant.causal:
        return "N d + 2 T_r N d", "N d + N"
    if tiling.B_r % tiling.B_c:
        return "N d + 2 d × keys up to the diagonal", "N d + N"
    return "N d + T_r (T_r + 1) B_r d", "N d + N"


def _forms(sweep: Sweep) -> str:
    plan, rows = sweep.plan, []
    N, setting = plan.bars_N, plan.setting
    for v in tables.DRAWN:
        counted = [r for r in tables.curve(sweep.table, v, setting, "counted") if r.n_q == N]
        elements = closed_form(problem(v.method, v.causal, N, setting))
        for op, form in zip(("load", "store"), formulas(v, setting.tiling), strict=True):
            value = sum(n for name, n in elements.items() if name.endswith(op))
            count = tables.total(tables.select(counted, op=op), what="elements")
            shown = _verdict(count == value, _integer(count), _integer(count))
            rows.append((v.label, f"{op}s", form, _integer(value), shown if counted else "not run"))
    return _table(
        f"Elements issued, N = {N:,}, {setting}",
        ("method", "", "closed form", "its value", "counted"),
        rows,
        3,
    )


def _theorem_2(sweep: Sweep) -> str:
    """How far FA2's loads are from N² d² / M, with M what a block's tiles take on chip."""
    plan, s = sweep.plan, sweep.plan.setting
    M = s.tiling.shared_bytes(s.d, s.dtype, "fa2") // acc_bytes(s.dtype)
    found = []
    for N, source in ((plan.bars_N, "counted"), (max(plan.curve), "predicted")):
        rows = [r for r in tables.curve(sweep.table, Variant("fa2"), s, source) if r.n_q == N]
        loads = tables.total(rows, tables.LOADS, "elements")
        if loads:
            found.append(f"{loads * M / (N * s.d) ** 2:.2f} at N = {length(N)} ({source})")
    if not found:
        return ""
    return (
        f"A block's tiles take M = {M:,} elements here, and the ratio of FA2's loads to N²d²/M is "
        f"{' and '.join(found)}."
    )


def _slopes(growth: list[Growth]) -> str:
    shown = []
    for v in tables.VARIANTS:
        for quantity in tables.QUANTITIES:
            counted = _fit(growth, v, quantity, "counted")
            predicted = _fit(growth, v, quantity, "predicted")
            shown.append((v.label, quantity, *counted, *predicted))
    return _table(
        "Exponents p of bytes ~ N^p with 95 % intervals. Counts have no noise: an interval says "
        "how far the points bend away from one power law.",
        ("method", "quantity", "counted", "over", "predicted", "over"),
        shown,
        2,
    )


def _fit(growth: list[Growth], v: Variant, quantity: str, source: str) -> tuple[str, str]:
    """An exponent and the range it was fitted over, or why there is none."""
    wanted = (v.method, v.causal, quantity, source)
    found = [g for g in growth if (g.method, g.causal, g.quantity, g.source) == wanted]
    if not found:
        return "not run", ""
    fit = found[0].fit
    if fit is None:
        return "one point" if found[0].moves else "nothing moves", ""
    return str(fit), f"N = {length(fit.first_N)} to {length(fit.last_N)}"


def _linear(sweep: Sweep, proof: Proof, growth: list[Growth]) -> str:
    yes, no = '<span class="yes">linear</span>', '<span class="no">quadratic</span>'
    rows = []
    for what, elements, quantity, verdict in (
        ("stores of O and L", "N d + N", "stores", yes),
        ("loads of Q", "N d", "loads of Q", yes),
        ("memory beyond Q, K, V, O", "N", "extra memory", yes),
        ("traffic of S and P", "0", "S and P", '<span class="yes">none</span>'),
        ("loads of K and V", "2 N² d / B_r", "loads of K and V", no),
        ("all loads and stores", "2 N² d / B_r + 2 N d + N", "loads and stores", no),
    ):
        both = (_fit(growth, Variant("fa2"), quantity, s)[0] for s in ("counted", "predicted"))
        rows.append((what, elements, *both, verdict))
    table = _table(
        f"FlashAttention-2, one head, elements issued; fitted exponents, predicted ones over N ≥ "
        f"{tables.LARGE_N:,}",
        ("what", "elements", "counted", "predicted", ""),
        rows,
        2,
    )
    standard, fa2 = (
        tables.leading(Variant(m), sweep.plan.setting, "total")[0] for m in ("standard", "fa2")
    )
    false = _p(
        """FlashAttention-2 is often said to need O(Nd) memory accesses. Of the loads that its warps
        issue this is not true: each of the N / B_r query tiles streams all of K and V. Linear are
        its stores, its loads of Q and the memory it needs. Gone are S and P: standard attention
        stores both, loads S twice and P once, five passes over N² elements, and needs room for
        both."""
    )
    constant = _p(
        f"""So with fixed tiles the methods differ by a constant. With those of this report
        ({_text(sweep.plan.setting)}) FA2 issues {standard / fa2:.1f} times fewer bytes than
        standard attention as N grows. A larger B_r makes that more; B_c does not enter."""
    )
    dram = _p(
        f"""A load that is issued need not reach DRAM. Query tiles of one head that run at the same
        time ask for the same keys, and a cache may serve all but the first. As long as it does,
        DRAM traffic may be linear in N where issued loads are not. {_of_dram(proof)}"""
    )
    title = "<h2>5. Where O(Nd) is true, and where it is not</h2>"
    return f"{title}{table}{false}{constant}{dram}"


def _of_dram(proof: Proof) -> str:
    if not proof.points:
        return "That is not measured here, and so not claimed."
    return "Section 3 has what DRAM sent, and how far a model of waves of blocks foretells it."


def _limits(sweep: Sweep, proof: Proof) -> str:
    plan = sweep.plan
    below = (
        "L2 and DRAM were read for FA2 alone, at a few N, each kernel with empty caches."
        if proof.points
        else "L2 and DRAM are neither measured nor modelled here."
    )
    items = [
        f"""The level is <b>issued</b>, in every number and figure but those of section 3: loads and
        stores of global memory as warps issue them. {below}""",
        """The kernels are the readable ones of this package, forward only, and all methods have the
        same tiles. Other kernels and other tiles move other amounts.""",
    ]
    if plan.backend == "simulator":
        items += [
            f"""There was no GPU: the kernels ran as Python, warps included, on
            {_text(plan.machine)}. That changes no count, but N is at most {max(plan.sizes)}; beyond
            it every curve is predicted.""",
            "The figure with a GPU's tile sizes is predicted throughout.",
        ]
    else:
        items.append(
            f"""Beyond N = {max(plan.sizes):,} every curve is predicted. Where N is above
            {CHECK_ALL_UP_TO:,}, a sample of {ROWS_CHECKED} rows of each output was checked."""
        )
    parts = sorted({e.input for e in sweep.exactness if short(e.input) != e.input})
    if parts:
        items.append(f"Of the real input a part was run: {_text('; '.join(parts))}.")
    items += [_text(note) + "." for note in sweep.notes]
    points = "".join(f"<li>{' '.join(item.split())}</li>" for item in items)
    return f"<h2>6. Limits</h2><ul>{points}</ul>"
