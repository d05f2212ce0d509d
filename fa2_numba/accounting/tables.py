"""Reading the traffic table: which rows, what sum, which curve."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fa2_numba.accounting.fits import Fit, fit_exponent
from fa2_numba.problem import PORTABLE
from fa2_numba.tiling import DTYPE_BYTES, Tiling
from fa2_numba.traffic import Traffic

# Where each of these is written from end to end exactly once, so that stores = size.
_WRITTEN_ONCE = {
    ("S", "S = Q K^T"),
    ("P", "normalise"),
    ("O_acc", "init"),
    ("l", "init"),
    ("m", "init"),
    ("L", "normalise"),
    ("L", "finish"),
    ("L", "epilogue"),
}


@dataclass(frozen=True)
class Variant:
    """A method with or without the causal mask: one line of a figure."""

    method: str
    causal: bool = False

    @property
    def label(self) -> str:
        """As figures and tables name it."""
        name = {"standard": "standard", "fa1": "FA1", "fa2": "FA2"}[self.method]
        return f"{name} causal" if self.causal else name


VARIANTS = tuple(Variant(m, causal) for causal in (False, True) for m in PORTABLE)
DRAWN = (Variant("standard"), Variant("fa1"), Variant("fa2"), Variant("fa2", True))


@dataclass(frozen=True)
class Setting:
    """What stays fixed along a curve over N: one head of one batch, N_q = N_k = N."""

    d: int
    tiling: Tiling
    dtype: str = "fp32"

    def columns(self) -> dict[str, Any]:
        """The columns that it fixes."""
        return {
            "d": self.d,
            "dtype": self.dtype,
            "block_r": self.tiling.B_r,
            "block_c": self.tiling.B_c,
            "batch": 1,
            "heads": 1,
        }

    def __str__(self) -> str:
        return f"{self.dtype}, d = {self.d}, B_r × B_c = {self.tiling.B_r} × {self.tiling.B_c}"


def select(rows: Iterable[Traffic], **columns: Any) -> list[Traffic]:
    """The rows whose columns have these values; a tuple of values accepts each of them."""
    wanted = {n: v if isinstance(v, tuple) else (v,) for n, v in columns.items()}
    return [r for r in rows if all(getattr(r, n) in v for n, v in wanted.items())]


def curve(
    rows: Iterable[Traffic], variant: Variant, setting: Setting, source: str
) -> list[Traffic]:
    """All rows of one line over N: plain or bound-causal mask, N_q = N_k."""
    mask = "causal" if variant.causal else "none"
    found = select(rows, method=variant.method, mask=mask, source=source, **setting.columns())
    return [r for r in found if r.n_q == r.n_k]


# Quantities: each sums bytes over some rows -------------------------------------------------------


def is_workspace(row: Traffic) -> bool:
    """Whether this row's stores are the size of an array that only the method needs."""
    return row.op == "store" and (row.array, row.phase) in _WRITTEN_ONCE


Choice = Callable[[Traffic], bool]
TOTAL: Choice = lambda row: True  # noqa: E731
WRITES: Choice = lambda row: row.op == "store"  # noqa: E731
LOADS: Choice = lambda row: row.op == "load"  # noqa: E731
KV_LOADS: Choice = lambda row: row.op == "load" and row.array in ("K", "V")  # noqa: E731
Q_LOADS: Choice = lambda row: row.op == "load" and row.array == "Q"  # noqa: E731
SCORES: Choice = lambda row: row.array in ("S", "P")  # noqa: E731
QUANTITIES: dict[str, Choice] = {
    "loads and stores": TOTAL,
    "stores": WRITES,
    "loads of Q": Q_LOADS,
    "loads of K and V": KV_LOADS,
    "S and P": SCORES,
    "extra memory": is_workspace,
}
LARGE_N = 4096  # from here on the leading term decides a predicted curve's slope


def total(rows: Iterable[Traffic], choice: Choice = TOTAL, what: str = "bytes") -> int:
    """The sum of a column over the chosen rows."""
    return sum(getattr(r, what) for r in rows if choice(r))


def over_N(
    rows: Iterable[Traffic], choice: Choice = TOTAL, what: str = "bytes"
) -> tuple[list[int], list[int]]:
    """N, ascending, and the sum at each N; an N without a chosen row has 0."""
    sums: dict[int, int] = {}
    for r in rows:
        sums[r.n_q] = sums.get(r.n_q, 0) + (getattr(r, what) if choice(r) else 0)
    N = sorted(sums)
    return N, [sums[n] for n in N]


def by_array(rows: Iterable[Traffic]) -> dict[str, int]:
    """Bytes of each array, loads and stores together."""
    sums: dict[str, int] = {}
    for r in rows:
        sums[r.array] = sums.get(r.array, 0) + r.bytes
    return sums


def visited_tiles(rows: Iterable[Traffic]) -> dict[int, float]:
    """N to the number of B_r x B_r tiles of S that were visited: elements of K loaded over B_r d.

    Only for N that B_r divides.
    """
    found = select(rows, array="K", op="load")
    known = [(r, r.elements) for r in found if r.elements is not None]
    return {r.n_k: n / (r.block_r * r.d) for r, n in known if r.n_k % r.block_r == 0}


@dataclass(frozen=True)
class Growth:
    """How one quantity of one method grows with N.

    Attributes
    ----------
    method, causal
        As in the traffic table.
    quantity : str
        One of `QUANTITIES`, in bytes issued.
    source : str
        "counted", or "predicted", then over N >= `LARGE_N` only.
    moves : bool
        Whether it is more than zero at some N.
    fit : Fit or None
        None with fewer than two N where it is.
    """

    method: str
    causal: bool
    quantity: str
    source: str
    moves: bool
    fit: Fit | None

    def as_dict(self) -> dict[str, Any]:
        """Column to value; the numbers are None without a fit."""
        numbers = asdict(self.fit) if self.fit else dict.fromkeys(Fit.__dataclass_fields__)
        if self.fit and math.isinf(self.fit.half_width):
            numbers["half_width"] = None
        names = ("method", "causal", "quantity", "source", "moves")
        columns = {n: getattr(self, n) for n in names}
        return {**columns, **numbers}


def growth(rows: Iterable[Traffic], setting: Setting) -> list[Growth]:
    """Fit every quantity of every method that has rows of this setting."""
    rows, found = list(rows), []
    for v in VARIANTS:
        for source in ("counted", "predicted"):
            line = curve(rows, v, setting, source)
            line = [r for r in line if source == "counted" or r.n_q >= LARGE_N]
            for quantity, choice in QUANTITIES.items() if line else ():
                N, y = over_N(line, choice)
                fit = fit_exponent(N, y)
                found.append(Growth(v.method, v.causal, quantity, source, any(y), fit))
    return found


# The closed forms' leading terms ------------------------------------------------------------------


def leading(variant: Variant, setting: Setting, quantity: str) -> tuple[float, int]:
    """(c, p): as N grows, a quantity's bytes approach ``c N^p``.

    `quantity` is "total", "writes" or "workspace". Standard attention skips no tile, so causal
    changes nothing there; it halves the tiles of the others. All are one head's, with S, P, l, m
    and L in the accumulation dtype.
    """
    d, B_r, B_c = setting.d, setting.tiling.B_r, setting.tiling.B_c
    e, acc = DTYPE_BYTES[setting.dtype], 8 if setting.dtype == "fp64" else 4
    s = 0.5 if variant.causal and variant.method != "standard" else 1.0
    rounds = e < acc  # fa1 then keeps O in an accumulator of its own
    forms: dict[str, dict[str, tuple[float, int]]] = {
        "standard": {
            "total": (e * d * (2 / B_r + 1 / B_c) + 5 * acc, 2),
            "writes": (2 * acc, 2),
            "workspace": (2 * acc, 2),
        },
        "fa1": {
            "total": (s * (e * d + acc * (2 * d + 4)) / B_c, 2),
            "writes": (s * acc * (d + 2) / B_c, 2),
            "workspace": (acc * (3 + (d if rounds else 0)), 1),
        },
        "fa2": {
            "total": (s * 2 * e * d / B_r, 2),
            "writes": (e * d + acc, 1),
            "workspace": (acc, 1),
        },
    }
    return forms[variant.method][quantity]
