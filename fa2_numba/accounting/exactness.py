"""How far outputs are from the float64 reference, and how far they may be."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa2_numba import reference

Array = NDArray[Any]


@dataclass(frozen=True)
class Exactness:
    """One output against the reference.

    Attributes
    ----------
    input : str
        Where q, k, v came from.
    method, dtype, batch, heads, heads_kv, n_q, n_k, d, causal, mask, block_r, block_c
        As in the traffic table.
    rows_checked : int
        Query rows of each head that were compared.
    out_error, out_allowed, lse_error, lse_allowed : float
        Largest absolute error against the float64 reference, and the largest that the rule of
        `reference.tolerance` allows; None where there was no lse.
    exact : bool
        Whether errors are allowed and NaN and inf are where they should be.
    message : str
        What is wrong, empty if nothing.
    """

    input: str
    method: str
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    n_q: int
    n_k: int
    d: int
    causal: bool
    mask: str
    block_r: int
    block_c: int
    rows_checked: int
    out_error: float
    out_allowed: float
    lse_error: float | None
    lse_allowed: float | None
    exact: bool
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Field to value."""
        return asdict(self)

    @property
    def used(self) -> float:
        """The larger of error / allowed of out and lse: exact means at most 1."""
        pairs = ((self.out_error, self.out_allowed), (self.lse_error, self.lse_allowed))
        return max(
            e / a if a else float(e > 0) for e, a in pairs if e is not None and a is not None
        )


class Expected:
    """The reference's results for one problem, computed once for all methods.

    Parameters
    ----------
    q, k, v : arrays on the host
    rows : integers, optional
        Compare these query rows only.
    problem
        What `reference.attention_reference` takes: causal, window, mask, scale ...
    """

    def __init__(self, q: Array, k: Array, v: Array, rows: Array | None = None, **problem: Any):
        problem = {**problem, "rows": rows}
        self.rows = rows
        self.reference = reference.attention_reference(q, k, v, **problem)
        self.same_precision = reference.attention_same_precision(q, k, v, **problem)
        self.inner = reference.rounding_error(q, k, v, **problem)

    def compare(
        self, out: Array, lse: Array | None, input: str, columns: dict[str, Any]
    ) -> Exactness:
        """Judge one output on the host; `columns` are the first ones of its traffic rows."""
        if self.rows is not None:
            out, lse = out[..., self.rows, :], None if lse is None else lse[..., self.rows]
        out_error, out_allowed, message = self._one(0, "out", out)
        lse_error, lse_allowed, lse_message = (
            (None, None, "") if lse is None else self._one(1, "lse", lse)
        )
        kept = {name: columns[name] for name in Exactness.__dataclass_fields__ if name in columns}
        return Exactness(
            input,
            **kept,
            rows_checked=out.shape[-2],
            out_error=out_error,
            out_allowed=out_allowed,
            lse_error=lse_error,
            lse_allowed=lse_allowed,
            exact=not (message or lse_message),
            message="; ".join(m for m in (message, lse_message) if m),
        )

    def _one(self, n: int, name: str, got: Array) -> tuple[float, float, str]:
        ref, same, inner = self.reference[n], self.same_precision[n], self.inner[n]
        try:
            return *reference.assert_close_to_reference(got, ref, same, name=name, inner=inner), ""
        except AssertionError as error:
            with np.errstate(all="ignore"):
                off = abs(got.astype(np.float64) - ref)
            finite = off[np.isfinite(off)]
            allowed = reference.tolerance(ref, same, inner)
            return float(finite.max(initial=0.0)), allowed, str(error)


def sample_rows(N_q: int, count: int, seed: int = 0) -> Array | None:
    """`count` rows of N_q, first and last among them; None (all rows) where N_q is not more."""
    if N_q <= count:
        return None
    inner = np.random.default_rng(seed).choice(np.arange(1, N_q - 1), count - 2, replace=False)
    return np.sort(np.concatenate([[0, N_q - 1], inner]))
