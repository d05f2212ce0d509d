"""FlashAttention-2, backward: Algorithm 2 of Dao, "FlashAttention-2" (2023), arXiv:2307.08691.

Lines 3 and 4, dQ = 0 and D = rowsum(dO o O), are made before by `gradient_rows`. Two kernels:

`columns`  dK, dV, and dQ += dS K by atomic adds.  Grid: one block for each key tile j of each
           key/value head of each batch; it goes through the query heads that read the tile.
           HBM: reads K_j, V_j once, Q_i, dO_i, L_i and D_i for every visited tile i; adds dQ_i to
           what is there, for every visited tile; writes dK_j and dV_j once.
`rows`     The deterministic form: instead of the adds, a second pass that computes S, dP and dS
           again.  Grid: one block for each row tile i of each head of each batch.  HBM: reads Q_i,
           dO_i, L_i and D_i once, K_j and V_j for every visited tile j; writes dQ_i once.

Shared     Q_i (scaled), dO_i (B_r x d), K_j, V_j (B_c x d), P_ij, dS_ij (B_r x B_c), L_i, D_i.
Registers  each thread: R_r x R_c of S_ij and of dP_ij; its keys of dK_j and dV_j, and R_r rows of
           dQ_i, times R_d columns.

Algorithm 2 as printed also loads O_i in the inner loop; with D at hand nothing needs it.
"""

from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import cache, hbm
from fa2_numba.clock import phase_marks
from fa2_numba.formats import FORMATS
from fa2_numba.launch import Operands
from fa2_numba.masking import EMPTY, FULL, tile_functions
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
    tile_adder,
    tile_storer,
    u32,
)
from fa2_numba.tiling import BACKWARD_TILES, Tiling

COLUMN_TILES, ROW_TILES = BACKWARD_TILES["fa2_backward_deterministic"]
COLUMN_PHASES = (
    "load K_j, V_j", "load Q_i, dO_i", "S, dP, dS", "dV, dK, dQ", "epilogue"
)  # fmt: skip
ROW_PHASES = ("load Q_i, dO_i", "load K_j, V_j", "S, dP, dS", "dQ", "epilogue")
OUTER, INNER, SCORES, PRODUCTS, EPILOGUE = range(5)  # of both


@cache.built
def build_columns(
    tiling: Tiling,
    d: int,
    dtype: str,
    rule: Any,
    change: Any,
    load_width: int,
    store_width: int,
    adds_dQ: bool,
) -> tuple[Any, int]:
    """The kernel of lines 5 to 19, and its shared bytes.

    ``columns(Q, K, V, dO, L, D, dQ, dK, dV, scale, range_args, mask_args, score_args, shared,
    clock)``. Without `adds_dQ` it leaves dQ to `rows`; the other parameters are those of
    `fa2.build`.
    """
    B_r, B_c, n_r, n_c = tiling.B_r, tiling.B_c, tiling.n_r, tiling.n_c
    R_r, R_c, threads = tiling.R_r, tiling.R_c, tiling.threads
    keys_of_dK = C_k, G_k = tiling.keys_of_dK(dtype)
    C, G = tiling.columns_of_O(d, dtype)
    R_k, R_d = C_k * G_k, C * G
    fmt = FORMATS[dtype]
    acc_type = fmt.acc
    ZERO, ONE = acc_type(0), acc_type(1)

    tiles, shared_bytes = tiling.backward_layout(d, dtype, COLUMN_TILES)
    Q_tile, dO_tile, K_tile, V_tile, P_tile, dS_tile, L_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate(COLUMN_TILES)
    )
    begin, mark, finish = phase_marks(len(COLUMN_PHASES))
    TICKS = len(COLUMN_PHASES) + 2
    ld = tiles["Q"][1]
    load_rows = loader(B_r, d, load_width, threads, fmt, mark, INNER, INNER)
    load_keys = loader(B_c, d, load_width, threads, fmt, mark, OUTER, OUTER)
    load_L_D = row_loader(tiling, fmt)
    clear_rows = clear_columns(B_r, d, ld, threads, fmt)
    clear_keys = clear_columns(B_c, d, ld, threads, fmt)
    scores = product_nt(tiling, -(-d // 4) * 4, fmt)
    gradient = score_gradient(tiling, rule, change, fmt)
    add_keys, add_keys_masked = (product_tn(tiling, d, fmt, masked) for masked in (False, True))
    add_rows, add_rows_masked = (product_nn(tiling, d, fmt, masked) for masked in (False, True))
    nonfinite_rows = nonfinite_finder(B_r, d, threads, fmt)
    nonfinite_keys = nonfinite_finder(B_c, d, threads, fmt)
    tile_range, tile_kind, _ = tile_functions(rule, B_r, B_c, hbm.device)
    prepare, _ = change.functions(hbm.device, acc_type)
    add_dQ = tile_adder(tiling, d, fmt)
    store_keys = tile_storer(B_c, keys_of_dK, tiling, d, fmt, store_width)

    def columns(
        Q, K, V, dO, L, D, dQ, dK, dV, scale, range_args, mask_args, score_args, shared, clock
    ):
        H, N_q = Q.shape[1], Q.shape[2]
        H_k, N_k = K.shape[1], K.shape[2]
        T_r, T_c = (N_q + B_r - 1) // B_r, (N_k + B_c - 1) // B_c
        block = cuda.blockIdx.x
        j = block % T_c  # first keys first: under a causal mask most rows see them
        h_k = block // T_c % H_k
        b = block // (T_c * H_k)
        group = H // H_k
        tid = u32(cuda.threadIdx.x)
        ty, tx = tid // u32(n_c), tid % u32(n_c)
        col_0 = j * B_c + np.int64(tx)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        Q_i, dO_i, K_j, V_j = Q_tile(shared), dO_tile(shared), K_tile(shared), V_tile(shared)
        P_ij, dS_ij, L_D = P_tile(shared), dS_tile(shared), L_tile(shared)
        S = cuda.local.array((R_r, R_c), acc_type)
        dP = cuda.local.array((R_r, R_c), acc_type)
        L_i = cuda.local.array(R_r, acc_type)
        D_i = cuda.local.array(R_r, acc_type)
        dK_j = cuda.local.array((R_k, R_d), acc_type)
        dV_j = cuda.local.array((R_k, R_d), acc_type)
        dQ_i = cuda.local.array((R_r, R_d), acc_type)

        clear_rows(Q_i, tid)
        clear_rows(dO_i, tid)
        clear_keys(K_j, tid)
        clear_keys(V_j, tid)
        load_keys(K_j, K, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)  # line 6
        load_keys(V_j, V, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
        for r in range(R_k):  # line 7
            for k in range(R_d):
                dK_j[r, k] = ZERO
                dV_j[r, k] = ZERO

        for g in range(group):
            h = h_k * group + g
            state = prepare(score_args, b, h)
            for i in range(T_r):  # line 8
                j_begin, j_end, lo_last, hi_first = tile_range(range_args, b, h, i, N_q, N_k)
                if j < j_begin or j >= j_end:
                    continue
                kind = tile_kind(mask_args, b, h, i, j, lo_last, hi_first, N_q, N_k)
                if kind == EMPTY:
                    continue
                load_rows(Q_i, Q, b, h, i * B_r, N_q, 0, d, scale, tid, clock, ticks)  # line 9
                load_rows(dO_i, dO, b, h, i * B_r, N_q, 0, d, ONE, tid, clock, ticks)
                load_L_D(L_D, L, D, b, h, i * B_r, N_q, tid)
                cuda.syncthreads()  # K_j, V_j, Q_i, dO_i, L_i and D_i are complete
                mark(clock, ticks, INNER)

                for r in range(R_r):
                    L_i[r] = L_D[u32(0), ty + u32(r * n_r)]
                    D_i[r] = L_D[u32(1), ty + u32(r * n_r)]
                    for c in range(R_c):
                        S[r, c] = ZERO
                        dP[r, c] = ZERO
                scores(S, Q_i, K_j, ty, tx)  # line 10
                scores(dP, dO_i, V_j, ty, tx)  # line 13
                row_0 = i * B_r + np.int64(ty)
                gradient(
                    S, dP, L_i, D_i, kind, mask_args, state, b, h, row_0, col_0, N_q, N_k
                )  # lines 11 and 14: P_ij and dS_ij
                for r in range(R_r):
                    for c in range(R_c):
                        P_ij[ty + u32(r * n_r), tx + u32(c * n_c)] = S[r, c]
                        dS_ij[ty + u32(r * n_r), tx + u32(c * n_c)] = dP[r, c]
                nonfinite = np.int32(0)
                if kind != FULL:
                    nonfinite = nonfinite_rows(Q_i, tid) | nonfinite_rows(dO_i, tid)
                    nonfinite |= nonfinite_keys(K_j, tid)
                # P_ij and dS_ij are complete; the barrier also tells of NaN or inf in the tiles
                nonfinite = cuda.syncthreads_or(nonfinite)
                mark(clock, ticks, SCORES)

                if nonfinite:
                    add_keys_masked(dV_j, P_ij, dO_i, ty, tx)
                    add_keys_masked(dK_j, dS_ij, Q_i, ty, tx)
                else:
                    add_keys(dV_j, P_ij, dO_i, ty, tx)  # line 12
                    add_keys(dK_j, dS_ij, Q_i, ty, tx)  # line 16; Q_i is scaled
                if adds_dQ:
                    for r in range(R_r):
                        for k in range(R_d):
                            dQ_i[r, k] = ZERO
                    if nonfinite:
                        add_rows_masked(dQ_i, dS_ij, K_j, ty, tx)
                    else:
                        add_rows(dQ_i, dS_ij, K_j, ty, tx)
                    add_dQ(dQ, dQ_i, scale, b, h, i * B_r, N_q, ty, tx)  # line 15
                cuda.syncthreads()  # all have read Q_i, dO_i, P_ij and dS_ij
                mark(clock, ticks, PRODUCTS)

        store_keys(dK, dK_j, b, h_k, j * B_c, N_k, ty, tx)  # line 18
        store_keys(dV, dV_j, b, h_k, j * B_c, N_k, ty, tx)
        mark(clock, ticks, EPILOGUE)
        finish(clock, ticks)

    return hbm.jit(columns, "fa2_backward_columns", threads), shared_bytes


@cache.built
def build_rows(
    tiling: Tiling, d: int, dtype: str, rule: Any, change: Any, load_width: int, store_width: int
) -> tuple[Any, int]:
    """The kernel of the second pass, and its shared bytes.

    ``rows(Q, K, V, dO, L, D, dQ, scale, range_args, mask_args, score_args, shared, clock)``.
    """
    B_r, B_c, n_r, n_c = tiling.B_r, tiling.B_c, tiling.n_r, tiling.n_c
    R_r, R_c, threads = tiling.R_r, tiling.R_c, tiling.threads
    C, G = tiling.columns_of_O(d, dtype)
    R_d = C * G
    fmt = FORMATS[dtype]
    acc_type = fmt.acc
    ZERO, ONE = acc_type(0), acc_type(1)

    tiles, shared_bytes = tiling.backward_layout(d, dtype, ROW_TILES)
    Q_tile, dO_tile, K_tile, V_tile, dS_tile, L_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate(ROW_TILES)
    )
    begin, mark, finish = phase_marks(len(ROW_PHASES))
    TICKS = len(ROW_PHASES) + 2
    ld = tiles["Q"][1]
    load_rows = loader(B_r, d, load_width, threads, fmt, mark, OUTER, OUTER)
    load_keys = loader(B_c, d, load_width, threads, fmt, mark, INNER, INNER)
    load_L_D = row_loader(tiling, fmt)
    clear_rows = clear_columns(B_r, d, ld, threads, fmt)
    clear_keys = clear_columns(B_c, d, ld, threads, fmt)
    scores = product_nt(tiling, -(-d // 4) * 4, fmt)
    gradient = score_gradient(tiling, rule, change, fmt)
    add_rows, add_rows_masked = (product_nn(tiling, d, fmt, masked) for masked in (False, True))
    find_nonfinite = nonfinite_finder(B_c, d, threads, fmt)
    tile_range, tile_kind, _ = tile_functions(rule, B_r, B_c, hbm.device)
    prepare, _ = change.functions(hbm.device, acc_type)
    store_rows = tile_storer(B_r, (1, R_r), tiling, d, fmt, store_width)

    def rows(Q, K, V, dO, L, D, dQ, scale, range_args, mask_args, score_args, shared, clock):
        H, N_q = Q.shape[1], Q.shape[2]
        H_k, N_k = K.shape[1], K.shape[2]
        T_r = (N_q + B_r - 1) // B_r
        block = cuda.blockIdx.x
        i = T_r - 1 - block % T_r  # last rows first: under a causal mask they are the longest
        h = block // T_r % H
        b = block // (T_r * H)
        h_k = h // (H // H_k)
        tid = u32(cuda.threadIdx.x)
        ty, tx = tid // u32(n_c), tid % u32(n_c)
        row_0 = i * B_r + np.int64(ty)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        Q_i, dO_i, K_j, V_j = Q_tile(shared), dO_tile(shared), K_tile(shared), V_tile(shared)
        dS_ij, L_D = dS_tile(shared), L_tile(shared)
        S = cuda.local.array((R_r, R_c), acc_type)
        dP = cuda.local.array((R_r, R_c), acc_type)
        L_i = cuda.local.array(R_r, acc_type)
        D_i = cuda.local.array(R_r, acc_type)
        dQ_i = cuda.local.array((R_r, R_d), acc_type)

        state = prepare(score_args, b, h)
        j_begin, j_end, lo_last, hi_first = tile_range(range_args, b, h, i, N_q, N_k)
        clear_rows(Q_i, tid)
        clear_rows(dO_i, tid)
        clear_keys(K_j, tid)
        clear_keys(V_j, tid)
        load_rows(Q_i, Q, b, h, i * B_r, N_q, 0, d, scale, tid, clock, ticks)
        load_rows(dO_i, dO, b, h, i * B_r, N_q, 0, d, ONE, tid, clock, ticks)
        load_L_D(L_D, L, D, b, h, i * B_r, N_q, tid)
        cuda.syncthreads()  # L_i and D_i are complete
        for r in range(R_r):
            L_i[r] = L_D[u32(0), ty + u32(r * n_r)]
            D_i[r] = L_D[u32(1), ty + u32(r * n_r)]
            for k in range(R_d):
                dQ_i[r, k] = ZERO

        for j in range(j_begin, j_end):
            kind = tile_kind(mask_args, b, h, i, j, lo_last, hi_first, N_q, N_k)
            if kind == EMPTY:
                continue
            load_keys(K_j, K, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
            load_keys(V_j, V, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
            cuda.syncthreads()  # Q_i, dO_i, K_j and V_j are complete
            mark(clock, ticks, INNER)

            for r in range(R_r):
                for c in range(R_c):
                    S[r, c] = ZERO
                    dP[r, c] = ZERO
            scores(S, Q_i, K_j, ty, tx)
            scores(dP, dO_i, V_j, ty, tx)
            col_0 = j * B_c + np.int64(tx)
            gradient(S, dP, L_i, D_i, kind, mask_args, state, b, h, row_0, col_0, N_q, N_k)
            for r in range(R_r):
                for c in range(R_c):
                    dS_ij[ty + u32(r * n_r), tx + u32(c * n_c)] = dP[r, c]
            nonfinite = np.int32(0)
            if kind != FULL:
                nonfinite = find_nonfinite(K_j, tid)
            nonfinite = cuda.syncthreads_or(nonfinite)  # dS_ij is complete
            mark(clock, ticks, SCORES)

            if nonfinite:
                add_rows_masked(dQ_i, dS_ij, K_j, ty, tx)
            else:
                add_rows(dQ_i, dS_ij, K_j, ty, tx)
            cuda.syncthreads()  # all have read K_j, V_j and dS_ij
            mark(clock, ticks, PRODUCTS)

        for r in range(R_r):
            for k in range(R_d):
                dQ_i[r, k] *= scale
        store_rows(dQ, dQ_i, b, h, i * B_r, N_q, ty, tx)
        mark(clock, ticks, EPILOGUE)
        finish(clock, ticks)

    return hbm.jit(rows, "fa2_backward_rows", threads), shared_bytes


def launch(problem: Problem, A: Operands) -> None:
    """Run FlashAttention-2's backward pass on the operands `A` of `problem`."""
    p, t = problem, problem.tiling
    deterministic = p.method == "fa2_backward_deterministic"
    inner = "load Q_i, dO_i"

    columns, shared_bytes = build_columns(
        t, p.d, p.dtype, p.mask.rule, p.score.change, p.load_width, p.gradient_width,
        not deterministic,
    )  # fmt: skip
    blocks = t.T_c(p.N_k) * p.H_k * p.B
    A.run(
        columns,
        blocks,
        t.threads,
        shared_bytes,
        A.array("Q", inner),
        A.array("K", "load K_j, V_j"),
        A.array("V", "load K_j, V_j"),
        A.array("dO", inner),
        A.array("L", inner),
        A.array("D", inner),
        A.array("dQ" if deterministic else p.dq_acc_name, "dQ_i += dS_ij K_j"),
        A.array("dK", "epilogue"),
        A.array("dV", "epilogue"),
        A.scale,
        A.mask_args("tile range"),
        A.mask_args("mask"),
        A.score_args("load slopes"),
        A.shared("fa2_backward_columns", COLUMN_TILES),
        A.clock("fa2_backward_columns", COLUMN_PHASES, blocks, t.threads),
    )
    if deterministic:
        blocks = t.T_r(p.N_q) * p.H * p.B
        rows, shared_bytes = build_rows(
            t, p.d, p.dtype, p.mask.rule, p.score.change, p.load_width, p.gradient_width
        )
        A.run(
            rows,
            blocks,
            t.threads,
            shared_bytes,
            A.array("Q", "again: Q_i, dO_i"),
            A.array("K", "again: K_j, V_j"),
            A.array("V", "again: K_j, V_j"),
            A.array("dO", "again: Q_i, dO_i"),
            A.array("L", "again: Q_i, dO_i"),
            A.array("D", "again: Q_i, dO_i"),
            A.array("dQ", "epilogue"),
            A.scale,
            A.mask_args("tile range"),
            A.mask_args("mask"),
            A.score_args("load slopes"),
            A.shared("fa2_backward_rows", ROW_TILES),
            A.clock("fa2_backward_rows", ROW_PHASES, blocks, t.threads),
        )
