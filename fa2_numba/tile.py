"""What a block does with a tile: load it, multiply it.

Factories: each returns a device function for one `Tiling`, its sizes frozen as constants so that
libNVVM unrolls every loop and keeps the register tiles in registers.

Indices into shared memory are unsigned (`u32`): a signed index costs a wrap-around test, and hides
from the compiler that four neighbours are one ``LDS.128``.
"""

import math
from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import smem
from fa2_numba.formats import Format
from fa2_numba.hbm import atomic_add, device, vector_load, vector_store
from fa2_numba.masking import FULL, UNCHANGED, tile_functions
from fa2_numba.tiling import Tiling, ceil_div

u32 = np.uint32
LOADS_IN_FLIGHT = 8  # that a thread asks for before it waits; 32 registers at 16 bytes each


def loader(
    rows: int,
    columns: int,
    width: int,
    threads: int,
    fmt: Format,
    mark: Any,
    issued: int,
    landed: int,
) -> Any:
    """A device function that brings a piece of a global matrix into a shared tile.

    ``load(T, A, b, h, row_0, N, col_0, M, factor, tid, clock, ticks)``:
    ``T[r, k] = factor * A[b, h, row_0 + r, col_0 + k]`` for r < `rows`, k < `columns`. A has N rows
    and M columns; what lies outside becomes 0. Neighbouring lanes take neighbouring pieces of
    `width` elements, so a warp reads whole lines. A thread asks for `LOADS_IN_FLIGHT` pieces
    before it stores the first.

    ``mark(clock, ticks, phase)`` closes phase `issued` when they are asked for, and phase `landed`
    when they are stored, for which they must have arrived.
    """
    pieces = columns // width
    total = rows * pieces
    steps = ceil_div(total, threads)
    batch = min(steps, LOADS_IN_FLIGHT)
    batches = ceil_div(steps, batch)
    held = batch * width
    whole_rows = threads % pieces == 0  # then a thread stays in its columns and steps down rows
    rows_a_step = threads // pieces
    storage, acc_type, to_acc = fmt.storage, fmt.acc, fmt.to_acc
    wide = smem.widest(width, np.dtype(acc_type).itemsize)
    load, put = vector_load(width), smem.vector_store(wide)

    @device
    def place(tid, step):
        if whole_rows:
            r = tid // u32(pieces) + u32(step * rows_a_step)
            return r, tid % u32(pieces) * u32(width), r < u32(rows)
        e = tid + u32(step * threads)
        return e // u32(pieces), e % u32(pieces) * u32(width), e < u32(total)

    @device
    def load_tile(T, A, b, h, row_0, N, col_0, M, factor, tid, clock, ticks):
        x = cuda.local.array(held, storage)
        y = cuda.local.array(wide, acc_type)
        nothing = storage(0)  # made here: libNVVM refuses a frozen float16 constant
        for s in range(batches):
            for t in range(batch):
                r, k, mine = place(tid, s * batch + t)
                for c in range(width):
                    x[t * width + c] = nothing
                if mine and row_0 + r < N and col_0 + k < M:
                    load(A, (b, h, row_0 + r, col_0 + k), x, t * width)
            mark(clock, ticks, issued)
            for t in range(batch):
                r, k, mine = place(tid, s * batch + t)
                if mine:
                    for c_0 in range(0, width, wide):
                        for c in range(wide):
                            y[c] = to_acc(x[t * width + c_0 + c]) * factor
                        put(T, (r, k + u32(c_0)), y, 0)
            mark(clock, ticks, landed)

    return load_tile


def clear_columns(rows: int, first: int, last: int, threads: int, fmt: Format) -> Any:
    """A device function ``clear(T, tid)`` that sets columns first..last-1 of a tile to 0.

    The padding that a product reads (d up to a multiple of 4, or to whole column groups).
    """
    width = last - first
    steps = ceil_div(rows * width, threads) if width > 0 else 0
    zero = fmt.acc(0)

    @device
    def clear(T, tid):
        for t in range(steps):
            e = tid + u32(t * threads)
            if e < u32(rows * width):
                T[e // u32(width), u32(first) + e % u32(width)] = zero

    return clear


def _step(length: int, products: int) -> int:
    """How many terms of `products` dot products are loaded and multiplied at once.

    At most 4 (one LDS.128), and no more multiply-adds than libNVVM unrolls: a loop that stays a
    loop would index the fragments at run time, and they would leave the registers.
    """
    return next(s for s in (4, 2, 1) if length % s == 0 and (s * products <= 256 or s == 1))


def product_nt(tiling: Tiling, length: int, fmt: Format) -> Any:
    """A device function ``S += A B^T`` on register tiles: ``product(S, A, B, ty, tx)``.

    A is the shared tile Q_i, B is K_j; `length` terms. Per step a thread reads 4 neighbours of R_r
    rows of A and R_c rows of B (LDS.128 each) for 4 * R_r * R_c multiply-adds.
    """
    n_r, n_c, R_r, R_c = tiling.n_r, tiling.n_c, tiling.R_r, tiling.R_c
    step, acc = _step(length, R_r * R_c), fmt.acc
    wide = smem.widest(step, np.dtype(acc).itemsize)
    get = smem.vector_load(wide)
    held_a, held_b = R_r * step, R_c * step

    @device
    def product(S, A, B, ty, tx):
        a = cuda.local.array(held_a, acc)
        b = cuda.local.array(held_b, acc)
        for k0 in range(0, length, step):
            for r in range(R_r):
                for k in range(0, step, wide):
                    get(A, (ty + u32(r * n_r), u32(k0 + k)), a, r * step + k)
            for c in range(R_c):
                for k in range(0, step, wide):
                    get(B, (tx + u32(c * n_c), u32(k0 + k)), b, c * step + k)
            for k in range(step):
                for r in range(R_r):
                    for c in range(R_c):
                        S[r, c] += a[r * step + k] * b[c * step + k]

    return product


def product_nn(tiling: Tiling, d: int, fmt: Format, masked: bool) -> Any:
    """A device function ``acc += P V`` on register tiles: ``product(acc, P, V, ty, tx)``.

    P is the shared tile P_ij, V is V_j. With `masked`, a term with P = 0 is left out: a masked key
    must not reach O even when its value is NaN or infinite (0 * NaN is NaN).
    """
    n_r, n_c, R_r = tiling.n_r, tiling.n_c, tiling.R_r
    C, G = tiling.columns_of_O(d, fmt.name)
    step, acc_type = _step(tiling.B_c, R_r * C * G), fmt.acc
    length = tiling.B_c
    zero = acc_type(0)
    wide = smem.widest(step, np.dtype(acc_type).itemsize)
    get_P, get_V = smem.vector_load(wide), smem.vector_load(C)
    held = R_r * step

    @device
    def product(acc, P, V, ty, tx):
        p = cuda.local.array(held, acc_type)
        v = cuda.local.array(C, acc_type)
        for k0 in range(0, length, step):
            for r in range(R_r):
                for k in range(0, step, wide):
                    get_P(P, (ty + u32(r * n_r), u32(k0 + k)), p, r * step + k)
            for k in range(step):
                for g in range(G):
                    get_V(V, (u32(k0 + k), u32(C) * (tx + u32(g * n_c))), v, 0)
                    for r in range(R_r):
                        for c in range(C):
                            if not masked or p[r * step + k] != zero:
                                acc[r, g * C + c] += p[r * step + k] * v[c]

    return product


def score_finisher(tiling: Tiling, rule: Any, change: Any, fmt: Format) -> Any:
    """A device function that applies score changes and mask to a register tile of S.

    ``finish(S, kind, mask_args, state, b, h, row_0, col_0, N_q, N_k)``; the thread's rows are
    ``row_0 + r*n_r``, its columns ``col_0 + c*n_c``. A masked score becomes -inf. With `kind` FULL
    nothing is masked, and without score changes nothing is done.
    """
    n_r, n_c, R_r, R_c = tiling.n_r, tiling.n_c, tiling.R_r, tiling.R_c
    _, _, (row_bounds, visible) = tile_functions(rule, tiling.B_r, tiling.B_c, device)
    _, changed = change.functions(device, fmt.acc)
    CHANGED = change is not UNCHANGED
    minus_inf = fmt.acc("-inf")

    @device
    def finish(S, kind, mask_args, state, b, h, row_0, col_0, N_q, N_k):
        if CHANGED or kind != FULL:
            for r in range(R_r):
                i, lo, hi = row_bounds(mask_args, b, h, row_0 + r * n_r, N_q, N_k)
                for c in range(R_c):
                    j = col_0 + c * n_c
                    inside = lo <= j < hi  # row and key exist, and the bounds allow it
                    if kind != FULL and not (inside and visible(mask_args, b, h, i, j)):
                        S[r, c] = minus_inf
                    elif CHANGED and inside:
                        S[r, c] = changed(state, i, j, S[r, c])

    return finish


# ---- the backward pass ------------------------------------------------------------------------


def product_tn(tiling: Tiling, d: int, fmt: Format, masked: bool) -> Any:
    """A device function ``acc += P^T A`` on register tiles: ``product(acc, P, A, ty, tx)``.

    P is the shared tile P_ij or dS_ij, A is dO_i or Q_i; acc is the thread's part of dV_j or dK_j.
    Per row a thread reads its keys of P and its columns of A. With `masked`, a term with P = 0 is
    left out, as in `product_nn`.
    """
    n_r, n_c, length = tiling.n_r, tiling.n_c, tiling.B_r
    C_k, G_k = tiling.keys_of_dK(fmt.name)
    C, G = tiling.columns_of_O(d, fmt.name)
    keys, acc_type = C_k * G_k, fmt.acc
    step, zero = _step(length, keys * C * G), acc_type(0)
    get_P, get_A = smem.vector_load(C_k), smem.vector_load(C)
    held = step * keys

    @device
    def product(acc, P, A, ty, tx):
        p = cuda.local.array(held, acc_type)
        a = cuda.local.array(C, acc_type)
        for k0 in range(0, length, step):
            for k in range(step):
                for g in range(G_k):
                    place = u32(k0 + k), u32(C_k) * (ty + u32(g * n_r))
                    get_P(P, place, p, k * keys + g * C_k)
            for k in range(step):
                for g in range(G):
                    get_A(A, (u32(k0 + k), u32(C) * (tx + u32(g * n_c))), a, 0)
                    for r in range(keys):
                        for c in range(C):
                            if not masked or p[k * keys + r] != zero:
                                acc[r, g * C + c] += p[k * keys + r] * a[c]

    return product


def row_loader(tiling: Tiling, fmt: Format) -> Any:
    """A device function ``load(T, L, D, b, h, row_0, N, tid)``: L_i and D_i into rows 0, 1 of T.

    A row without keys, and one past the last, gets L = inf: its P = exp(S - L) is 0, not NaN.
    """
    B_r, threads = tiling.B_r, tiling.threads
    steps = ceil_div(B_r, threads)
    zero, infinity, minus_inf = fmt.acc(0), fmt.acc("inf"), fmt.acc("-inf")

    @device
    def load(T, L, D, b, h, row_0, N, tid):
        for t in range(steps):
            r = tid + u32(t * threads)
            if r < u32(B_r):
                l, delta = infinity, zero
                if row_0 + r < N:
                    l, delta = L[b, h, row_0 + r], D[b, h, row_0 + r]
                T[u32(0), r] = infinity if l == minus_inf else l
                T[u32(1), r] = delta

    return load


def score_gradient(tiling: Tiling, rule: Any, change: Any, fmt: Format) -> Any:
    """A device function that makes P of a register tile of S, and dS of one of dP.

    ``gradient(S, dP, L, D, kind, mask_args, state, b, h, row_0, col_0, N_q, N_k)``, the arguments
    as in `score_finisher`; L and D are those of the thread's rows. ``P = exp(S - L)`` and
    ``dS = P o (dP - D)``, times the derivative of the score change. Both are 0 where masked.
    """
    n_r, n_c, R_r, R_c = tiling.n_r, tiling.n_c, tiling.R_r, tiling.R_c
    finish = score_finisher(tiling, rule, change, fmt)
    derivative = change.derivative(device, fmt.acc)
    DERIVED = derivative is not None
    exp, zero, minus_inf = fmt.exp, fmt.acc(0), fmt.acc("-inf")

    @device
    def gradient(S, dP, L, D, kind, mask_args, state, b, h, row_0, col_0, N_q, N_k):
        for r in range(R_r):
            for c in range(R_c):
                dP[r, c] -= D[r]
                if DERIVED:
                    i = row_0 + r * n_r + N_k - N_q
                    dP[r, c] *= derivative(state, i, col_0 + c * n_c, S[r, c])
        finish(S, kind, mask_args, state, b, h, row_0, col_0, N_q, N_k)
        for r in range(R_r):
            for c in range(R_c):
                # What is masked stays 0 also where L_i, dO_i or V_j hold NaN.
                p = exp(S[r, c] - L[r]) if S[r, c] != minus_inf else zero
                S[r, c] = p
                dP[r, c] = p * dP[r, c] if p != zero else zero

    return gradient


def tile_storer(
    rows: int, groups: tuple[int, int], tiling: Tiling, d: int, fmt: Format, width: int
) -> Any:
    """A device function ``store(A, acc, b, h, row_0, N, ty, tx)``: a register tile into A.

    The thread's rows of the tile of `rows` are ``C_r*(ty + g*n_r) + c`` for g < G_r, c < C_r, with
    `groups` the pair (C_r, G_r); its columns are those of O. `width` elements move at once.
    """
    C_r, G_r = groups
    n_r, n_c = tiling.n_r, tiling.n_c
    C, G = tiling.columns_of_O(d, fmt.name)
    R_d, held = C * G, C_r * G_r
    storage, from_acc = fmt.storage, fmt.from_acc
    put = vector_store(width)

    @device
    def store(A, acc, b, h, row_0, N, ty, tx):
        out = cuda.local.array(R_d, storage)
        for r in range(held):
            row = C_r * (np.int64(ty) + r // C_r * n_r) + r % C_r
            if row < rows and row_0 + row < N:
                for k in range(R_d):
                    out[k] = from_acc(acc[r, k])
                for g in range(G):
                    col = C * (np.int64(tx) + g * n_c)
                    for c in range(0, C, width):
                        if col + c < d:
                            put(A, (b, h, row_0 + row, col + c), out, g * C + c)

    return store


def tile_adder(tiling: Tiling, d: int, fmt: Format) -> Any:
    """A device function ``add(A, acc, factor, b, h, row_0, N, ty, tx)``: A += factor acc.

    For a register tile of O's places, element by element and atomically.
    """
    n_r, n_c, R_r = tiling.n_r, tiling.n_c, tiling.R_r
    C, G = tiling.columns_of_O(d, fmt.name)

    @device
    def add(A, acc, factor, b, h, row_0, N, ty, tx):
        for r in range(R_r):
            row = row_0 + np.int64(ty) + r * n_r
            if row < N:
                for g in range(G):
                    col = C * (np.int64(tx) + g * n_c)
                    for c in range(C):
                        if col + c < d:
                            atomic_add(A, (b, h, row, col + c), factor * acc[r, g * C + c])

    return add


def nonfinite_finder(rows: int, columns: int, threads: int, fmt: Format) -> Any:
    """A device function ``find(T, tid)``: 1 if this thread's share of T has NaN or inf, else 0."""
    steps = ceil_div(rows * columns, threads)

    @device
    def find(T, tid):
        found = np.int32(0)
        for t in range(steps):
            e = tid + u32(t * threads)
            if e < u32(rows * columns):
                x = T[e // u32(columns), e % u32(columns)]
                if not math.isfinite(x):
                    found = np.int32(1)
        return found

    return find
