"""What a warpgroup does with scores and output in its accumulators: mask, softmax, store.

The accumulators of 64 x n are n / 2 registers of each thread (`ptx.hopper`): of row
``16 * warp + lane // 4`` (r = 0) and of the row 8 below (r = 1), the columns ``8 * c + 2 * q + e``,
where q is ``lane % 4`` and e 0 or 1, are in register ``4 * c + 2 * r + e``. So a row is in the four
lanes of a quad.
"""

import math
from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import hbm
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
)
from fa2_numba.tile import u32

WARPGROUP = 128  # threads
ROWS = 64  # of a warpgroup's accumulators
PACK = {"bf16": cvt_rn_bf16x2_f32, "fp16": cvt_rn_f16x2_f32}
ZERO, ONE, NEG_INF = np.float32(0), np.float32(1), np.float32("-inf")
SLACK = np.float32(8)  # powers of two by which P~ may exceed 1


@device
def first_row(thread):
    """Row of r = 0 among its warpgroup's 64."""
    lane, warp = u32(thread) % u32(32), u32(thread) // u32(32) % u32(4)
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


def online_softmax(
    n: int, dtype: str, lazy: bool = True, maxima_first: bool = False
) -> tuple[Any, Any, Any]:
    """The online-softmax step on the 64 x n scores, in three parts that keep each pipe busy.

    Scores times c are in powers of two. m, l, alpha, shift: of both rows; l is this lane's share.
    A maximum is kept while it is exceeded by no more than 2^8: P~ is then at most 2^8, l and O stay
    as they are, and the result is the same, as both are relative to m.

    Returns
    -------
    begin : device function ``(S, m, l, alpha, shift, c) -> changed``
        Both maxima, and P~ of row 0. Row 1's maximum is found while the exponentials of row 0 are
        under way; so the compiler must not find it before.
    finish : device function ``(S, P, l, shift, c)``
        P~ of row 1, and both rounded to 16 bits: an A of n k.
    """
    pack = PACK[dtype]

    @device
    def settle(x, m, l, alpha, shift, c, r):
        """The row's new m from the maximum of its lane's scores; whether it changed."""
        x = max_f32(x, shfl_bfly(x, 1))
        x = max_f32(x, shfl_bfly(x, 2))
        if lazy:
            exceeds = (x - m[r]) * c > SLACK
        else:
            exceeds = x > m[r]
        new = x if exceeds else m[r]
        shift[r] = ZERO if new == NEG_INF else new * c
        alpha[r] = ex2_approx_ftz_f32(m[r] * c - shift[r]) if exceeds else ONE
        m[r] = new
        l[r] *= alpha[r]
        return exceeds

    @device
    def begin(S, m, l, alpha, shift, c):
        x = max_f32(S[0], S[1])
        y = max_f32(S[4], S[5])
        for k in range(2, n // 8, 2):
            x = max_f32(x, max_f32(S[4 * k], S[4 * k + 1]))
            if 4 * k + 4 < n // 2:
                y = max_f32(y, max_f32(S[4 * k + 4], S[4 * k + 5]))
        if maxima_first:
            u = max_f32(S[2], S[3])
            v = max_f32(S[6], S[7])
            for k in range(2, n // 8, 2):
                u = max_f32(u, max_f32(S[4 * k + 2], S[4 * k + 3]))
                if 4 * k + 4 < n // 2:
                    v = max_f32(v, max_f32(S[4 * k + 6], S[4 * k + 7]))
            changed = settle(max_f32(x, y), m, l, alpha, shift, c, 0)
            changed = settle(max_f32(u, v), m, l, alpha, shift, c, 1) or changed
        else:
            changed = settle(max_f32(x, y), m, l, alpha, shift, c, 0)
        x = NEG_INF
        y = x
        sum_0, sum_1 = ZERO, ZERO
        for k in range(n // 8):
            p = ex2_approx_ftz_f32(S[4 * k] * c - shift[0])
            if not maxima_first:
                if k % 2:
                    x = max_f32(x, max_f32(S[4 * k + 2], S[4 * k + 3]))
                else:
                    y = max_f32(y, max_f32(S[4 * k + 2], S[4 * k + 3]))
            q = ex2_approx_ftz_f32(S[4 * k + 1] * c - shift[0])
            S[4 * k] = p
            S[4 * k + 1] = q
            sum_0 += p
            sum_1 += q
        l[0] += sum_0 + sum_1
        if not maxima_first:
            changed = settle(max_f32(x, y), m, l, alpha, shift, c, 1) or changed
        return changed

    @device
    def finish(S, P, l, shift, c):
        sum_0, sum_1 = ZERO, ZERO
        for k in range(n // 8):
            p = ex2_approx_ftz_f32(S[4 * k + 2] * c - shift[1])
            q = ex2_approx_ftz_f32(S[4 * k + 3] * c - shift[1])
            S[4 * k + 2] = p
            S[4 * k + 3] = q
            sum_0 += p
            sum_1 += q
        l[1] += sum_0 + sum_1
        for k in range(n // 8):
            P[2 * k] = pack(S[4 * k + 1], S[4 * k])
            P[2 * k + 1] = pack(S[4 * k + 3], S[4 * k + 2])

    return begin, finish


def rescaler(d: int) -> Any:
    """``rescale(acc, alpha)``: both rows of O times their alpha."""

    @device
    def rescale(acc, alpha):
        for c in range(d // 8):
            acc[4 * c] *= alpha[0]
            acc[4 * c + 1] *= alpha[0]
            acc[4 * c + 2] *= alpha[1]
            acc[4 * c + 3] *= alpha[1]

    return rescale


def packer(n: int, dtype: str) -> Any:
    """``pack(S, P)``: the accumulators, rounded to 16 bits, two in a register: an A of n k."""
    pack = PACK[dtype]

    @device
    def pack_scores(S, P):
        for c in range(n // 8):
            P[2 * c] = pack(S[4 * c + 1], S[4 * c])
            P[2 * c + 1] = pack(S[4 * c + 3], S[4 * c + 2])

    return pack_scores


@device
def _swap(x, y, mine, lanes):
    """Exchange x of a lane without the bit with y of ... so that both hold two of one kind."""
    other = np.uint32(shfl_bfly(np.int32(x if mine else y), lanes))
    if mine:
        return other, y
    return x, other


def output_writer(d: int, padded: int, dtype: str, width: int) -> Any:
    """``write(O, L, acc, m, l, scale, b, h, row, N_q)``: normalise, round and store two rows.

    A quad transposes 4 x 4 registers (two exchanges of each), so that each lane has 8 neighbouring
    columns: it stores 16 bytes, and the quad 64 without a gap.
    """
    pack = PACK[dtype]
    store = hbm.vector_store(width)
    halves = 8

    @device
    def write(O, L, acc, m, l, scale, b, h, row, N_q):
        q = u32(cuda.laneid) % u32(4)
        odd, high = (q & u32(1)) != u32(0), (q & u32(2)) != u32(0)
        out = cuda.local.array(halves, np.uint16)
        for r in range(2):
            total = l[r] + shfl_bfly(l[r], 1)
            total = total + shfl_bfly(total, 2)
            inverse = rcp_approx_ftz_f32(total) if total != ZERO else ZERO
            there = row + 8 * r < N_q
            for g in range(0, padded // 8, 4):
                a = pack(acc[4 * g + 2 * r + 1] * inverse, acc[4 * g + 2 * r] * inverse)
                w = a
                y = a
                z = a
                if g + 1 < padded // 8:
                    w = pack(acc[4 * g + 5 + 2 * r] * inverse, acc[4 * g + 4 + 2 * r] * inverse)
                if g + 2 < padded // 8:
                    y = pack(acc[4 * g + 9 + 2 * r] * inverse, acc[4 * g + 8 + 2 * r] * inverse)
                if g + 3 < padded // 8:
                    z = pack(acc[4 * g + 13 + 2 * r] * inverse, acc[4 * g + 12 + 2 * r] * inverse)
                a, w = _swap(a, w, odd, 1)
                y, z = _swap(y, z, odd, 1)
                a, y = _swap(a, y, high, 2)
                w, z = _swap(w, z, high, 2)
                column = 8 * (np.int64(g) + np.int64(q))
                out[0] = a
                out[1] = a >> u32(16)
                out[2] = w
                out[3] = w >> u32(16)
                out[4] = y
                out[5] = y >> u32(16)
                out[6] = z
                out[7] = z >> u32(16)
                if there:
                    for at in range(0, 8, width):
                        if column + at < d:
                            store(O, (b, h, row + 8 * r, column + at), out, at)
            if there and q == u32(0):
                log_l = np.float32(math.log(total))
                L[b, h, row + 8 * r] = m[r] * scale + log_l if total != ZERO else NEG_INF

    return write
