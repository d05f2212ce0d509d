"""FlashAttention, forward: Algorithm 1 of Dao et al., "FlashAttention" (2022), arXiv:2205.14135.

Grid       `loop`: one block for each head of each batch; the outer loop runs over K_j, V_j, the
           inner one over row tiles. `init` and `finish`: one block for each row tile.
HBM        reads K_j, V_j once; for every visited tile reads and writes Q_i (read only), O_i, l_i
           and m_i, O_i rescaled each time. `init` (line 2) writes O, l and m; `finish` reads l and
           m, writes L = m + log l, and for fp16 and bf16 rounds O, which the loop keeps in fp32.
Shared     Q_i (B_r x d, scaled), K_j, V_j (B_c x d), P~_ij (B_r x B_c).
Registers  each thread: R_r x R_c of S_ij, R_r x R_d of P~_ij V_j.
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
    score_finisher,
    u32,
)
from fa2_numba.tiling import Tiling, ceil_div

TILES = "QKVP"
PHASES = ("load K_j, V_j", "load Q_i", "S = Q K^T", "softmax", "P V", "rescale O_i")
LOAD_KV, LOAD_Q, SCORES, SOFTMAX, OUTPUT, RESCALE = range(len(PHASES))


@cache.built
def build_init(tiling: Tiling, d: int, dtype: str, width: int) -> Any:
    """Kernel ``init(O, l, m)``, line 2: O = 0, l = 0, m = -inf; `width` elements of O at once."""
    B_r, threads = tiling.B_r, tiling.threads
    acc_type = FORMATS[dtype].acc
    ZERO, NEG_INF = acc_type(0), acc_type("-inf")
    pieces = d // width
    steps, row_steps = ceil_div(B_r * pieces, threads), ceil_div(B_r, threads)
    store = hbm.vector_store(width)

    def init(O, l, m):
        H, N_q = O.shape[1], O.shape[2]
        T_r = (N_q + B_r - 1) // B_r
        block = cuda.blockIdx.x
        i, h, b = block % T_r, block // T_r % H, block // (T_r * H)
        tid = cuda.threadIdx.x
        zeros = cuda.local.array(width, acc_type)
        for c in range(width):
            zeros[c] = ZERO
        for t in range(steps):
            e = tid + t * threads
            row = i * B_r + e // pieces
            if e < B_r * pieces and row < N_q:
                store(O, (b, h, row, e % pieces * width), zeros, 0)
        for t in range(row_steps):
            row = i * B_r + tid + t * threads
            if tid + t * threads < B_r and row < N_q:
                l[b, h, row] = ZERO
                m[b, h, row] = NEG_INF

    return hbm.jit(init, "fa1_init", threads)


@cache.built
def build_loop(
    tiling: Tiling, d: int, dtype: str, rule: Any, change: Any, load_width: int, o_width: int
) -> tuple[Any, int]:
    """Kernel ``loop``, lines 5 to 15, and its shared bytes.

    ``loop(Q, K, V, O, l, m, scale, range_args, mask_args, score_args, shared, clock)``; O, l and m
    are in the accumulation dtype; `o_width` elements of O move at once.
    """
    B_r, B_c, n_r, n_c = tiling.B_r, tiling.B_c, tiling.n_r, tiling.n_c
    R_r, R_c, threads = tiling.R_r, tiling.R_c, tiling.threads
    C, G = tiling.columns_of_O(d, dtype)
    R_d = C * G
    fmt = FORMATS[dtype]
    acc_type, exp = fmt.acc, fmt.exp
    ZERO, ONE, NEG_INF = acc_type(0), acc_type(1), acc_type("-inf")

    tiles, shared_bytes = tiling.shared_layout(d, dtype)
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
    find_nonfinite = nonfinite_finder(B_c, d_V, threads, fmt)
    row_max, row_sum = row_reductions(n_c)
    tile_range, tile_kind, _ = tile_functions(rule, B_r, B_c, hbm.device)
    prepare, _ = change.functions(hbm.device, acc_type)
    finish_scores = score_finisher(tiling, rule, change, fmt)
    load_O, store_O = hbm.vector_load(o_width), hbm.vector_store(o_width)

    def loop(Q, K, V, O, l, m, scale, range_args, mask_args, score_args, shared, clock):
        H, N_q = Q.shape[1], Q.shape[2]
        H_k, N_k = K.shape[1], K.shape[2]
        T_r, T_c = (N_q + B_r - 1) // B_r, (N_k + B_c - 1) // B_c
        h, b = cuda.blockIdx.x % H, cuda.blockIdx.x // H
        h_k = h // (H // H_k)
        tid = u32(cuda.threadIdx.x)
        ty, tx = tid // u32(n_c), tid % u32(n_c)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        Q_i, K_j, V_j, P_ij = Q_tile(shared), K_tile(shared), V_tile(shared), P_tile(shared)
        S_ij = cuda.local.array((R_r, R_c), acc_type)
        acc = cuda.local.array((R_r, R_d), acc_type)
        o = cuda.local.array(R_d, acc_type)
        m_tile = cuda.local.array(R_r, acc_type)
        l_tile = cuda.local.array(R_r, acc_type)

        state = prepare(score_args, b, h)
        clear_Q(Q_i, tid)
        clear_K(K_j, tid)
        clear_V(V_j, tid)

        for j in range(T_c):  # line 5
            loaded = False
            for i in range(T_r):  # line 7
                j_begin, j_end, lo_last, hi_first = tile_range(range_args, b, h, i, N_q, N_k)
                if j < j_begin or j >= j_end:
                    continue
                kind = tile_kind(mask_args, b, h, i, j, lo_last, hi_first, N_q, N_k)
                if kind == EMPTY:
                    continue
                if not loaded:
                    load_KV(K_j, K, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)  # line 6
                    load_KV(V_j, V, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
                    loaded = True
                load_Q(Q_i, Q, b, h, i * B_r, N_q, 0, d, scale, tid, clock, ticks)  # line 8
                cuda.syncthreads()  # Q_i, K_j and V_j are complete
                mark(clock, ticks, LOAD_Q)

                for r in range(R_r):
                    for c in range(R_c):
                        S_ij[r, c] = ZERO
                scores(S_ij, Q_i, K_j, ty, tx)  # line 9
                row_0 = i * B_r + np.int64(ty)
                finish_scores(
                    S_ij, kind, mask_args, state, b, h, row_0, j * B_c + np.int64(tx), N_q, N_k
                )
                nonfinite = np.int32(0)
                if kind != FULL:
                    nonfinite = find_nonfinite(V_j, tid)
                mark(clock, ticks, SCORES)

                for r in range(R_r):  # line 10: m~_ij, P~_ij, l~_ij of this tile alone
                    m_here = S_ij[r, 0]
                    for c in range(1, R_c):
                        m_here = max(m_here, S_ij[r, c])
                    m_here = row_max(m_here)
                    shift = ZERO if m_here == NEG_INF else m_here
                    l_here = ZERO
                    for c in range(R_c):
                        p = exp(S_ij[r, c] - shift)
                        P_ij[ty + u32(r * n_r), tx + u32(c * n_c)] = p
                        l_here += p
                    m_tile[r] = m_here
                    l_tile[r] = row_sum(l_here)
                    for k in range(R_d):
                        acc[r, k] = ZERO
                # P~_ij is complete; the barrier also tells whether V_j holds NaN or inf
                nonfinite = cuda.syncthreads_or(nonfinite)
                mark(clock, ticks, SOFTMAX)
                if nonfinite:
                    accumulate_masked(acc, P_ij, V_j, ty, tx)
                else:
                    accumulate(acc, P_ij, V_j, ty, tx)
                mark(clock, ticks, OUTPUT)

                for r in range(R_r):
                    row = row_0 + r * n_r
                    m_old, l_old = NEG_INF, ZERO
                    if row < N_q and tx == 0:  # one lane reads for its row
                        m_old = m[b, h, row]
                        l_old = l[b, h, row]
                    m_old, l_old = row_max(m_old), row_sum(l_old)
                    m_new = max(m_old, m_tile[r])  # line 11
                    shift = ZERO if m_new == NEG_INF else m_new
                    a_old = exp(m_old - shift) * l_old
                    a_tile = exp(m_tile[r] - shift)
                    l_new = a_old + a_tile * l_tile[r]
                    inverse = ONE / l_new if l_new != ZERO else ZERO
                    if row < N_q:
                        for g in range(G):  # line 12: O_i rescaled in HBM
                            col = C * (np.int64(tx) + g * n_c)
                            for c in range(0, C, o_width):
                                if col + c < d:
                                    load_O(O, (b, h, row, col + c), o, g * C + c)
                                    for k in range(o_width):
                                        o[g * C + c + k] = inverse * (
                                            a_old * o[g * C + c + k]
                                            + a_tile * acc[r, g * C + c + k]
                                        )
                                    store_O(O, (b, h, row, col + c), o, g * C + c)
                        if tx == 0:  # line 13
                            l[b, h, row] = l_new
                            m[b, h, row] = m_new
                cuda.syncthreads()  # all have read Q_i and P~_ij (and V_j): they may be replaced
                mark(clock, ticks, RESCALE)
        finish(clock, ticks)

    return hbm.jit(loop, "fa1_loop", threads), shared_bytes


@cache.built
def build_finish(tiling: Tiling, d: int, dtype: str, rounds: bool, width: int) -> Any:
    """Kernel ``finish(O_acc, l, m, O, L)``: L = m + log l and, if `rounds`, O in its own dtype."""
    B_r, threads = tiling.B_r, tiling.threads
    fmt = FORMATS[dtype]
    acc_type, storage, from_acc, log = fmt.acc, fmt.storage, fmt.from_acc, fmt.log
    ZERO = acc_type(0)
    pieces = d // width
    steps = ceil_div(B_r * pieces, threads) if rounds else 0
    row_steps = ceil_div(B_r, threads)
    load, store = hbm.vector_load(width), hbm.vector_store(width)

    def finish(O_acc, l, m, O, L):
        H, N_q = O.shape[1], O.shape[2]
        T_r = (N_q + B_r - 1) // B_r
        block = cuda.blockIdx.x
        i, h, b = block % T_r, block // T_r % H, block // (T_r * H)
        tid = cuda.threadIdx.x
        wide = cuda.local.array(width, acc_type)
        narrow = cuda.local.array(width, storage)
        for t in range(steps):
            e = tid + t * threads
            row = i * B_r + e // pieces
            if e < B_r * pieces and row < N_q:
                load(O_acc, (b, h, row, e % pieces * width), wide, 0)
                for c in range(width):
                    narrow[c] = from_acc(wide[c])
                store(O, (b, h, row, e % pieces * width), narrow, 0)
        for t in range(row_steps):
            row = i * B_r + tid + t * threads
            if tid + t * threads < B_r and row < N_q:
                l_row = l[b, h, row]
                m_row = m[b, h, row]
                # A row without keys: its m is -inf, and so is L. (Read in both cases, or the
                # compiler would read m for rows with keys alone.)
                L[b, h, row] = m_row + (log(l_row) if l_row != ZERO else ZERO)

    return hbm.jit(finish, "fa1_finish", threads)


def launch(problem: Problem, A: Operands) -> None:
    """Run FlashAttention on the operands `A` of `problem`."""
    p, t = problem, problem.tiling
    for name in ("l", "m", *(["O_acc"] if p.rounds else [])):
        A.workspace(name)
    row_tiles = t.T_r(p.N_q) * p.H * p.B

    def accumulator(phase: str) -> Any:
        return A.array(p.o_acc_name, phase)

    init = build_init(t, p.d, p.dtype, p.o_row_width)
    A.run(
        init,
        row_tiles,
        t.threads,
        0,
        accumulator("init"),
        A.array("l", "init"),
        A.array("m", "init"),
    )
    loop, shared_bytes = build_loop(
        t, p.d, p.dtype, p.mask.rule, p.score.change, p.load_width, p.o_acc_width
    )
    blocks = p.H * p.B if p.N_q and p.N_k else 0
    A.run(
        loop,
        blocks,
        t.threads,
        shared_bytes,
        A.array("Q", "load Q_i"),
        A.array("K", "load K_j, V_j"),
        A.array("V", "load K_j, V_j"),
        accumulator("rescale O_i"),
        A.array("l", "rescale O_i"),
        A.array("m", "rescale O_i"),
        A.scale,
        A.mask_args("tile range"),
        A.mask_args("mask"),
        A.score_args("load slopes"),
        A.shared("fa1_loop", TILES),
        A.clock("fa1_loop", PHASES, blocks, t.threads),
    )
    A.run(
        build_finish(t, p.d, p.dtype, p.rounds, p.o_row_width),
        row_tiles,
        t.threads,
        0,
        accumulator("finish"),
        A.array("l", "finish"),
        A.array("m", "finish"),
        A.array("O", "finish"),
        A.array("L", "finish"),
    )
