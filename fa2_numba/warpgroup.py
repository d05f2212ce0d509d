"""What a warpgroup does with the scores and the output in its accumulators.

The accumulators of 64 x n are n / 2 registers of each thread (`ptx.hopper`): of row
``16 * warp + lane // 4`` (r = 0) and of the row 8 below (r = 1), the columns ``8 * c + 2 * q + e``,
where q is ``lane % 4`` and e 0 or 1, are in register ``4 * c + 2 * r + e``. So a row is in the four
lanes of a quad. Loops over registers have a constant number of turns and unroll.
"""

import math
from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import hbm
from fa2_numba.formats import LOG2_E, Format
from fa2_numba.hbm import device
from fa2_numba.masking import FULL, tile_functions
from fa2_numba.ptx import (
    PATTERN_BYTES,
    ROW_BYTES,
    bar_arrive,
    bar_sync,
    cp_async_bulk_wait_group_read,
    cvt_rn_bf16x2_f32,
    cvt_rn_f16x2_f32,
    ex2_approx_ftz_f32,
    fence_proxy_async,
    ld_shared_v2_f32,
    ldmatrix_x4,
    matrix_descriptor,
    max_f32,
    mbarrier_try_wait_parity,
    mov_b32,
    prmt_b32,
    rcp_approx_ftz_f32,
    shfl_bfly,
    shfl_idx,
    smem_address,
    stmatrix_x4,
    stmatrix_x4_trans,
    vote_any,
    vote_ballot,
)
from fa2_numba.tile import u32
from fa2_numba.tiling import BOX_COLUMNS, Ring
from fa2_numba.tiling import WARPGROUP_ROWS as ROWS

THREADS = 128
LANES = 32
PACK = {"bf16": cvt_rn_bf16x2_f32, "fp16": cvt_rn_f16x2_f32}
ZERO, ONE, NEG_INF = np.float32(0), np.float32(1), np.float32("-inf")
NAN = np.float32("nan")
AHEAD = 4  # columns, of a thread's 16 of 64, whose L or D are loaded ahead
LARGEST_SHIFT = np.float32(2**27)  # its rounding multiplies P~ by 2^4 at most, in l and O alike


@device
def first_row(thread):
    """Row of r = 0 among its warpgroup's 64."""
    lane, warp = u32(thread) % u32(LANES), u32(thread) // u32(LANES) % u32(4)
    return u32(16) * warp + lane // u32(4)


def places(ring: Ring) -> Any:
    """``place(n)``: the address of the n-th place of a ring in shared memory, which goes round."""

    @device
    def place(n):
        return smem_address(u32(ring.start) + n % u32(ring.places) * u32(ring.size))

    return place


def waiter(ring: Ring, empty: bool = False) -> Any:
    """``wait(n)``: until the barrier of the n-th place of a ring is through with its round.

    Of barriers that end when a place is full: until what it holds is there. With `empty`, until
    what it held in the round before may be replaced; in the first round nothing is waited for.
    """
    at = places(ring)

    @device
    def wait(n):
        mbarrier_try_wait_parity(at(n), n // u32(ring.places) & u32(1) ^ u32(empty))

    return wait


@device
def across(address):
    """Descriptor of a matrix whose rows are rows of boxes."""
    return matrix_descriptor(address, 0, PATTERN_BYTES)


@device
def along(address, box_bytes):
    """Descriptor of a matrix in boxes of that size, where products add up over their rows."""
    return matrix_descriptor(address, box_bytes, PATTERN_BYTES)


def score_finisher(n: int, B_c: int, rule: Any, change: Any) -> tuple[Any, Any]:
    """Score change and mask of a tile's 64 x n accumulators.

    Returns
    -------
    change_scores : device function ``(S, state, scale, i, j)``
        Scales the scores of rows i and i + 8 and of columns from j on, and changes them.
    mask_scores : device function ``(S, mask_args, b, h, row, j, N_q, N_k)``
        Makes those -inf that rows `row` and ``row + 8`` do not see. `j` is the first column's.
    """
    _, _, (row_bounds, visible) = tile_functions(rule, ROWS, B_c, device)
    _, changed = change.functions(device, np.float32)
    elementwise = rule.elementwise
    words = -(-n // 128)  # a thread has 32 of 128 columns

    @device
    def change_scores(S, state, scale, i, j):
        for c in range(n // 8):
            for r in range(2):
                for e in range(2):
                    s = S[4 * c + 2 * r + e] * scale
                    S[4 * c + 2 * r + e] = changed(state, i + 8 * r, j + 8 * c + e, s)

    @device
    def mask_scores(S, mask_args, b, h, row, j, N_q, N_k):
        seen = cuda.local.array(words, np.uint32)
        for r in range(2):
            i, lo, hi = row_bounds(mask_args, b, h, row + 8 * r, N_q, N_k)
            first, end = np.int32(lo - j), np.int32(hi - j)
            # Bits, of which an instruction makes seven predicates; to compare each column with
            # both bounds takes two. Hidden from libNVVM, which would make a case of its own of each
            # word that it understands, and ptxas then keeps the scores twice.
            for word in range(words):
                before = np.int32(128 * word)
                bits = _columns_before(end - before) & ~_columns_before(first - before)
                seen[word] = u32(mov_b32(np.int32(bits)))
            for c in range(n // 8):
                for e in range(2):
                    if not seen[c // 16] & u32(1 << (2 * (c % 16) + e)):
                        S[4 * c + 2 * r + e] = NEG_INF
            if elementwise:
                for c in range(n // 8):
                    for e in range(2):
                        if S[4 * c + 2 * r + e] != NEG_INF:  # so inside the bounds
                            if not visible(mask_args, b, h, i, j + 8 * c + e):
                                S[4 * c + 2 * r + e] = NEG_INF

    return change_scores, mask_scores


def online_softmax(n: int, dtype: str, late: bool) -> tuple[Any, Any]:
    """The online-softmax step on 64 x n scores, in two parts between which O may be rescaled.

    ``S * c`` are powers of 2. m, l, alpha, shift are those of rows r = 0 and 1; l is this lane's
    share of the row sum.

    Parameters
    ----------
    n : int
        Columns.
    dtype : str
        What P~ is rounded to.
    late : bool
        Whether the first part has 7/8 of the exponentials, after both maxima; else half of them,
        row 1's maximum among them.

    Returns
    -------
    begin_softmax : device function ``(S, m, l, alpha, shift, c) -> changed``
        Both new maxima m, l and the factor alpha of O; whether one of them is not 1. P~ of row 0
        and, if late, of 3/4 of row 1.
    finish_softmax : device function ``(S, P, l, shift, c)``
        The rest of P~ and of row 1's l, and both rows rounded to 16 bits: an A of n k.
    """
    pack = PACK[dtype]
    ahead = 3 * (n // 8) // 4 if late else 0  # of row 1's n / 8 pairs: those in the first part
    # A branch on l is to find the unit of exponentials at work, so l leaves out its last 4 pairs.
    summed = max(ahead - 4, 0)

    @device
    def settle(x, m, l, alpha, shift, c, r):
        """m, l and alpha of row r from the maximum of this lane's new scores."""
        x = max_f32(x, shfl_bfly(x, 1))
        x = max_f32(x, shfl_bfly(x, 2))
        changed = x > m[r]
        new = x if changed else m[r]
        shift[r] = new * c
        if not abs(shift[r]) < LARGEST_SHIFT:
            # No key yet: P~ is 0 and not NaN. Or P~ may leave its range: the row is found NaN.
            shift[r] = ZERO if new == NEG_INF else NAN
        alpha[r] = ex2_approx_ftz_f32(m[r] * c - shift[r]) if changed else ONE
        m[r] = new
        l[r] *= alpha[r]
        return changed

    @device
    def exponentiate(S, shift, c, k):
        """P~ of row 1's pair k."""
        S[4 * k + 2] = ex2_approx_ftz_f32(S[4 * k + 2] * c - shift[1])
        S[4 * k + 3] = ex2_approx_ftz_f32(S[4 * k + 3] * c - shift[1])

    @device
    def begin_softmax(S, m, l, alpha, shift, c):
        # Two maxima and two sums of each row: the units have the next before the last is ready.
        x, y = max_f32(S[0], S[1]), max_f32(S[4], S[5])
        for k in range(2, n // 8):
            if k % 2:
                y = max_f32(y, max_f32(S[4 * k], S[4 * k + 1]))
            else:
                x = max_f32(x, max_f32(S[4 * k], S[4 * k + 1]))
        if late:
            z, w = max_f32(S[2], S[3]), max_f32(S[6], S[7])
            for k in range(2, n // 8):
                if k % 2:
                    w = max_f32(w, max_f32(S[4 * k + 2], S[4 * k + 3]))
                else:
                    z = max_f32(z, max_f32(S[4 * k + 2], S[4 * k + 3]))
        else:
            z, w = NEG_INF, NEG_INF
        changed = settle(max_f32(x, y), m, l, alpha, shift, c, 0)
        if late:
            changed = settle(max_f32(z, w), m, l, alpha, shift, c, 1) or changed
        sum_0, sum_1 = ZERO, ZERO
        for k in range(n // 8):
            p = ex2_approx_ftz_f32(S[4 * k] * c - shift[0])
            if not late:
                if k % 2:
                    w = max_f32(w, max_f32(S[4 * k + 2], S[4 * k + 3]))
                else:
                    z = max_f32(z, max_f32(S[4 * k + 2], S[4 * k + 3]))
            q = ex2_approx_ftz_f32(S[4 * k + 1] * c - shift[0])
            S[4 * k], S[4 * k + 1] = p, q
            sum_0 += p
            sum_1 += q
        l[0] += sum_0 + sum_1
        if late:
            sum_0, sum_1 = ZERO, ZERO
            for k in range(ahead):
                exponentiate(S, shift, c, k)
                if k < summed:
                    sum_0 += S[4 * k + 2]
                    sum_1 += S[4 * k + 3]
            l[1] += sum_0 + sum_1
        else:
            changed = settle(max_f32(z, w), m, l, alpha, shift, c, 1) or changed
        return changed

    @device
    def finish_softmax(S, P, l, shift, c):
        sum_0, sum_1 = ZERO, ZERO
        for k in range(summed, n // 8):
            if k >= ahead:
                exponentiate(S, shift, c, k)
            sum_0 += S[4 * k + 2]
            sum_1 += S[4 * k + 3]
        l[1] += sum_0 + sum_1
        for k in range(n // 8):
            P[2 * k] = pack(S[4 * k + 1], S[4 * k])
            P[2 * k + 1] = pack(S[4 * k + 3], S[4 * k + 2])

    return begin_softmax, finish_softmax


def rescaler(n: int) -> Any:
    """``rescale(acc, alpha)``: both rows of a 64 x n O times their alpha."""

    @device
    def rescale(acc, alpha):
        for c in range(n // 8):
            acc[4 * c] *= alpha[0]
            acc[4 * c + 1] *= alpha[0]
            acc[4 * c + 2] *= alpha[1]
            acc[4 * c + 3] *= alpha[1]

    return rescale


@device
def _exchange(x, y, has_bit, lanes):
    """Lanes without the bit keep x and get the other's x; lanes with it keep y and get its y."""
    other = u32(shfl_bfly(np.int32(x if has_bit else y), lanes))
    if has_bit:
        return other, y
    return x, other


def tile_writer(d: int, n: int, dtype: str, width: int) -> Any:
    """``write(A, acc, factor_0, factor_1, b, h, row, N, first)``: scale, round and store two rows.

    The 64 x n accumulators go to the columns from `first` on; what is past the last row or column
    is not stored. A quad transposes 4 x 4 registers of two columns each, in two exchanges, so that
    a lane has 8 neighbouring columns. It stores them in pieces of `width`.
    """
    pack = PACK[dtype]
    store = hbm.vector_store(width)
    chunks = n // 8  # of 8 columns

    @device
    def rounded(acc, factor, chunk, r):
        if chunk < chunks:
            return pack(acc[4 * chunk + 2 * r + 1] * factor, acc[4 * chunk + 2 * r] * factor)
        return u32(0)

    @device
    def write(A, acc, factor_0, factor_1, b, h, row, N, first):
        q = u32(cuda.laneid) % u32(4)
        odd, high = (q & u32(1)) != u32(0), (q & u32(2)) != u32(0)
        out = cuda.local.array(8, np.uint16)
        for r in range(2):
            factor = factor_1 if r else factor_0
            exists = row + 8 * r < N
            for g in range(0, chunks, 4):
                x_0, x_1 = rounded(acc, factor, g, r), rounded(acc, factor, g + 1, r)
                x_2, x_3 = rounded(acc, factor, g + 2, r), rounded(acc, factor, g + 3, r)
                x_0, x_1 = _exchange(x_0, x_1, odd, 1)
                x_2, x_3 = _exchange(x_2, x_3, odd, 1)
                x_0, x_2 = _exchange(x_0, x_2, high, 2)
                x_1, x_3 = _exchange(x_1, x_3, high, 2)
                out[0], out[1] = x_0, x_0 >> u32(16)
                out[2], out[3] = x_1, x_1 >> u32(16)
                out[4], out[5] = x_2, x_2 >> u32(16)
                out[6], out[7] = x_3, x_3 >> u32(16)
                column = np.int64(first) + 8 * (np.int64(g) + np.int64(q))
                if exists and 8 * (np.int64(g) + np.int64(q)) < n:
                    for at in range(0, 8, width):
                        if column + at < d:
                            store(A, (b, h, row + 8 * r, column + at), out, at)

    return write


@device
def piece_of_row(box, row, piece):
    """The address of 16 bytes, number `piece`, of a row of a box: `ptx.swizzle_128b` in parts."""
    return u32(box + row * u32(ROW_BYTES) + ((piece ^ row & u32(7)) << u32(4)))


def box_writer(n: int, dtype: str, boxes: Ring) -> Any:
    """``write(A, acc, factor_0, factor_1, b, h, row, N, first)``: as `tile_writer`, in boxes.

    Each warp rounds its 16 rows into shared memory and has the copy unit store them, as
    `hbm.box_storer` takes A; no warp waits for another. n is up to 64. `boxes` are the places of
    the warps of all warpgroups but the first. A thread's stores end with
    `cp_async_bulk_wait_group`.
    """
    pack, store = PACK[dtype], hbm.box_storer(16, BOX_COLUMNS)
    wait_read = cp_async_bulk_wait_group_read(0)

    @device
    def write(A, acc, factor_0, factor_1, b, h, row, N, first):
        lane = u32(cuda.laneid)
        warp = u32(cuda.threadIdx.x) // u32(LANES) - u32(THREADS // LANES)
        box = smem_address(u32(boxes.start) + u32(warp * u32(boxes.size)))
        if lane == u32(0):
            wait_read()  # the last box has left its place
        cuda.syncwarp()
        # A lane gives the address of a row of 8 columns: of the 16 rows, in two pieces of 16 bytes.
        at = piece_of_row(box, lane & u32(15), lane >> u32(4))
        for k in range(n // 16):
            stmatrix_x4(
                u32(at ^ u32(32 * k)),
                pack(acc[8 * k + 1] * factor_0, acc[8 * k] * factor_0),
                pack(acc[8 * k + 3] * factor_1, acc[8 * k + 2] * factor_1),
                pack(acc[8 * k + 5] * factor_0, acc[8 * k + 4] * factor_0),
                pack(acc[8 * k + 7] * factor_1, acc[8 * k + 6] * factor_1),
            )
        fence_proxy_async()  # each lane's own writes, for the copy unit
        cuda.syncwarp()
        if lane == u32(0):
            store(A, box, np.int32(row), np.int32(first), np.int32(h), np.int32(b))

    return write


def output_writer(write_tile: Any) -> Any:
    """``write(O, L, acc, m, l, scale, b, h, row, N_q)``: normalise, round and store two rows.

    `write_tile` is of `tile_writer` or `box_writer`; O is what that takes.
    """

    @device
    def total(l, r):
        x = l[r] + shfl_bfly(l[r], 1)
        return x + shfl_bfly(x, 2)

    @device
    def inverse(l):
        return rcp_approx_ftz_f32(l) if l != ZERO else ZERO  # no keys: O = 0

    @device
    def write(O, L, acc, m, l, scale, b, h, row, N_q):
        l_0, l_1 = total(l, 0), total(l, 1)
        write_tile(O, acc, inverse(l_0), inverse(l_1), b, h, row, N_q, 0)
        # Two lanes of a quad have a row each: all lanes go through a logarithm if one does.
        r = np.int64(u32(cuda.laneid) % u32(4))
        if r < 2 and row + 8 * r < N_q:
            m_r, l_r = (m[1], l_1) if r else (m[0], l_0)
            log_l = np.float32(math.log(l_r))
            L[b, h, row + 8 * r] = m_r * scale + log_l if l_r != ZERO else NEG_INF

    return write


# Heads whose tiles go by length together: 66 share out evenly over 132 SMs, and what they read is
# in L2 where it is short (docs/decisions/0017-row-tiles-of-fa3.md).
SECTION = 66


@device
def tile_of_block(block, tiles, heads, section):
    """The tile and the head of a block, of so many tiles of so many heads.

    Of `section` heads after each other, the first tiles of all come first, then the second.
    """
    first = u32(block // u32(section * tiles) * section)
    within = u32(block - first * tiles)
    together = min(section, u32(heads - first))
    return u32(within // together), u32(first + within % together)


@device
def nth_tile(n, block, blocks, tiles, heads, section):
    """The n-th tile of one of `blocks` blocks that take them all: its number, the tile, the head.

    In the order of `tile_of_block`; there is none if the number is `tiles` * `heads` or more. Every
    second round goes backwards: a block that got a long one then gets a short one.
    """
    turn = blocks - u32(1) - block if n & u32(1) else block
    number = u32(n * blocks + turn)
    tile, head = tile_of_block(number, tiles, heads, section)
    return number, tile, head


@device
def take_turn(group):
    """Wait for a warpgroup's turn at starting products: named barrier `group`."""
    bar_sync(group, 2 * THREADS)


@device
def pass_turn(group):
    """Hand the turn on to a warpgroup."""
    bar_arrive(group, 2 * THREADS)


def row_statistics(rows: int, with_D: bool = True) -> tuple[Any, Any]:
    """L and D of `rows` rows on their way to shared memory, by one warp: ``fetch``, ``put``.

    Returns
    -------
    fetch : device function ``(L, D, b, h, first, N_q, l, D_i)``
        Each lane's, from memory; those past the last row as of a row that sees no key.
    put : device function ``(L_D, place, l, D_i)``
        Into rows `place` and `place` + 1 of a tile, L in base 2.
    """

    @device
    def fetch(L, D, b, h, first, N_q, l, D_i):
        for k in range(rows // 32):
            row = first + np.int64(cuda.laneid) + 32 * k
            l[k], D_i[k] = NEG_INF, ZERO
            if row < N_q:
                l[k] = L[b, h, row]
                if with_D:
                    D_i[k] = D[b, h, row]

    @device
    def put(L_D, place, l, D_i):
        lane = u32(cuda.laneid)
        for k in range(rows // 32):
            # Rows that see no key, and those past the last, have P = 0.
            log_2 = l[k] * LOG2_E if l[k] != NEG_INF else -NEG_INF
            L_D[place, lane + u32(32 * k)] = log_2
            L_D[place + u32(1), lane + u32(32 * k)] = D_i[k]

    return fetch, put


def row_tiles_seeing(rule: Any, B_r: int, B_c: int) -> Any:
    """``seeing(args, b, h, j, N_q, N_k) -> (begin, end)``, for a whole warp.

    The row tiles from `begin` to before `end` have rows that see keys of tile j. The ends of a
    mask's bounds never move left from row to row, so both are counts of row tiles, each of which
    a lane looks at.
    """
    _, _, (row_bounds, _) = tile_functions(rule, B_r, B_c, device)
    bounded = rule.bounded

    @device
    def seeing(args, b, h, j, N_q, N_k):
        T_r = np.int32((N_q + B_r - 1) // B_r)
        if not bounded:
            return np.int32(0), T_r
        first_key, end_key = np.int64(j) * B_c, (np.int64(j) + 1) * B_c
        before = past = t = np.int32(0)
        while t < T_r:
            i = np.int32(t + np.int32(cuda.laneid))
            first = np.int64(i) * B_r
            # Of the tile's rows the last has the last key, the first the first.
            _, _, hi = row_bounds(args, b, h, min(first + B_r, N_q) - 1, N_q, N_k)
            _, lo, _ = row_bounds(args, b, h, first, N_q, N_k)
            before += np.int32(cuda.popc(vote_ballot(i < T_r and hi <= first_key)))
            past += np.int32(cuda.popc(vote_ballot(i < T_r and lo < end_key)))
            t = np.int32(t + np.int32(LANES))
        return before, past

    return seeing


def partial_tiles(rule: Any, B_r: int, B_c: int) -> Any:
    """``is_partial(mask_args, b, h, i, j, N_q, N_k)``: whether a row of tile i misses a key of j.

    Each row misses the keys past the last. Rows past the last do not count.
    """
    _, tile_kind, (row_bounds, _) = tile_functions(rule, B_r, B_c, device)
    elementwise = rule.elementwise

    @device
    def is_partial(mask_args, b, h, i, j, N_q, N_k):
        first, first_key = np.int64(i) * B_r, np.int64(j) * B_c
        _, _, hi = row_bounds(mask_args, b, h, first, N_q, N_k)
        _, lo, _ = row_bounds(mask_args, b, h, min(first + B_r, N_q) - 1, N_q, N_k)
        outside = lo > first_key or hi < first_key + B_c
        if elementwise:
            return outside or tile_kind(mask_args, b, h, i, j, 0, N_k, N_q, N_k) != FULL
        return outside

    return is_partial


@device
def _columns_before(end):
    """Bit 2 c + e for each column 8 c + e, of 128, that comes before `end`."""
    end = min(max(end, np.int32(0)), np.int32(128))
    count = end // np.int32(8) * np.int32(2) + min(end % np.int32(8), np.int32(2))
    return u32((np.uint64(1) << np.uint64(count)) - np.uint64(1))


@device
def _keys_before(end):
    """Bit r for each of 16 keys r that comes before `end`."""
    return (u32(1) << u32(min(max(end, np.int32(0)), np.int32(16)))) - u32(1)


def hidden_finder(rule: Any, keys_in_rows: bool) -> Any:
    """``find(mask_args, b, h, row, key, N_q, N_k)``: one bit for each score of a thread.

    Of a tile of 64 x 64: whether the row does not see the key. Bit k is that of accumulator 2 k,
    bit k + 16 that of 2 k + 1. `row` and `key` are those of the thread's first score. Rows of the
    tile are query rows, or keys with `keys_in_rows`. A row sees an interval of keys, so its bits
    need no comparison each.
    """
    _, _, (row_bounds, visible) = tile_functions(rule, ROWS, ROWS, device)
    elementwise = rule.elementwise

    @device
    def seen_by_rows(mask_args, b, h, row, key, N_q, N_k):
        """Which scores are inside the bounds of their rows."""
        seen = u32(0)
        for r in range(2):
            _, lo, hi = row_bounds(mask_args, b, h, row + 8 * r, N_q, N_k)
            x = _columns_before(np.int32(hi - key)) & ~_columns_before(np.int32(lo - key))
            x = x & u32(0x5555) | (x & u32(0xAAAA)) << u32(15)  # bit 2 c + e to 2 c + 16 e
            seen |= x << u32(r)
        return u32(seen)

    @device
    def seen_in_columns(mask_args, b, h, row, key, N_q, N_k):
        """The same; query rows are in columns.

        Each lane asks for the bounds of two of the 64: of row l in the first half, then in the
        second. Which of the warp's 16 keys they see it hands to those that have such scores.
        """
        lane = u32(cuda.laneid)
        q, g = lane % u32(4), lane // u32(4)
        first_key, my_row = key - np.int64(g), row - np.int64(u32(2) * q) + np.int64(lane)
        seen = u32(0)
        for half in range(2):
            _, lo, hi = row_bounds(mask_args, b, h, my_row + LANES * half, N_q, N_k)
            lo, hi = np.int32(lo - first_key), np.int32(hi - first_key)
            mine = u32(_keys_before(hi) & ~_keys_before(lo))
            next_row = u32(shfl_bfly(np.int32(mine), 1))  # in even lanes
            two = np.int32(u32(mine | next_row << u32(16)))
            for k in range(4):
                # My column e and row r: from bit 16 e + 8 r to bit 16 e + r.
                x = u32(shfl_idx(two, np.int32(u32(8 * k) + u32(2) * q))) >> g & u32(0x01010101)
                x = (x | x >> u32(7)) & u32(0x00030003)
                seen |= x << u32(8 * half + 2 * k)
        return u32(seen)

    @device
    def find(mask_args, b, h, row, key, N_q, N_k):
        if keys_in_rows:
            seen = seen_in_columns(mask_args, b, h, row, key, N_q, N_k)
        else:
            seen = seen_by_rows(mask_args, b, h, row, key, N_q, N_k)
        if elementwise:
            for x in range(ROWS // 2):
                down, across = 8 * (x // 2 % 2), 8 * (x // 4) + x % 2
                i, j = (row + across, key + down) if keys_in_rows else (row + down, key + across)
                bit = u32(1 << (x // 2 + 16 * (x % 2)))
                if seen & bit and not visible(mask_args, b, h, i + N_k - N_q, j):
                    seen &= ~bit
        # The compiler would else make a case of its own of each tile of which it knows all.
        return u32(mov_b32(np.int32(~seen)))

    return find


def score_packer(dtype: str) -> tuple[Any, Any]:
    """``round_scores(X, packed, hidden)``: 64 x 64 scores in 16 bits, an A of 64 k.

    And ``hide(packed, hidden)``, which is its second half. Those whose bit of `hidden`, as
    `hidden_finder` has them, is set become 0.
    """
    pack_two = PACK[dtype]

    @device
    def hide(packed, hidden):
        """Make those 0 whose bit is set: also NaN, which 0 times NaN would be."""
        seen = u32(~hidden)
        for k in range(ROWS // 4):
            # Bits k and k + 16 become the signs of bytes 1 and 3, and those two bytes each.
            packed[k] = packed[k] & prmt_b32(u32(seen << u32(15 - k)), u32(0), u32(0xBB99))

    @device
    def round_scores(X, packed, hidden):
        for k in range(ROWS // 4):
            packed[k] = pack_two(X[2 * k + 1], X[2 * k])
        if mov_b32(np.int32(hidden)):
            hide(packed, hidden)

    return round_scores, hide


def score_gradients(n: int, keys_in_rows: bool, change: Any) -> tuple[Any, Any, Any, Any]:
    """P and dS of 64 x n scores: lines 11 and 14 of FlashAttention-2's Algorithm 2.

    L, in units of log 2, and D are local arrays of the thread's two rows, where those are query
    rows; with `keys_in_rows` they are the addresses in shared memory of those of its first column.

    Returns
    -------
    fetch : device function ``(ahead, A)``
        L or D of the thread's first columns, `AHEAD` registers. Before the wait for the product
        that they go with, they are there with it. Nothing where they are not in shared memory.
    make_P : device function ``(S, L, ahead, c)``
        S becomes ``2 ** (c S - L)``. For scores that do not change.
    make_dS : device function ``(P, dP, D, ahead)``
        dP becomes ``P (dP - D)``.
    make_both : device function ``(S, dP, L, D, scale, state, i, j)``
        The same for scores that change; i and j are the places of the thread's first score.
    """
    _, changed = change.functions(device, np.float32)
    derivative = change.derivative(device, np.float32)
    DERIVED = derivative is not None
    loaded = AHEAD // 2 if keys_in_rows else 0

    @device
    def load(two, A, k):
        """Those of the thread's columns 8 k and 8 k + 1."""
        if keys_in_rows:
            ld_shared_v2_f32(two, u32(A + u32(32 * k)))

    @device
    def take(two, A, ahead, k):
        """The same, of which the first were loaded ahead."""
        if k < loaded:
            two[0], two[1] = ahead[2 * k], ahead[2 * k + 1]
        else:
            load(two, A, k)

    @device
    def fetch(ahead, A):
        two = cuda.local.array(2, np.float32)
        two[0], two[1] = ZERO, ZERO
        for k in range(loaded):
            load(two, A, k)
            ahead[2 * k], ahead[2 * k + 1] = two[0], two[1]

    @device
    def of(two, A, x):
        """That of register x: 4 registers hold 2 rows of 2 columns."""
        return two[x % 2] if keys_in_rows else A[x // 2 % 2]

    @device
    def make_P(S, L, ahead, c):
        two = cuda.local.array(2, np.float32)
        two[0], two[1] = ZERO, ZERO
        for k in range(n // 8):
            take(two, L, ahead, k)
            for x in range(4 * k, 4 * k + 4):
                S[x] = ex2_approx_ftz_f32(S[x] * c - of(two, L, x))

    @device
    def make_dS(P, dP, D, ahead):
        two = cuda.local.array(2, np.float32)
        two[0], two[1] = ZERO, ZERO
        for k in range(n // 8):
            take(two, D, ahead, k)
            for x in range(4 * k, 4 * k + 4):
                dP[x] = P[x] * (dP[x] - of(two, D, x))

    @device
    def make_both(S, dP, L, D, scale, state, i, j):
        two_L, two_D = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        two_L[0], two_L[1], two_D[0], two_D[1] = ZERO, ZERO, ZERO, ZERO
        for k in range(n // 8):
            load(two_L, L, k)
            load(two_D, D, k)
            for x in range(4 * k, 4 * k + 4):
                row, column = 8 * (x // 2 % 2), 8 * k + x % 2
                i_x, j_x = (i + column, j + row) if keys_in_rows else (i + row, j + column)
                s = S[x] * scale
                new = changed(state, i_x, j_x, s) * LOG2_E
                S[x] = ex2_approx_ftz_f32(new - of(two_L, L, x))
                dP[x] = S[x] * (dP[x] - of(two_D, D, x))
                if DERIVED:
                    dP[x] = dP[x] * derivative(state, i_x, j_x, s)

    return fetch, make_P, make_dS, make_both


def matrix_loader(n: int) -> Any:
    """``load(A, at, thread)``: 64 x n values from a box at address `at` to registers, an A of n k.

    For n up to 64; a box has rows of 64.
    """

    @device
    def load(A, at, thread):
        lane, warp = u32(thread) % u32(LANES), u32(thread) // u32(LANES) % u32(4)
        # A lane gives the address of a row of one of four 8 x 8 matrices: of the warp's 16 rows,
        # then of the same 8 columns on.
        place = piece_of_row(at, u32(16) * warp + (lane & u32(15)), lane >> u32(4))
        four = cuda.local.array(4, np.uint32)
        for k in range(n // 16):
            ldmatrix_x4(four, u32(place ^ u32(32 * k)))
            for x in range(4):
                A[4 * k + x] = four[x]

    return load


def transposed_storer(n: int) -> Any:
    """``store(packed, at, thread)``: 64 x n packed values to shared memory, transposed.

    To a box at address `at` of n rows of 64: the warpgroup's column c is the box's row c.
    """

    @device
    def store(packed, at, thread):
        lane, warp = u32(thread) % u32(LANES), u32(thread) // u32(LANES) % u32(4)
        # A lane gives the address of column lane % 8 of one of four 8 x 8 matrices: two of the
        # warp's 16 rows, in pieces of 16 bytes, times two of 16 columns.
        piece = u32(2) * warp + (lane >> u32(3) & u32(1))
        row = (lane >> u32(4)) * u32(8) + (lane & u32(7))
        place = u32(at + row * u32(128) + ((piece ^ (lane & u32(7))) << u32(4)))  # swizzled
        for k in range(n // 16):
            stmatrix_x4_trans(
                u32(place + u32(2048 * k)),
                packed[4 * k],
                packed[4 * k + 1],
                packed[4 * k + 2],
                packed[4 * k + 3],
            )

    return store


def clearer(n: int) -> Any:
    """``clear(X)``: n registers become 0.

    Before a product that does not read its accumulators, too: ptxas drops the zeros, and what was
    in the registers need not be kept until then.
    """

    @device
    def clear(X):
        for k in range(n):
            X[k] = ZERO

    return clear


def zero_times(n: int) -> Any:
    """``product(acc) -> 0``, or NaN if one of a thread's accumulators of 64 x n is NaN or inf."""

    @device
    def product(acc):
        x, y = ZERO, ZERO
        for k in range(0, n // 2, 2):
            x += acc[k] * ZERO
            y += acc[k + 1] * ZERO
        return x + y

    return product


def rows_by_lanes(d: int, fmt: Format) -> tuple[Any, Any, Any]:
    """What a warp does with rows of d elements in memory.

    A lane has the columns lane, lane + 32, ...

    Returns
    -------
    dot : device function ``(A, B, b, h_a, row_a, h_b, row_b)``
        The product of a row of A and one of B, in all lanes.
    is_finite : device function ``(A, b, h, row)``
        Whether all elements of the row are.
    add : device function ``(acc, x, A, b, h, row)``
        acc += x times the row.
    """
    to_acc = fmt.to_acc
    own = -(-d // LANES)

    @device
    def dot(A, B, b, h_a, row_a, h_b, row_b):
        lane = np.int64(cuda.laneid)
        s = ZERO
        for k in range(own):
            column = lane + LANES * k
            if column < d:
                s += to_acc(A[b, h_a, row_a, column]) * to_acc(B[b, h_b, row_b, column])
        for bit in range(5):
            s += shfl_bfly(s, 1 << bit)
        return s

    @device
    def is_finite(A, b, h, row):
        lane = np.int64(cuda.laneid)
        x = ZERO
        for k in range(own):
            if lane + LANES * k < d:
                x += to_acc(A[b, h, row, lane + LANES * k]) * ZERO
        return not vote_any(x != ZERO)

    @device
    def add(acc, x, A, b, h, row):
        lane = np.int64(cuda.laneid)
        for k in range(own):
            if lane + LANES * k < d:
                acc[k] += x * to_acc(A[b, h, row, lane + LANES * k])

    return dot, is_finite, add


def row_recomputer(d: int, rule: Any, change: Any, fmt: Format) -> Any:
    """``recompute(Q, K, V, O, L, scale, mask_args, state, b, h, h_k, first, N_q, N_k)``.

    A warp computes those of rows `first` to ``first + 15`` of O again that are not finite, and
    their L, key by key: a key that a row does not see is not touched, whatever V holds there. (In
    P V it counts as 0 times that, which is NaN if that is NaN or infinite.)
    """
    _, _, (row_bounds, visible) = tile_functions(rule, ROWS, ROWS, device)
    _, changed = change.functions(device, np.float32)
    from_acc, exp, log = fmt.from_acc, fmt.exp, fmt.log
    own = -(-d // LANES)  # columns of a lane
    dot, is_finite, add = rows_by_lanes(d, fmt)

    @device
    def score(Q, K, scale, state, b, h, h_k, row, i, j):
        return changed(state, i, j, dot(Q, K, b, h, row, h_k, j) * scale)

    @device
    def recompute(Q, K, V, O, L, scale, mask_args, state, b, h, h_k, first, N_q, N_k):
        lane = np.int64(cuda.laneid)
        for row in range(first, min(first + 16, N_q)):
            if not is_finite(O, b, h, row):
                i, lo, hi = row_bounds(mask_args, b, h, row, N_q, N_k)
                m, l = NEG_INF, ZERO
                for j in range(lo, hi):
                    if visible(mask_args, b, h, i, j):
                        m = max_f32(m, score(Q, K, scale, state, b, h, h_k, row, i, j))
                acc = cuda.local.array(own, np.float32)
                for k in range(own):
                    acc[k] = ZERO
                for j in range(lo, hi):
                    if visible(mask_args, b, h, i, j):
                        p = exp(score(Q, K, scale, state, b, h, h_k, row, i, j) - m)
                        l += p
                        add(acc, p, V, b, h_k, j)
                for k in range(own):
                    if lane + LANES * k < d:
                        o = acc[k] / l if l != ZERO else ZERO
                        O[b, h, row, lane + LANES * k] = from_acc(o)
                if lane == 0:
                    L[b, h, row] = m + log(l) if l != ZERO else NEG_INF

    return recompute


def gradient_recomputer(gradient: str, d: int, rule: Any, change: Any, fmt: Format) -> Any:
    """Rows of dQ, dK or dV again where they are not finite, pair by pair of query row and key.

    A pair of which the row does not see the key is not touched, whatever is there. (In products of
    tiles it counts as 0 times that, which is NaN if that is NaN or infinite.)

    Returns
    -------
    device function
        ``recompute(Q, K, V, dO, L, D, out, scale, mask_args, score_args, b, h, group, first, N_q,
        N_k)``: those of rows `first` to ``first + 15`` of `out`, by a warp. h is a head of `out`;
        `group` query heads read a key head.
    """
    _, _, (row_bounds, visible) = tile_functions(rule, ROWS, ROWS, device)
    prepare, changed = change.functions(device, np.float32)
    derivative = change.derivative(device, np.float32)
    DERIVED = derivative is not None
    from_acc, exp = fmt.from_acc, fmt.exp
    own = -(-d // LANES)  # columns of a lane
    dot, is_finite, add = rows_by_lanes(d, fmt)

    @device
    def factor(Q, K, V, dO, L, D, scale, state, b, h, h_k, row, i, j):
        """P_ij, or dS_ij times the scale."""
        s = dot(Q, K, b, h, row, h_k, j) * scale
        l = L[b, h, row]
        p = exp(changed(state, i, j, s) - l) if l != NEG_INF else ZERO  # no score of it is finite
        if gradient == "dV":
            return p
        ds = p * (dot(dO, V, b, h, row, h_k, j) - D[b, h, row])
        return ds * scale * derivative(state, i, j, s) if DERIVED else ds * scale

    @device
    def sum_row(Q, K, V, dO, L, D, acc, scale, mask_args, score_args, b, h, group, row, N_q, N_k):
        """dQ_i."""
        state = prepare(score_args, b, h)
        i, lo, hi = row_bounds(mask_args, b, h, row, N_q, N_k)
        for j in range(lo, hi):
            if visible(mask_args, b, h, i, j):
                x = factor(Q, K, V, dO, L, D, scale, state, b, h, h // group, row, i, j)
                add(acc, x, K, b, h // group, j)

    @device
    def sum_key(Q, K, V, dO, L, D, acc, scale, mask_args, score_args, b, h_k, group, j, N_q, N_k):
        """dK_j or dV_j."""
        for h in range(h_k * group, (h_k + 1) * group):
            state = prepare(score_args, b, h)
            for row in range(N_q):
                i, lo, hi = row_bounds(mask_args, b, h, row, N_q, N_k)
                if lo <= j and j < hi and visible(mask_args, b, h, i, j):
                    x = factor(Q, K, V, dO, L, D, scale, state, b, h, h_k, row, i, j)
                    add(acc, x, dO if gradient == "dV" else Q, b, h, row)

    sum_one = sum_row if gradient == "dQ" else sum_key

    @device
    def recompute(
        Q, K, V, dO, L, D, out, scale, mask_args, score_args, b, h, group, first, N_q, N_k
    ):  # fmt: skip
        lane = np.int64(cuda.laneid)
        acc = cuda.local.array(own, np.float32)
        for row in range(first, min(first + 16, N_q if gradient == "dQ" else N_k)):
            if not is_finite(out, b, h, row):
                for k in range(own):
                    acc[k] = ZERO
                sum_one(
                    Q, K, V, dO, L, D, acc, scale, mask_args, score_args, b, h, group, row, N_q, N_k
                )  # fmt: skip
                for k in range(own):
                    if lane + LANES * k < d:
                        out[b, h, row, lane + LANES * k] = from_acc(acc[k])

    return recompute
