"""FlashAttention-2's outer algorithm with FlashAttention's split of the work over warps.

FlashAttention splits each K_j and V_j over the warps of a block and gives every warp all of Q_i
("split-K", FlashAttention-2, section 3.3 and figure 3a). Each warp then holds a part of the row
maxima and a part of P V, which the warps write to shared memory, wait, and add up. FlashAttention-2
splits Q_i instead (`fa2`): a warp owns whole rows and has nothing to exchange.

Grid       one block for each row tile of each head of each batch.
HBM        as `fa2`, to the element.
Shared     Q_i, K_j, V_j, P_ij as `fa2`, and what split-K adds: M, a row of B_r for each warp's
           row maxima (at the end, its row sums) and one for alpha; R (warps * B_r x d), the warps'
           parts of P V.
Registers  each thread: its part of S_ij (all rows, the warp's keys) and of the warp's P V; its
           share of O_i, which the warps split as `SHARE` neighbours of a row.

For study: no score changes; V is finite where it is masked.
"""

from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import cache, hbm, smem
from fa2_numba.clock import phase_marks
from fa2_numba.formats import FORMATS
from fa2_numba.launch import Operands
from fa2_numba.masking import EMPTY, UNCHANGED, tile_functions
from fa2_numba.problem import Problem
from fa2_numba.smem import shared_tile
from fa2_numba.softmax import row_reductions
from fa2_numba.tile import loader, product_nt, score_finisher, u32
from fa2_numba.tiling import VECTOR_BYTES, Tiling, acc_bytes, ceil_div

TILES = "QKVPMR"
PHASES = ("load Q_i", "load K_j, V_j", "S = Q K^T", "softmax", "P V", "add over warps", "epilogue")
LOAD_Q, LOAD_KV, SCORES, SOFTMAX, OUTPUT, ADD, EPILOGUE = range(len(PHASES))
WARP = 32


@cache.built
def build(
    tiling: Tiling, d: int, dtype: str, rule: Any, load_width: int, store_width: int
) -> tuple[Any, int]:
    """Kernel ``split_keys(Q, K, V, O, L, scale, range_args, mask_args, shared, clock)``; its bytes.

    Parameters are those of `fa2.build`.

    Raises
    ------
    ValueError
        Sizes that do not split evenly: n_c is 8, B_r a multiple of 4, B_c of 8 for each warp, d of
        32.
    """
    B_r, B_c, threads = tiling.B_r, tiling.B_c, tiling.threads
    warps = threads // WARP
    if tiling.n_c != 8 or threads % WARP or B_c % (8 * warps) or B_r % 4 or d % 32:
        raise ValueError(
            f"tiling: got {tiling} at d={d}, accepted for split_keys: n_c=8, whole warps, B_r a "
            f"multiple of 4, B_c of {8 * warps}, d of 32"
        )
    B_w = B_c // warps  # keys of a warp
    own = Tiling(B_r, B_w, 4, 8)  # what one warp computes, with its 4 x 8 lanes
    n_r, n_c, R_r, R_c = own.n_r, own.n_c, own.R_r, own.R_c
    C, G = own.columns_of_O(d, dtype)
    R_d = C * G
    fmt = FORMATS[dtype]
    acc_type, storage, from_acc, exp, log = fmt.acc, fmt.storage, fmt.from_acc, fmt.exp, fmt.log
    ZERO, ONE, NEG_INF = acc_type(0), acc_type(1), acc_type("-inf")

    tiles, M_offset = tiling.shared_layout(d, dtype, P_replaces_K=True)
    M_rows = warps + 1
    R_offset = M_offset + ceil_div(M_rows * B_r * acc_bytes(dtype), 128) * 128
    tiles |= {"M": (M_rows, B_r, M_offset), "R": (warps * B_r, d, R_offset)}
    shared_bytes = R_offset + warps * B_r * d * acc_bytes(dtype)
    Q_tile, K_tile, V_tile, P_tile, M_tile, R_tile = (
        shared_tile(*tiles[n][:2], acc_type, tiles[n][2], row) for row, n in enumerate(TILES)
    )
    SHARE = VECTOR_BYTES // acc_bytes(dtype)  # neighbours of O_i that a thread keeps together
    ALPHA = warps  # the row of M that holds alpha
    pieces = d // SHARE  # of a row of O_i
    shares = ceil_div(B_r * pieces, threads)
    held = shares * SHARE
    begin, mark, finish = phase_marks(len(PHASES))
    TICKS = len(PHASES) + 2
    load_Q = loader(B_r, d, load_width, threads, fmt, mark, LOAD_Q, LOAD_Q)
    load_KV = loader(B_c, d, load_width, threads, fmt, mark, LOAD_KV, LOAD_KV)
    scores = product_nt(own, d, fmt)
    row_max, row_sum = row_reductions(n_c)
    tile_range, tile_kind, _ = tile_functions(rule, B_r, B_c, hbm.device)
    finish_scores = score_finisher(own, rule, UNCHANGED, fmt)
    step = smem.widest(B_w, acc_bytes(dtype))
    get_P = smem.vector_load(step)
    held_p = R_r * step
    get_V, put_R, get_R = smem.vector_load(C), smem.vector_store(C), smem.vector_load(SHARE)
    store_O = hbm.vector_store(store_width)

    @hbm.device
    def product(part, P, V, key_0, lr, lc):
        """part = P V over the keys of one warp."""
        p = cuda.local.array(held_p, acc_type)
        v = cuda.local.array(C, acc_type)
        for r in range(R_r):
            for k in range(R_d):
                part[r, k] = ZERO
        for k_0 in range(0, B_w, step):
            for r in range(R_r):
                get_P(P, (lr + u32(r * n_r), key_0 + u32(k_0)), p, r * step)
            for k in range(step):
                for g in range(G):
                    get_V(V, (key_0 + u32(k_0 + k), u32(C) * (lc + u32(g * n_c))), v, 0)
                    for r in range(R_r):
                        for c in range(C):
                            part[r, g * C + c] += p[r * step + k] * v[c]

    def split_keys(Q, K, V, O, L, scale, range_args, mask_args, shared, clock):
        H, N_q = Q.shape[1], Q.shape[2]
        H_k, N_k = K.shape[1], K.shape[2]
        T_r = (N_q + B_r - 1) // B_r
        block = cuda.blockIdx.x
        i = T_r - 1 - block % T_r
        h = block // T_r % H
        b = block // (T_r * H)
        h_k = h // (H // H_k)
        tid = u32(cuda.threadIdx.x)
        warp, lane = tid // u32(WARP), tid % u32(WARP)
        lr, lc = lane // u32(n_c), lane % u32(n_c)
        key_0 = warp * u32(B_w)  # this warp's keys in a tile
        row_0 = i * B_r + np.int64(lr)

        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        Q_i, K_j, V_j, P_ij = Q_tile(shared), K_tile(shared), V_tile(shared), P_tile(shared)
        M, R = M_tile(shared), R_tile(shared)
        S_ij = cuda.local.array((R_r, R_c), acc_type)
        part = cuda.local.array((R_r, R_d), acc_type)
        m_i = cuda.local.array(R_r, acc_type)
        l_i = cuda.local.array(R_r, acc_type)  # this lane's share, of this warp's keys
        o = cuda.local.array(held, acc_type)
        x = cuda.local.array(SHARE, acc_type)

        j_begin, j_end, lo_last, hi_first = tile_range(range_args, b, h, i, N_q, N_k)
        load_Q(Q_i, Q, b, h, i * B_r, N_q, 0, d, scale, tid, clock, ticks)
        for r in range(R_r):
            m_i[r] = NEG_INF
            l_i[r] = ZERO
        for k in range(held):
            o[k] = ZERO

        for j in range(j_begin, j_end):
            kind = tile_kind(mask_args, b, h, i, j, lo_last, hi_first, N_q, N_k)
            if kind == EMPTY:
                continue
            load_KV(K_j, K, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
            load_KV(V_j, V, b, h_k, j * B_c, N_k, 0, d, ONE, tid, clock, ticks)
            cuda.syncthreads()  # Q_i, K_j and V_j are complete
            mark(clock, ticks, LOAD_KV)

            for r in range(R_r):
                for c in range(R_c):
                    S_ij[r, c] = ZERO
            scores(S_ij, Q_i, K_j, lr, key_0 + lc)
            col_0 = j * B_c + np.int64(key_0 + lc)
            finish_scores(S_ij, kind, mask_args, 0, b, h, row_0, col_0, N_q, N_k)
            for r in range(R_r):
                m = S_ij[r, 0]
                for c in range(1, R_c):
                    m = max(m, S_ij[r, c])
                m = row_max(m)
                if lc == u32(0):
                    M[warp, lr + u32(r * n_r)] = m
            cuda.syncthreads()  # every warp's maxima are there; all have read K_j
            mark(clock, ticks, SCORES)

            for r in range(R_r):
                row = lr + u32(r * n_r)
                m = m_i[r]
                for w in range(warps):
                    m = max(m, M[u32(w), row])
                shift = ZERO if m == NEG_INF else m
                alpha = exp(m_i[r] - shift)
                l = ZERO
                for c in range(R_c):
                    p = exp(S_ij[r, c] - shift)
                    P_ij[row, key_0 + lc + u32(c * n_c)] = p
                    l += p
                l_i[r] = alpha * l_i[r] + l
                m_i[r] = m
                if tid == lr * u32(n_c):  # one lane a row, of the first warp
                    M[u32(ALPHA), row] = alpha
            cuda.syncthreads()  # P_ij and alpha are complete
            mark(clock, ticks, SOFTMAX)
            product(part, P_ij, V_j, key_0, lr, lc)
            mark(clock, ticks, OUTPUT)

            for r in range(R_r):
                row = warp * u32(B_r) + lr + u32(r * n_r)
                for g in range(G):
                    for c in range(C):
                        x[c] = part[r, g * C + c]
                    put_R(R, (row, u32(C) * (lc + u32(g * n_c))), x, 0)
            cuda.syncthreads()  # every warp's part of P V is there
            for s in range(shares):
                e = tid + u32(s * threads)
                if e < u32(B_r * pieces):
                    row, col = e // u32(pieces), e % u32(pieces) * u32(SHARE)
                    alpha = M[u32(ALPHA), row]
                    for k in range(SHARE):
                        o[s * SHARE + k] *= alpha
                    for w in range(warps):
                        get_R(R, (u32(w * B_r) + row, col), x, 0)
                        for k in range(SHARE):
                            o[s * SHARE + k] += x[k]
            cuda.syncthreads()  # all have read M, R, V_j and P_ij: they may be replaced
            mark(clock, ticks, ADD)

        for r in range(R_r):
            l = row_sum(l_i[r])
            if lc == u32(0):
                M[warp, lr + u32(r * n_r)] = l
        cuda.syncthreads()  # every warp's sums are there
        out = cuda.local.array(SHARE, storage)
        for s in range(shares):
            e = tid + u32(s * threads)
            if e < u32(B_r * pieces):
                l = ZERO
                for w in range(warps):
                    l += M[u32(w), e // u32(pieces)]
                inverse = ONE / l if l != ZERO else ZERO
                row = i * B_r + np.int64(e // u32(pieces))
                col = np.int64(e % u32(pieces)) * SHARE
                if row < N_q:
                    for k in range(SHARE):
                        out[k] = from_acc(o[s * SHARE + k] * inverse)
                    for k in range(0, SHARE, store_width):
                        store_O(O, (b, h, row, col + k), out, k)
        for r in range(R_r):
            row = row_0 + r * n_r
            if tid == lr * u32(n_c) and row < N_q:
                l = ZERO
                for w in range(warps):
                    l += M[u32(w), lr + u32(r * n_r)]
                L[b, h, row] = m_i[r] + log(l) if l != ZERO else NEG_INF
        mark(clock, ticks, EPILOGUE)
        finish(clock, ticks)

    return hbm.jit(split_keys, "split_keys", threads), shared_bytes


def launch(problem: Problem, A: Operands) -> None:
    """Run on the operands `A` of `problem`, which is one of method "fa2"."""
    p = problem
    kernel, shared_bytes = build(p.tiling, p.d, p.dtype, p.mask.rule, p.load_width, p.store_width)
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
        A.shared("split_keys", TILES),
        A.clock("split_keys", PHASES, blocks, p.tiling.threads),
    )
