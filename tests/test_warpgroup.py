"""What a warp does with scores and output in its accumulators, on the simulator.

The tensor-core kernel itself needs a GPU (`test_fa3_gpu.py`); these parts of it do not.
"""

from typing import Any

import numpy as np
import pytest
from numba import cuda

from fa2_numba import hbm, launch, masking, reference, simulator, warpgroup
from fa2_numba.formats import FORMATS

on_the_simulator = pytest.mark.skipif(not simulator.ACTIVE, reason="runs on the simulator")

N = 64  # columns of scores
HELD = N // 2  # registers of a thread: of rows r = 0 and 1


def place(lane: int, register: int) -> tuple[int, int]:
    """Row and column of an accumulator among the 16 rows of a warp."""
    c, r, e = register // 4, register // 2 % 2, register % 2
    return lane // 4 + 8 * r, 8 * c + 2 * (lane % 4) + e


def places(held: int) -> np.ndarray:
    """Rows and columns of a warp's accumulators, `held` a thread."""
    return np.array([[place(t, k) for k in range(held)] for t in range(32)]).transpose(2, 0, 1)


ROW, COLUMN = places(HELD)


def run(kernel: Any, *args: Any) -> None:
    """One block of one warp."""
    launch.launch(hbm.jit(kernel), 1, 32, 0, 0, *args)


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to 16 bits is of sm_90; here 0 stands for two such numbers."""
    monkeypatch.setitem(warpgroup.PACK, "bf16", lambda high, low: np.uint32(0))


def softmax_step(S: np.ndarray, before: np.ndarray, c: float, late: bool) -> Any:
    """m, l, alpha of 16 rows, the scores, both after each part; which lanes saw a change."""
    begin, finish = warpgroup.online_softmax(N, "bf16", late)

    def kernel(S, before, c, numbers, changed, after):
        lane = cuda.threadIdx.x
        own, P = cuda.local.array(HELD, np.float32), cuda.local.array(HELD // 2, np.uint32)
        m, l = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        alpha, shift = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        for k in range(HELD):
            own[k] = S[lane, k]
        for r in range(2):
            m[r], l[r] = before[lane // 4 + 8 * r, 0], before[lane // 4 + 8 * r, 1]
        for part in range(2):
            if part == 0:
                changed[lane] = begin(own, m, l, alpha, shift, c)
            else:
                finish(own, P, l, shift, c)
            for r in range(2):
                row = lane // 4 + 8 * r
                numbers[part, lane % 4, row, 0], numbers[part, lane % 4, row, 1] = m[r], l[r]
                numbers[part, lane % 4, row, 2] = alpha[r]
            for k in range(HELD):
                after[part, lane, k] = own[k]

    numbers, changed = np.zeros((2, 4, 16, 3), np.float32), np.zeros(32, np.bool_)
    after = np.zeros((2, 32, HELD), np.float32)
    run(kernel, S[ROW, COLUMN], before, np.float32(c), numbers, changed, after)
    back = np.full((2, 16, N), np.nan, np.float32)
    back[:, ROW, COLUMN] = after
    return numbers, changed, back


@on_the_simulator
@pytest.mark.usefixtures("pack")
@pytest.mark.parametrize("late", [False, True])
def test_the_softmax_step(late: bool) -> None:
    rng = np.random.default_rng(7)
    S = (4 * rng.standard_normal((16, N))).astype(np.float32)
    S[3] = -np.inf  # sees no key here, nor before
    S[4, 5:] = -np.inf
    before = np.zeros((16, 2), np.float32)
    before[:, 0] = np.where(
        rng.random(16) < 0.5, -np.inf, 30
    )  # no key yet, or larger than all here
    before[3, 0] = -np.inf
    c = 0.7
    numbers, changed, back = softmax_step(S, before, c, late)
    m = np.maximum(before[:, 0], S.max(axis=1))
    np.testing.assert_array_equal(numbers[..., 0], np.broadcast_to(m, (2, 4, 16)))
    alpha = np.where(m > before[:, 0], np.where(np.isinf(before[:, 0]), 0, np.nan), 1)
    np.testing.assert_array_equal(numbers[..., 2], np.broadcast_to(alpha, (2, 4, 16)))
    for row in range(16):
        quad = slice(4 * (row % 8), 4 * (row % 8) + 4)
        both = [row % 8, row % 8 + 8]
        assert np.all(changed[quad] == np.any(m[both] > before[both, 0]))
    shift = np.where(np.isinf(m), 0, m)[:, None]
    expected = np.exp2((S.astype(np.float64) - shift) * c)
    begun = 3 * N // 4 if late else 0  # row 1 of each thread in the first part; row 0 is complete
    np.testing.assert_allclose(back[0, :8], expected[:8], rtol=1e-5)
    np.testing.assert_allclose(back[0, 8:, :begun], expected[8:, :begun], rtol=1e-5)
    np.testing.assert_array_equal(back[0, 8:, begun:], S[8:, begun:])
    np.testing.assert_allclose(back[1], expected, rtol=1e-5)
    l = numbers[..., 1].sum(axis=1)
    np.testing.assert_allclose(l[0, :8], expected[:8].sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(l[1], expected.sum(axis=1), rtol=1e-5)
    # What a branch on row 1's l need not wait for is added later.
    of_row_1 = expected[8:, : begun - 32 if late else 0].sum(axis=1)
    np.testing.assert_allclose(l[0, 8:], of_row_1, rtol=1e-5)
    assert np.all(back[:, 3] == 0)


@on_the_simulator
@pytest.mark.usefixtures("pack")
@pytest.mark.parametrize(("largest", "leaves"), [(2.0**26, False), (2.0**28, True), (np.inf, True)])
def test_scores_that_leave_the_range_are_found(largest: float, leaves: bool) -> None:
    """m c is rounded: P~ of scores so large may be 0 or infinite. It is NaN, and so found."""
    S = np.zeros((16, N), np.float32)
    S[:, 0] = largest
    before = np.full((16, 2), [-np.inf, 0], np.float32)
    _, _, back = softmax_step(S, before, 1.0, True)
    assert np.isnan(back[:, :8, 0]).all() == leaves
    if not leaves:
        assert np.all((back[:, :8, 0] >= 2.0**-4) & (back[:, :8, 0] <= 2.0**4))


@on_the_simulator
@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (masking.causal(), reference.causal_mask),
        (masking.window(9, 3), lambda *n: reference.window_mask(*n, 9, 3)),
        (masking.causal_skip(), reference.causal_mask),
    ],
    ids=["causal", "window", "skip"],
)
@pytest.mark.parametrize(("n", "N_k"), [(32, 90), (144, 200), (144, 270)])
def test_masked_scores(mask: masking.Mask, visible: Any, n: int, N_k: int) -> None:
    _, finish = warpgroup.score_finisher(n, n, mask.rule, masking.UNCHANGED)
    N_q, first, j, held = 70, 64, 64, n // 2  # rows up to 79: some do not exist

    def kernel(S, args):
        lane = cuda.threadIdx.x
        own = cuda.local.array(held, np.float32)
        for k in range(held):
            own[k] = S[lane, k]
        finish(own, args, 0, 0, first + lane // 4, j + 2 * (lane % 4), N_q, N_k)
        for k in range(held):
            S[lane, k] = own[k]

    S = np.ones((32, held), np.float32)
    run(kernel, S, mask.args)
    seen = np.zeros((16, n), bool)
    seen[tuple(places(held))] = S == 1
    assert np.all((S == 1) | (S == -np.inf))
    expected = np.zeros((16, n), bool)
    expected[: N_q - first, : N_k - j] = visible(N_q, N_k)[first:, j : j + n]
    np.testing.assert_array_equal(seen, expected)


@on_the_simulator
@pytest.mark.parametrize(
    ("mask", "options"),
    [(masking.causal(), {"causal": True}), (masking.window(4, 2), {"window": (4, 2)})],
    ids=["causal", "window"],
)
def test_rows_that_are_not_finite_are_computed_again(mask: masking.Mask, options: Any) -> None:
    """A masked NaN or infinity of V reaches nobody, a visible one those who see it; L, too."""
    rng = np.random.default_rng(3)
    N_q, N_k, d = 14, 20, 40
    q, k, v = (rng.standard_normal((1, 1, n, d)).astype(np.float16) for n in (N_q, N_k, N_k))
    v[0, 0, 12, 3], v[0, 0, 15, 7] = np.nan, np.inf
    q[0, 0, 2] = 0
    O, L = np.full((1, 1, 16, d), 5, np.float16)[:, :, :N_q], np.full((1, 1, N_q), 9, np.float32)
    again = [0, 2, 7, 13]
    O[0, 0, again, 1] = np.nan
    recompute = warpgroup.row_recomputer(d, mask.rule, masking.UNCHANGED, FORMATS["fp16"])
    scale = np.float32(0.3)

    def kernel(Q, K, V, O, L, args):
        recompute(Q, K, V, O, L, scale, args, 0, 0, 0, 0, 0, N_q, N_k)

    run(kernel, q, k, v, O, L, mask.args)
    out, lse = reference.attention_reference(q, k, v, scale=float(scale), **options)
    np.testing.assert_allclose(O[0, 0, again], out[0, 0, again], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(L[0, 0, again], lse[0, 0, again], rtol=1e-5)
    left = [row for row in range(N_q) if row not in again]
    assert np.all(O[0, 0, left] == 5) and np.all(L[0, 0, left] == 9)
