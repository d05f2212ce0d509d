"""FlashAttention-2 with one of its ideas taken back, to see what that idea is worth.

Each variant is Algorithm 1 of FlashAttention-2 (arXiv:2307.08691) but for one thing, which it does
as FlashAttention (arXiv:2205.14135) does:

`NORMALISE`   O_i is divided by l_i after every tile, and multiplied back before the next
              (section 3.1: "we can instead maintain an un-scaled version of O").
`ONE_BLOCK`   one block for each head walks all row tiles (section 3.2: parallelism over N).

Grid, HBM, shared memory and registers are those of `fa2` (with `ONE_BLOCK`, H * B blocks). For
study: fp32 and fp64 accumulate alike, every mask works, score changes do not, and V is finite
where it is masked.
"""

from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import cache, hbm
from fa2_numba.clock import phase_marks
from fa2_numba.formats import FORMATS
from fa2_numba.launch import Operands
from fa2_numba.masking import EMPTY, FULL, UNCHANGED, tile_functions
from fa2_numba.problem import Problem
from fa2_numba.smem import shared_tile
from fa2_numba.softmax import online_softmax_step, row_reductions
from fa2_numba.tile import clear_columns, loader, product_nn, product_nt, score_finisher, u32
from fa2_numba.tiling import Tiling

AS_FA2, NORMALISE, ONE_BLOCK = "as fa2", "normalise", "one block"
VARIANTS = (AS_FA2, NORMALISE, ONE_BLOCK)
TILES = "QKVP"
PHASES = ("load Q_i", "load K_j, V_j", "S = Q K^T", "softmax", "P V", "epilogue")
LOAD_Q, LOAD_KV, SCORES, SOFTMAX, OUTPUT, EPILOGUE = range(len(PHASES))


@cache.built
def build(
    tiling: Tiling,
    d: int,
    dtype: str,
    rule: Any,
    load_width: int,
    store_width: int,
    variant: str,
) -> tuple[Any, int]:
    """Kernel ``steps(Q, K, V, O, L, scale, range_args, mask_args, shared, clock)``; shared bytes.

    `variant` is one of `VARIANTS`; the other parameters are those of `fa2.build`.
    """
    B_r, B_c, n_r, n_c = tiling.B_r, tiling.B_c, tiling.n_r, tiling.n_c
    R_r, R_c, threads = tiling.R_r, tiling.R_c, tiling.threads
    C, G = tiling.columns_of_O(d, dtype)
    R_d = C * G
    fmt = FORMATS[dtype]
    acc_type, storage, from_acc, log = fmt.acc, fmt.storage, fmt.from_acc, fmt.log
    ZERO, ONE, NEG_INF = acc_type(0), acc_type(1), acc_type("-inf")
    normalise, one_block = variant == NORMALISE, variant == ONE_BLOCK

    tiles, shared_bytes = tiling.shared_layout(d, dtype, P_replaces_K=True)
    Q_tile, K_tile, V_tile, P_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate(TILES)
    )
    begin, mark, finish = phase_marks(len(PHASES))
    TICKS = len(PHASES) + 2
    d_4, d_V = -(-d // 4) * 4, tiles["V"][1]
    load_Q = loader(B_r, d, load_width, threads, fmt, mark, LOAD_Q, LOAD_Q)
    load_KV = loader(B_c, d, load_width, threads, fmt, mark, LOAD_KV, LOAD_KV)
    clear_Q = clear_columns(B_r, d, d_4, threads, fmt)
    clear_K = clear_columns(B_c, d, d_4, threads, fmt)
    clear_V = clear_columns(B_c, d, d_V, threads, fmt)
    scores = product_nt(tiling, d_4, fmt)
    accumulate = product_nn(tiling, d, fmt, masked=False)
    accumulate_masked = product_nn(tiling, d, fmt, masked=True)
    softmax_step = online_softmax_step(tiling, R_d, fmt)
    _, row_sum = row_reductions(n_c)
    tile_range, tile_kind, _ = tile_functions(rule, B_r, B_c, hbm.device)
    finish_scores = score_finisher(tiling, rule, UNCHANGED, fmt)
    store_O = hbm.vector_store(store_width)

    def steps(Q, K, V, O, L, scale, range_args, mask_args, shared, clock):
        H, N_q = Q.shape[1], Q.shape[2]
        H_k, N_k = K.shape[1], K.shape[2]
        T_r = (N_q + B_r - 1) // B_r
        block = cuda.blockIdx.x
        first, count = T_r - 1 - block % T_r, 1
        head = block // T_r
        if one_block:
            first, count, head = T_r - 1, T_r, block
        h, b = head % H, head // H
        h_k = h // (H // H_k)
        tid = u32(cuda.threadIdx.x)
        ty, tx = tid // u32(n_c), tid % u32(n_c)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        Q_i, K_j, V_j, P_ij = Q_tile(shared), K_tile(shared), V_tile(shared), P_tile(shared)
        S_ij = cuda.local.array((R_r, R_c), acc_type)
        acc = cuda.local.array((R_r, R_d), acc_type)
        m_i = cuda.local.array(R_r, acc_type)
        l_i = cuda.local.array(R_r, acc_type)
        out = cuda.local.array(R_d, storage)
        clear_Q(Q_i, tid)
        clear_V(V_j, tid)

        for n in range(count):
            i = first - n
            row_0 = i * B_r + np.int64(ty)
            j_begin, j_end, lo_last, hi_first = tile_range(range_args, b, h, i, N_q, N_k)
            load_Q(Q_i, Q, b, h, i * B_r, N_q, 0, d, scale, tid, clock, ticks)
            for r in range(R_r):
                m_i[r] = NEG_INF
                l_i[r] = ZERO
                for k in range(R_d):
                    acc[r, k] = ZERO

            for j in range(j_begin, j_end):
                kind = tile_kind(mask_args, b, h, i, j, lo_last, hi_first, N_q, N_k)
                if kind == EMPTY:
                    continue
                load_KV(K_j, K, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
                load_KV(V_j, V, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
                clear_K(K_j, tid)
                cuda.syncthreads()  # Q_i, K_j and V_j are complete
                mark(clock, ticks, LOAD_KV)

                for r in range(R_r):
                    for c in range(R_c):
                        S_ij[r, c] = ZERO
                scores(S_ij, Q_i, K_j, ty, tx)
                col_0 = j * B_c + np.int64(tx)
                finish_scores(S_ij, kind, mask_args, 0, b, h, row_0, col_0, N_q, N_k)
                cuda.syncthreads()  # all have read K_j: P_ij may take its place
                mark(clock, ticks, SCORES)

                if normalise:
                    for r in range(R_r):  # diag(l_i) O_i
                        l = row_sum(l_i[r])
                        for k in range(R_d):
                            acc[r, k] *= l
                softmax_step(S_ij, m_i, l_i, acc)
                for r in range(R_r):
                    for c in range(R_c):
                        P_ij[ty + u32(r * n_r), tx + u32(c * n_c)] = S_ij[r, c]
                cuda.syncthreads()  # P_ij is complete
                mark(clock, ticks, SOFTMAX)
                if kind == FULL:
                    accumulate(acc, P_ij, V_j, ty, tx)
                else:
                    accumulate_masked(acc, P_ij, V_j, ty, tx)
                if normalise:
                    for r in range(R_r):  # diag(l_i)^-1 O_i
                        l = row_sum(l_i[r])
                        inverse = ONE / l if l != ZERO else ZERO
                        for k in range(R_d):
                            acc[r, k] *= inverse
                cuda.syncthreads()  # all have read K_j, V_j and P_ij
                mark(clock, ticks, OUTPUT)

            for r in range(R_r):
                row = row_0 + r * n_r
                l = row_sum(l_i[r])
                inverse = ONE / l if l != ZERO else ZERO
                if normalise:
                    inverse = ONE
                if row < N_q:
                    for k in range(R_d):
                        out[k] = from_acc(acc[r, k] * inverse)
                    for g in range(G):
                        col = C * (np.int64(tx) + g * n_c)
                        for c in range(0, C, store_width):
                            if col + c < d:
                                store_O(O, (b, h, row, col + c), out, g * C + c)
                    if tx == 0:
                        L[b, h, row] = m_i[r] + log(l) if l != ZERO else NEG_INF
            cuda.syncthreads()  # all have read Q_i: the next row tile may replace it
            mark(clock, ticks, EPILOGUE)
        finish(clock, ticks)

    return hbm.jit(steps, "steps", threads), shared_bytes


def launch(problem: Problem, A: Operands, variant: str) -> None:
    """Run a variant on the operands `A` of `problem`, which is one of method "fa2"."""
    p = problem
    kernel, shared_bytes = build(
        p.tiling, p.d, p.dtype, p.mask.rule, p.load_width, p.store_width, variant
    )
    row_tiles = p.tiling.T_r(p.N_q)
    blocks = p.H * p.B * (min(row_tiles, 1) if variant == ONE_BLOCK else row_tiles)
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
        A.shared("steps", TILES),
        A.clock("steps", PHASES, blocks, p.tiling.threads),
    )
