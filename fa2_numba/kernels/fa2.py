"""FlashAttention-2, forward: Algorithm 1 of Dao, "FlashAttention-2" (2023), arXiv:2307.08691.

Grid       one block for each row tile i of each head of each batch: T_r * H * B blocks.
HBM        reads Q_i once, K_j and V_j for every visited tile j; writes O_i and L_i once.
           S_ij, P_ij, m_i, l_i and the unnormalised O_i never leave the chip.
Shared     Q_i (B_r x d, scaled), K_j, V_j (B_c x d); P_ij (B_r x B_c) where K_j was.
Registers  each thread: R_r x R_c of S_ij, R_r x R_d of O_i (acc), m_i and l_i of its R_r rows.
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
from fa2_numba.softmax import online_softmax_step, row_reductions
from fa2_numba.tile import (
    clear_columns,
    loader,
    nonfinite_finder,
    product_nn,
    product_nt,
    score_finisher,
    u32,
)
from fa2_numba.tiling import Tiling

TILES = "QKVP"
PHASES = ("load Q_i", "issue K_j, V_j", "land K_j, V_j", "S = Q K^T", "softmax", "P V", "epilogue")
LOAD_Q, ISSUE, LAND, SCORES, SOFTMAX, OUTPUT, EPILOGUE = range(len(PHASES))


@cache.built
def build(
    tiling: Tiling, d: int, dtype: str, rule: Any, change: Any, load_width: int, store_width: int
) -> tuple[Any, int]:
    """The kernel for one tiling, head dimension, dtype, mask rule and score change.

    Parameters
    ----------
    tiling : Tiling
        Tile sizes and thread grid.
    d : int
        Head dimension, 1..256.
    dtype : str
        "fp32", "fp64", "fp16" or "bf16".
    rule, change
        Compiled part of a `masking.Mask` and a `masking.Score`.
    load_width, store_width : int
        Elements per load of Q, K, V and per store of O: those of 16 bytes, or 1 where an address
        or stride is not aligned.

    Returns
    -------
    kernel : dispatcher
        ``fa2(Q, K, V, O, L, scale, range_args, mask_args, score_args, shared, clock)``.
    shared_bytes : int
        Dynamic shared memory of a block.
    """
    B_r, B_c, n_r, n_c = tiling.B_r, tiling.B_c, tiling.n_r, tiling.n_c
    R_r, R_c, threads = tiling.R_r, tiling.R_c, tiling.threads
    C, G = tiling.columns_of_O(d, dtype)
    R_d = C * G
    fmt = FORMATS[dtype]
    acc_type, storage, from_acc, log = fmt.acc, fmt.storage, fmt.from_acc, fmt.log
    ZERO, ONE, NEG_INF = acc_type(0), acc_type(1), acc_type("-inf")

    tiles, shared_bytes = tiling.shared_layout(d, dtype, P_replaces_K=True)
    Q_tile, K_tile, V_tile, P_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate(TILES)
    )
    begin, mark, finish = phase_marks(len(PHASES))
    TICKS = len(PHASES) + 2
    d_4, d_V = -(-d // 4) * 4, tiles["V"][1]
    load_Q = loader(B_r, d, load_width, threads, fmt, mark, LOAD_Q, LOAD_Q)
    load_KV = loader(B_c, d, load_width, threads, fmt, mark, ISSUE, LAND)
    clear_Q = clear_columns(B_r, d, d_4, threads, fmt)
    clear_K = clear_columns(B_c, d, d_4, threads, fmt)
    clear_V = clear_columns(B_c, d, d_V, threads, fmt)
    scores = product_nt(tiling, d_4, fmt)
    accumulate = product_nn(tiling, d, fmt, masked=False)
    accumulate_masked = product_nn(tiling, d, fmt, masked=True)
    find_nonfinite = nonfinite_finder(B_c, d_V, threads, fmt)
    softmax_step = online_softmax_step(tiling, R_d, fmt)
    _, row_sum = row_reductions(n_c)
    tile_range, tile_kind, _ = tile_functions(rule, B_r, B_c, hbm.device)
    prepare, _ = change.functions(hbm.device, acc_type)
    finish_scores = score_finisher(tiling, rule, change, fmt)
    store_O = hbm.vector_store(store_width)

    def fa2(Q, K, V, O, L, scale, range_args, mask_args, score_args, shared, clock):
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
        row_0 = i * B_r + np.int64(ty)  # this thread's rows are row_0 + r*n_r

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        Q_i, K_j, V_j, P_ij = Q_tile(shared), K_tile(shared), V_tile(shared), P_tile(shared)
        S_ij = cuda.local.array((R_r, R_c), acc_type)
        acc = cuda.local.array((R_r, R_d), acc_type)
        m_i = cuda.local.array(R_r, acc_type)
        l_i = cuda.local.array(R_r, acc_type)

        state = prepare(score_args, b, h)
        j_begin, j_end, lo_last, hi_first = tile_range(range_args, b, h, i, N_q, N_k)
        clear_Q(Q_i, tid)
        clear_V(V_j, tid)
        load_Q(Q_i, Q, b, h, i * B_r, N_q, 0, d, scale, tid, clock, ticks)  # line 4
        for r in range(R_r):  # line 5
            m_i[r] = NEG_INF
            l_i[r] = ZERO
            for k in range(R_d):
                acc[r, k] = ZERO

        for j in range(j_begin, j_end):  # line 6
            kind = tile_kind(mask_args, b, h, i, j, lo_last, hi_first, N_q, N_k)
            if kind == EMPTY:
                continue
            load_KV(K_j, K, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)  # line 7
            load_KV(V_j, V, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
            clear_K(K_j, tid)  # its padding again: P_ij was there
            cuda.syncthreads()  # Q_i, K_j and V_j are complete
            mark(clock, ticks, LAND)

            for r in range(R_r):
                for c in range(R_c):
                    S_ij[r, c] = ZERO
            scores(S_ij, Q_i, K_j, ty, tx)  # line 8
            finish_scores(
                S_ij, kind, mask_args, state, b, h, row_0, j * B_c + np.int64(tx), N_q, N_k
            )
            nonfinite = np.int32(0)
            if kind != FULL:
                nonfinite = find_nonfinite(V_j, tid)

            cuda.syncthreads()  # all have read K_j: P_ij may take its place
            mark(clock, ticks, SCORES)
            softmax_step(S_ij, m_i, l_i, acc)  # lines 9 and 10, S_ij becomes P~_ij
            for r in range(R_r):
                for c in range(R_c):
                    P_ij[ty + u32(r * n_r), tx + u32(c * n_c)] = S_ij[r, c]
            # P_ij is complete; the barrier also tells whether any thread found NaN or inf in V_j
            nonfinite = cuda.syncthreads_or(nonfinite)
            mark(clock, ticks, SOFTMAX)
            if nonfinite:
                accumulate_masked(acc, P_ij, V_j, ty, tx)
            else:
                accumulate(acc, P_ij, V_j, ty, tx)  # line 10: O_i += P~_ij V_j
            cuda.syncthreads()  # all have read K_j, V_j and P_ij: the next tile may replace them
            mark(clock, ticks, OUTPUT)

        out = cuda.local.array(R_d, storage)
        for r in range(R_r):
            row = row_0 + r * n_r
            l = row_sum(l_i[r])
            inverse = ONE / l if l != ZERO else ZERO  # a row without keys: O = 0
            if row < N_q:
                for k in range(R_d):
                    out[k] = from_acc(acc[r, k] * inverse)  # line 12
                for g in range(G):
                    col = C * (np.int64(tx) + g * n_c)
                    for c in range(0, C, store_width):
                        if col + c < d:
                            store_O(O, (b, h, row, col + c), out, g * C + c)  # line 14
                if tx == 0:
                    L[b, h, row] = m_i[r] + log(l) if l != ZERO else NEG_INF  # lines 13, 15
        mark(clock, ticks, EPILOGUE)
        finish(clock, ticks)

    return hbm.jit(fa2, "fa2", threads), shared_bytes


def launch(problem: Problem, A: Operands) -> None:
    """Run FlashAttention-2 on the operands `A` of `problem`."""
    p = problem
    kernel, shared_bytes = build(
        p.tiling, p.d, p.dtype, p.mask.rule, p.score.change, p.load_width, p.store_width
    )
    blocks = p.tiling.T_r(p.N_q) * p.H * p.B
    A.run(
        kernel,
        blocks,
        p.tiling.threads,
        shared_bytes,
        A.array("Q", "load Q_i"),
        A.array("K", "load K_j, V_j"),
        A.array("V", "load K_j, V_j"),
        A.array("O", "epilogue"),
        A.array("L", "epilogue"),
        A.scale,
        A.mask_args("tile range"),
        A.mask_args("mask"),
        A.score_args("load slopes"),
        A.shared("fa2", TILES),
        A.clock("fa2", PHASES, blocks, p.tiling.threads),
    )
