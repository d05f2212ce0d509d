"""FlashAttention-3, forward: Shah et al. (2024), arXiv:2407.08608, on Hopper's tensor cores.

Grid       a block an SM, which takes row tiles (i, h, b) in turns, the longest first.
HBM        reads Q_i once, K_j and V_j for every visited tile j, in boxes that the hardware copies;
           writes O_i, for d up to 64 in boxes, too, and L_i once. Rows whose O is not finite are
           computed again at the end, key by key, so that a masked NaN does not reach them.
Shared     rings of Q_i (B_r x d), K_j and V_j (B_c x d); the barriers that say which are there; for
           d up to 64 O_i (B_r x d) on its way to memory.
Registers  a consumer's thread: its part of 64 rows of S_ij, of P_ij (16 bits) and of O_i (acc).

The first warpgroup only copies: the producer. Each of the others, the consumers, has 64 of the rows
of each row tile. A step takes one tile (i, j): S = Q_i K_j^T and, of the step before, O += P V run
on the tensor cores; then P is the softmax of S. The order hides the softmax twice:

* behind the products of another consumer: they take turns at starting theirs (section 3.1);
* behind O += P V of this one, which still runs then (section 3.2, Algorithm 2).

Steps follow each other through all row tiles of a block: the first S of a row tile runs beside the
last P V of the one before, and no unit waits for the start or the end of a row tile.
"""

import math
from typing import Any

import numpy as np
from numba import cuda, float32, uint32

from fa2_numba import cache, hbm, ptx
from fa2_numba.formats import FORMATS, LOG2_E
from fa2_numba.launch import Operands, processors
from fa2_numba.masking import FULL, UNCHANGED, tile_functions
from fa2_numba.problem import Problem
from fa2_numba.smem import shared_tile
from fa2_numba.tile import u32
from fa2_numba.tiling import BOX_COLUMNS, CONSUMER_REGISTERS, HOPPER_INFO, Tiling
from fa2_numba.tiling import WARPGROUP_ROWS as ROWS
from fa2_numba.warpgroup import (
    NEG_INF,
    ONE,
    SECTION,
    THREADS,
    ZERO,
    across,
    along,
    box_writer,
    first_row,
    nth_tile,
    online_softmax,
    output_writer,
    pass_turn,
    places,
    rescaler,
    row_recomputer,
    score_finisher,
    take_turn,
    tile_writer,
    waiter,
    zero_times,
)

PRODUCER_REGISTERS = {2: 40, 3: 32}  # of a thread, by how many consumers there are
# What the producer tells the consumers of a row tile: its first row, head, batch, the range of j,
# the first full tile and the number of full tiles.
FIRST_ROW, HEAD, BATCH, J_BEGIN, J_END, FULL_BEGIN, FULL_TILES, FIELDS = range(8)
LAST = -1  # as J_END: there is no further row tile
FLOAT32_MAX = float(np.finfo(np.float32).max)


@cache.built
def build(
    tiling: Tiling,
    d: int,
    dtype: str,
    rule: Any,
    change: Any,
    scaled: bool,
    store_width: int,
    store_boxes: bool,
) -> tuple[Any, int]:
    """The kernel for one tiling, head dimension, dtype, mask rule and score change.

    Parameters
    ----------
    tiling : Tiling
        B_r is 128 or 192, B_c a multiple of 16.
    d : int
        Head dimension, 1..256.
    dtype : str
        "fp16" or "bf16".
    rule, change
        Compiled part of a `masking.Mask` and a `masking.Score`.
    scaled : bool
        Whether scores are scaled one by one, as a scale that is not positive needs; else the
        scale is part of the exponential.
    store_width : int
        Elements per store of O: 8, or 1 where an address or stride is not aligned.
    store_boxes : bool
        Whether the copy unit stores O instead, which it can for d up to 64.

    Returns
    -------
    kernel : dispatcher
        ``fa3(Q_boxes, K_boxes, V_boxes, O_out, Q, K, V, O, L, section_heads, scale, range_args,
        mask_args, score_args)``. O_out is O's boxes, or O.
    shared_bytes : int
        Dynamic shared memory of a block.
    """
    B_r, B_c = tiling.B_r, tiling.B_c
    consumers = B_r // ROWS
    threads = THREADS * (1 + consumers)
    boxes, width = -(-d // BOX_COLUMNS), -(-d // 16) * 16  # of a row of d; d as products take it
    q_box, k_box = ROWS * ptx.ROW_BYTES, B_c * ptx.ROW_BYTES
    in_S, in_P, in_O = B_c // 2, B_c // 4, width // 2  # registers of a thread
    fmt = FORMATS[dtype]

    # Rings: steps and row tiles take the next place, and go round.
    rings, shared_bytes = tiling.hopper_layout(d)
    q_stages, kv_stages = rings["Q"].places // consumers, rings["K"].places

    def ring(name):
        return places(rings[name])

    q_at, k_at, v_at = ring("Q"), ring("K"), ring("V")
    q_full, q_empty = ring("Q full"), ring("Q empty")
    k_full, k_empty = ring("K full"), ring("K empty")
    v_full, v_empty = ring("V full"), ring("V empty")
    wait_K, wait_V = waiter(rings["K full"]), waiter(rings["V full"])
    infos = HOPPER_INFO // (4 * FIELDS)
    # The producer writes of a row tile before the Q of one may be replaced: q_stages of them may be
    # unread then.
    assert infos > q_stages
    info_tile = shared_tile(infos, FIELDS, np.int32, rings["info"].start)

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
    fence_S, fence_O_P = ptx.wgmma_fence(in_S), ptx.wgmma_fence(in_O, in_P)
    fence = ptx.wgmma_fence(in_S, in_O, in_P)
    wait_first_S, wait_S = (ptx.wgmma_wait_group(pending, in_S) for pending in (0, 1))
    wait_O = ptx.wgmma_wait_group(0, in_O, in_P, in_S)
    wait_last_O = ptx.wgmma_wait_group(0, in_O, in_P)
    give_back_registers = ptx.setmaxnreg_dec(PRODUCER_REGISTERS[consumers])
    take_registers = ptx.setmaxnreg_inc(CONSUMER_REGISTERS[consumers])

    tile_range, tile_kind, _ = tile_functions(rule, B_r, B_c, hbm.device)
    prepare, _ = change.functions(hbm.device, np.float32)
    elementwise, plain = rule.elementwise, change is UNCHANGED and not scaled
    change_scores, mask_scores = score_finisher(B_c, B_c, rule, change)
    # With d this small a step's exponentials take as long as its products: let P V run beside most.
    late = d <= 64
    begin_softmax, finish_softmax = online_softmax(B_c, dtype, late)
    if store_boxes:
        write = output_writer(box_writer(width, dtype, rings["O"]))
    else:
        write = output_writer(tile_writer(d, width, dtype, store_width))
    rescale, wait_stores = rescaler(width), ptx.cp_async_bulk_wait_group(0)
    zero_of, recompute = zero_times(width), row_recomputer(d, rule, change, fmt)
    load_Q, load_KV = (hbm.box_loader(boxes, rows, BOX_COLUMNS) for rows in (ROWS, B_c))

    # ---- which row tiles, which tiles of theirs -------------------------------------------------

    @hbm.device
    def row_tile(n, T_r, H, B, section):
        """The block's n-th row tile: its number, i, h, b.

        `section` heads after each other share their K and V in L2; of a section, the last rows of
        all its heads come first: under a causal mask they are the longest.
        """
        block, blocks = u32(cuda.blockIdx.x), u32(cuda.gridDim.x)
        number, tile, head = nth_tile(n, block, blocks, T_r, u32(H * B), section)
        return number, u32(T_r - u32(1) - tile), u32(head % H), u32(head // H)

    @hbm.device
    def visited(range_args, b, h, i, N_q, N_k):
        """Key tiles of row tile i: first, end, first full one, number of full ones.

        Never none: rows that see no key have one tile, too, masked.
        """
        j_begin, j_end, lo_last, hi_first = tile_range(range_args, b, h, i, N_q, N_k)
        if j_begin >= j_end:
            return np.int32(0), np.int32(1), np.int32(0), np.int32(0)
        full_begin = (lo_last + B_c - 1) // B_c
        full_tiles = max(hi_first // B_c - full_begin, 0)
        return np.int32(j_begin), np.int32(j_end), np.int32(full_begin), np.int32(full_tiles)

    @hbm.device
    def is_partial(mask_args, b, h, row, j, full_begin, full_tiles, N_q, N_k):
        """Whether some row of the tile does not see some key of it."""
        outside = u32(j - full_begin) >= u32(full_tiles)
        if elementwise:
            i = row // np.int32(B_r)
            return outside or tile_kind(mask_args, b, h, i, j, 0, N_k, N_q, N_k) != FULL
        return outside

    # ---- the producer ---------------------------------------------------------------------------

    @hbm.device
    def copy_Q(Q, n, first, h, b):
        """Row tile n's Q_i, 64 rows for each consumer as soon as it is done with what was there."""
        for g in range(consumers):
            slot = u32(n % u32(q_stages) * u32(consumers) + u32(g))
            ptx.mbarrier_try_wait_parity(q_empty(slot), n // u32(q_stages) & u32(1) ^ u32(1))
            ptx.mbarrier_arrive_expect_tx(q_full(slot), boxes * q_box)
            load_Q(Q, q_at(slot), q_full(slot), np.int32(first + np.int32(g * ROWS)), h, b)

    @hbm.device
    def copy_KV(A, at, full, empty, step, j, h, b):
        """K_j or V_j of a step, as soon as all consumers are done with what was there."""
        ptx.mbarrier_try_wait_parity(empty, step // u32(kv_stages) & u32(1) ^ u32(1))
        ptx.mbarrier_arrive_expect_tx(full, boxes * k_box)
        load_KV(A, at, full, np.int32(j * np.int32(B_c)), h, b)

    # ---- the consumers --------------------------------------------------------------------------

    @hbm.device
    def multiply(S, P, acc, slot, step, group):
        """Start S = Q K^T of this step and O += P V of the last; S is complete on return."""
        last = u32(step - u32(1))
        following = u32(1) if group == u32(consumers) else u32(group + u32(1))
        Q, K, V = across(q_at(slot)), across(k_at(step)), along(v_at(last), k_box)
        wait_K(step)
        if late:  # turns are short: nothing in them that can be before
            wait_V(last)
        take_turn(group)
        fence(S, acc, P)
        multiply_QK(S, Q, K, 0)
        ptx.wgmma_commit_group()
        if not late:
            wait_V(last)
        multiply_PV(acc, P, 0, V, 1)
        ptx.wgmma_commit_group()
        pass_turn(following)
        wait_S(S)

    @hbm.device
    def release(leader, step, is_last_of_Q, slot):
        """S is complete: K_j may be replaced, and after its last product Q_i."""
        if leader:
            ptx.mbarrier_arrive(k_empty(step))
            if is_last_of_Q:
                ptx.mbarrier_arrive(q_empty(slot))

    @hbm.device
    def finish_PV(S, P, acc, l, alpha, leader, step):
        """O += P V of the step before is complete: V may be replaced."""
        # ptxas would wait first of all. A branch on what the softmax made so far keeps it here.
        ptx.trap_if_negative(l[1] + alpha[0] if late else l[0] + alpha[1])
        wait_O(acc, P, S)
        if leader:
            ptx.mbarrier_arrive(v_empty(u32(step - u32(1))))

    @hbm.device
    def clear(acc):
        for k in range(in_O):
            acc[k] = ZERO

    # ---- the kernel -----------------------------------------------------------------------------

    def fa3(
        Q_boxes,
        K_boxes,
        V_boxes,
        O_out,
        Q,
        K,
        V,
        O,
        L,
        section_heads,
        scale,
        range_args,
        mask_args,
        score_args,
    ):
        B, H, N_q, N_k = u32(Q.shape[0]), u32(Q.shape[1]), Q.shape[2], K.shape[2]
        group_size = Q.shape[1] // K.shape[1]
        T_r = u32((N_q + B_r - 1) // B_r)
        row_tiles, section = u32(T_r * H * B), u32(section_heads)
        thread = u32(cuda.threadIdx.x)
        group = u32(ptx.shfl_idx(np.int32(thread // u32(THREADS)), 0))
        info = info_tile(None)

        if thread == u32(0):
            for slot in range(q_stages * consumers):
                ptx.mbarrier_init(q_full(u32(slot)), 1)
                ptx.mbarrier_init(q_empty(u32(slot)), 1)
            for stage in range(kv_stages):
                ptx.mbarrier_init(k_full(u32(stage)), 1)
                ptx.mbarrier_init(v_full(u32(stage)), 1)
                ptx.mbarrier_init(k_empty(u32(stage)), consumers)
                ptx.mbarrier_init(v_empty(u32(stage)), consumers)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # all see the barriers

        if group == u32(0):
            give_back_registers()
            warp = thread // u32(32)
            if warp < u32(3) and ptx.elect_sync():  # a warp each for Q, K and V
                hbm.use_boxes(Q_boxes)
                hbm.use_boxes(K_boxes)
                hbm.use_boxes(V_boxes)
                n = step = u32(0)
                while True:
                    tile, i, h, b = row_tile(n, T_r, H, B, section)
                    if tile >= row_tiles:
                        break
                    j_begin, j_end, full_begin, full_tiles = visited(range_args, b, h, i, N_q, N_k)
                    head, batch = np.int32(h), np.int32(b)
                    if warp == u32(0):
                        at, first = n % u32(infos), np.int32(i * u32(B_r))
                        info[at, FIRST_ROW], info[at, HEAD], info[at, BATCH] = first, head, batch
                        info[at, J_BEGIN], info[at, J_END] = j_begin, j_end
                        info[at, FULL_BEGIN], info[at, FULL_TILES] = full_begin, full_tiles
                        copy_Q(Q_boxes, n, first, head, batch)
                    else:
                        head = np.int32(h // u32(group_size))
                        j = j_end
                        while j > j_begin:
                            j = np.int32(j - np.int32(1))
                            if warp == u32(1):
                                at, full, empty = k_at(step), k_full(step), k_empty(step)
                                copy_KV(K_boxes, at, full, empty, step, j, head, batch)
                            else:
                                at, full, empty = v_at(step), v_full(step), v_empty(step)
                                copy_KV(V_boxes, at, full, empty, step, j, head, batch)
                            step = u32(step + u32(1))
                    n = u32(n + u32(1))
                if warp == u32(0):
                    info[n % u32(infos), J_END] = np.int32(LAST)
                    for g in range(consumers):
                        slot = u32(n % u32(q_stages) * u32(consumers) + u32(g))
                        phase = n // u32(q_stages) & u32(1)
                        ptx.mbarrier_try_wait_parity(q_empty(slot), phase ^ u32(1))
                        ptx.mbarrier_arrive(q_full(slot))
        else:
            take_registers()
            S = cuda.local.array(in_S, float32)
            P = cuda.local.array(in_P, uint32)
            acc = cuda.local.array(in_O, float32)
            m, m_done = cuda.local.array(2, float32), cuda.local.array(2, float32)
            l, l_done = cuda.local.array(2, float32), cuda.local.array(2, float32)
            alpha, shift = cuda.local.array(2, float32), cuda.local.array(2, float32)
            me = u32(group - u32(1))
            leader = thread % u32(THREADS) == u32(0)
            speaker = u32(cuda.laneid) == u32(0)  # asks for its warp's stores
            if store_boxes:
                if speaker:
                    hbm.use_boxes(O_out)
            my_row = np.int32(u32(me * u32(ROWS)) + first_row(thread))
            my_column = np.int64(u32(2) * (thread % u32(4)))
            c, of_m = (scale * LOG2_E, scale) if plain else (LOG2_E, ONE)
            leaked = ZERO  # NaN if an O is not finite: V may be so where it is masked
            n = step = u32(0)

            # The first S has no P V beside it.
            slot = me
            ptx.mbarrier_try_wait_parity(q_full(slot), 0)
            h, b = info[n, HEAD], info[n, BATCH]
            row = np.int32(info[n, FIRST_ROW] + my_row)
            j_begin, j = info[n, J_BEGIN], np.int32(info[n, J_END] - np.int32(1))
            full_begin, full_tiles = info[n, FULL_BEGIN], info[n, FULL_TILES]
            wait_K(step)
            fence_S(S)
            multiply_QK(S, across(q_at(slot)), across(k_at(step)), 0)
            ptx.wgmma_commit_group()
            if group == u32(consumers):
                pass_turn(1)  # the first turn is the first consumer's
            wait_first_S(S)
            release(leader, step, j == j_begin, slot)
            column = np.int64(j) * B_c + my_column
            if not plain:
                state = prepare(score_args, b, h)
                change_scores(S, state, scale, np.int64(row) + N_k - N_q, column)
            if is_partial(mask_args, b, h, row, j, full_begin, full_tiles, N_q, N_k):
                mask_scores(S, mask_args, b, h, np.int64(row), column, N_q, N_k)
            m[0], m[1], l[0], l[1] = NEG_INF, NEG_INF, ZERO, ZERO
            begin_softmax(S, m, l, alpha, shift, c)
            finish_softmax(S, P, l, shift, c)
            clear(acc)

            while True:
                row_done, h_done, b_done = row, h, b
                new_tile = j == j_begin  # this step is the first of a new row tile
                if new_tile:
                    n = u32(n + u32(1))
                    slot = u32(n % u32(q_stages) * u32(consumers) + me)
                    ptx.mbarrier_try_wait_parity(q_full(slot), n // u32(q_stages) & u32(1))
                    at = n % u32(infos)
                    j_end = info[at, J_END]
                    if j_end == np.int32(LAST):
                        break
                    h, b = info[at, HEAD], info[at, BATCH]
                    row = np.int32(info[at, FIRST_ROW] + my_row)
                    j_begin, j = info[at, J_BEGIN], j_end
                    full_begin, full_tiles = info[at, FULL_BEGIN], info[at, FULL_TILES]
                j = np.int32(j - np.int32(1))
                step = u32(step + u32(1))
                multiply(S, P, acc, slot, step, group)
                release(leader, step, j == j_begin, slot)
                column = np.int64(j) * B_c + my_column
                if not plain:
                    state = prepare(score_args, b, h)
                    change_scores(S, state, scale, np.int64(row) + N_k - N_q, column)
                if is_partial(mask_args, b, h, row, j, full_begin, full_tiles, N_q, N_k):
                    mask_scores(S, mask_args, b, h, np.int64(row), column, N_q, N_k)
                if new_tile:
                    for r in range(2):
                        m_done[r], l_done[r], m[r], l[r] = m[r], l[r], NEG_INF, ZERO
                changed = begin_softmax(S, m, l, alpha, shift, c)
                finish_PV(S, P, acc, l, alpha, leader, step)
                if new_tile:
                    leaked += zero_of(acc)
                    write(
                        O_out,
                        L,
                        acc,
                        m_done,
                        l_done,
                        of_m,
                        np.int64(b_done),
                        np.int64(h_done),
                        np.int64(row_done),
                        N_q,
                    )
                    clear(acc)
                elif ptx.vote_any(changed):
                    rescale(acc, alpha)
                finish_softmax(S, P, l, shift, c)

                if plain and not elementwise:
                    # Full tiles of the same rows: the same step without what they do not need.
                    while j > j_begin and u32(j - np.int32(1) - full_begin) < u32(full_tiles):
                        j = np.int32(j - np.int32(1))
                        step = u32(step + u32(1))
                        multiply(S, P, acc, slot, step, group)
                        release(leader, step, j == j_begin, slot)
                        changed = begin_softmax(S, m, l, alpha, shift, c)
                        finish_PV(S, P, acc, l, alpha, leader, step)
                        if ptx.vote_any(changed):
                            rescale(acc, alpha)
                        finish_softmax(S, P, l, shift, c)

            # The last P V has no S beside it.
            wait_V(step)
            fence_O_P(acc, P)
            multiply_PV(acc, P, 0, along(v_at(step), k_box), 1)
            ptx.wgmma_commit_group()
            wait_last_O(acc, P)
            leaked += zero_of(acc)
            write(O_out, L, acc, m, l, of_m, np.int64(b), np.int64(h), np.int64(row), N_q)
            if group == u32(1):
                take_turn(1)  # the last turn that was handed on; nobody takes it
            if store_boxes and speaker:
                wait_stores()  # a block ends after all were read, and rows of them may be read here
            if ptx.vote_any(leaked != ZERO):
                cuda.syncwarp()  # all its lanes see the warp's stores of O
                L_again = hbm.phase(L, 1)
                first_of_warp = np.int64(my_row) - np.int64(cuda.laneid) // 4
                n = u32(0)
                while True:
                    tile, i, h_q, b_q = row_tile(n, T_r, H, B, section)
                    if tile >= row_tiles:
                        break
                    recompute(
                        Q,
                        K,
                        V,
                        O,
                        L_again,
                        scale,
                        mask_args,
                        prepare(score_args, b_q, h_q),
                        np.int64(b_q),
                        np.int64(h_q),
                        np.int64(h_q) // group_size,
                        np.int64(i) * B_r + first_of_warp,
                        N_q,
                        N_k,
                    )
                    n = u32(n + u32(1))

    return hbm.jit(fa3, "fa3", threads), shared_bytes


def launch(problem: Problem, A: Operands) -> None:
    """Run FlashAttention-3 on the operands `A` of `problem`."""
    p, t = problem, problem.tiling
    if not p.B * p.H * p.N_q:
        return
    kernel, shared_bytes = build(
        t,
        p.d,
        p.dtype,
        p.mask.rule,
        p.score.change,
        not 0 < float(A.scale) * math.log2(math.e) <= FLOAT32_MAX,
        p.fa3_store_width,
        p.fa3_stores_boxes,
    )
    O_box = (1, 1, 16, BOX_COLUMNS)  # of a warp
    heads = p.H * p.B
    row_tiles = t.T_r(p.N_q) * heads
    A.run(
        kernel,
        min(row_tiles, processors(A.device)),
        THREADS + t.threads,
        shared_bytes,
        A.boxes("Q", (1, 1, ROWS, BOX_COLUMNS), "load Q_i"),
        A.boxes("K", (1, 1, t.B_c, BOX_COLUMNS), "load K_j, V_j"),
        A.boxes("V", (1, 1, t.B_c, BOX_COLUMNS), "load K_j, V_j"),
        A.boxes("O", O_box, "epilogue") if p.fa3_stores_boxes else A.array("O", "epilogue"),
        A.array("Q", "recompute"),
        A.array("K", "recompute"),
        A.array("V", "recompute"),
        A.array("O", "recompute"),
        A.array("L", "epilogue", "recompute"),
        min(SECTION, heads) if p.mask.rule.bounded else 1,
        A.scale,
        A.mask_args("tile range"),
        A.mask_args("mask"),
        A.score_args("score"),
    )
