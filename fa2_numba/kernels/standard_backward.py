"""Standard attention, backward: Algorithm 3 of Dao et al. (2022), arXiv:2205.14135.

Three kernels, with the N_q x N_k matrices P and dS in global memory (in the accumulation dtype):

`scores`   P = exp(S - L) and dS = P o (dO V^T - D).  Grid: one block a B_r x B_c tile.
           HBM: reads Q_i, dO_i, K_j, V_j, L_i and D_i for every tile, writes P and dS once.
`columns`  dV = P^T dO and dK = dS^T Q.  Grid: one block for each key tile of each key/value head;
           it goes through the query heads that read the tile.
           HBM: reads P and dS once, dO_i and Q_i for every key tile, writes dK and dV once.
`rows`     dQ = dS K.  Grid: one block a B_r x d tile of dQ.
           HBM: reads dS once, K_j for every row tile, writes dQ once.

No tile is skipped: a masked P is written as 0 and read back. The paper's forward pass keeps P, and
its backward pass takes D from rows of P and dP. Here P is made from L, and D by `gradient_rows`
from dO and O, so that dP is not written: 5 N^2 elements instead of the paper's 7 N^2.
"""

from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import cache, hbm
from fa2_numba.clock import phase_marks
from fa2_numba.formats import FORMATS
from fa2_numba.launch import Operands
from fa2_numba.masking import PARTIAL, none
from fa2_numba.problem import Problem
from fa2_numba.smem import shared_tile
from fa2_numba.tile import (
    clear_columns,
    loader,
    nonfinite_finder,
    product_nn,
    product_nt,
    product_tn,
    row_loader,
    score_gradient,
    tile_storer,
    u32,
)
from fa2_numba.tiling import BACKWARD_TILES, Tiling

SCORE_TILES, COLUMN_TILES, ROW_TILES = BACKWARD_TILES["standard_backward"]
SCORE_PHASES = ("load Q_i, dO_i, K_j, V_j", "P, dS", "store P, dS")
COLUMN_PHASES = ("load P_ij, dS_ij, Q_i, dO_i", "dV, dK", "epilogue")
ROW_PHASES = ("load dS_ij, K_j", "dQ = dS K", "epilogue")
LOAD, PRODUCT, STORE = range(3)


@cache.built
def build_scores(
    tiling: Tiling, d: int, dtype: str, rule: Any, change: Any, load_width: int
) -> tuple[Any, int]:
    """Kernel ``scores(Q, K, V, dO, L, D, P, dS, scale, mask_args, score_args, shared, clock)``."""
    B_r, B_c, n_r, n_c = tiling.B_r, tiling.B_c, tiling.n_r, tiling.n_c
    R_r, R_c, threads = tiling.R_r, tiling.R_c, tiling.threads
    fmt = FORMATS[dtype]
    acc_type = fmt.acc
    ZERO, ONE = acc_type(0), acc_type(1)

    tiles, shared_bytes = tiling.backward_layout(d, dtype, SCORE_TILES)
    Q_tile, dO_tile, K_tile, V_tile, L_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate(SCORE_TILES)
    )
    begin, mark, finish = phase_marks(len(SCORE_PHASES))
    TICKS = len(SCORE_PHASES) + 2
    d_4 = -(-d // 4) * 4
    load_rows = loader(B_r, d, load_width, threads, fmt, mark, LOAD, LOAD)
    load_keys = loader(B_c, d, load_width, threads, fmt, mark, LOAD, LOAD)
    load_L_D = row_loader(tiling, fmt)
    clear_rows = clear_columns(B_r, d, d_4, threads, fmt)
    clear_keys = clear_columns(B_c, d, d_4, threads, fmt)
    product = product_nt(tiling, d_4, fmt)
    gradient = score_gradient(tiling, rule, change, fmt)
    prepare, _ = change.functions(hbm.device, acc_type)

    def scores(Q, K, V, dO, L, D, P, dS, scale, mask_args, score_args, shared, clock):
        H, N_q = Q.shape[1], Q.shape[2]
        H_k, N_k = K.shape[1], K.shape[2]
        T_r, T_c = (N_q + B_r - 1) // B_r, (N_k + B_c - 1) // B_c
        block = cuda.blockIdx.x
        j = block % T_c
        i = block // T_c % T_r
        h = block // (T_c * T_r) % H
        b = block // (T_c * T_r * H)
        h_k = h // (H // H_k)
        tid = u32(cuda.threadIdx.x)
        ty, tx = tid // u32(n_c), tid % u32(n_c)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        Q_i, dO_i, K_j, V_j = Q_tile(shared), dO_tile(shared), K_tile(shared), V_tile(shared)
        L_D = L_tile(shared)
        S_ij = cuda.local.array((R_r, R_c), acc_type)
        dP_ij = cuda.local.array((R_r, R_c), acc_type)
        L_i = cuda.local.array(R_r, acc_type)
        D_i = cuda.local.array(R_r, acc_type)

        state = prepare(score_args, b, h)
        clear_rows(Q_i, tid)
        clear_rows(dO_i, tid)
        clear_keys(K_j, tid)
        clear_keys(V_j, tid)
        load_rows(Q_i, Q, b, h, i * B_r, N_q, 0, d, scale, tid, clock, ticks)
        load_rows(dO_i, dO, b, h, i * B_r, N_q, 0, d, ONE, tid, clock, ticks)
        load_keys(K_j, K, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
        load_keys(V_j, V, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
        load_L_D(L_D, L, D, b, h, i * B_r, N_q, tid)
        cuda.syncthreads()  # the tiles are complete
        mark(clock, ticks, LOAD)

        for r in range(R_r):
            L_i[r] = L_D[u32(0), ty + u32(r * n_r)]
            D_i[r] = L_D[u32(1), ty + u32(r * n_r)]
            for c in range(R_c):
                S_ij[r, c] = ZERO
                dP_ij[r, c] = ZERO
        product(S_ij, Q_i, K_j, ty, tx)
        product(dP_ij, dO_i, V_j, ty, tx)
        row_0, col_0 = i * B_r + np.int64(ty), j * B_c + np.int64(tx)
        gradient(
            S_ij, dP_ij, L_i, D_i, PARTIAL, mask_args, state, b, h, row_0, col_0, N_q, N_k
        )  # now P_ij and dS_ij
        mark(clock, ticks, PRODUCT)
        for r in range(R_r):
            for c in range(R_c):
                row, col = row_0 + r * n_r, col_0 + c * n_c
                if row < N_q and col < N_k:
                    P[b, h, row, col] = S_ij[r, c]
                    dS[b, h, row, col] = dP_ij[r, c]
        mark(clock, ticks, STORE)
        finish(clock, ticks)

    return hbm.jit(scores, "standard_backward_scores", threads), shared_bytes


@cache.built
def build_columns(
    tiling: Tiling, d: int, dtype: str, masked: bool, load_width: int, p_width: int, width: int
) -> tuple[Any, int]:
    """Kernel ``columns(Q, dO, P, dS, dK, dV, scale, shared, clock)``, and its shared bytes.

    `p_width` elements of P and dS move at once, `width` of dK and dV.
    """
    B_r, B_c, n_c, threads = tiling.B_r, tiling.B_c, tiling.n_c, tiling.threads
    keys_of_dK = C_k, G_k = tiling.keys_of_dK(dtype)
    C, G = tiling.columns_of_O(d, dtype)
    R_k, R_d = C_k * G_k, C * G
    fmt, P_fmt = FORMATS[dtype], FORMATS["fp64" if dtype == "fp64" else "fp32"]
    acc_type = fmt.acc
    ZERO, ONE = acc_type(0), acc_type(1)

    tiles, shared_bytes = tiling.backward_layout(d, dtype, COLUMN_TILES)
    Q_tile, dO_tile, P_tile, dS_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate(COLUMN_TILES)
    )
    begin, mark, finish = phase_marks(len(COLUMN_PHASES))
    TICKS = len(COLUMN_PHASES) + 2
    load_rows = loader(B_r, d, load_width, threads, fmt, mark, LOAD, LOAD)
    load_P = loader(B_r, B_c, p_width, threads, P_fmt, mark, LOAD, LOAD)
    clear_rows = clear_columns(B_r, d, tiles["Q"][1], threads, fmt)
    add, add_masked = (product_tn(tiling, d, fmt, masked) for masked in (False, True))
    find_nonfinite = nonfinite_finder(B_r, d, threads, fmt)
    store = tile_storer(B_c, keys_of_dK, tiling, d, fmt, width)

    def columns(Q, dO, P, dS, dK, dV, scale, shared, clock):
        H, N_q, N_k = P.shape[1], P.shape[2], P.shape[3]
        H_k = dK.shape[1]
        T_r, T_c = (N_q + B_r - 1) // B_r, (N_k + B_c - 1) // B_c
        block = cuda.blockIdx.x
        j = block % T_c
        h_k = block // T_c % H_k
        b = block // (T_c * H_k)
        group = H // H_k
        tid = u32(cuda.threadIdx.x)
        ty, tx = tid // u32(n_c), tid % u32(n_c)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        Q_i, dO_i, P_ij, dS_ij = Q_tile(shared), dO_tile(shared), P_tile(shared), dS_tile(shared)
        dK_j = cuda.local.array((R_k, R_d), acc_type)
        dV_j = cuda.local.array((R_k, R_d), acc_type)
        for r in range(R_k):
            for k in range(R_d):
                dK_j[r, k] = ZERO
                dV_j[r, k] = ZERO
        clear_rows(Q_i, tid)
        clear_rows(dO_i, tid)

        for g in range(group):
            h = h_k * group + g
            for i in range(T_r):
                load_P(P_ij, P, b, h, i * B_r, N_q, j * B_c, N_k, ONE, tid, clock, ticks)
                load_P(dS_ij, dS, b, h, i * B_r, N_q, j * B_c, N_k, ONE, tid, clock, ticks)
                load_rows(Q_i, Q, b, h, i * B_r, N_q, 0, d, scale, tid, clock, ticks)
                load_rows(dO_i, dO, b, h, i * B_r, N_q, 0, d, ONE, tid, clock, ticks)
                cuda.syncthreads()  # the tiles are complete
                mark(clock, ticks, LOAD)
                nonfinite = np.int32(0)
                if masked:
                    nonfinite = find_nonfinite(Q_i, tid) | find_nonfinite(dO_i, tid)
                if cuda.syncthreads_or(nonfinite):
                    add_masked(dV_j, P_ij, dO_i, ty, tx)
                    add_masked(dK_j, dS_ij, Q_i, ty, tx)
                else:
                    add(dV_j, P_ij, dO_i, ty, tx)
                    add(dK_j, dS_ij, Q_i, ty, tx)
                cuda.syncthreads()  # all have read the tiles: the next may replace them
                mark(clock, ticks, PRODUCT)

        store(dK, dK_j, b, h_k, j * B_c, N_k, ty, tx)
        store(dV, dV_j, b, h_k, j * B_c, N_k, ty, tx)
        mark(clock, ticks, STORE)
        finish(clock, ticks)

    return hbm.jit(columns, "standard_backward_columns", threads), shared_bytes


@cache.built
def build_rows(
    tiling: Tiling, d: int, dtype: str, masked: bool, load_width: int, p_width: int, width: int
) -> tuple[Any, int]:
    """Kernel ``rows(K, dS, dQ, scale, shared, clock)``, and its shared bytes.

    `p_width` elements of dS move at once, `width` of dQ.
    """
    B_r, B_c, n_c, threads, R_r = tiling.B_r, tiling.B_c, tiling.n_c, tiling.threads, tiling.R_r
    C, G = tiling.columns_of_O(d, dtype)
    R_d = C * G
    fmt, P_fmt = FORMATS[dtype], FORMATS["fp64" if dtype == "fp64" else "fp32"]
    acc_type = fmt.acc
    ZERO, ONE = acc_type(0), acc_type(1)

    tiles, shared_bytes = tiling.backward_layout(d, dtype, ROW_TILES)
    K_tile, dS_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate(ROW_TILES)
    )
    begin, mark, finish = phase_marks(len(ROW_PHASES))
    TICKS = len(ROW_PHASES) + 2
    load_dS = loader(B_r, B_c, p_width, threads, P_fmt, mark, LOAD, LOAD)
    load_keys = loader(B_c, d, load_width, threads, fmt, mark, LOAD, LOAD)
    clear_keys = clear_columns(B_c, d, tiles["K"][1], threads, fmt)
    add, add_masked = (product_nn(tiling, d, fmt, masked) for masked in (False, True))
    find_nonfinite = nonfinite_finder(B_c, d, threads, fmt)
    store = tile_storer(B_r, (1, R_r), tiling, d, fmt, width)

    def rows(K, dS, dQ, scale, shared, clock):
        H, N_q, N_k = dS.shape[1], dS.shape[2], dS.shape[3]
        H_k = K.shape[1]
        T_r, T_c = (N_q + B_r - 1) // B_r, (N_k + B_c - 1) // B_c
        block = cuda.blockIdx.x
        i = block % T_r
        h = block // T_r % H
        b = block // (T_r * H)
        tid = u32(cuda.threadIdx.x)
        ty, tx = tid // u32(n_c), tid % u32(n_c)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        K_j, dS_ij = K_tile(shared), dS_tile(shared)
        dQ_i = cuda.local.array((R_r, R_d), acc_type)
        for r in range(R_r):
            for k in range(R_d):
                dQ_i[r, k] = ZERO
        clear_keys(K_j, tid)

        for j in range(T_c):
            load_dS(dS_ij, dS, b, h, i * B_r, N_q, j * B_c, N_k, ONE, tid, clock, ticks)
            load_keys(K_j, K, b, h // (H // H_k), j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
            cuda.syncthreads()  # dS_ij and K_j are complete
            mark(clock, ticks, LOAD)
            nonfinite = np.int32(0)
            if masked:
                nonfinite = find_nonfinite(K_j, tid)
            if cuda.syncthreads_or(nonfinite):
                add_masked(dQ_i, dS_ij, K_j, ty, tx)
            else:
                add(dQ_i, dS_ij, K_j, ty, tx)
            cuda.syncthreads()  # all have read the tiles: the next may replace them
            mark(clock, ticks, PRODUCT)

        for r in range(R_r):
            for k in range(R_d):
                dQ_i[r, k] *= scale
        store(dQ, dQ_i, b, h, i * B_r, N_q, ty, tx)
        mark(clock, ticks, STORE)
        finish(clock, ticks)

    return hbm.jit(rows, "standard_backward_rows", threads), shared_bytes


def launch(problem: Problem, A: Operands) -> None:
    """Run standard attention's backward pass on the operands `A` of `problem`."""
    p, t = problem, problem.tiling
    A.workspace("P")
    A.workspace("dS")
    row_tiles, masked = t.T_r(p.N_q) * p.H * p.B, p.mask.rule is not none().rule

    scores, shared_bytes = build_scores(t, p.d, p.dtype, p.mask.rule, p.score.change, p.load_width)
    blocks = t.T_c(p.N_k) * row_tiles
    A.run(
        scores,
        blocks,
        t.threads,
        shared_bytes,
        *(A.array(name, "P, dS") for name in ("Q", "K", "V", "dO", "L", "D", "P", "dS")),
        A.scale,
        A.mask_args("mask"),
        A.score_args("load slopes"),
        A.shared("standard_backward_scores", SCORE_TILES),
        A.clock("standard_backward_scores", SCORE_PHASES, blocks, t.threads),
    )
    widths = p.load_width, p.p_width, p.gradient_width
    columns, shared_bytes = build_columns(t, p.d, p.dtype, masked, *widths)
    blocks, phase = t.T_c(p.N_k) * p.H_k * p.B, "dV = P^T dO, dK = dS^T Q"
    A.run(
        columns,
        blocks,
        t.threads,
        shared_bytes,
        *(A.array(name, phase) for name in ("Q", "dO", "P", "dS", "dK", "dV")),
        A.scale,
        A.shared("standard_backward_columns", COLUMN_TILES),
        A.clock("standard_backward_columns", COLUMN_PHASES, blocks, t.threads),
    )
    rows, shared_bytes = build_rows(t, p.d, p.dtype, masked, *widths)
    A.run(
        rows,
        row_tiles,
        t.threads,
        shared_bytes,
        *(A.array(name, "dQ = dS K") for name in ("K", "dS", "dQ")),
        A.scale,
        A.shared("standard_backward_rows", ROW_TILES),
        A.clock("standard_backward_rows", ROW_PHASES, row_tiles, t.threads),
    )
