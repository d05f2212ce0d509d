"""The worked example: six tokens, two dimensions, three by three tiles."""

from fa2_numba.accounting.exactness import Exactness, Expected
from fa2_numba.accounting.sweep import to_device
from fa2_numba.reference import WORKED_EXAMPLE, InnerStep, RowTile, flash_attention_2_trace
from fa2_numba.tiling import Tiling

INTRODUCTION = """\
FlashAttention-2, Algorithm 1 (Dao 2023), on N = 6, d = 2 with B_r = B_c = 2 and scale 1.
Row tile i goes over key tiles j. After each: the scores S_ij, the running maximum m_i,
P_ij = exp(S_ij - m_i), the running sum l_i and the output so far, acc, not yet divided by l_i.
"""


def trace() -> list[InnerStep | RowTile]:
    """Every step in float64."""
    x = WORKED_EXAMPLE
    return list(flash_attention_2_trace(x["q"], x["k"], x["v"], x["B_r"], x["B_c"], x["scale"]))


def agreement() -> list[Exactness]:
    """The steps' result and the fa2 kernel's, each against attention in one piece."""
    import numpy as np

    from fa2_numba import api
    from fa2_numba.arrays import to_host

    q, k, v, scale = (WORKED_EXAMPLE[name] for name in ("q", "k", "v", "scale"))
    expected = Expected(q, k, v, scale=scale)
    tiles = [step for step in trace() if isinstance(step, RowTile)]
    by_hand = (np.concatenate([t.O_i for t in tiles]), np.concatenate([t.L_i for t in tiles]))
    measured = api.measure(
        *(to_device(x) for x in (q, k, v)), scale=scale, method="fa2", tiling=Tiling(2, 2, 2, 2)
    )
    columns = measured.problem.columns()
    return [
        expected.compare(*by_hand, "worked example", {**columns, "method": "the steps above"}),
        expected.compare(to_host(measured.out), to_host(measured.lse), "worked example", columns),
    ]
