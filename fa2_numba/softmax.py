"""The online softmax, on register tiles (FlashAttention-2, Algorithm 1, lines 8 to 10).

A row of S_ij is spread over n_c neighbouring lanes; each function below treats the R_r rows that a
thread shares. m_i is the running maximum, l_i the running sum of exp(S - m_i).
"""

from typing import Any

from fa2_numba.formats import Format
from fa2_numba.hbm import device
from fa2_numba.ptx import shfl_bfly
from fa2_numba.tiling import Tiling


def row_reductions(n_c: int) -> tuple[Any, Any]:
    """Device functions ``row_max(x)``, ``row_sum(x)`` over the n_c lanes of a row.

    A butterfly: after log2(n_c) exchanges every lane has the result.
    """
    exchanges = n_c.bit_length() - 1

    @device
    def row_max(x):
        for s in range(exchanges):
            x = max(x, shfl_bfly(x, 1 << s))
        return x

    @device
    def row_sum(x):
        for s in range(exchanges):
            x = x + shfl_bfly(x, 1 << s)
        return x

    return row_max, row_sum


def online_softmax_step(tiling: Tiling, R_d: int, fmt: Format) -> Any:
    """A device function ``step(S_ij, m_i, l_i, acc)``: lines 9 and 10 up to the product with V_j.

    On return S_ij holds P~_ij, m_i the new maximum, and l_i and acc are rescaled by
    alpha = exp(m_i^(j-1) - m_i^(j)). l_i is this lane's share of the row sum: the lanes are added
    once, after the last j (`row_sum`), since alpha is common to the row.

    A row that has seen no key yet has m_i = -inf; its exponentials are taken against 0 instead, so
    that they are 0 and not NaN.
    """
    R_r, R_c = tiling.R_r, tiling.R_c
    zero, minus_inf = fmt.acc(0), fmt.acc("-inf")
    exp = fmt.exp
    row_max, _ = row_reductions(tiling.n_c)

    @device
    def step(S_ij, m_i, l_i, acc):
        for r in range(R_r):
            m = S_ij[r, 0]
            for c in range(1, R_c):
                m = max(m, S_ij[r, c])
            m = max(m_i[r], row_max(m))  # line 9: m_i^(j)
            shift = zero if m == minus_inf else m
            alpha = exp(m_i[r] - shift)
            l = zero
            for c in range(R_c):
                p = exp(S_ij[r, c] - shift)  # line 9: P~_ij
                S_ij[r, c] = p
                l += p
            l_i[r] = alpha * l_i[r] + l  # line 9: l_i^(j)
            m_i[r] = m
            for k in range(R_d):
                acc[r, k] *= alpha  # line 10: diag(alpha) O_i^(j-1)

    return step
