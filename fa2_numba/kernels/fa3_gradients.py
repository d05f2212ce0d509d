"""FlashAttention-3, backward, one gradient a kernel: any d up to 256, the same bits each time.

Where dK_j and dV_j, or they and dQ_i, do not fit the registers together (d above 128), and where
dQ must not be added up by chance, each gradient has a kernel of its own, which computes the scores
again. It adds up in registers what it stores at the end: no exchange between warpgroups, nothing
added to memory.

Grid       a block an SM. It takes tiles, 128 rows of the gradient of one head, in turns with the
           others, and loads what the next needs while it stores the last.
HBM        reads what stays, X_i and Z_i, once, and what goes by, Y_j and W_j, for each step, in
           boxes that the hardware copies, and L and D; writes the gradient once. Rows that are not
           finite are computed again then, pair by pair.
Shared     X, Z (128 x d); rings of Y, W (B_m x d), of L, D; the barriers that say which are there.
Registers  a consumer's thread: its parts of 64 rows' scores, of dP, of P or dS (16 bits), and of
           the gradient (acc).

              X    Z     Y    W
    dQ_i     Q_i  dO_i  K_j  V_j    acc += dS Y
    dK_j     K_j  V_j   Q_i  dO_i   acc += dS^T Y
    dV_j     K_j   -    Q_i  dO_i   acc += P^T W

The first warpgroup only loads: the producer. Each of the other two, the consumers, has 64 of the
rows. For dK and dQ they start products in turns, which two named barriers hand on:

    first      acc, S            exponentials    dP              ...
    second              acc, S                       dP          ...

acc += dS Y is that of the step before, S = X Y^T is this step's, and dP = Z W^T starts when the
exponentials are done. So one's exponentials run beside the other's products, and Y of the step
before is free as soon as acc is complete. For dV, S runs beside acc += P^T W of the step before,
and the exponentials beside that. Y is free when S is complete; so L, which a slow warp may still
read then, has twice as many places as Y.
"""

from typing import Any

import numpy as np
from numba import cuda, float32, uint32

from fa2_numba import cache, hbm, ptx
from fa2_numba.formats import FORMATS, LOG2_E
from fa2_numba.launch import Operands, processors
from fa2_numba.masking import UNCHANGED, tile_functions
from fa2_numba.problem import Problem
from fa2_numba.smem import shared_tile
from fa2_numba.tile import u32
from fa2_numba.tiling import (
    BOX_COLUMNS,
    CONSUMER_REGISTERS,
    GRADIENT_ROWS,
    HOPPER_INFO,
    gradient_layout,
)
from fa2_numba.tiling import WARPGROUP_ROWS as ROWS
from fa2_numba.warpgroup import (
    AHEAD,
    NEG_INF,
    ONE,
    SECTION,
    THREADS,
    ZERO,
    across,
    along,
    clearer,
    first_row,
    gradient_recomputer,
    hidden_finder,
    nth_tile,
    partial_tiles,
    pass_turn,
    places,
    row_statistics,
    row_tiles_seeing,
    score_gradients,
    score_packer,
    take_turn,
    tile_writer,
    waiter,
    zero_times,
)

CONSUMERS = 2
STAYING = CONSUMERS * ROWS  # rows of X and Z
PRODUCER_REGISTERS = 40
# What the producer tells the consumers of a step, and of a tile of what stays.
TILE, HEAD, BATCH, PARTIAL, FIELDS = range(5)
STEPS = PARTIAL
LAST = -1  # as STEPS: there is no further tile
SECTIONS = 1, SECTION  # heads whose tiles go by length together: without bounds of a mask, with


@cache.built
def build(
    gradient: str, d: int, dtype: str, rule: Any, change: Any, store_width: int
) -> tuple[Any, int]:
    """The kernel of one gradient.

    Parameters
    ----------
    gradient : {"dQ", "dK", "dV"}
    d : int
        Head dimension, 1..256.
    dtype : str
        "fp16" or "bf16".
    rule, change
        Compiled part of a `masking.Mask` and a `masking.Score`.
    store_width : int
        Elements per store: 8, or 1 where an address or stride is not aligned.

    Returns
    -------
    kernel : dispatcher
        ``fa3_gradient(X_boxes, Z_boxes, Y_boxes, W_boxes, Q, K, V, dO, L, D, out,
        section_heads, scale, range_args, mask_args, score_args)``.
    shared_bytes : int
        Dynamic shared memory of a block.
    """
    of_keys, from_dS = gradient != "dQ", gradient != "dV"
    B_m = GRADIENT_ROWS
    B_r, B_c = (B_m, STAYING) if of_keys else (STAYING, B_m)
    threads = THREADS * (1 + CONSUMERS)
    boxes, width = -(-d // BOX_COLUMNS), -(-d // 16) * 16  # of a row of d; d as products take it
    x_box, y_box = STAYING * ptx.ROW_BYTES, B_m * ptx.ROW_BYTES
    in_S, in_P, in_acc = B_m // 2, B_m // 4, width // 2  # registers of a thread
    of_lane = B_m // 32  # rows whose L and D a lane moves

    rings, shared_bytes = gradient_layout(gradient, d)
    y_stages, w_stages = rings["Y"].places, rings["W"].places

    def ring(name):
        return places(rings[name])

    x_at, z_at, y_at, w_at = (ring(n) for n in "XZYW")
    x_full, x_empty = ring("X, Z full"), ring("X, Z empty")
    y_full, y_empty = ring("Y full"), ring("Y empty")
    w_full, w_empty = ring("W full"), ring("W empty")
    wait_Y, wait_W = waiter(rings["Y full"]), waiter(rings["W full"])
    wait_Y_empty, wait_W_empty = (waiter(rings[f"{name} empty"], True) for name in "YW")
    open_at = ring("open")
    l_at, l_stages = ring("L, D"), rings["L, D"].places
    l_tile = shared_tile(2 * l_stages, B_m, np.float32, rings["L, D"].start)
    infos = HOPPER_INFO // (4 * FIELDS)
    assert infos > y_stages  # a step reads its own, when the producer may be `y_stages` ahead
    info_tile = shared_tile(infos, FIELDS, np.int32, rings["info"].start)
    tile_info = shared_tile(1, FIELDS, np.int32, rings["tile"].start)

    steps_of_d = ptx.k_major_steps(width, x_box), ptx.k_major_steps(width, y_box)
    multiply_S = ptx.wgmma_mma_async(B_m, dtype, *steps_of_d)
    multiply_acc = ptx.wgmma_mma_async(
        width,
        dtype,
        tuple(range(0, in_P, 4)),
        ptx.mn_major_steps(B_m),
        a_in_registers=True,
        transpose_b=True,
    )
    fence_S, fence_acc = ptx.wgmma_fence(in_S), ptx.wgmma_fence(in_acc, in_P)
    wait_first_S = ptx.wgmma_wait_group(int(from_dS), in_S)
    wait_S = ptx.wgmma_wait_group(int(not from_dS), in_S)
    wait_both = ptx.wgmma_wait_group(0, in_S, in_S)
    wait_acc = ptx.wgmma_wait_group(int(from_dS), in_acc, in_P)
    wait_last = ptx.wgmma_wait_group(0, in_acc, in_P)
    give_back_registers = ptx.setmaxnreg_dec(PRODUCER_REGISTERS)
    take_registers = ptx.setmaxnreg_inc(CONSUMER_REGISTERS[CONSUMERS])

    tile_range, _, _ = tile_functions(rule, B_r, B_c, hbm.device)
    prepare, changed = change.functions(hbm.device, np.float32)
    plain = change is UNCHANGED
    seeing, is_partial = row_tiles_seeing(rule, B_r, B_c), partial_tiles(rule, B_r, B_c)
    find_hidden = hidden_finder(rule, of_keys)
    fetch, make_P, make_dS, make_both = score_gradients(B_m, of_keys, change)
    round_scores, _ = score_packer(dtype)
    clear_S, clear_acc, zero_of = clearer(in_S), clearer(in_acc), zero_times(width)
    write = tile_writer(d, width, dtype, store_width)
    fetch_rows, put_rows = row_statistics(B_m, from_dS)
    load_X, load_Y = (hbm.box_loader(boxes, rows, BOX_COLUMNS) for rows in (STAYING, B_m))
    recompute = gradient_recomputer(gradient, d, rule, change, FORMATS[dtype])

    # ---- tiles and masks ------------------------------------------------------------------------

    @hbm.device
    def my_tile(n, tiles, heads, section):
        """The block's n-th tile: its number among all, which it is of its head, the head."""
        block, blocks = u32(cuda.blockIdx.x), u32(cuda.gridDim.x)
        number, tile, head = nth_tile(n, block, blocks, tiles, heads, section)
        # First those that are the longest under a causal mask: first keys, last rows.
        return number, np.int32(tile if of_keys else u32(tiles - u32(1) - tile)), head

    @hbm.device
    def visited(range_args, b, h, t, N_q, N_k):
        """Tiles that go by tile t of what stays: first, end."""
        if of_keys:
            return seeing(range_args, b, h, t, N_q, N_k)
        begin, end, _, _ = tile_range(range_args, b, h, t, N_q, N_k)
        return np.int32(begin), np.int32(end)

    # ---- products -------------------------------------------------------------------------------

    @hbm.device
    def start_scores(S, stays, goes, me):
        """S = X Y^T, or dP = Z W^T, at these addresses: of my 64 rows in each box."""
        clear_S(S)
        fence_S(S)
        multiply_S(S, across(stays + me * u32(ROWS * ptx.ROW_BYTES)), across(goes), 0)
        ptx.wgmma_commit_group()

    @hbm.device
    def start_S(S, me, step):
        start_scores(S, x_at(u32(0)), y_at(step), me)

    @hbm.device
    def start_dP(dP, me, step):
        start_scores(dP, z_at(u32(0)), w_at(step), me)

    @hbm.device
    def start_acc(acc, P, step):
        fence_acc(acc, P)
        multiply_acc(acc, P, 0, along(y_at(step) if from_dS else w_at(step), y_box), 1)
        ptx.wgmma_commit_group()

    @hbm.device
    def uniform(x):
        """The first lane's x: the same in all, as ptxas then knows."""
        return np.int32(ptx.shfl_idx(x, 0))

    @hbm.device
    def hold_until(P, unknown):
        """P is complete before what follows.

        ptxas moves exponentials behind the start of products and waits for these, but nothing
        across a wait at a barrier that depends on it. This barrier is always open: the phase before
        its first is over, and nobody ends that. Only a negative sum of P would ask for it.
        `unknown` is 0 or more, which ptxas does not know; that P is, it does.
        """
        x, y = P[0] + unknown, P[1]
        for k in range(2, in_S, 2):
            x += P[k]
            y += P[k + 1]
        parity = u32(0) if x + y < ZERO else u32(1)
        ptx.mbarrier_try_wait_parity(open_at(u32(0)), parity)

    # ---- scores ---------------------------------------------------------------------------------

    @hbm.device
    def hidden_scores(mask_args, info, step, mine, column, N_q, N_k):
        """Which of my scores are masked: a bit for each."""
        at = step % u32(infos)
        hidden = u32(0)
        if ptx.vote_any(info[at, PARTIAL] != np.int32(0)):
            first = np.int64(info[at, TILE]) * B_m + np.int64(column)
            b, h = info[at, BATCH], info[at, HEAD]
            row, key = (first, np.int64(mine)) if of_keys else (np.int64(mine), first)
            hidden = find_hidden(mask_args, b, h, row, key, N_q, N_k)
        return u32(hidden)

    @hbm.device
    def L_of(step, column):
        return u32(l_at(step) + column * u32(4))

    @hbm.device
    def D_of(step, column):
        return u32(l_at(step) + column * u32(4) + u32(4 * B_m))

    @hbm.device
    def set_P(S, L_i, step, column, c):
        ahead = cuda.local.array(AHEAD, float32)
        if of_keys:
            fetch(ahead, L_of(step, column))
            make_P(S, L_of(step, column), ahead, c)
        else:
            make_P(S, L_i, ahead, c)

    @hbm.device
    def set_dS(S, dP, D_i, step, column):
        ahead = cuda.local.array(AHEAD, float32)
        if of_keys:
            fetch(ahead, D_of(step, column))
            make_dS(S, dP, D_of(step, column), ahead)
        else:
            make_dS(S, dP, D_i, ahead)

    @hbm.device
    def change_scores(
        S, dP, L_i, D_i, scale, score_args, info, step, mine, column, N_q, N_k
    ):  # fmt: skip
        """P, and dS where it is needed, of scores that change."""
        at = step % u32(infos)
        state = prepare(score_args, info[at, BATCH], info[at, HEAD])
        first, mine = np.int64(info[at, TILE]) * B_m + np.int64(column), np.int64(mine)
        i, j = (first, mine) if of_keys else (mine, first)
        i = i + N_k - N_q
        if not from_dS:
            for x in range(in_S):
                row, col = 8 * (x // 2 % 2), 8 * (x // 4) + x % 2
                S[x] = changed(state, i + col, j + row, S[x] * scale)
            set_P(S, L_i, step, column, LOG2_E)
        elif of_keys:
            make_both(S, dP, L_of(step, column), D_of(step, column), scale, state, i, j)
        else:
            make_both(S, dP, L_i, D_i, scale, state, i, j)

    # ---- the kernel -----------------------------------------------------------------------------

    def fa3_gradient(
        X_boxes, Z_boxes, Y_boxes, W_boxes, Q, K, V, dO, L, D, out, section_heads, scale,
        range_args, mask_args, score_args,
    ):  # fmt: skip
        H, H_k, N_q, N_k = u32(Q.shape[1]), u32(K.shape[1]), Q.shape[2], K.shape[2]
        group_size = H // H_k
        N, heads = (N_k, H_k) if of_keys else (N_q, H)
        tiles, all_heads = u32((N + STAYING - 1) // STAYING), u32(heads * u32(Q.shape[0]))
        all_tiles, section = u32(tiles * all_heads), u32(section_heads)
        by = group_size if of_keys else u32(1)  # query heads that go by
        thread = u32(cuda.threadIdx.x)
        group = u32(ptx.shfl_idx(np.int32(thread // u32(THREADS)), 0))
        info, told = info_tile(None), tile_info(None)

        if thread == u32(0):
            ptx.mbarrier_init(x_full(u32(0)), 1)
            ptx.mbarrier_init(x_full(u32(1)), 1)
            ptx.mbarrier_init(x_empty(u32(0)), CONSUMERS * THREADS)
            ptx.mbarrier_init(open_at(u32(0)), 1)  # nobody arrives
            for stage in range(y_stages):
                ptx.mbarrier_init(y_full(u32(stage)), 1 + 32)  # Y_j; L, D, information
                ptx.mbarrier_init(y_empty(u32(stage)), CONSUMERS)
            for stage in range(w_stages):
                ptx.mbarrier_init(w_full(u32(stage)), 1)
                ptx.mbarrier_init(w_empty(u32(stage)), CONSUMERS)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # all see the barriers

        n = step = u32(0)  # of the block's tiles, of the steps of all of them
        if group == u32(0):
            give_back_registers()
            warp, lane = thread // u32(32), u32(cuda.laneid)
            if warp < u32(2):  # one copies X and every Y, one Z and every W
                elected = ptx.elect_sync()
                if elected:
                    hbm.use_boxes(X_boxes)
                    hbm.use_boxes(Z_boxes)
                    hbm.use_boxes(Y_boxes)
                    hbm.use_boxes(W_boxes)
                while True:
                    number, t, head = my_tile(n, tiles, all_heads, section)
                    if number >= all_tiles:
                        break
                    h_x, b = np.int32(head % heads), np.int32(head // heads)
                    steps = np.int32(0)
                    if warp == u32(0):
                        for g in range(by):
                            h = np.int32(u32(h_x) * by + u32(g))
                            s, end = visited(range_args, b, h, t, N_q, N_k)
                            steps = np.int32(steps + max(np.int32(end - s), np.int32(0)))
                    if elected:
                        first, phase = np.int32(t * np.int32(STAYING)), n & u32(1) ^ u32(1)
                        if warp == u32(0):
                            ptx.mbarrier_try_wait_parity(x_empty(u32(0)), phase)
                            told[0, TILE], told[0, HEAD] = t, h_x
                            told[0, BATCH], told[0, STEPS] = b, steps
                            ptx.mbarrier_arrive_expect_tx(x_full(warp), boxes * x_box)
                            load_X(X_boxes, x_at(u32(0)), x_full(u32(0)), first, h_x, b)
                        elif from_dS:
                            ptx.mbarrier_try_wait_parity(x_empty(u32(0)), phase)
                            ptx.mbarrier_arrive_expect_tx(x_full(warp), boxes * x_box)
                            load_X(Z_boxes, z_at(u32(0)), x_full(u32(1)), first, h_x, b)
                    for g in range(by):
                        h = np.int32(u32(h_x) * by + u32(g))
                        h_y = h if of_keys else np.int32(u32(h) // group_size)
                        s, end = visited(range_args, b, h, t, N_q, N_k)
                        while s < end:
                            if elected:
                                row = np.int32(s * np.int32(B_m))
                                if warp == u32(0):
                                    wait_Y_empty(step)
                                    ptx.mbarrier_arrive_expect_tx(y_full(step), boxes * y_box)
                                    load_Y(Y_boxes, y_at(step), y_full(step), row, h_y, b)
                                else:
                                    wait_W_empty(step)
                                    ptx.mbarrier_arrive_expect_tx(w_full(step), boxes * y_box)
                                    load_Y(W_boxes, w_at(step), w_full(step), row, h_y, b)
                            step = u32(step + u32(1))
                            s = np.int32(s + np.int32(1))
                    n = u32(n + u32(1))
                if elected and warp == u32(0):
                    ptx.mbarrier_try_wait_parity(x_empty(u32(0)), n & u32(1) ^ u32(1))
                    told[0, STEPS] = np.int32(LAST)
                    ptx.mbarrier_arrive(x_full(u32(0)))
            elif warp == u32(2):  # L and D of what goes by, and what the consumers have to know
                L_D = l_tile(None)
                l, D_i = cuda.local.array(of_lane, float32), cuda.local.array(of_lane, float32)
                while True:
                    number, t, head = my_tile(n, tiles, all_heads, section)
                    if number >= all_tiles:
                        break
                    h_x, b = np.int32(head % heads), np.int32(head // heads)
                    for g in range(by):
                        h = np.int32(u32(h_x) * by + u32(g))
                        s, end = visited(range_args, b, h, t, N_q, N_k)
                        while s < end:
                            if of_keys:
                                fetch_rows(L, D, b, h, np.int64(s) * B_m, N_q, l, D_i)
                            wait_Y_empty(step)
                            if of_keys:
                                put_rows(L_D, u32(step % u32(l_stages) * u32(2)), l, D_i)
                            if lane == u32(0):
                                at = step % u32(infos)
                                info[at, TILE], info[at, HEAD], info[at, BATCH] = s, h, b
                                i, j = (s, t) if of_keys else (t, s)
                                partial = is_partial(mask_args, b, h, i, j, N_q, N_k)
                                info[at, PARTIAL] = np.int32(partial)
                            # Each lane, of what it may have written.
                            ptx.mbarrier_arrive(y_full(step))
                            step = u32(step + u32(1))
                            s = np.int32(s + np.int32(1))
                    n = u32(n + u32(1))
        else:
            take_registers()
            S, dP = cuda.local.array(in_S, float32), cuda.local.array(in_S, float32)
            P = cuda.local.array(in_P, uint32)  # P or dS, whichever acc is made of
            acc = cuda.local.array(in_acc, float32)
            L_i, D_i = cuda.local.array(2, float32), cuda.local.array(2, float32)
            me = u32(group - u32(1))
            leader = thread % u32(THREADS) == u32(0)
            my_row = np.int32(u32(me * u32(ROWS)) + first_row(thread))
            column = u32(2) * (thread % u32(4))
            c = scale * LOG2_E
            if from_dS and group == u32(2):
                pass_turn(u32(u32(3) - group))  # the first turn is the first consumer's

            while True:
                ptx.mbarrier_try_wait_parity(x_full(u32(0)), n & u32(1))
                # What is made of `step`, addresses and descriptors, stays in uniform registers if
                # ptxas sees that all lanes leave the loops together. Of what was read from shared
                # memory it does not know that.
                left = uniform(told[0, STEPS])
                if left == np.int32(LAST):
                    break
                h_x, b = uniform(told[0, HEAD]), uniform(told[0, BATCH])
                mine = np.int32(uniform(told[0, TILE]) * np.int32(STAYING) + my_row)
                if not of_keys:
                    for r in range(2):
                        row = np.int64(mine) + 8 * r
                        L_i[r], D_i[r] = NEG_INF, ZERO
                        if row < N_q:
                            L_i[r], D_i[r] = L[b, h_x, row], D[b, h_x, row]
                unknown = np.float32(h_x)  # see `hold_until`
                clear_acc(acc)
                if left > np.int32(0):
                    # The first step has no product of a step before beside it.
                    wait_Y(step)
                    start_S(S, me, step)
                    if from_dS:
                        ptx.mbarrier_try_wait_parity(x_full(u32(1)), n & u32(1))
                        wait_W(step)
                        start_dP(dP, me, step)
                    if not of_keys:
                        for r in range(2):  # rows without keys, or past the last: P = 0
                            L_i[r] = L_i[r] * LOG2_E if L_i[r] != NEG_INF else -NEG_INF
                    hidden = hidden_scores(mask_args, info, step, mine, column, N_q, N_k)
                    wait_first_S(S)
                    if leader and not from_dS:
                        ptx.mbarrier_arrive(y_empty(step))
                    if plain:
                        set_P(S, L_i, step, column, c)
                    if from_dS:
                        wait_both(dP, S)
                        if leader:
                            ptx.mbarrier_arrive(w_empty(step))
                    if not plain:
                        change_scores(
                            S, dP, L_i, D_i, scale, score_args, info, step, mine, column, N_q, N_k
                        )
                    elif from_dS:
                        set_dS(S, dP, D_i, step, column)
                    round_scores(dP if from_dS else S, P, hidden)

                    while ptx.vote_any(left > np.int32(1)):
                        left = np.int32(left - np.int32(1))
                        last = step
                        step = u32(step + u32(1))
                        if from_dS:
                            take_turn(group)
                            start_acc(acc, P, last)
                            wait_Y(step)
                            start_S(S, me, step)
                            pass_turn(u32(u32(3) - group))
                            hidden = hidden_scores(mask_args, info, step, mine, column, N_q, N_k)
                            wait_acc(acc, P)
                            if leader:
                                ptx.mbarrier_arrive(y_empty(last))
                            wait_S(S)
                            if plain:
                                set_P(S, L_i, step, column, c)
                                hold_until(S, unknown)
                            wait_W(step)
                            take_turn(group)
                            start_dP(dP, me, step)
                            pass_turn(u32(u32(3) - group))
                            wait_both(dP, S)
                            if leader:
                                ptx.mbarrier_arrive(w_empty(step))
                        else:
                            wait_Y(step)
                            start_S(S, me, step)
                            wait_W(last)
                            start_acc(acc, P, last)
                            hidden = hidden_scores(mask_args, info, step, mine, column, N_q, N_k)
                            wait_S(S)
                            if leader:
                                ptx.mbarrier_arrive(y_empty(step))
                            if plain:
                                set_P(S, L_i, step, column, c)
                                hold_until(S, unknown)
                            wait_acc(acc, P)
                            if leader:
                                ptx.mbarrier_arrive(w_empty(last))
                        if not plain:
                            change_scores(
                                S, dP, L_i, D_i, scale, score_args, info, step, mine, column, N_q,
                                N_k,
                            )  # fmt: skip
                        elif from_dS:
                            set_dS(S, dP, D_i, step, column)
                        round_scores(dP if from_dS else S, P, hidden)

                    # Each thread gives X back. Products keep a consumer's warps together. At the
                    # end of a tile, where one may compute rows again, or in a tile without steps
                    # nothing does: if one thread gave it back for all, and twice before a slow warp
                    # looks at x_full, two phases would be over. Their parity is that of none.
                    ptx.mbarrier_arrive(x_empty(u32(0)))
                    if not from_dS:
                        wait_W(step)
                    start_acc(acc, P, step)
                    wait_last(acc, P)
                    if leader:
                        ptx.mbarrier_arrive(y_empty(step) if from_dS else w_empty(step))
                    step = u32(step + u32(1))
                else:
                    if from_dS:
                        ptx.mbarrier_try_wait_parity(x_full(u32(1)), n & u32(1))
                    ptx.mbarrier_arrive(x_empty(u32(0)))

                factor = scale if from_dS else ONE
                batch, head, row = np.int64(b), np.int64(h_x), np.int64(mine)
                write(out, acc, factor, factor, batch, head, row, N, 0)
                if ptx.vote_any(zero_of(acc) != ZERO):
                    cuda.syncwarp()  # all its lanes see the warp's stores
                    recompute(
                        Q, K, V, dO, hbm.phase(L, 1), hbm.phase(D, 1), hbm.phase(out, 1), scale,
                        mask_args, score_args, batch, head, np.int64(group_size),
                        row - np.int64(cuda.laneid) // 4, N_q, N_k,
                    )  # fmt: skip
                n = u32(n + u32(1))
            if from_dS and group == u32(1):
                take_turn(group)  # the last turn that was handed on; nobody takes it

    return hbm.jit(fa3_gradient, f"fa3_{gradient}", threads), shared_bytes


OPERANDS = {"dQ": ("Q", "dO", "K", "V"), "dK": ("K", "V", "Q", "dO"), "dV": ("K", "V", "Q", "dO")}


def launch(problem: Problem, A: Operands, *gradients: str) -> None:
    """Compute some of the gradients "dQ", "dK" and "dV" of `problem`, each by its kernel."""
    p, again = problem, "recompute"
    for gradient in gradients:
        kernel, shared_bytes = build(
            gradient, p.d, p.dtype, p.mask.rule, p.score.change, p.fa3_gradient_width
        )
        N, heads = (p.N_q, p.H) if gradient == "dQ" else (p.N_k, p.H_k)
        X, Z, Y, W = OPERANDS[gradient]
        stays, goes = f"{gradient}: load {X}, {Z}", f"{gradient}: load {Y}, {W}"
        x_box, y_box = (1, 1, STAYING, BOX_COLUMNS), (1, 1, GRADIENT_ROWS, BOX_COLUMNS)
        rows = stays if gradient == "dQ" else goes
        A.run(
            kernel,
            min(-(-N // STAYING) * heads * p.B, processors(A.device)),
            THREADS * (1 + CONSUMERS),
            shared_bytes,
            A.boxes(X, x_box, stays),
            A.boxes(Z, x_box, stays),
            A.boxes(Y, y_box, goes),
            A.boxes(W, y_box, goes),
            *(A.array(name, again) for name in ("Q", "K", "V", "dO")),
            A.array("L", rows, again),
            A.array("D", rows, again),
            A.array(gradient, "epilogue", again),
            min(SECTIONS[p.mask.rule.bounded], heads * p.B),
            A.scale,
            A.mask_args("tile range"),
            A.mask_args("mask"),
            A.score_args("score"),
        )
