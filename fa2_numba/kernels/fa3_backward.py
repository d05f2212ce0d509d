"""FlashAttention-3, backward, on Hopper's tensor cores, for d up to 128.

FlashAttention-2's Algorithm 2 (Dao 2023, arXiv:2307.08691) in the manner of Shah et al. (2024),
arXiv:2407.08608: copies, products and exponentials side by side.

Grid       a block for each key tile j of each key/value head of each batch, which goes through the
           query heads that read the tile and the row tiles i that see its keys. Last rows first:
           under a causal mask, blocks that start together then meet at the same Q_i, dO_i and dQ_i.
HBM        reads K_j and V_j once, Q_i and dO_i for each step, in boxes that the hardware copies,
           and L_i and D_i; adds dQ_i to what is there, a tile at a time; writes dK_j and dV_j once.
           Rows that are not finite are computed again at the end, pair by pair, so that a masked
           NaN does not reach them.
Shared     K_j, V_j (B_c x d); rings of Q_i, dO_i (B_r x d), L_i, D_i, dS_ij and of dQ_i (fp32); the
           barriers that say which are there.
Registers  a consumer's thread: its parts of 64 keys' S^T, dP^T, P^T and dS^T (16 bits), dK_j, dV_j,
           of dQ_i, and, for d up to 64, of K_j and V_j.

The first warpgroup is the producer: a warp each copies K_j and every Q_i; V_j and every dO_i; L_i
and D_i; and dQ_i to memory. Each of the other two, the consumers, has 64 of the keys. So
S^T = K_j Q_i^T and dP^T = V_j dO_i^T have keys in rows, and P^T and dS^T are what
dV_j += P^T dO_i and dK_j += dS^T Q_i take from registers. These are computed for 64 rows at a time;
a tile of d up to 64 has two such halves. dQ_i = dS K_j adds up over the keys of both consumers:
when both have put their dS_ij into shared memory, each of them computes 64 x 64 of dQ_i and puts it
there too; the whole tile is sent a step later. Beside the exponentials runs dP^T, beside dS runs
dV_j, beside the meeting dK_j, and beside putting dQ_i the next S^T and, for d up to 64, dP^T.

The consumers start S^T and dP^T in turns, which two named barriers hand on: so one's exponentials
run beside the other's products. Without turns both would wait for their S^T, and then for the unit
of exponentials, at the same time.

The deterministic form adds nothing to memory: dQ is left to `fa3_gradients`.
"""

from typing import Any

import numpy as np
from numba import cuda, float32, uint32

from fa2_numba import cache, hbm, ptx
from fa2_numba.formats import FORMATS, LOG2_E
from fa2_numba.launch import Operands
from fa2_numba.masking import UNCHANGED
from fa2_numba.problem import Problem
from fa2_numba.smem import shared_tile
from fa2_numba.tile import u32
from fa2_numba.tiling import BOX_COLUMNS, HOPPER_INFO, Tiling
from fa2_numba.tiling import WARPGROUP_ROWS as ROWS
from fa2_numba.warpgroup import (
    AHEAD,
    ONE,
    THREADS,
    ZERO,
    across,
    along,
    clearer,
    first_row,
    gradient_recomputer,
    hidden_finder,
    matrix_loader,
    partial_tiles,
    pass_turn,
    places,
    row_statistics,
    row_tiles_seeing,
    score_gradients,
    score_packer,
    take_turn,
    tile_of_block,
    tile_writer,
    transposed_storer,
    waiter,
    zero_times,
)

CONSUMERS = 2
# Registers of a thread of the producer and of a consumer. A consumer waits for its own until the
# producer has given back enough: together they may have 168 for each thread of the block.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 56, 224
# What the producer tells the consumers of a step.
ROW_TILE, HEAD, BATCH, KIND, FIELDS = range(5)
LAST, WHOLE, PARTIAL = range(-1, 2)  # as KIND: there is no further step; of the tile (i, j)
HEADS_IN_L2 = 8  # whose tiles go by length together, under a mask: what they add to stays in L2
MEETING = 3  # the named barrier at which both consumers meet; 1 and 2 hand on their turns


@cache.built
def build(
    tiling: Tiling, d: int, dtype: str, rule: Any, change: Any, store_width: int, adds_dQ: bool
) -> tuple[Any, int]:
    """The kernel for one head dimension, dtype, mask rule and score change.

    Parameters
    ----------
    tiling : Tiling
        B_r is 128 for d up to 64, else 64; B_c is 128.
    d : int
        Head dimension, 1..128.
    dtype : str
        "fp16" or "bf16".
    rule, change
        Compiled part of a `masking.Mask` and a `masking.Score`.
    store_width : int
        Elements per store of dK and dV: 8, or 1 where an address or stride is not aligned.
    adds_dQ : bool
        Whether it computes dQ.

    Returns
    -------
    kernel : dispatcher
        ``fa3_backward(Q_boxes, K_boxes, V_boxes, dO_boxes, Q, K, V, dO, L, D, dQ_acc, dK, dV,
        section_heads, scale, range_args, mask_args, score_args)``.
    shared_bytes : int
        Dynamic shared memory of a block.
    """
    B_r, B_c = tiling.B_r, tiling.B_c
    threads = THREADS * (1 + CONSUMERS)
    boxes, width = -(-d // BOX_COLUMNS), -(-d // 16) * 16  # of a row of d; d as products take it
    halves = B_r // ROWS
    assert halves * boxes == 2, "the consumers share dQ_i by its rows or by its columns"
    row_box, key_box, half_box = (rows * ptx.ROW_BYTES for rows in (B_r, B_c, ROWS))
    in_S, in_P, in_dK, in_dQ = ROWS // 2, ROWS // 4, width // 2, BOX_COLUMNS // 2  # of a thread
    holds = boxes == 1  # K_j and V_j in registers, too
    in_K = width // 4 if holds else 1
    of_lane = B_r // 32  # rows whose L and D a lane moves
    fmt = FORMATS[dtype]
    registers = PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS
    assert registers <= (1 + CONSUMERS) * (65_536 // threads // 8 * 8), (
        "a block would wait for ever"
    )

    rings, shared_bytes = tiling.hopper_backward_layout(d)
    stages = rings["Q"].places  # those of dO and dQ, too

    def ring(name):
        return places(rings[name])

    k_at, v_at, q_at, do_at, ds_at, dq_at = (ring(n) for n in ("K", "V", "Q", "dO", "dS", "dQ"))
    kv_full = ring("K, V full")
    q_full, q_empty = ring("Q full"), ring("Q empty")
    do_full, do_empty = ring("dO full"), ring("dO empty")
    dq_full, dq_empty = ring("dQ full"), ring("dQ empty")
    wait_Q, wait_dO, wait_dQ_full = (waiter(rings[f"{name} full"]) for name in ("Q", "dO", "dQ"))
    wait_Q_empty, wait_dO_empty, wait_dQ_empty = (
        waiter(rings[f"{name} empty"], True) for name in ("Q", "dO", "dQ")
    )
    l_at, l_tile = ring("L, D"), shared_tile(2 * stages, B_r, np.float32, rings["L, D"].start)
    infos = HOPPER_INFO // (4 * FIELDS)
    assert infos > stages  # a step reads its own, when the producer may be `stages` ahead
    info_tile = shared_tile(infos, FIELDS, np.int32, rings["info"].start)

    keys_steps = tuple(range(0, in_K, 4)) if holds else ptx.k_major_steps(width, key_box)
    rows_steps = ptx.k_major_steps(width, row_box)
    multiply_S = ptx.wgmma_mma_async(ROWS, dtype, keys_steps, rows_steps, a_in_registers=holds)
    multiply_dK = ptx.wgmma_mma_async(
        width,
        dtype,
        tuple(range(0, in_P, 4)),
        ptx.mn_major_steps(ROWS),
        a_in_registers=True,
        transpose_b=True,
    )
    multiply_dQ = ptx.wgmma_mma_async(
        BOX_COLUMNS,
        dtype,
        ptx.k_major_steps(B_c, row_box),
        ptx.mn_major_steps(B_c),
        transpose_b=True,
    )
    fence_K = ptx.wgmma_fence(in_K, in_K)
    fence_S, fence_dQ = ptx.wgmma_fence(in_S), ptx.wgmma_fence(in_dQ)
    fence_dK = ptx.wgmma_fence(in_dK, in_P)
    # S^T has dP^T behind it, and dV and dK of the half before come with it.
    wait_S = ptx.wgmma_wait_group(1, in_S, in_P, in_P)
    wait_dP = ptx.wgmma_wait_group(1, in_S, in_S)
    wait_scores = ptx.wgmma_wait_group(0, in_S, in_S, in_P, in_P)
    wait_products = ptx.wgmma_wait_group(0, in_dK, in_dK, in_P, in_P)
    wait_dQ = ptx.wgmma_wait_group(1 + holds, in_dQ)
    wait_last_dQ = ptx.wgmma_wait_group(0, in_dQ)
    wait_read = ptx.cp_async_bulk_wait_group_read(0)
    give_back_registers = ptx.setmaxnreg_dec(PRODUCER_REGISTERS)
    take_registers = ptx.setmaxnreg_inc(CONSUMER_REGISTERS)

    prepare, _ = change.functions(hbm.device, np.float32)
    plain = change is UNCHANGED
    seeing, is_partial = row_tiles_seeing(rule, B_r, B_c), partial_tiles(rule, B_r, B_c)
    find_hidden = hidden_finder(rule, keys_in_rows=True)
    fetch, make_P, make_dS, make_both = score_gradients(ROWS, True, change)
    round_scores, _ = score_packer(dtype)
    load_held = matrix_loader(width)
    store_dS, zero_of = transposed_storer(ROWS), zero_times(width)
    write = tile_writer(d, width, dtype, store_width)
    clear_S, clear_dQ, clear_dK = clearer(in_S), clearer(in_dQ), clearer(in_dK)
    fetch_rows, put_rows = row_statistics(B_r)
    load_rows, load_keys = (hbm.box_loader(boxes, rows, BOX_COLUMNS) for rows in (B_r, B_c))
    recompute_dK, recompute_dV = (
        gradient_recomputer(gradient, d, rule, change, fmt) for gradient in ("dK", "dV")
    )

    # ---- products -------------------------------------------------------------------------------

    @hbm.device
    def start_scores(S, held, keys, rows, me, half):
        """S^T from K_j and Q_i, or dP^T from V_j and dO_i, at these addresses or held."""
        B = across(u32(rows + half * u32(half_box)))
        clear_S(S)
        fence_S(S)
        if holds:
            multiply_S(S, held, 0, B, 0)
        else:
            multiply_S(S, across(keys + me * u32(half_box)), B, 0)
        ptx.wgmma_commit_group()

    @hbm.device
    def start_S(S, K_j, me, step, half):
        start_scores(S, K_j, k_at(u32(0)), q_at(step), me, half)

    @hbm.device
    def start_dP(dP, V_j, me, step, half):
        start_scores(dP, V_j, v_at(u32(0)), do_at(step), me, half)

    @hbm.device
    def start_both(S, dP, K_j, V_j, me, step, half):
        """S^T and dP^T, in my turn."""
        take_turn(u32(me + u32(1)))
        start_S(S, K_j, me, step, half)
        if half == u32(0):
            wait_dO(step)
        start_dP(dP, V_j, me, step, half)
        pass_turn(u32(u32(2) - me))

    @hbm.device
    def start_gradient(acc, P, rows, half):
        """dV_j += P^T dO_i, or dK_j += dS^T Q_i."""
        fence_dK(acc, P)
        multiply_dK(acc, P, 0, along(u32(rows + half * u32(half_box)), row_box), 1)
        ptx.wgmma_commit_group()

    @hbm.device
    def start_dQ(dQ, me, step):
        """64 x 64 of dQ: of two halves one, of one half a box of its columns."""
        A, B = ds_at(step), k_at(u32(0))
        if halves == 2:
            A = u32(A + me * u32(half_box))
        else:
            B = u32(B + me * u32(key_box))
        clear_dQ(dQ)
        fence_dQ(dQ)
        multiply_dQ(dQ, across(A), along(B, key_box), 0)
        ptx.wgmma_commit_group()

    # ---- dQ to memory ---------------------------------------------------------------------------

    @hbm.device
    def put_dQ(dQ, step, thread):
        """My part of a step's dQ to its place in shared memory, in the order of the registers."""
        of_two = u32(thread - u32(THREADS))
        warp, lane = of_two // u32(32), of_two % u32(32)
        wait_dQ_empty(step)
        place = u32(dq_at(step) + warp * u32(128 * in_dQ) + lane * u32(16))
        for n in range(0, in_dQ, 4):
            at = u32(place + u32(128 * n))
            ptx.st_shared_v4_f32(at, dQ[n], dQ[n + 1], dQ[n + 2], dQ[n + 3])

    @hbm.device
    def meet(step, thread):
        """Both have put their parts of dS_ij, and of the dQ of the step before, which can go."""
        ptx.fence_proxy_async()  # products see dS_ij, the hardware what was put
        ptx.bar_sync(MEETING, CONSUMERS * THREADS)
        if thread == u32(THREADS) and step > u32(0):
            ptx.mbarrier_arrive(dq_full(u32(step - u32(1))))

    @hbm.device
    def send_dQ(dQ_acc, b, h, i, step):
        """Add what was put to memory; its place is free when that was read."""
        index = (np.int64(b), np.int64(h), np.int64(i), np.int64(0))
        hbm.bulk_add(dQ_acc, index, dq_at(step), CONSUMERS * THREADS * in_dQ)
        wait_read()

    # ---- scores ---------------------------------------------------------------------------------

    @hbm.device
    def hidden_scores(mask_args, info, kind, step, half, key, column, N_q, N_k):
        """Which of my scores are masked: a bit for each."""
        hidden = u32(0)
        if ptx.vote_any(kind == np.int32(PARTIAL)):
            at = step % u32(infos)
            row = np.int64(info[at, ROW_TILE]) * B_r + np.int64(column + half * u32(ROWS))
            b, h = info[at, BATCH], info[at, HEAD]
            hidden = find_hidden(mask_args, b, h, row, np.int64(key), N_q, N_k)
        return u32(hidden)

    @hbm.device
    def L_of(step, half, column):
        return u32(l_at(step) + (column + half * u32(ROWS)) * u32(4))

    @hbm.device
    def D_of(step, half, column):
        return u32(L_of(step, half, column) + u32(4 * B_r))

    @hbm.device
    def change_both(S, dP, scale, score_args, info, step, half, key, column, N_q, N_k):
        """P and dS of scores that change."""
        at = step % u32(infos)
        state = prepare(score_args, info[at, BATCH], info[at, HEAD])
        row = np.int64(info[at, ROW_TILE]) * B_r + np.int64(column + half * u32(ROWS))
        L_at, D_at = L_of(step, half, column), D_of(step, half, column)
        make_both(S, dP, L_at, D_at, scale, state, row + N_k - N_q, np.int64(key))

    @hbm.device
    def half_step(
        S, dP, P, dS, dK, dV, kind, me, step, half, key, column, c,
        scale, mask_args, score_args, info, N_q, N_k, thread,
    ):  # fmt: skip
        """S^T and dP^T of 64 rows are in flight; then dV and dK are."""
        hidden = hidden_scores(mask_args, info, kind, step, half, key, column, N_q, N_k)
        ahead = cuda.local.array(AHEAD, float32)
        if plain:
            fetch(ahead, L_of(step, half, column))
            wait_S(S, P, dS)
            make_P(S, L_of(step, half, column), ahead, c)
        else:
            wait_scores(S, dP, P, dS)
            change_both(S, dP, scale, score_args, info, step, half, key, column, N_q, N_k)
        round_scores(S, P, hidden)
        start_gradient(dV, P, do_at(step), half)
        if plain:
            fetch(ahead, D_of(step, half, column))
            wait_dP(dP, S)
            make_dS(S, dP, D_of(step, half, column), ahead)
        round_scores(dP, dS, hidden)
        if adds_dQ:
            store_dS(dS, u32(ds_at(step) + me * u32(row_box) + half * u32(half_box)), thread)
        start_gradient(dK, dS, q_at(step), half)

    @hbm.device
    def finish_step(
        S, dP, P, dS, dK, dV, K_j, V_j, kind, me, step, key, column, c,
        scale, mask_args, score_args, info, N_q, N_k, thread, leader,
    ):  # fmt: skip
        """A step whose first S^T and dP^T are in flight: dV, dK and dS_ij. The kind of the next."""
        half_step(
            S, dP, P, dS, dK, dV, kind, me, step, u32(0), key, column, c,
            scale, mask_args, score_args, info, N_q, N_k, thread,
        )  # fmt: skip
        if halves == 2:
            start_both(S, dP, K_j, V_j, me, step, u32(1))
            half_step(
                S, dP, P, dS, dK, dV, kind, me, step, u32(1), key, column, c,
                scale, mask_args, score_args, info, N_q, N_k, thread,
            )  # fmt: skip
        if adds_dQ:
            meet(step, thread)
        then = u32(step + u32(1))
        wait_Q(then)
        kind = info[then % u32(infos), KIND]
        wait_products(dK, dV, P, dS)
        # Q_i, dO_i, L_i and D_i may be replaced. The consumer's other warps are no step behind: the
        # meeting keeps them together, or, without it, the products.
        if leader:
            ptx.mbarrier_arrive(do_empty(step))
            ptx.mbarrier_arrive(q_empty(step))
        return kind

    # ---- the kernel -----------------------------------------------------------------------------

    def fa3_backward(
        Q_boxes, K_boxes, V_boxes, dO_boxes, Q, K, V, dO, L, D, dQ_acc, dK_out, dV_out,
        section_heads, scale, range_args, mask_args, score_args,
    ):  # fmt: skip
        H_k, N_q, N_k = u32(K.shape[1]), Q.shape[2], K.shape[2]
        group_size = np.int32(u32(Q.shape[1]) // H_k)
        T_c = u32((N_k + B_c - 1) // B_c)
        # First keys first: under a causal mask most rows see them.
        tile, head = tile_of_block(
            u32(cuda.blockIdx.x), T_c, u32(H_k * u32(K.shape[0])), u32(section_heads)
        )
        j, h_k, b = np.int32(tile), np.int32(head % H_k), np.int32(head // H_k)
        thread = u32(cuda.threadIdx.x)
        group = u32(ptx.shfl_idx(np.int32(thread // u32(THREADS)), 0))

        if thread == u32(0):
            ptx.mbarrier_init(kv_full(u32(0)), 1)
            ptx.mbarrier_init(kv_full(u32(1)), 1)
            for stage in range(stages):
                ptx.mbarrier_init(q_full(u32(stage)), 1 + 32)  # Q_i; L_i, D_i, information
                ptx.mbarrier_init(do_full(u32(stage)), 1)
                ptx.mbarrier_init(q_empty(u32(stage)), CONSUMERS)
                ptx.mbarrier_init(do_empty(u32(stage)), CONSUMERS)
                ptx.mbarrier_init(dq_full(u32(stage)), 1)
                ptx.mbarrier_init(dq_empty(u32(stage)), 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # all see the barriers

        if group == u32(0):
            give_back_registers()
            warp, lane = thread // u32(32), u32(cuda.laneid)
            step = u32(0)
            if warp != u32(2):  # copies K_j and every Q_i; V_j and every dO_i; or sends every dQ_i
                elected = ptx.elect_sync()
                if elected and warp < u32(2):
                    hbm.use_boxes(Q_boxes)
                    hbm.use_boxes(K_boxes)
                    hbm.use_boxes(V_boxes)
                    hbm.use_boxes(dO_boxes)
                    key = np.int32(j * np.int32(B_c))
                    ptx.mbarrier_arrive_expect_tx(kv_full(warp), boxes * key_box)
                    if warp == u32(0):
                        load_keys(K_boxes, k_at(u32(0)), kv_full(u32(0)), key, h_k, b)
                    else:
                        load_keys(V_boxes, v_at(u32(0)), kv_full(u32(1)), key, h_k, b)
                for g in range(group_size):
                    h = np.int32(h_k * group_size + np.int32(g))
                    begin, i = seeing(range_args, b, h, j, N_q, N_k)
                    while i > begin:
                        i = np.int32(i - np.int32(1))
                        if elected:
                            row = np.int32(i * np.int32(B_r))
                            if warp == u32(0):
                                wait_Q_empty(step)
                                ptx.mbarrier_arrive_expect_tx(q_full(step), boxes * row_box)
                                load_rows(Q_boxes, q_at(step), q_full(step), row, h, b)
                            elif warp == u32(1):
                                wait_dO_empty(step)
                                ptx.mbarrier_arrive_expect_tx(do_full(step), boxes * row_box)
                                load_rows(dO_boxes, do_at(step), do_full(step), row, h, b)
                            elif adds_dQ:
                                wait_dQ_full(step)
                                send_dQ(dQ_acc, b, h, i, step)
                                ptx.mbarrier_arrive(dq_empty(step))
                        step = u32(step + u32(1))
            else:  # L_i and D_i, and what the consumers have to know
                L_D, info = l_tile(None), info_tile(None)
                l, D_i = cuda.local.array(of_lane, float32), cuda.local.array(of_lane, float32)
                for g in range(group_size):
                    h = np.int32(h_k * group_size + np.int32(g))
                    begin, i = seeing(range_args, b, h, j, N_q, N_k)
                    while i > begin:
                        i = np.int32(i - np.int32(1))
                        fetch_rows(L, D, b, h, np.int64(i) * B_r, N_q, l, D_i)
                        wait_Q_empty(step)
                        put_rows(L_D, u32(step % u32(stages) * u32(2)), l, D_i)
                        if lane == u32(0):
                            at = step % u32(infos)
                            info[at, ROW_TILE], info[at, HEAD], info[at, BATCH] = i, h, b
                            partial = is_partial(mask_args, b, h, i, j, N_q, N_k)
                            info[at, KIND] = np.int32(PARTIAL if partial else WHOLE)
                        ptx.mbarrier_arrive(q_full(step))  # each lane, of what it wrote
                        step = u32(step + u32(1))
                wait_Q_empty(step)
                if lane == u32(0):
                    info[step % u32(infos), KIND] = np.int32(LAST)
                    ptx.mbarrier_arrive(q_full(step))  # no Q_i comes
                ptx.mbarrier_arrive(q_full(step))
        else:
            take_registers()
            S, dP = cuda.local.array(in_S, float32), cuda.local.array(in_S, float32)
            P, dS = cuda.local.array(in_P, uint32), cuda.local.array(in_P, uint32)
            dQ = cuda.local.array(in_dQ, float32)
            K_j, V_j = cuda.local.array(in_K, uint32), cuda.local.array(in_K, uint32)
            dK, dV = cuda.local.array(in_dK, float32), cuda.local.array(in_dK, float32)
            clear_dK(dK)
            clear_dK(dV)
            me = u32(group - u32(1))
            leader = thread % u32(THREADS) == u32(0)
            my_key = np.int32(np.int32(j * np.int32(B_c)) + np.int32(me * u32(ROWS)))
            my_key = np.int32(my_key + np.int32(first_row(thread)))
            my_column = u32(2) * (thread % u32(4))
            c = scale * LOG2_E
            info = info_tile(None)
            step = u32(0)

            # Also where no step comes: no copy may outlive the block.
            ptx.mbarrier_try_wait_parity(kv_full(u32(0)), 0)
            ptx.mbarrier_try_wait_parity(kv_full(u32(1)), 0)
            wait_Q(step)
            kind = info[step, KIND]
            # A vote has one outcome for all lanes: so ptxas keeps `step` in a uniform register.
            if ptx.vote_any(kind != np.int32(LAST)):
                if holds:
                    load_held(K_j, u32(k_at(u32(0)) + me * u32(half_box)), thread)
                    load_held(V_j, u32(v_at(u32(0)) + me * u32(half_box)), thread)
                    fence_K(K_j, V_j)
                if group == u32(2):
                    pass_turn(1)  # the first turn is the first consumer's
                # The first step has no dQ of a step before beside it.
                start_both(S, dP, K_j, V_j, me, step, u32(0))
                kind = finish_step(
                    S, dP, P, dS, dK, dV, K_j, V_j, kind, me, step, my_key, my_column, c,
                    scale, mask_args, score_args, info, N_q, N_k, thread, leader,
                )  # fmt: skip
                step = u32(step + u32(1))

                while ptx.vote_any(kind != np.int32(LAST)):
                    if adds_dQ:
                        start_dQ(dQ, me, u32(step - u32(1)))
                    if holds:
                        start_both(S, dP, K_j, V_j, me, step, u32(0))
                    else:
                        take_turn(group)
                        start_S(S, K_j, me, step, u32(0))
                    if adds_dQ:
                        wait_dQ(dQ)
                        put_dQ(dQ, u32(step - u32(1)), thread)
                    if not holds:  # no registers for dP before
                        wait_dO(step)
                        start_dP(dP, V_j, me, step, u32(0))
                        pass_turn(u32(u32(2) - me))
                    kind = finish_step(
                        S, dP, P, dS, dK, dV, K_j, V_j, kind, me, step, my_key, my_column, c,
                        scale, mask_args, score_args, info, N_q, N_k, thread, leader,
                    )  # fmt: skip
                    step = u32(step + u32(1))

                if group == u32(1):
                    take_turn(group)  # the last turn that was handed on; nobody takes it
                # The last dQ has no S beside it.
                if adds_dQ:
                    start_dQ(dQ, me, u32(step - u32(1)))
                    wait_last_dQ(dQ)
                    put_dQ(dQ, u32(step - u32(1)), thread)
                    meet(step, thread)

            batch, head, key = np.int64(b), np.int64(h_k), np.int64(my_key)
            write(dK_out, dK, scale, scale, batch, head, key, N_k, 0)
            write(dV_out, dV, ONE, ONE, batch, head, key, N_k, 0)
            if ptx.vote_any(zero_of(dK) + zero_of(dV) != ZERO):
                cuda.syncwarp()  # all its lanes see the warp's stores
                dK_again, dV_again = hbm.phase(dK_out, 1), hbm.phase(dV_out, 1)
                first = key - np.int64(cuda.laneid) // 4
                recompute_dK(
                    Q, K, V, dO, hbm.phase(L, 1), hbm.phase(D, 1), dK_again, scale, mask_args,
                    score_args, batch, head, group_size, first, N_q, N_k,
                )  # fmt: skip
                recompute_dV(
                    Q, K, V, dO, hbm.phase(L, 1), hbm.phase(D, 1), dV_again, scale, mask_args,
                    score_args, batch, head, group_size, first, N_q, N_k,
                )  # fmt: skip

    return hbm.jit(fa3_backward, "fa3_backward", threads), shared_bytes


@cache.built
def build_finish(
    tiling: Tiling, d: int, dtype: str, rule: Any, change: Any, store_width: int
) -> Any:
    """Kernel ``finish(dQ_acc, Q, K, V, dO, L, D, dQ, scale, mask_args, score_args)``.

    dQ in its own dtype, a block a row tile, each thread from the accumulators of its place in the
    kernel that added them.
    """
    halves, in_dQ, threads = tiling.B_r // ROWS, BOX_COLUMNS // 2, CONSUMERS * THREADS
    load, write = hbm.vector_load(4), tile_writer(d, BOX_COLUMNS, dtype, store_width)
    zero_of = zero_times(BOX_COLUMNS)
    recompute = gradient_recomputer("dQ", d, rule, change, FORMATS[dtype])

    def finish(dQ_acc, Q, K, V, dO, L, D, dQ, scale, mask_args, score_args):
        H, T_r, N_q, N_k = dQ_acc.shape[1], dQ_acc.shape[2], dQ.shape[2], K.shape[2]
        group_size = H // K.shape[1]
        block, thread = np.int64(cuda.blockIdx.x), u32(cuda.threadIdx.x)
        i, h, b = block % T_r, block // T_r % H, block // (T_r * H)
        warp, lane = thread // u32(32), thread % u32(32)
        acc = cuda.local.array(in_dQ, float32)
        for n in range(0, in_dQ, 4):
            place = np.int64(warp * u32(32 * in_dQ) + lane * u32(4) + u32(32 * n))
            load(dQ_acc, (b, h, i, place), acc, n)
        consumer = thread // u32(THREADS)
        row = i * (halves * ROWS) + np.int64(first_row(thread))
        first_column = np.int64(0)
        if halves == 2:
            row += np.int64(consumer * u32(ROWS))
        else:
            first_column = np.int64(consumer * u32(BOX_COLUMNS))
        write(dQ, acc, scale, scale, b, h, row, N_q, first_column)
        leaked = cuda.syncthreads_or(np.int32(zero_of(acc) != ZERO))  # all of the rows is stored
        if leaked and consumer < u32(halves):
            recompute(
                Q, K, V, dO, L, D, hbm.phase(dQ, 1), scale, mask_args, score_args, b, h, group_size,
                row - np.int64(lane) // 4, N_q, N_k,
            )  # fmt: skip

    return hbm.jit(finish, "fa3_backward_finish", threads)


def launch(problem: Problem, A: Operands) -> None:
    """Run FlashAttention-3's backward pass on the operands `A` of `problem`, for d up to 128."""
    p, t = problem, problem.tiling
    adds_dQ = p.adds_dQ
    rule, change, width = p.mask.rule, p.score.change, p.fa3_gradient_width
    kernel, shared_bytes = build(t, p.d, p.dtype, rule, change, width, adds_dQ)
    again = "recompute"
    inner, outer = "load Q_i, dO_i", "load K_j, V_j"
    row_box, key_box = (1, 1, t.B_r, BOX_COLUMNS), (1, 1, t.B_c, BOX_COLUMNS)
    whole = [A.array(name, again) for name in ("Q", "K", "V", "dO")]
    A.run(
        kernel,
        t.T_c(p.N_k) * p.H_k * p.B,
        THREADS + t.threads,
        shared_bytes,
        A.boxes("Q", row_box, inner),
        A.boxes("K", key_box, outer),
        A.boxes("V", key_box, outer),
        A.boxes("dO", row_box, inner),
        *whole,
        A.array("L", inner, again),
        A.array("D", inner, again),
        A.array("dQ_acc", "dQ_i += dS_ij K_j") if adds_dQ else None,
        A.array("dK", "epilogue", again),
        A.array("dV", "epilogue", again),
        min(HEADS_IN_L2, p.H_k * p.B) if rule.bounded else 1,
        A.scale,
        A.mask_args("tile range"),
        A.mask_args("mask"),
        A.score_args("score"),
    )
    if adds_dQ:
        A.run(
            build_finish(t, p.d, p.dtype, rule, change, width),
            t.T_r(p.N_q) * p.H * p.B,
            t.threads,
            0,
            A.array("dQ_acc", "finish"),
            *whole,
            A.array("L", again),
            A.array("D", again),
            A.array("dQ", "finish", again),
            A.scale,
            A.mask_args("mask"),
            A.score_args("score"),
        )
