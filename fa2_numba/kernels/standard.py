"""Standard attention: Algorithm 0 of Dao et al., "FlashAttention" (2022), arXiv:2205.14135.

Three kernels, with the N_q x N_k matrices S and P in global memory (in the accumulation dtype):

`scores`   S = scale Q K^T, then score changes and mask.  Grid: one block a B_r x B_c tile of S.
           HBM: reads Q_i and K_j for every tile, writes S once.
`softmax`  P = softmax(S) by rows, and L.  Grid: one warp a row.
           HBM: reads S twice (maximum and sum in one pass, then normalise), writes P and L once.
`output`   O = P V.  Grid: one block a B_r x d tile of O.
           HBM: reads P once, V_j for every row tile, writes O once.

No tile is skipped: a masked score is written as -inf and read back, as in the paper's baseline.
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
from fa2_numba.softmax import row_reductions
from fa2_numba.tile import (
    clear_columns,
    loader,
    nonfinite_finder,
    product_nn,
    product_nt,
    score_finisher,
    u32,
)
from fa2_numba.tiling import Tiling, ceil_div

SCORES_PHASES = ("load Q_i, K_j", "S = Q K^T", "store S")
SOFTMAX_PHASES = ("row max and sum", "normalise")
OUTPUT_PHASES = ("load P_ij, V_j", "O = P V", "epilogue")
LOAD, PRODUCT, STORE = range(3)  # of `scores` and `output`
REDUCE, NORMALISE = range(2)  # of `softmax`, which reads S in both
WARP = 32
SOFTMAX_WARPS = 4  # rows of a block


@cache.built
def build_scores(
    tiling: Tiling, d: int, dtype: str, rule: Any, change: Any, load_width: int
) -> tuple[Any, int]:
    """Kernel ``scores(Q, K, S, scale, mask_args, score_args, shared, clock)``; its shared bytes."""
    B_r, B_c, n_r, n_c = tiling.B_r, tiling.B_c, tiling.n_r, tiling.n_c
    R_r, R_c, threads = tiling.R_r, tiling.R_c, tiling.threads
    fmt = FORMATS[dtype]
    acc_type = fmt.acc
    ZERO, ONE = acc_type(0), acc_type(1)

    tiles, shared_bytes = tiling.shared_layout(d, dtype, "QK")
    Q_tile, K_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate("QK")
    )
    begin, mark, finish = phase_marks(len(SCORES_PHASES))
    TICKS = len(SCORES_PHASES) + 2
    d_4 = -(-d // 4) * 4
    load_Q = loader(B_r, d, load_width, threads, fmt, mark, LOAD, LOAD)
    load_K = loader(B_c, d, load_width, threads, fmt, mark, LOAD, LOAD)
    clear_Q = clear_columns(B_r, d, d_4, threads, fmt)
    clear_K = clear_columns(B_c, d, d_4, threads, fmt)
    product = product_nt(tiling, d_4, fmt)
    prepare, _ = change.functions(hbm.device, acc_type)
    finish_scores = score_finisher(tiling, rule, change, fmt)

    def scores(Q, K, S, scale, mask_args, score_args, shared, clock):
        H, N_q = Q.shape[1], Q.shape[2]
        H_k, N_k = K.shape[1], K.shape[2]
        T_r, T_c = (N_q + B_r - 1) // B_r, (N_k + B_c - 1) // B_c
        block = cuda.blockIdx.x
        j = block % T_c
        i = block // T_c % T_r
        h = block // (T_c * T_r) % H
        b = block // (T_c * T_r * H)
        tid = u32(cuda.threadIdx.x)
        ty, tx = tid // u32(n_c), tid % u32(n_c)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        Q_i, K_j = Q_tile(shared), K_tile(shared)
        S_ij = cuda.local.array((R_r, R_c), acc_type)
        for r in range(R_r):
            for c in range(R_c):
                S_ij[r, c] = ZERO

        state = prepare(score_args, b, h)
        clear_Q(Q_i, tid)
        clear_K(K_j, tid)
        load_Q(Q_i, Q, b, h, i * B_r, N_q, 0, d, scale, tid, clock, ticks)
        load_K(K_j, K, b, h // (H // H_k), j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
        cuda.syncthreads()  # Q_i and K_j are complete
        mark(clock, ticks, LOAD)
        product(S_ij, Q_i, K_j, ty, tx)

        row_0, col_0 = i * B_r + np.int64(ty), j * B_c + np.int64(tx)
        finish_scores(S_ij, PARTIAL, mask_args, state, b, h, row_0, col_0, N_q, N_k)
        mark(clock, ticks, PRODUCT)
        for r in range(R_r):
            for c in range(R_c):
                row, col = row_0 + r * n_r, col_0 + c * n_c
                if row < N_q and col < N_k:
                    S[b, h, row, col] = S_ij[r, c]
        mark(clock, ticks, STORE)
        finish(clock, ticks)

    return hbm.jit(scores, "standard_scores", threads), shared_bytes


@cache.built
def build_softmax(dtype: str, width: int) -> Any:
    """Kernel ``softmax(S, P, L, clock)``; `width` elements of S and P move at once."""
    fmt = FORMATS[dtype]
    acc_type, exp, log = fmt.acc, fmt.exp, fmt.log
    ZERO, ONE, NEG_INF = acc_type(0), acc_type(1), acc_type("-inf")
    load, store = hbm.vector_load(width), hbm.vector_store(width)
    row_max, row_sum = row_reductions(WARP)
    begin, mark, finish = phase_marks(len(SOFTMAX_PHASES))
    TICKS = len(SOFTMAX_PHASES) + 2

    def softmax(S, P, L, clock):
        H, N_q, N_k = S.shape[1], S.shape[2], S.shape[3]
        row_of_all = np.int64(cuda.blockIdx.x) * SOFTMAX_WARPS + cuda.threadIdx.x // WARP
        lane = cuda.threadIdx.x % WARP
        row = row_of_all % N_q
        h = row_of_all // N_q % H
        b = row_of_all // (N_q * H)
        inside = b < S.shape[0]
        chunks = (N_k + WARP * width - 1) // (WARP * width)
        s = cuda.local.array(width, acc_type)
        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)

        m, l = NEG_INF, ZERO  # this lane's share of the row, then the row's
        for t in range(chunks):
            col = (t * WARP + lane) * width
            if inside and col < N_k:
                load(hbm.phase(S, REDUCE), (b, h, row, col), s, 0)
                m_old = m
                for c in range(width):
                    m = max(m, s[c])
                shift = ZERO if m == NEG_INF else m
                l *= exp(m_old - shift)
                for c in range(width):
                    l += exp(s[c] - shift)
        m_row = row_max(m)
        shift = ZERO if m_row == NEG_INF else m_row
        l = row_sum(l * exp(m - shift))
        inverse = ONE / l if l != ZERO else ZERO
        mark(clock, ticks, REDUCE)

        for t in range(chunks):
            col = (t * WARP + lane) * width
            if inside and col < N_k:
                load(hbm.phase(S, NORMALISE), (b, h, row, col), s, 0)
                for c in range(width):
                    s[c] = exp(s[c] - shift) * inverse
                store(P, (b, h, row, col), s, 0)
        if inside and lane == 0:
            L[b, h, row] = m_row + log(l) if l != ZERO else NEG_INF
        mark(clock, ticks, NORMALISE)
        finish(clock, ticks)

    return hbm.jit(softmax, "standard_softmax")


@cache.built
def build_output(
    tiling: Tiling,
    d: int,
    dtype: str,
    masked: bool,
    load_width: int,
    p_width: int,
    store_width: int,
) -> tuple[Any, int]:
    """Kernel ``output(P, V, O, shared, clock)`` and its shared bytes.

    `p_width` elements of P move at once.
    """
    B_r, B_c, n_r, n_c = tiling.B_r, tiling.B_c, tiling.n_r, tiling.n_c
    R_r, threads = tiling.R_r, tiling.threads
    C, G = tiling.columns_of_O(d, dtype)
    R_d = C * G
    fmt = FORMATS[dtype]
    acc_type, storage, from_acc = fmt.acc, fmt.storage, fmt.from_acc
    P_fmt = FORMATS["fp64" if dtype == "fp64" else "fp32"]
    ZERO, ONE = acc_type(0), acc_type(1)

    tiles, shared_bytes = tiling.shared_layout(d, dtype, "VP")
    V_tile, P_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate("VP")
    )
    begin, mark, finish = phase_marks(len(OUTPUT_PHASES))
    TICKS = len(OUTPUT_PHASES) + 2
    d_V = tiles["V"][1]
    load_P = loader(B_r, B_c, p_width, threads, P_fmt, mark, LOAD, LOAD)
    load_V = loader(B_c, d, load_width, threads, fmt, mark, LOAD, LOAD)
    clear_V = clear_columns(B_c, d, d_V, threads, fmt)
    accumulate = product_nn(tiling, d, fmt, masked=False)
    accumulate_masked = product_nn(tiling, d, fmt, masked=True)
    find_nonfinite = nonfinite_finder(B_c, d_V, threads, fmt)
    store_O = hbm.vector_store(store_width)

    def output(P, V, O, shared, clock):
        H, N_q, N_k = P.shape[1], P.shape[2], P.shape[3]
        H_k = V.shape[1]
        T_r, T_c = (N_q + B_r - 1) // B_r, (N_k + B_c - 1) // B_c
        block = cuda.blockIdx.x
        i = block % T_r
        h = block // T_r % H
        b = block // (T_r * H)
        tid = u32(cuda.threadIdx.x)
        ty, tx = tid // u32(n_c), tid % u32(n_c)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        V_j, P_ij = V_tile(shared), P_tile(shared)
        acc = cuda.local.array((R_r, R_d), acc_type)
        for r in range(R_r):
            for k in range(R_d):
                acc[r, k] = ZERO
        clear_V(V_j, tid)

        for j in range(T_c):
            load_P(P_ij, P, b, h, i * B_r, N_q, j * B_c, N_k, ONE, tid, clock, ticks)
            load_V(V_j, V, b, h // (H // H_k), j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
            cuda.syncthreads()  # P_ij and V_j are complete
            mark(clock, ticks, LOAD)
            nonfinite = np.int32(0)
            if masked:
                nonfinite = find_nonfinite(V_j, tid)
            if cuda.syncthreads_or(nonfinite):
                accumulate_masked(acc, P_ij, V_j, ty, tx)
            else:
                accumulate(acc, P_ij, V_j, ty, tx)
            cuda.syncthreads()  # all have read P_ij and V_j: the next tiles may replace them
            mark(clock, ticks, PRODUCT)

        out = cuda.local.array(R_d, storage)
        for r in range(R_r):
            row = i * B_r + np.int64(ty) + r * n_r
            if row < N_q:
                for k in range(R_d):
                    out[k] = from_acc(acc[r, k])
                for g in range(G):
                    col = C * (np.int64(tx) + g * n_c)
                    for c in range(0, C, store_width):
                        if col + c < d:
                            store_O(O, (b, h, row, col + c), out, g * C + c)
        mark(clock, ticks, STORE)
        finish(clock, ticks)

    return hbm.jit(output, "standard_output", threads), shared_bytes


def launch(problem: Problem, A: Operands) -> None:
    """Run standard attention on the operands `A` of `problem`."""
    p, t = problem, problem.tiling
    A.workspace("S")
    A.workspace("P")
    tiles = t.T_r(p.N_q) * p.H * p.B
    masked = p.mask.rule is not none().rule

    scores, shared_bytes = build_scores(t, p.d, p.dtype, p.mask.rule, p.score.change, p.load_width)
    blocks = t.T_c(p.N_k) * tiles
    A.run(
        scores,
        blocks,
        t.threads,
        shared_bytes,
        A.array("Q", "S = Q K^T"),
        A.array("K", "S = Q K^T"),
        A.array("S", "S = Q K^T"),
        A.scale,
        A.mask_args("mask"),
        A.score_args("load slopes"),
        A.shared("standard_scores", "QK"),
        A.clock("standard_scores", SCORES_PHASES, blocks, t.threads),
    )
    blocks = ceil_div(p.B * p.H * p.N_q, SOFTMAX_WARPS)
    A.run(
        build_softmax(p.dtype, p.p_width),
        blocks,
        SOFTMAX_WARPS * WARP,
        0,
        A.array("S", *SOFTMAX_PHASES),
        A.array("P", "normalise"),
        A.array("L", "normalise"),
        A.clock("standard_softmax", SOFTMAX_PHASES, blocks, SOFTMAX_WARPS * WARP),
    )
    output, shared_bytes = build_output(
        t, p.d, p.dtype, masked, p.load_width, p.p_width, p.store_width
    )
    A.run(
        output,
        tiles,
        t.threads,
        shared_bytes,
        A.array("P", "O = P V"),
        A.array("V", "O = P V"),
        A.array("O", "O = P V"),
        A.shared("standard_output", "VP"),
        A.clock("standard_output", OUTPUT_PHASES, tiles, t.threads),
    )
