"""What a warpgroup does with the scores and the output in its accumulators.

The accumulators of 64 x n are n / 2 registers of each thread (`ptx.hopper`): of row
``16 * warp + lane // 4`` (r = 0) and of the row 8 below (r = 1), the columns ``8 * c + 2 * q + e``,
where q is ``lane % 4`` and e 0 or 1, are in register ``4 * c + 2 * r + e``. So a row is in the four
lanes of a quad. Loops over registers have a constant number of turns and unroll.
"""

import math
from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import hbm
from fa2_numba.formats import Format
from fa2_numba.hbm import device
from fa2_numba.masking import tile_functions
from fa2_numba.ptx import (
    cvt_rn_bf16x2_f32,
    cvt_rn_f16x2_f32,
    ex2_approx_ftz_f32,
    max_f32,
    mov_b32,
    rcp_approx_ftz_f32,
    shfl_bfly,
    vote_any,
)
from fa2_numba.tile import u32
from fa2_numba.tiling import WARPGROUP_ROWS as ROWS

THREADS = 128
LANES = 32
PACK = {"bf16": cvt_rn_bf16x2_f32, "fp16": cvt_rn_f16x2_f32}
ZERO, ONE, NEG_INF = np.float32(0), np.float32(1), np.float32("-inf")
NAN = np.float32("nan")
LARGEST_SHIFT = np.float32(2**27)  # its rounding multiplies P~ by 2^4 at most, in l and O alike


@device
def first_row(thread):
    """Row of r = 0 among its warpgroup's 64."""
    lane, warp = u32(thread) % u32(LANES), u32(thread) // u32(LANES) % u32(4)
    return u32(16) * warp + lane // u32(4)


def score_finisher(n: int, B_c: int, rule: Any, change: Any) -> tuple[Any, Any]:
    """Score change and mask of a tile's 64 x n accumulators.

    Returns
    -------
    change_scores : device function ``(S, state, scale, i, j)``
        Scales the scores of rows i and i + 8 and of columns from j on, and changes them.
    mask_scores : device function ``(S, mask_args, b, h, row, j, N_q, N_k)``
        Makes those -inf that rows `row` and ``row + 8`` do not see. `j` is the first column's.
    """
    _, _, (row_bounds, visible) = tile_functions(rule, ROWS, B_c, device)
    _, changed = change.functions(device, np.float32)
    elementwise = rule.elementwise

    @device
    def change_scores(S, state, scale, i, j):
        for c in range(n // 8):
            for r in range(2):
                for e in range(2):
                    s = S[4 * c + 2 * r + e] * scale
                    S[4 * c + 2 * r + e] = changed(state, i + 8 * r, j + 8 * c + e, s)

    @device
    def mask_scores(S, mask_args, b, h, row, j, N_q, N_k):
        for r in range(2):
            i, lo, hi = row_bounds(mask_args, b, h, row + 8 * r, N_q, N_k)
            # Hidden from libNVVM, which would make a case of its own of each that it understands,
            # and ptxas then keeps the scores twice.
            first = mov_b32(np.int32(lo - j))
            end = mov_b32(np.int32(hi - j))
            for c in range(n // 8):
                for e in range(2):
                    if np.int32(8 * c + e) < first or np.int32(8 * c + e) >= end:
                        S[4 * c + 2 * r + e] = NEG_INF
                    elif elementwise:
                        if not visible(mask_args, b, h, i, j + 8 * c + e):
                            S[4 * c + 2 * r + e] = NEG_INF

    return change_scores, mask_scores


def online_softmax(n: int, dtype: str, maxima_first: bool) -> tuple[Any, Any]:
    """The online-softmax step on 64 x n scores, in two parts between which O may be rescaled.

    ``S * c`` are powers of 2. m, l, alpha, shift are those of rows r = 0 and 1; l is this lane's
    share of the row sum.

    Parameters
    ----------
    n : int
        Columns.
    dtype : str
        What P~ is rounded to.
    maxima_first : bool
        Whether row 1's maximum is found before the exponentials of row 0, or among them: that
        takes more registers and less time.

    Returns
    -------
    begin_softmax : device function ``(S, m, l, alpha, shift, c) -> changed``
        Both new maxima m, l and the factor alpha of O; whether one of them is not 1. P~ of row 0.
    finish_softmax : device function ``(S, P, l, shift, c)``
        P~ of row 1, and both rows rounded to 16 bits: an A of n k.
    """
    pack = PACK[dtype]

    @device
    def settle(x, m, l, alpha, shift, c, r):
        """m, l and alpha of row r from the maximum of this lane's new scores."""
        x = max_f32(x, shfl_bfly(x, 1))
        x = max_f32(x, shfl_bfly(x, 2))
        changed = x > m[r]
        new = x if changed else m[r]
        shift[r] = new * c
        if not abs(shift[r]) < LARGEST_SHIFT:
            # No key yet: P~ is 0 and not NaN. Or P~ may leave its range: the row is found NaN.
            shift[r] = ZERO if new == NEG_INF else NAN
        alpha[r] = ex2_approx_ftz_f32(m[r] * c - shift[r]) if changed else ONE
        m[r] = new
        l[r] *= alpha[r]
        return changed

    @device
    def begin_softmax(S, m, l, alpha, shift, c):
        # Two maxima and two sums of each row: the units have the next before the last is ready.
        x, y = max_f32(S[0], S[1]), max_f32(S[4], S[5])
        for k in range(2, n // 8):
            if k % 2:
                y = max_f32(y, max_f32(S[4 * k], S[4 * k + 1]))
            else:
                x = max_f32(x, max_f32(S[4 * k], S[4 * k + 1]))
        if maxima_first:
            z, w = max_f32(S[2], S[3]), max_f32(S[6], S[7])
            for k in range(2, n // 8):
                if k % 2:
                    w = max_f32(w, max_f32(S[4 * k + 2], S[4 * k + 3]))
                else:
                    z = max_f32(z, max_f32(S[4 * k + 2], S[4 * k + 3]))
        else:
            z, w = NEG_INF, NEG_INF
        changed = settle(max_f32(x, y), m, l, alpha, shift, c, 0)
        if maxima_first:
            changed = settle(max_f32(z, w), m, l, alpha, shift, c, 1) or changed
        sum_0, sum_1 = ZERO, ZERO
        for k in range(n // 8):
            p = ex2_approx_ftz_f32(S[4 * k] * c - shift[0])
            if not maxima_first:
                if k % 2:
                    w = max_f32(w, max_f32(S[4 * k + 2], S[4 * k + 3]))
                else:
                    z = max_f32(z, max_f32(S[4 * k + 2], S[4 * k + 3]))
            q = ex2_approx_ftz_f32(S[4 * k + 1] * c - shift[0])
            S[4 * k], S[4 * k + 1] = p, q
            sum_0 += p
            sum_1 += q
        l[0] += sum_0 + sum_1
        if not maxima_first:
            changed = settle(max_f32(z, w), m, l, alpha, shift, c, 1) or changed
        return changed

    @device
    def finish_softmax(S, P, l, shift, c):
        sum_0, sum_1 = ZERO, ZERO
        for k in range(n // 8):
            p = ex2_approx_ftz_f32(S[4 * k + 2] * c - shift[1])
            q = ex2_approx_ftz_f32(S[4 * k + 3] * c - shift[1])
            S[4 * k + 2], S[4 * k + 3] = p, q
            sum_0 += p
            sum_1 += q
        l[1] += sum_0 + sum_1
        for k in range(n // 8):
            P[2 * k] = pack(S[4 * k + 1], S[4 * k])
            P[2 * k + 1] = pack(S[4 * k + 3], S[4 * k + 2])

    return begin_softmax, finish_softmax


def rescaler(n: int) -> Any:
    """``rescale(acc, alpha)``: both rows of a 64 x n O times their alpha."""

    @device
    def rescale(acc, alpha):
        for c in range(n // 8):
            acc[4 * c] *= alpha[0]
            acc[4 * c + 1] *= alpha[0]
            acc[4 * c + 2] *= alpha[1]
            acc[4 * c + 3] *= alpha[1]

    return rescale


@device
def _exchange(x, y, has_bit, lanes):
    """Lanes without the bit keep x and get the other's x; lanes with it keep y and get its y."""
    other = u32(shfl_bfly(np.int32(x if has_bit else y), lanes))
    if has_bit:
        return other, y
    return x, other


def output_writer(d: int, n: int, dtype: str, width: int) -> Any:
    """``write(O, L, acc, m, l, scale, b, h, row, N_q)``: normalise, round and store two rows.

    A quad transposes 4 x 4 registers of two columns each, in two exchanges, so that a lane has 8
    neighbouring columns. It stores them in pieces of `width`.
    """
    pack = PACK[dtype]
    store = hbm.vector_store(width)
    chunks = n // 8  # of 8 columns

    @device
    def rounded(acc, inverse, chunk, r):
        if chunk < chunks:
            return pack(acc[4 * chunk + 2 * r + 1] * inverse, acc[4 * chunk + 2 * r] * inverse)
        return u32(0)

    @device
    def write(O, L, acc, m, l, scale, b, h, row, N_q):
        q = u32(cuda.laneid) % u32(4)
        odd, high = (q & u32(1)) != u32(0), (q & u32(2)) != u32(0)
        out = cuda.local.array(8, np.uint16)
        for r in range(2):
            total = l[r] + shfl_bfly(l[r], 1)
            total = total + shfl_bfly(total, 2)
            inverse = rcp_approx_ftz_f32(total) if total != ZERO else ZERO  # no keys: O = 0
            exists = row + 8 * r < N_q
            for g in range(0, chunks, 4):
                x_0, x_1 = rounded(acc, inverse, g, r), rounded(acc, inverse, g + 1, r)
                x_2, x_3 = rounded(acc, inverse, g + 2, r), rounded(acc, inverse, g + 3, r)
                x_0, x_1 = _exchange(x_0, x_1, odd, 1)
                x_2, x_3 = _exchange(x_2, x_3, odd, 1)
                x_0, x_2 = _exchange(x_0, x_2, high, 2)
                x_1, x_3 = _exchange(x_1, x_3, high, 2)
                out[0], out[1] = x_0, x_0 >> u32(16)
                out[2], out[3] = x_1, x_1 >> u32(16)
                out[4], out[5] = x_2, x_2 >> u32(16)
                out[6], out[7] = x_3, x_3 >> u32(16)
                column = 8 * (np.int64(g) + np.int64(q))
                if exists:
                    for at in range(0, 8, width):
                        if column + at < d:
                            store(O, (b, h, row + 8 * r, column + at), out, at)
            if exists and q == u32(0):
                log_l = np.float32(math.log(total))
                L[b, h, row + 8 * r] = m[r] * scale + log_l if total != ZERO else NEG_INF

    return write


def zero_times(n: int) -> Any:
    """``product(acc) -> 0``, or NaN if one of a thread's accumulators of 64 x n is NaN or inf."""

    @device
    def product(acc):
        x, y = ZERO, ZERO
        for k in range(0, n // 2, 2):
            x += acc[k] * ZERO
            y += acc[k + 1] * ZERO
        return x + y

    return product


def row_recomputer(d: int, rule: Any, change: Any, fmt: Format) -> Any:
    """``recompute(Q, K, V, O, L, scale, mask_args, state, b, h, h_k, first, N_q, N_k)``.

    A warp computes those of rows `first` to ``first + 15`` of O again that are not finite, and
    their L, key by key: a key that a row does not see is not touched, whatever V holds there. (In
    P V it counts as 0 times that, which is NaN if that is NaN or infinite.)
    """
    _, _, (row_bounds, visible) = tile_functions(rule, ROWS, ROWS, device)
    _, changed = change.functions(device, np.float32)
    to_acc, from_acc, exp, log = fmt.to_acc, fmt.from_acc, fmt.exp, fmt.log
    own = -(-d // LANES)  # columns of a lane: lane, lane + 32, ...

    @device
    def score(Q, K, scale, state, b, h, h_k, row, i, j):
        lane = np.int64(cuda.laneid)
        s = ZERO
        for k in range(own):
            column = lane + LANES * k
            if column < d:
                s += to_acc(Q[b, h, row, column]) * to_acc(K[b, h_k, j, column])
        for bit in range(5):
            s += shfl_bfly(s, 1 << bit)
        return changed(state, i, j, s * scale)

    @device
    def recompute(Q, K, V, O, L, scale, mask_args, state, b, h, h_k, first, N_q, N_k):
        lane = np.int64(cuda.laneid)
        for row in range(first, min(first + 16, N_q)):
            x = ZERO
            for k in range(own):
                if lane + LANES * k < d:
                    x += to_acc(O[b, h, row, lane + LANES * k]) * ZERO
            if vote_any(x != ZERO):
                i, lo, hi = row_bounds(mask_args, b, h, row, N_q, N_k)
                m, l = NEG_INF, ZERO
                for j in range(lo, hi):
                    if visible(mask_args, b, h, i, j):
                        m = max_f32(m, score(Q, K, scale, state, b, h, h_k, row, i, j))
                acc = cuda.local.array(own, np.float32)
                for k in range(own):
                    acc[k] = ZERO
                for j in range(lo, hi):
                    if visible(mask_args, b, h, i, j):
                        p = exp(score(Q, K, scale, state, b, h, h_k, row, i, j) - m)
                        l += p
                        for k in range(own):
                            if lane + LANES * k < d:
                                acc[k] += p * to_acc(V[b, h_k, j, lane + LANES * k])
                for k in range(own):
                    if lane + LANES * k < d:
                        o = acc[k] / l if l != ZERO else ZERO
                        O[b, h, row, lane + LANES * k] = from_acc(o)
                if lane == 0:
                    L[b, h, row] = m + log(l) if l != ZERO else NEG_INF

    return recompute
