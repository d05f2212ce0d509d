"""Four memory levels: what warps issue, what L2 sends to the SMs and looks up, what DRAM moves.

The issued level is predicted and counted, by array. The others are read from the GPU's counters, by
kernel; for DRAM there is a model beside them (`io_model.dram`). `point` puts all that is known of
one problem into one row, `fits` says how each level grows with N.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from fa2_numba.accounting.fits import Fit, fit_exponent
from fa2_numba.accounting.sweep import SM_90_SHARED, mask_of
from fa2_numba.accounting.tables import LOADS, WRITES, total
from fa2_numba.io_model import SECTOR, STREAMING, compulsory, dram, predict
from fa2_numba.problem import Problem
from fa2_numba.tiling import DTYPE_BYTES, Tiling, ceil_div
from fa2_numba.traffic import Traffic

if TYPE_CHECKING:
    from fa2_numba.accounting.hardware import Case
    from fa2_numba.launch import Launch

Row = dict[str, Any]

LEVELS = ("issued", "L2 to SM", "L2 lookups", "DRAM")
# Level to what ncu calls its loads, its stores, and the bytes of one. "L2 to SM" crosses the
# crossbar, spills included (there are none). "L2 lookups" are fewer on Hopper, where requests of
# several SMs for one sector are joined before they reach L2.
COUNTERS: dict[str, tuple[str, str, int]] = {
    "L2 to SM": (
        "l1tex__m_xbar2l1tex_read_sectors_mem_lg_op_ld.sum",
        "l1tex__m_l1tex2xbar_write_sectors_mem_lg_op_st.sum",
        SECTOR,
    ),
    "L2 lookups": (
        "lts__t_sectors_srcunit_tex_op_read.sum",
        "lts__t_sectors_srcunit_tex_op_write.sum",
        SECTOR,
    ),
    "DRAM": ("dram__bytes_read.sum", "dram__bytes_write.sum", 1),
}
METRICS = tuple(name for load, store, _ in COUNTERS.values() for name in (load, store))


# Measured -----------------------------------------------------------------------------------------


def problem(
    method: str,
    causal: bool,
    N: int,
    tiling: Tiling,
    *,
    d: int = 64,
    heads: int = 1,
    batch: int = 1,
) -> Problem:
    """Full or causal fp32 attention with N_q = N_k = N on contiguous arrays."""
    return Problem(method, "fp32", batch, heads, heads, N, N, d, tiling, mask_of(causal))


def case_of(problem: Problem) -> "Case":
    """The problem as `hardware.profile` takes it; full or causal."""
    from fa2_numba.accounting.hardware import Case

    p, t = problem, problem.tiling
    sizes = (p.B, p.H, p.H_k, p.N_q, p.N_k, p.d)
    causal = bool(p.columns()["causal"])
    return Case(p.method, p.dtype, *sizes, causal, tiling=(t.B_r, t.B_c, t.n_r, t.n_c))


def measure(problems: Sequence[Problem]) -> list[list[Traffic]]:
    """The rows that the GPU's counters give for each problem, in one run of ncu.

    Every kernel starts with empty caches.

    Raises
    ------
    HardwareError
        The counters cannot be read.
    """
    from fa2_numba.accounting.hardware import profile

    launches = profile([case_of(p) for p in problems], METRICS, cache_control="all")
    return [
        hardware_rows(p, [launch for launch in launches if launch["case"] == n])
        for n, p in enumerate(problems)
    ]


def hardware_rows(problem: Problem, launches: Iterable[Mapping[str, Any]]) -> list[Traffic]:
    """Traffic rows from what `hardware.profile` says of one problem's launches.

    The counters know kernels, not arrays, and whole sectors, not elements: array "all", phase the
    kernel's name, elements and requests None.
    """
    rows = []
    for launch in launches:
        for level, (load, store, width) in COUNTERS.items():
            for op, metric in (("load", load), ("store", store)):
                moved = int(launch[metric]) * width
                columns = {**problem.columns(), "level": level}
                rows.append(
                    Traffic(
                        **columns,
                        array="all",
                        phase=str(launch["kernel"]),
                        op=op,
                        elements=None,
                        bytes=moved,
                        requests=None,
                        sectors=moved // SECTOR,
                        cycles=None,
                        source="hardware",
                    )
                )
    return rows


def launched(problem: Problem) -> "list[Launch]":
    """The launches of a problem's plain kernels on this GPU, with what the GPU gives each."""
    from fa2_numba import api
    from fa2_numba.accounting.launches import watched

    case, found = case_of(problem), []
    with watched(lambda operands, kernel: found.append(operands)):
        api.attention(*case.arrays(), **case.options())
    return found[-1].launches


def device() -> tuple[int, int]:
    """(SMs, bytes of L2) of the current GPU."""
    from numba import cuda

    gpu = cuda.get_current_device()
    return int(gpu.MULTIPROCESSOR_COUNT), int(gpu.L2_CACHE_SIZE)


def slots(launches: "Iterable[Launch]", SMs: int) -> dict[str, int]:
    """Blocks that the GPU holds at once, by kernel: W of `io_model.dram`."""
    return {launch.kernel: launch.blocks_per_sm * SMs for launch in launches}


def code(launches: "Iterable[Launch]") -> int:
    """Bytes of machine code that the launches fetch: each kernel's, once a launch."""
    return sum(launch.code_bytes for launch in launches)


# Modelled -----------------------------------------------------------------------------------------


def modelled(
    problem: Problem, slots: Mapping[str, int], l2_bytes: int, code: int = 0
) -> dict[str, int]:
    """Bytes that DRAM loads and stores by `io_model.dram`, with half of L2 as cache.

    `code` bytes of machine code come on top, loaded once. (With one head and N = 1024 they are 8 %
    of what fa2 loads.)

    Half, for the L2 of an A100 or H100 has two parts, each of which keeps what its own SMs read:
    what all SMs read lies in both. On an H200 with 60 MB, 33.5 MB that were read again all came
    from DRAM again.
    """
    moved = dram(problem, slots, l2_bytes // 2)
    sums = {op: sum(n for (_, _, of), n in moved.items() if of == op) for op in ("load", "store")}
    return {"loads": sums["load"] + code, "stores": sums["store"]}


def in_domain(problem: Problem, slots: Mapping[str, int], l2_bytes: int) -> bool:
    """Whether the model has one answer, and blocks need not keep in step for it.

    One answer: the same with a quarter of L2 as cache and with all of it. fa2 besides must be one
    wave, or its K and V fit a quarter of L2: blocks of later waves start when earlier ones end, not
    together, and drift. fa1 is in no domain: it comes back to Q and O of a head so often and so
    late that what L2 keeps decides, and no size was found from which it keeps all or nothing.
    """
    p = problem
    if p.method == "fa1" or dram(p, slots, l2_bytes // 4) != dram(p, slots, l2_bytes):
        return False
    all_keys = p.B * p.H_k * p.N_k * 2 * p.d * DTYPE_BYTES[p.dtype]
    return p.method != "fa2" or waves(p, slots) == 1 or all_keys <= l2_bytes // 4


def waves(problem: Problem, slots: Mapping[str, int]) -> int:
    """How many waves the streaming kernel's blocks make."""
    p = problem
    blocks = p.B * p.H * (1 if p.method == "fa1" else p.tiling.T_r(p.N_q))
    return ceil_div(blocks, slots[STREAMING[p.method][-1]])


# Together -----------------------------------------------------------------------------------------


def point(
    problem: Problem,
    hardware: Sequence[Traffic],
    slots: Mapping[str, int],
    l2_bytes: int,
    counted: bool = False,
    code: int = 0,
) -> Row:
    """All levels of one problem, as JSON takes it.

    Parameters
    ----------
    problem : Problem
    hardware : list of Traffic
        Its rows of `measure`.
    slots : mapping
        Blocks the GPU holds at once, by kernel.
    l2_bytes : int
    counted : bool
        Whether the issued level was counted too, and found equal.
    code : int
        Bytes of the kernels' machine code.

    Returns
    -------
    dict
        The problem's columns; "loads" and "stores", bytes by level; "model", what `modelled` says;
        "ratio", DRAM loads over the model's; "in_domain"; "compulsory", bytes of Q, K and V;
        "waves".
    """
    p = problem
    names = ("method", "causal", "dtype", "batch", "heads", "n_q", "n_k", "d", "block_r", "block_c")
    model, issued = modelled(p, slots, l2_bytes, code), predict(p)
    moved = {
        ops: {
            level: total([r for r in (*issued, *hardware) if r.level == level], choice)
            for level in LEVELS
        }
        for ops, choice in (("loads", LOADS), ("stores", WRITES))
    }
    needed = compulsory(p)
    return {
        **{name: p.columns()[name] for name in names},
        "slots": {name: slots[name] for name in STREAMING[p.method]},
        "waves": waves(p, slots),
        **moved,
        "model": model,
        "ratio": moved["loads"]["DRAM"] / model["loads"],
        "in_domain": in_domain(p, slots, l2_bytes),
        "compulsory": sum(needed[name] for name in "QKV"),
        "counted": counted,
    }


def series(points: Iterable[Row]) -> dict[tuple[str, bool, int], list[Row]]:
    """Points by (method, causal, heads), each in the order of N."""
    found: dict[tuple[str, bool, int], list[Row]] = {}
    for row in sorted(points, key=lambda row: row["n_q"]):
        found.setdefault((row["method"], row["causal"], row["heads"]), []).append(row)
    return found


def fits(points: Iterable[Row]) -> list[Row]:
    """The exponents in N of the bytes loaded at each level, for each method, mask and heads.

    Of fa2's DRAM loads also those of the part with one wave and of the part with more.
    """
    rows = []
    for (method, causal, heads), line in series(points).items():
        parts = [(level, "all", line) for level in LEVELS]
        if method == "fa2":
            one, more = (
                [p for p in line if (p["waves"] == 1) is is_one] for is_one in (True, False)
            )
            parts += [("DRAM", "one wave", one), ("DRAM", "more waves", more)]
        for level, part, chosen in parts:
            fit = fit_exponent([p["n_q"] for p in chosen], [p["loads"][level] for p in chosen])
            if fit:
                numbers = asdict(fit)
                if math.isinf(fit.half_width):
                    numbers["half_width"] = None
                names = {"method": method, "causal": causal, "heads": heads, "level": level}
                rows.append({**names, "part": part, **numbers})
    return rows


# Theorem 2 ----------------------------------------------------------------------------------------

_SQUARE = tuple(Tiling(B, B, 8 if B < 128 else 16, 16) for B in (16, 32, 64, 128))


def on_chip(B_r: int, B_c: int, d: int) -> int:
    """M of Theorem 2: elements of the tiles Q_i, K_j, V_j, O_i and S_ij that a block holds."""
    return 2 * B_r * d + 2 * B_c * d + B_r * B_c


def theorem_2_rows(counted: Iterable[Row] = ()) -> list[Row]:
    """Elements that FlashAttention issues over N, d and M, and the theorem's N^2 d^2 / M.

    Predicted for square tiles that fit an H100 or H200, where d <= M <= N d.

    Parameters
    ----------
    counted : iterable of dict
        Counted traffic rows, as a report's ``traffic.json`` has them; those of one head without a
        mask are used.

    Returns
    -------
    list of dict
        method, n, d, block_r, block_c, M, order (N^2 d^2 / M), elements, source.
    """
    elements: dict[tuple[Any, ...], int] = {}
    for N, d, t in product((2**n for n in range(10, 17)), (32, 64, 128), _SQUARE):
        for method in ("fa1", "fa2"):
            if t.fits(d, "fp32", method, SM_90_SHARED):
                rows = predict(problem(method, False, N, t, d=d))
                elements[method, N, d, t.B_r, t.B_c, "predicted"] = total(rows, what="elements")
    for r in counted:
        alone = r["mask"] == "none" and r["n_q"] == r["n_k"] and r["batch"] == r["heads"] == 1
        if alone and r["source"] == "counted" and r["method"] != "standard":
            names = ("method", "n_q", "d", "block_r", "block_c", "source")
            key = tuple(r[name] for name in names)
            elements[key] = elements.get(key, 0) + r["elements"]
    found = []
    for (method, N, d, B_r, B_c, source), moved in elements.items():
        M = on_chip(B_r, B_c, d)
        if d <= M <= N * d:
            columns = {"method": method, "n": N, "d": d, "block_r": B_r, "block_c": B_c, "M": M}
            order = N**2 * d**2 / M
            found.append({**columns, "order": order, "elements": moved, "source": source})
    return found


@dataclass(frozen=True)
class Order:
    """How elements issued follow N^2 d^2 / M.

    Attributes
    ----------
    fit : Fit
        Of the exponent p in ``elements ~ (N^2 d^2 / M)^p``; `Fit.first_N` and `last_N` are the
        range of N^2 d^2 / M.
    constant : float
        Geometric mean of elements over N^2 d^2 / M.
    lowest, highest : float
        Its extremes: Theta hides what depends on the shape of the tiles.
    """

    fit: Fit
    constant: float
    lowest: float
    highest: float


def order(rows: Iterable[Row]) -> Order | None:
    """The fit through rows of `theorem_2_rows`, None with fewer than two."""
    rows = list(rows)
    fit = fit_exponent([r["order"] for r in rows], [r["elements"] for r in rows])
    if fit is None:
        return None
    ratios = [r["elements"] / r["order"] for r in rows]
    constant = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return Order(fit, constant, min(ratios), max(ratios))
