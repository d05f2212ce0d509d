"""FlashAttention, backward: Algorithm 4 of Dao et al. (2022), arXiv:2205.14135, without dropout.

Grid       one block for each key/value head of each batch. The outer loop runs over K_j, V_j, the
           inner ones over the query heads that read them and over row tiles.
HBM        reads K_j, V_j once; for every visited tile reads Q_i, O_i, dO_i and L_i, and reads and
           writes dQ_i; writes dK_j, dV_j once. (L_i = m_i + log l_i stands for the paper's two.)
           `gradient_rows` clears dQ before (line 5), and rounds it for fp16 and bf16.
Shared     Q_i (scaled), dO_i (B_r x d), K_j, V_j (B_c x d), P_ij, dS_ij (B_r x B_c).
Registers  each thread: R_r x R_c of S_ij and of dP_ij; its keys of dK_j and dV_j, and R_r rows of
           dQ_i, times R_d columns.
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
from fa2_numba.softmax import row_reductions
from fa2_numba.tile import (
    clear_columns,
    loader,
    nonfinite_finder,
    product_nn,
    product_nt,
    product_tn,
    score_gradient,
    tile_storer,
    u32,
)
from fa2_numba.tiling import BACKWARD_TILES, Tiling

(TILES,) = BACKWARD_TILES["fa1_backward"]
PHASES = (
    "load K_j, V_j", "load Q_i, O_i, dO_i", "S, dP, dS", "dV, dK, dQ", "epilogue"
)  # fmt: skip
LOAD_KV, LOAD_Q, SCORES, PRODUCTS, EPILOGUE = range(len(PHASES))


@cache.built
def build(
    tiling: Tiling, d: int, dtype: str, rule: Any, change: Any, load_width: int, width: int
) -> tuple[Any, int]:
    """The kernel of lines 6 to 25, and its shared bytes.

    ``fa1(Q, K, V, O, L, dO, dL, dQ, dK, dV, scale, range_args, mask_args, score_args, shared,
    clock)``; dL may be None, dQ is in the accumulation dtype. `width` elements of O, dQ, dK and dV
    move at once.
    """
    B_r, B_c, n_r, n_c = tiling.B_r, tiling.B_c, tiling.n_r, tiling.n_c
    R_r, R_c, threads = tiling.R_r, tiling.R_c, tiling.threads
    keys_of_dK = C_k, G_k = tiling.keys_of_dK(dtype)
    C, G = tiling.columns_of_O(d, dtype)
    R_k, R_d = C_k * G_k, C * G
    fmt = FORMATS[dtype]
    acc_type, storage, to_acc = fmt.acc, fmt.storage, fmt.to_acc
    ZERO, ONE = acc_type(0), acc_type(1)
    INFINITY, NEG_INF = acc_type("inf"), acc_type("-inf")

    tiles, shared_bytes = tiling.backward_layout(d, dtype, TILES)
    Q_tile, dO_tile, K_tile, V_tile, P_tile, dS_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate(TILES)
    )
    begin, mark, finish = phase_marks(len(PHASES))
    TICKS = len(PHASES) + 2
    ld = tiles["Q"][1]
    load_rows = loader(B_r, d, load_width, threads, fmt, mark, LOAD_Q, LOAD_Q)
    load_keys = loader(B_c, d, load_width, threads, fmt, mark, LOAD_KV, LOAD_KV)
    clear_rows = clear_columns(B_r, d, ld, threads, fmt)
    clear_keys = clear_columns(B_c, d, ld, threads, fmt)
    scores = product_nt(tiling, -(-d // 4) * 4, fmt)
    gradient = score_gradient(tiling, rule, change, fmt)
    add_keys, add_keys_masked = (product_tn(tiling, d, fmt, masked) for masked in (False, True))
    add_rows, add_rows_masked = (product_nn(tiling, d, fmt, masked) for masked in (False, True))
    nonfinite_rows = nonfinite_finder(B_r, d, threads, fmt)
    nonfinite_keys = nonfinite_finder(B_c, d, threads, fmt)
    _, row_sum = row_reductions(n_c)
    tile_range, tile_kind, _ = tile_functions(rule, B_r, B_c, hbm.device)
    prepare, _ = change.functions(hbm.device, acc_type)
    load, store_dQ = hbm.vector_load(width), hbm.vector_store(width)
    store_keys = tile_storer(B_c, keys_of_dK, tiling, d, fmt, width)

    def fa1(
        Q, K, V, O, L, dO, dL, dQ, dK, dV,
        scale, range_args, mask_args, score_args, shared, clock,
    ):  # fmt: skip
        H, N_q = Q.shape[1], Q.shape[2]
        H_k, N_k = K.shape[1], K.shape[2]
        T_r, T_c = (N_q + B_r - 1) // B_r, (N_k + B_c - 1) // B_c
        h_k, b = cuda.blockIdx.x % H_k, cuda.blockIdx.x // H_k
        group = H // H_k
        tid = u32(cuda.threadIdx.x)
        ty, tx = tid // u32(n_c), tid % u32(n_c)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        Q_i, dO_i, K_j, V_j = Q_tile(shared), dO_tile(shared), K_tile(shared), V_tile(shared)
        P_ij, dS_ij = P_tile(shared), dS_tile(shared)
        S = cuda.local.array((R_r, R_c), acc_type)
        dP = cuda.local.array((R_r, R_c), acc_type)
        L_i = cuda.local.array(R_r, acc_type)
        D_i = cuda.local.array(R_r, acc_type)
        dK_j = cuda.local.array((R_k, R_d), acc_type)
        dV_j = cuda.local.array((R_k, R_d), acc_type)
        dQ_i = cuda.local.array((R_r, R_d), acc_type)
        o = cuda.local.array(C, storage)
        x = cuda.local.array(C, acc_type)

        clear_rows(Q_i, tid)
        clear_rows(dO_i, tid)
        clear_keys(K_j, tid)
        clear_keys(V_j, tid)

        for j in range(T_c):  # line 6
            load_keys(K_j, K, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)  # line 7
            load_keys(V_j, V, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
            for r in range(R_k):  # line 8
                for k in range(R_d):
                    dK_j[r, k] = ZERO
                    dV_j[r, k] = ZERO
            col_0 = j * B_c + np.int64(tx)

            for g in range(group):
                h = h_k * group + g
                state = prepare(score_args, b, h)
                for i in range(T_r):  # line 9
                    j_begin, j_end, lo_last, hi_first = tile_range(range_args, b, h, i, N_q, N_k)
                    if j < j_begin or j >= j_end:
                        continue
                    kind = tile_kind(mask_args, b, h, i, j, lo_last, hi_first, N_q, N_k)
                    if kind == EMPTY:
                        continue
                    row_0 = i * B_r + np.int64(ty)
                    load_rows(Q_i, Q, b, h, i * B_r, N_q, 0, d, scale, tid, clock, ticks)  # line 10
                    load_rows(dO_i, dO, b, h, i * B_r, N_q, 0, d, ONE, tid, clock, ticks)
                    cuda.syncthreads()  # K_j, V_j, Q_i and dO_i are complete
                    for r in range(R_r):
                        row = row_0 + r * n_r
                        l, delta = ZERO, ZERO  # this lane's share
                        if tx == 0:  # one lane reads for its row
                            l = INFINITY  # a row without keys, or past the last: P = 0
                            if row < N_q:
                                l = L[b, h, row]
                                l = INFINITY if l == NEG_INF else l
                                if dL is not None:
                                    delta -= dL[b, h, row]
                        if row < N_q:
                            for k in range(G):
                                col = C * (np.int64(tx) + k * n_c)
                                for c in range(0, C, width):
                                    if col + c < d:
                                        load(O, (b, h, row, col + c), o, c)
                                for c in range(C):
                                    if col + c < d:
                                        delta += to_acc(o[c]) * dO_i[ty + u32(r * n_r), col + c]
                        L_i[r], D_i[r] = row_sum(l), row_sum(delta)  # line 19
                    mark(clock, ticks, LOAD_Q)

                    for r in range(R_r):
                        for c in range(R_c):
                            S[r, c] = ZERO
                            dP[r, c] = ZERO
                    scores(S, Q_i, K_j, ty, tx)  # line 11
                    scores(dP, dO_i, V_j, ty, tx)  # line 17
                    gradient(
                        S, dP, L_i, D_i, kind, mask_args, state, b, h, row_0, col_0, N_q, N_k
                    )  # lines 12, 13 and 20: P_ij and dS_ij
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

                    for r in range(R_r):
                        for k in range(R_d):
                            dQ_i[r, k] = ZERO
                    if nonfinite:
                        add_keys_masked(dV_j, P_ij, dO_i, ty, tx)
                        add_keys_masked(dK_j, dS_ij, Q_i, ty, tx)
                        add_rows_masked(dQ_i, dS_ij, K_j, ty, tx)
                    else:
                        add_keys(dV_j, P_ij, dO_i, ty, tx)  # line 16
                        add_keys(dK_j, dS_ij, Q_i, ty, tx)  # line 22; Q_i is scaled
                        add_rows(dQ_i, dS_ij, K_j, ty, tx)
                    for r in range(R_r):
                        row = row_0 + r * n_r
                        if row < N_q:
                            for k in range(G):
                                col = C * (np.int64(tx) + k * n_c)
                                for c in range(0, C, width):
                                    if col + c < d:  # line 21
                                        load(dQ, (b, h, row, col + c), x, c)
                                        for n in range(width):
                                            x[c + n] += scale * dQ_i[r, k * C + c + n]
                                        store_dQ(dQ, (b, h, row, col + c), x, c)
                    cuda.syncthreads()  # all have read Q_i, dO_i, P_ij and dS_ij, and K_j and V_j
                    mark(clock, ticks, PRODUCTS)

            store_keys(dK, dK_j, b, h_k, j * B_c, N_k, ty, tx)  # line 24
            store_keys(dV, dV_j, b, h_k, j * B_c, N_k, ty, tx)
            mark(clock, ticks, EPILOGUE)
        finish(clock, ticks)

    return hbm.jit(fa1, "fa1_backward", threads), shared_bytes


def launch(problem: Problem, A: Operands) -> None:
    """Run FlashAttention's backward pass on the operands `A` of `problem`."""
    p = problem
    kernel, shared_bytes = build(
        p.tiling, p.d, p.dtype, p.mask.rule, p.score.change, p.load_width, p.gradient_width
    )
    blocks = p.B * p.H_k if p.N_k else 0
    load = "load Q_i, O_i, dO_i"
    A.run(
        kernel,
        blocks,
        p.tiling.threads,
        shared_bytes,
        A.array("Q", load),
        A.array("K", "load K_j, V_j"),
        A.array("V", "load K_j, V_j"),
        A.array("O", load),
        A.array("L", load),
        A.array("dO", load),
        A.array("dL", load) if p.dlse else None,
        A.array(p.dq_acc_name, "dQ_i += dS_ij K_j"),
        A.array("dK", "epilogue"),
        A.array("dV", "epilogue"),
        A.scale,
        A.mask_args("tile range"),
        A.mask_args("mask"),
        A.score_args("load slopes"),
        A.shared("fa1_backward", TILES),
        A.clock("fa1_backward", PHASES, blocks, p.tiling.threads),
    )
