"""FlashAttention-3, forward: Shah et al. (2024), arXiv:2407.08608, for Hopper's tensor cores.

Grid       one block an SM; it takes row tiles (i, h, b) in turns, the longest first.
HBM        reads Q_i once, K_j and V_j for every visited tile j; writes O_i and L_i once.
Shared     Q_i (B_r x d), `STAGES` of K_j and of V_j (B_c x d), in boxes of 64 columns.
Registers  a consumer warpgroup: 64 rows of S_ij, of P_ij (16 bits) and of O_i (acc), m_i and l_i.

One warp of the first warpgroup only copies (the producer); the others (consumers) multiply. A
consumer's steps are one stream, in which the tiles of the next row tile follow those of the last:
in each step S = Q K^T of the step's tile and O += P V of the tile before run on the tensor cores,
then the softmax of S, while another consumer's products run (section 3.1), and while P V of this
one still runs (section 3.2, Algorithm 2).
"""

from typing import Any

import numpy as np
from numba import cuda, float32, uint32

from fa2_numba import cache, hbm, ptx
from fa2_numba.formats import LOG2_E
from fa2_numba.masking import FULL, UNCHANGED, tile_functions
from fa2_numba.smem import shared_tile
from fa2_numba.tile import u32
from fa2_numba.tiling import Tiling
from fa2_numba.warpgroup import (
    NEG_INF,
    ONE,
    ROWS,
    WARPGROUP,
    ZERO,
    first_row,
    online_softmax,
    output_writer,
    rescaler,
    score_finisher,
)

BOX = 64  # columns of a box
# What the producer tells the consumers of a row tile, in a ring of as many.
INFO, INFO_TILES = 8, 4
FIRST_ROW, HEAD, BATCH, J_BEGIN, J_END, FULL_BEGIN, FULL_TILES = range(7)
REGISTERS = {2: (40, 232), 3: (32, 160)}  # of a producer's and a consumer's thread


@cache.built
def build(
    tiling: Tiling,
    d: int,
    dtype: str,
    rule: Any,
    change: Any,
    store_width: int,
    turns: bool = True,
    stages: int = 2,
    q_stages: int = 2,
    rescaling: str = "lazy",
    maxima_first: bool = False,
    mid: bool = True,
) -> tuple[Any, int]:
    B_r, B_c = tiling.B_r, tiling.B_c
    STAGES = stages
    groups = B_r // ROWS
    threads = WARPGROUP * (groups + 1)
    width = -(-d // 16) * 16  # k of Q K^T, n of P V
    boxes = -(-d // BOX)
    q_box, k_box = ROWS * ptx.ROW_BYTES, B_c * ptx.ROW_BYTES
    q_bytes, k_bytes = boxes * q_box, boxes * k_box  # of a consumer's Q, of a K_j
    k_start = q_stages * groups * q_bytes
    v_start = k_start + STAGES * k_bytes
    q_full = v_start + STAGES * k_bytes
    q_empty = q_full + 8 * q_stages * groups
    k_full = q_empty + 8 * q_stages * groups
    k_empty, v_full, v_empty = (k_full + 8 * STAGES * n for n in (1, 2, 3))
    info_start = -(-(k_full + 8 * STAGES * 4) // 16) * 16
    shared_bytes = info_start + 4 * INFO_TILES * INFO
    info_tile = shared_tile(INFO_TILES, INFO, np.int32, info_start)

    in_S, in_P, in_O = B_c // 2, B_c // 4, width // 2  # registers
    multiply_QK = ptx.wgmma_mma_async(
        B_c, dtype, ptx.k_major_steps(width, q_box), ptx.k_major_steps(width, k_box)
    )
    multiply_PV = ptx.wgmma_mma_async(
        width,
        dtype,
        tuple(range(0, in_P, 4)),
        ptx.mn_major_steps(B_c),
        a_in_registers=True,
        transpose_b=True,
    )
    fence_S, fence = ptx.wgmma_fence(in_S), ptx.wgmma_fence(in_S, in_O, in_P)
    wait_S, wait_first_S = ptx.wgmma_wait_group(1, in_S), ptx.wgmma_wait_group(0, in_S)
    wait_O = ptx.wgmma_wait_group(0, in_O, in_P, in_S)
    wait_last_O = ptx.wgmma_wait_group(0, in_O, in_P)
    fence_O_P = ptx.wgmma_fence(in_O, in_P)
    fewer, more = (
        f(n) for f, n in zip((ptx.setmaxnreg_dec, ptx.setmaxnreg_inc), REGISTERS[groups])
    )

    tile_range, tile_kind, _ = tile_functions(rule, B_r, B_c, hbm.device)
    prepare, _ = change.functions(hbm.device, np.float32)
    always = rescaling == "always"
    plain, elementwise = change is UNCHANGED, rule.elementwise
    change_scores, mask_scores = score_finisher(B_c, B_c, rule, change)
    begin_softmax, finish_softmax = online_softmax(B_c, dtype, rescaling == "lazy", maxima_first)
    rescale = rescaler(width)
    write = output_writer(d, width, dtype, store_width)

    @hbm.device
    def row_tile(n, T_r, H, B, section):
        """The block's n-th row tile: its number, i, h, b."""
        block, blocks = u32(cuda.blockIdx.x), u32(cuda.gridDim.x)
        # Every second round goes backwards: a block that got a long one then gets a short one.
        turn = blocks - u32(1) - block if n & u32(1) else block
        tile = u32(n * blocks + turn)
        first_head = u32(tile // u32(section * T_r) * section)
        within = u32(tile - first_head * T_r)
        heads = min(section, u32(H * B - first_head))
        head = u32(first_head + within % heads)
        return tile, u32(T_r - u32(1) - within // heads), u32(head % H), u32(head // H)

    @hbm.device
    def visited(range_args, b, h, i, N_q, N_k):
        """Key tiles of row tile i: first, end, first full one, number of full ones.

        Never none: rows that see no key have one tile, too, masked.
        """
        j_begin, j_end, lo_last, hi_first = tile_range(range_args, b, h, i, N_q, N_k)
        if j_begin >= j_end:
            return np.int32(0), np.int32(1), np.int32(0), u32(0)
        full_begin = (lo_last + B_c - 1) // B_c
        full = max(hi_first // B_c - full_begin, 0)
        return np.int32(j_begin), np.int32(j_end), np.int32(full_begin), u32(full)

    @hbm.device
    def is_partial(mask_args, b, h, i, j, full_begin, full, N_q, N_k):
        """Whether some row of tile (i, j) does not see some key of it."""
        outside = u32(j - full_begin) >= full
        if elementwise:
            return outside or tile_kind(mask_args, b, h, i, j, 0, N_k, N_q, N_k) != FULL
        return outside

    def loader(rows):
        size = rows * ptx.ROW_BYTES

        @hbm.device
        def load(tensor, at, full, row, head, batch):
            ptx.mbarrier_arrive_expect_tx(full, boxes * size)
            for c in range(boxes):
                ptx.cp_async_bulk_tensor_4d_load(
                    at + u32(c * size), tensor, BOX * c, row, head, batch, full
                )

        return load

    load_Q, load_KV = loader(ROWS), loader(B_c)

    def slot(start, count, size):
        """Where the slot of a step is: a ring of `count` slots of `size` bytes."""

        @hbm.device
        def address(step):
            return ptx.smem_address(u32(start) + step % u32(count) * u32(size))

        return address

    q_full_of, q_empty_of = slot(q_full, q_stages * groups, 8), slot(q_empty, q_stages * groups, 8)
    k_full_of, k_empty_of = slot(k_full, STAGES, 8), slot(k_empty, STAGES, 8)
    v_full_of, v_empty_of = slot(v_full, STAGES, 8), slot(v_empty, STAGES, 8)
    q_at, k_at = slot(0, q_stages * groups, q_bytes), slot(k_start, STAGES, k_bytes)
    v_at = slot(v_start, STAGES, k_bytes)

    @hbm.device
    def phase_of(step):
        return step // u32(STAGES) & u32(1)

    @hbm.device
    def q_place(q_slot):
        return ptx.matrix_descriptor(q_at(q_slot), 0, ptx.PATTERN_BYTES)

    @hbm.device
    def k_place(step):
        return ptx.matrix_descriptor(k_at(step), 0, ptx.PATTERN_BYTES)

    @hbm.device
    def v_place(step):
        return ptx.matrix_descriptor(v_at(step), k_box, ptx.PATTERN_BYTES)

    @hbm.device
    def multiply(S, P, acc, q_slot, step, group):
        """S = Q K^T of this step and O += P V of the last, begun; S is complete."""
        last = u32(step - u32(1))
        ptx.mbarrier_try_wait_parity(k_full_of(step), phase_of(step))
        if turns:
            ptx.bar_sync(group, 2 * WARPGROUP)
        fence(S, acc, P)
        multiply_QK(S, q_place(q_slot), k_place(step), 0)
        ptx.wgmma_commit_group()
        ptx.mbarrier_try_wait_parity(v_full_of(last), phase_of(last))
        multiply_PV(acc, P, 0, v_place(last), 1)
        ptx.wgmma_commit_group()
        if turns:
            ptx.bar_arrive(u32(1) if group == u32(groups) else u32(group + u32(1)), 2 * WARPGROUP)
        wait_S(S)

    @hbm.device
    def clear(acc):
        for k in range(in_O):
            acc[k] = ZERO

    def fa3(
        Q, K, V, O, L, N_k, group_size, section_heads, scale, range_args, mask_args, score_args
    ):
        N_q = O.shape[2]
        H, B = u32(O.shape[1]), u32(O.shape[0])
        T_r = u32((N_q + B_r - 1) // B_r)
        tiles, section = u32(T_r * H * B), u32(section_heads)
        thread = u32(cuda.threadIdx.x)
        group = u32(cuda.shfl_sync(0xFFFFFFFF, np.int32(thread // u32(WARPGROUP)), 0))
        info = info_tile(None)

        if thread == u32(0):
            for g in range(q_stages * groups):
                ptx.mbarrier_init(ptx.smem_address(u32(q_full + 8 * g)), 1)
                ptx.mbarrier_init(ptx.smem_address(u32(q_empty + 8 * g)), 1)
            for s in range(STAGES):
                ptx.mbarrier_init(ptx.smem_address(u32(k_full + 8 * s)), 1)
                ptx.mbarrier_init(ptx.smem_address(u32(v_full + 8 * s)), 1)
                ptx.mbarrier_init(ptx.smem_address(u32(k_empty + 8 * s)), groups)
                ptx.mbarrier_init(ptx.smem_address(u32(v_empty + 8 * s)), groups)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # all see the barriers

        if group == u32(0):
            fewer()
            warp = thread // u32(32)
            if warp < u32(3) and ptx.elect_sync():  # warp 0 copies Q, warp 1 K, warp 2 V
                step = u32(0)
                n = u32(0)
                for tensor in (Q, K, V):
                    ptx.fence_proxy_tensormap(tensor)
                while True:
                    tile, i, h, b = row_tile(n, T_r, H, B, section)
                    if tile >= tiles:
                        break
                    batch = np.int32(b)
                    j_begin, j_end, full_begin, full_tiles = visited(range_args, b, h, i, N_q, N_k)
                    if warp == u32(0):
                        slot = n % u32(INFO_TILES)
                        info[slot, FIRST_ROW] = np.int32(i * u32(B_r))
                        info[slot, HEAD] = np.int32(h)
                        info[slot, BATCH] = batch
                        info[slot, J_BEGIN] = j_begin
                        info[slot, J_END] = j_end
                        info[slot, FULL_BEGIN] = full_begin
                        info[slot, FULL_TILES] = np.int32(full_tiles)
                        stage, phase = n % u32(q_stages), n // u32(q_stages) & u32(1)
                        for g in range(groups):
                            slot = u32(stage * u32(groups) + u32(g))
                            empty = ptx.smem_address(u32(q_empty) + u32(8) * slot)
                            ptx.mbarrier_try_wait_parity(empty, phase ^ u32(1))
                            row = np.int32(i * u32(B_r) + u32(g * ROWS))
                            full = ptx.smem_address(u32(q_full) + u32(8) * slot)
                            at = ptx.smem_address(slot * u32(q_bytes))
                            load_Q(Q, at, full, row, np.int32(h), batch)
                    else:
                        head = np.int32(h // u32(group_size))
                        j = j_end
                        while j > j_begin:
                            j = np.int32(j - np.int32(1))
                            stage, phase = step % u32(STAGES), step // u32(STAGES) & u32(1)
                            row = np.int32(j * np.int32(B_c))
                            if warp == u32(1):
                                empty = ptx.smem_address(u32(k_empty) + u32(8) * stage)
                                ptx.mbarrier_try_wait_parity(empty, phase ^ u32(1))
                                full = ptx.smem_address(u32(k_full) + u32(8) * stage)
                                at = ptx.smem_address(u32(k_start) + stage * u32(k_bytes))
                                load_KV(K, at, full, row, head, batch)
                            else:
                                empty = ptx.smem_address(u32(v_empty) + u32(8) * stage)
                                ptx.mbarrier_try_wait_parity(empty, phase ^ u32(1))
                                full = ptx.smem_address(u32(v_full) + u32(8) * stage)
                                at = ptx.smem_address(u32(v_start) + stage * u32(k_bytes))
                                load_KV(V, at, full, row, head, batch)
                            step = u32(step + u32(1))
                    n = u32(n + u32(1))
                if warp == u32(0):  # no further row tile
                    info[n % u32(INFO_TILES), J_END] = np.int32(-1)
                    stage, phase = n % u32(q_stages), n // u32(q_stages) & u32(1)
                    for g in range(groups):
                        slot = u32(stage * u32(groups) + u32(g))
                        empty = ptx.smem_address(u32(q_empty) + u32(8) * slot)
                        ptx.mbarrier_try_wait_parity(empty, phase ^ u32(1))
                        ptx.mbarrier_arrive(ptx.smem_address(u32(q_full) + u32(8) * slot))
        else:
            more()
            S = cuda.local.array(in_S, float32)
            P = cuda.local.array(in_P, uint32)
            acc = cuda.local.array(in_O, float32)
            m = cuda.local.array(2, float32)
            l = cuda.local.array(2, float32)
            alpha = cuda.local.array(2, float32)
            shift = cuda.local.array(2, float32)
            m_done = cuda.local.array(2, float32)
            l_done = cuda.local.array(2, float32)
            me = u32(group - u32(1))
            leader = thread % u32(WARPGROUP) == u32(0)
            my_row = np.int32(u32(me * u32(ROWS)) + first_row(thread))
            my_column = np.int32(u32(2) * (thread % u32(4)))
            c = scale * LOG2_E if plain else LOG2_E
            of_m = scale if plain else ONE
            n, step, q_slot = u32(0), u32(0), me

            # The first S has no P V beside it.
            ptx.mbarrier_try_wait_parity(q_full_of(q_slot), 0)
            h, b = info[u32(0), HEAD], info[u32(0), BATCH]
            row = np.int32(info[u32(0), FIRST_ROW] + my_row)
            j_begin, j = info[u32(0), J_BEGIN], np.int32(info[u32(0), J_END] - np.int32(1))
            full_begin, full_tiles = info[u32(0), FULL_BEGIN], u32(info[u32(0), FULL_TILES])
            state = prepare(score_args, b, h)
            ptx.mbarrier_try_wait_parity(k_full_of(step), 0)
            fence_S(S)
            multiply_QK(S, q_place(q_slot), k_place(step), 0)
            ptx.wgmma_commit_group()
            if turns and group == u32(groups):
                ptx.bar_arrive(1, 2 * WARPGROUP)  # the first turn is the first consumer's
            wait_first_S(S)
            if leader:
                ptx.mbarrier_arrive(k_empty_of(step))
                if j == j_begin:
                    ptx.mbarrier_arrive(q_empty_of(q_slot))
            column = np.int32(j * np.int32(B_c) + my_column)
            if not plain:
                change_scores(S, state, scale, np.int64(row) + N_k - N_q, np.int64(column))
            if is_partial(
                mask_args, b, h, row // np.int32(B_r), j, full_begin, full_tiles, N_q, N_k
            ):
                mask_scores(S, mask_args, b, h, np.int64(row), np.int64(column), N_q, N_k)
            for r in range(2):
                m[r] = NEG_INF
                l[r] = ZERO
            begin_softmax(S, m, l, alpha, shift, c)
            finish_softmax(S, P, l, shift, c)
            clear(acc)

            while True:
                first = j == j_begin  # what follows is a new row tile's first
                row_done, h_done, b_done = row, h, b
                if first:
                    n = u32(n + u32(1))
                    q_slot = u32(n % u32(q_stages) * u32(groups) + me)
                    ptx.mbarrier_try_wait_parity(q_full_of(q_slot), n // u32(q_stages) & u32(1))
                    at = n % u32(INFO_TILES)
                    j = np.int32(info[at, J_END] - np.int32(1))
                    if j < np.int32(0):
                        break
                    h, b = info[at, HEAD], info[at, BATCH]
                    row = np.int32(info[at, FIRST_ROW] + my_row)
                    j_begin = info[at, J_BEGIN]
                    full_begin, full_tiles = info[at, FULL_BEGIN], u32(info[at, FULL_TILES])
                    state = prepare(score_args, b, h)
                else:
                    j = np.int32(j - np.int32(1))
                step = u32(step + u32(1))
                multiply(S, P, acc, q_slot, step, group)
                if leader:
                    ptx.mbarrier_arrive(k_empty_of(step))
                    if j == j_begin:
                        ptx.mbarrier_arrive(q_empty_of(q_slot))
                column = np.int32(j * np.int32(B_c) + my_column)
                if not plain:
                    change_scores(S, state, scale, np.int64(row) + N_k - N_q, np.int64(column))
                if is_partial(
                    mask_args, b, h, row // np.int32(B_r), j, full_begin, full_tiles, N_q, N_k
                ):
                    mask_scores(S, mask_args, b, h, np.int64(row), np.int64(column), N_q, N_k)
                if first:
                    for r in range(2):
                        m_done[r] = m[r]
                        l_done[r] = l[r]
                        m[r] = NEG_INF
                        l[r] = ZERO
                changed = begin_softmax(S, m, l, alpha, shift, c)
                if not mid:
                    finish_softmax(S, P, l, shift, c)
                ptx.trap_if_negative(l[0] + alpha[1] if mid else l[0] + l[1])
                wait_O(acc, P, S)
                if leader:
                    ptx.mbarrier_arrive(v_empty_of(u32(step - u32(1))))
                if first:
                    write(O, L, acc, m_done, l_done, of_m, b_done, h_done, np.int64(row_done), N_q)
                    clear(acc)
                elif cuda.any_sync(0xFFFFFFFF, changed):
                    rescale(acc, alpha)
                finish_softmax(S, P, l, shift, c)

                # Full tiles of the same rows: the same without what they do not need.
                if plain and not elementwise:
                    while j > j_begin and u32(j - np.int32(1) - full_begin) < full_tiles:
                        j = np.int32(j - np.int32(1))
                        step = u32(step + u32(1))
                        multiply(S, P, acc, q_slot, step, group)
                        if leader:
                            ptx.mbarrier_arrive(k_empty_of(step))
                            if j == j_begin:
                                ptx.mbarrier_arrive(q_empty_of(q_slot))
                        changed = begin_softmax(S, m, l, alpha, shift, c)
                        if not mid:
                            finish_softmax(S, P, l, shift, c)
                        ptx.trap_if_negative(l[0] + alpha[1] if mid else l[0] + l[1])
                        wait_O(acc, P, S)
                        if leader:
                            ptx.mbarrier_arrive(v_empty_of(u32(step - u32(1))))
                        if always or cuda.any_sync(0xFFFFFFFF, changed):
                            rescale(acc, alpha)
                        finish_softmax(S, P, l, shift, c)

            ptx.mbarrier_try_wait_parity(v_full_of(step), phase_of(step))
            fence_O_P(acc, P)
            multiply_PV(acc, P, 0, v_place(step), 1)
            ptx.wgmma_commit_group()
            wait_last_O(acc, P)
            write(O, L, acc, m, l, of_m, b, h, np.int64(row), N_q)
            if turns and group == u32(1):
                ptx.bar_sync(1, 2 * WARPGROUP)  # the last consumer's last arrival

    return hbm.jit(fa3, "fa3", threads), shared_bytes
