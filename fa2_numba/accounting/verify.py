"""Predicted, counted and the hardware's numbers, for each kernel launch.

The counted kernels say what the warps ask for, and the model what they must ask for. The plain
kernels, launched once more under ncu, are read by the GPU's own counters. All must be the same
integers; nothing is rounded or scaled.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from fa2_numba import io_model
from fa2_numba.accounting import hardware
from fa2_numba.accounting.hardware import (
    COUNTERS,
    ON_CHIP,
    Case,
    Counter,
    HardwareError,
    NotPermitted,
)
from fa2_numba.accounting.terminal import new_table
from fa2_numba.traffic import Traffic

Totals = dict[tuple[str, str], int]  # (quantity, op) to a number
Rows = dict[tuple[Any, ...], NDArray[np.int64]]  # key of a traffic row to its numbers

# What a counter's quantity is in a traffic row. An instruction of a warp is one request. (Bytes
# are those that the lanes of an instruction do not share: `Operands.distinct_bytes`.)
COUNTED = {"instructions": "requests", "requests": "requests", "sectors": "sectors"}
COUNTED_ON_CHIP = {
    "shared bytes": "bytes",
    "shared instructions": "requests",
    "shared wavefronts": "wavefronts",
    "shared conflicts": "conflicts",
}
SECTOR_BYTES = 32
NONE = np.zeros(4, np.int64)  # a row in which nothing moved
COLUMNS = "method, dtype, batch, heads, heads_kv, n_q, n_k, d, causal, mask, block_r, block_c"
ISSUED = ("load", "store")
# In these ptxas may keep values of the producer in local memory, as many as its version decides.
SPILLING = ("fa3_backward", "fa3_dQ", "fa3_dK", "fa3_dV")
LOCAL = ("local load", "local store")
# A row's op to the hardware's: an atomic add whose old value nobody asks for is a reduction.
OPS = {"load": "load", "store": "store", "atomic": "reduction"}
# What the copy unit moves.
COPIED = (
    ("box copies", "load"),
    ("box bytes", "load"),
    ("box copies", "store"),
    ("box bytes", "store"),
    ("box sectors", "store"),
    ("bulk adds", "reduction"),
    ("bulk bytes", "reduction"),
)


@dataclass(frozen=True)
class CountedLaunch:
    """What one launch of a counted kernel moved.

    Attributes
    ----------
    case : int
        Index of the case.
    problem : dict
        Its columns, as in the traffic table.
    kernel : str
        Its name.
    totals : dict
        (quantity, op) to the sum over arrays and phases.
    predicted : dict
        The same of the model, for what it predicts.
    """

    case: int
    problem: dict[str, Any]
    kernel: str
    totals: Totals
    predicted: Totals = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One number of one launch: counted, read, and in most cases predicted.

    Attributes
    ----------
    case, problem, kernel
        As in `CountedLaunch`.
    launch : int
        Place of the launch among all.
    quantity, op : str
        As in `hardware.Counter`.
    counted : int
        By the counted kernel; 0 for accesses that no plain kernel makes.
    hardware : int or float
        By the GPU, while the plain kernel ran.
    exact : bool
        Whether they must be equal.
    predicted : int, optional
        By the model; None where it says nothing.
    """

    case: int
    launch: int
    problem: dict[str, Any]
    kernel: str
    quantity: str
    op: str
    counted: int
    hardware: int | float
    exact: bool = True
    predicted: int | None = None

    @property
    def difference(self) -> int | float:
        """What the hardware saw beyond the count."""
        return self.hardware - self.counted

    @property
    def as_predicted(self) -> bool:
        """Whether the count is the model's, if that says anything."""
        return self.predicted in (None, self.counted)

    def as_dict(self) -> dict[str, Any]:
        """Column to value."""
        return {
            "case": self.case,
            "launch": self.launch,
            **self.problem,
            "kernel": self.kernel,
            "quantity": self.quantity,
            "op": self.op,
            "counted": self.counted,
            "hardware": self.hardware,
            "difference": self.difference,
            "exact": self.exact,
            "predicted": self.predicted,
        }

    def __str__(self) -> str:
        p = self.problem
        model = "" if self.as_predicted else f"predicted {self.predicted:,}, "
        return (
            f"{p['method']}, {p['dtype']}, {p['mask']}, {sizes(p)}, {self.kernel}: {self.quantity} "
            f"({self.op}) {model}counted {self.counted:,}, hardware {self.hardware:,}"
        )


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes
    ----------
    rows : list of Row
        Each launch and counter.
    counters : list of Counter
        What was read.
    unread : list of Counter
        What could not be compared, for want of permission.
    refusal : str
        Why not, empty if everything could.
    """

    rows: list[Row]
    counters: list[Counter]
    unread: list[Counter] = field(default_factory=list)
    refusal: str = ""

    @property
    def launches(self) -> int:
        """How many launches were compared."""
        return len({row.launch for row in self.rows})

    @property
    def differing(self) -> list[Row]:
        """The rows whose numbers are not the same, and must be."""
        return [row for row in self.rows if row.exact and (row.difference or not row.as_predicted)]


def count(cases: Sequence[Case], on_chip: bool = False) -> list[CountedLaunch]:
    """Run the counted kernels of each case, in this process; shared memory too with `on_chip`."""
    return [launch for n, case in enumerate(cases) for launch in _launches(n, case, on_chip)]


@dataclass(frozen=True)
class _Counts:
    """What one launch of a call has counted.

    Attributes
    ----------
    kernel : str
    totals : dict
        As in `CountedLaunch`.
    rows : dict
        The traffic rows in which it counted.
    boxes : set of key
        Those of all launches so far that the copy unit moves.
    """

    kernel: str
    totals: Totals
    rows: Rows
    boxes: Collection[Any]


def _launches(n: int, case: Case, on_chip: bool) -> list[CountedLaunch]:
    from fa2_numba.accounting.launches import measure, watched  # they need Numba

    problem: Any = None
    counts: list[_Counts] = []
    totals_before: Totals = {}
    rows_before: Rows = {}

    def after(operands: Any, kernel: str) -> None:
        nonlocal problem, totals_before, rows_before
        problem = operands.problem
        sums, rows = totals(operands), _rows(operands.rows())  # of the call so far
        mine = {key: total - totals_before.get(key, 0) for key, total in sums.items()}
        moved = {key: row - rows_before.get(key, NONE) for key, row in rows.items()}
        moved = {key: row for key, row in moved.items() if row.any()}
        counts.append(_Counts(kernel, mine, moved, _boxes(operands)))
        totals_before, rows_before = sums, rows

    with watched(after):
        measure(case, on_chip)
    if not counts:
        return []
    columns = problem.columns()
    about = {name: columns[name] for name in COLUMNS.split(", ")}
    predicted = _predictions(counts, _rows(io_model.predict(problem)))
    return [
        CountedLaunch(n, about, launch.kernel, launch.totals, said)
        for launch, said in zip(counts, predicted, strict=True)
    ]


def _predictions(counts: Sequence[_Counts], model: Rows) -> list[Totals]:
    """What the model's rows of a call say of each of its launches.

    The model knows phases, not launches. A row belongs to the launch that counted it; of several
    the last has what the others have not counted, and a row that none counted is the last
    launch's.
    """
    place = dict.fromkeys(model, len(counts) - 1)
    for n, launch in enumerate(counts):
        place |= dict.fromkeys(launch.rows, n)
    left = {key: model.get(key, NONE) for key in place}
    found = []
    for n, launch in enumerate(counts):
        said = launch.rows | {key: left[key] for key, where in place.items() if where == n}
        left |= {key: left[key] - row for key, row in said.items()}
        sums, counted = _sums(said, launch.boxes), _sums(launch.rows, launch.boxes)
        for op in OPS.values():
            # Lanes share elements, as those of tables. The model does not say which.
            if counted["bytes", op] != launch.totals["bytes", op]:
                del sums["bytes", op]
        found.append(sums)
    return found


def _rows(rows: Iterable[Traffic]) -> Rows:
    return {row.key: np.array(row.numbers, np.int64) for row in rows}


def _boxes(operands: Any) -> set[Any]:
    """The keys of the rows that the copy unit moves: boxes, and what fa3 adds to dQ."""
    adds = [r for r in operands.rows() if r.op == "atomic" and r.method.startswith("fa3")]
    return {row.key for row in (*operands.rows(boxes=True), *adds)}


def _sums(rows: Rows, boxes: Collection[Any]) -> Totals:
    """The sums over arrays and phases, by (quantity, op).

    The bytes of boxes are those of their sectors, as the hardware counts them; of what is added,
    its own.
    """
    sums = {(quantity, op): 0 for quantity in ("bytes", *COUNTED) for op in OPS.values()}
    sums |= dict.fromkeys(COPIED, 0) | {("instructions", "TMA"): 0}
    for key, (_, size, requests, sectors) in ((key, row.tolist()) for key, row in rows.items()):
        op = OPS[key[-1]]
        if key in boxes:
            sums["instructions", "TMA"] += requests
            if op == "reduction":
                sums["bulk adds", op] += requests
                sums["bulk bytes", op] += size
                continue
            sums["box copies", op] += requests
            sums["box bytes", op] += SECTOR_BYTES * sectors
            if op == "store":
                sums["box sectors", op] += sectors
            continue
        sums["bytes", op] += size
        for quantity, column in COUNTED.items():
            sums[quantity, op] += sectors if column == "sectors" else requests
    return sums


def totals(operands: Any) -> Totals:
    """What a call has counted so far, by (quantity, op): sums over arrays and phases."""
    sums = _sums(_rows(operands.rows()), _boxes(operands))
    sums |= {("bytes", OPS[op]): n for op, n in operands.distinct_bytes().items()}
    sums["bytes", "reduction"] -= sums["bulk bytes", "reduction"]  # no lane asks for them
    for quantity, column in COUNTED_ON_CHIP.items():
        for op in ISSUED:
            moved = (row for row in operands.on_chip_rows() if row.op == op)
            sums[quantity, op] = sum(getattr(row, column) for row in moved)
    return sums


def verify(
    cases: Sequence[Case],
    *,
    ncu: str | None = None,
    counted: Sequence[CountedLaunch] | None = None,
    on_chip: bool = False,
) -> Verification:
    """Compare each launch of the cases with the hardware's counters.

    Parameters
    ----------
    cases : sequence of Case
        What to run.
    ncu : str, optional
        Path of ncu.
    counted : sequence of CountedLaunch, optional
        What `count` returns for these cases; default: it is called.
    on_chip : bool
        Compare shared memory too. Its counting kernels take longer to compile and run.

    Returns
    -------
    Verification
        Where hardware counters are not permitted, what ncu can tell by patching the kernels'
        instructions, which needs no permission.

    Raises
    ------
    HardwareError
        Nothing could be compared, or only a part of it for another reason than permission.
    """
    counted = count(cases, on_chip) if counted is None else counted
    wanted = COUNTERS + ON_CHIP if on_chip else COUNTERS
    if not counted:
        raise HardwareError("launches: none in these cases, so there is nothing to compare")
    try:
        return Verification(*_compared(cases, wanted, ncu, counted))
    except NotPermitted as refused:
        patched = [replace(c, metric=c.patched, optional=True) for c in wanted if c.patched]
        try:
            rows, counters = _compared(cases, patched, ncu, counted)
        except HardwareError:
            raise refused from None
        if not rows:
            raise refused from None
        known = {(c.quantity, c.op) for c in counters}
        unread = [c for c in wanted if (c.quantity, c.op) not in known and not c.optional]
        return Verification(rows, counters, unread, str(refused))


def _compared(
    cases: Sequence[Case],
    counters: Sequence[Counter],
    ncu: str | None,
    counted: Sequence[CountedLaunch],
) -> tuple[list[Row], list[Counter]]:
    """The rows, and those of the counters that this GPU has."""
    optional = {c.metric for c in counters if c.optional}
    read = hardware.profile(cases, [c.metric for c in counters], ncu=ncu, optional=optional)
    here = [c for c in counters if any(c.metric in reading for reading in read)]
    return compare(counted, read, here), here


def compare(
    counted: Sequence[CountedLaunch], read: Sequence[hardware.Reading], counters: Sequence[Counter]
) -> list[Row]:
    """The rows of each launch, one for each of `counters`.

    Raises
    ------
    HardwareError
        The launches of counted and plain kernels are not, one by one, the same, or a counter was
        not read for one of them.
    """
    for launch, reading in zip(counted, read, strict=False):
        if (launch.case, launch.kernel) != (reading["case"], reading["kernel"]):
            raise HardwareError(
                f"launches: counted {launch.kernel} in case {launch.case}, where the plain run "
                f"launched {reading['kernel']} in case {reading['case']}"
            )
    if len(counted) != len(read):
        raise HardwareError(f"launches: counted {len(counted)}, profiled {len(read)}")
    for n, reading in enumerate(read):
        for counter in counters:
            if counter.metric not in reading:
                raise HardwareError(f"ncu: {counter.metric} is missing in launch {n}")
    return [
        Row(
            launch.case,
            n,
            launch.problem,
            launch.kernel,
            counter.quantity,
            counter.op,
            launch.totals.get((counter.quantity, counter.op), 0),
            reading[counter.metric],
            counter.exact and not (counter.op in LOCAL and launch.kernel in SPILLING),
            launch.predicted.get((counter.quantity, counter.op)),
        )
        for n, (launch, reading) in enumerate(zip(counted, read, strict=True))
        for counter in counters
    ]


# The command --------------------------------------------------------------------------------------


def grid(methods: Sequence[str]) -> list[Case]:
    """A dozen quick cases of all methods, dtypes and kinds of masks, those of `methods`."""
    square, ragged = (1, 4, 4, 512, 512, 64), (2, 4, 2, 333, 517, 64)
    cases = [
        Case("fa2", "fp32", *square),
        Case("fa2", "fp32", *ragged),
        Case("fa2", "fp32", *square, causal=True),
        Case("fa2", "fp32", *ragged, causal=True),
        Case("fa2", "fp32", *ragged, mask="boolean"),
        Case("fa2", "fp32", 1, 2, 2, 300, 300, 33, window=(64, 0)),
        Case("fa2", "fp64", 1, 2, 2, 200, 300, 48),
        Case("fa2", "fp16", *ragged, causal=True),
        Case("fa2", "bf16", *ragged, mask="documents"),
        Case("fa1", "fp32", *square, causal=True),
        Case("fa1", "fp32", *ragged, causal=True),
        Case("standard", "fp32", *square, causal=True),
        Case("standard", "fp32", *ragged, causal=True),
    ]
    return [case for case in cases if case.method in methods]


def sizes(problem: dict[str, Any]) -> str:
    """``2 × 4/2 × 333 × 517, d 64``: batch, heads over key/value heads, N_q, N_k."""
    p = problem
    heads = f"{p['heads']}" if p["heads"] == p["heads_kv"] else f"{p['heads']}/{p['heads_kv']}"
    return f"{p['batch']} × {heads} × {p['n_q']} × {p['n_k']}, d {p['d']}"


def table(found: Verification) -> Table:
    """One line for each launch: what the hardware counted, and how many numbers differ."""
    title = "Global memory by the hardware's counters, launch by launch"
    about = ("method", "dtype", "mask", "B × H × N_q × N_k", "kernel")
    moved = {(row.quantity, row.op) for row in found.rows if row.hardware}
    shown = [(quantity, op) for quantity in ("bytes", "requests", "sectors") for op in ISSUED]
    others = ("bytes", "reduction"), ("box bytes", "load"), ("box bytes", "store")
    shown += [key for key in others if key in moved]
    numbers, differing = (f"{quantity}\n{op}" for quantity, op in shown), found.differing
    table = new_table(title, [*about, *numbers, "differ"], len(about))
    for _, group in groupby(found.rows, lambda row: row.launch):
        rows = list(group)
        p, read = rows[0].problem, {(row.quantity, row.op): row.hardware for row in rows}
        compared = [row for row in rows if row.exact]
        differ = sum(row in differing for row in compared)
        table.add_row(
            p["method"],
            p["dtype"],
            p["mask"],
            sizes(p),
            rows[0].kernel,
            *(f"{read[key]:,}" if key in read else "" for key in shown),
            Text(f"{differ} of {len(compared)}", style="red" if differ else "green"),
        )
    return table


def summary(found: Verification) -> list[str]:
    """What was found, in sentences: every number that differs, and what was not compared."""
    exact = [row for row in found.rows if row.exact]
    equal = sum(not row.difference for row in exact)
    predicted = [row for row in exact if row.predicted is not None]
    as_predicted = sum(row.as_predicted for row in predicted)
    lines = [f"differs: {row}" for row in found.differing]
    if found.unread:
        lines += [
            found.refusal,
            "Compared, by patched instructions: " + _listed(found.counters),
            "Not compared: " + _listed(found.unread),
        ]
    if predicted:
        lines.append(f"{as_predicted:,} of {len(predicted):,} predicted numbers equal the counted.")
    lines.append(
        f"{equal:,} of {len(exact):,} counted numbers equal the hardware's, in "
        f"{found.launches:,} launches."
    )
    return lines


def _listed(counters: Iterable[Counter]) -> str:
    return ", ".join(f"{c.quantity} ({c.op})" for c in counters)
