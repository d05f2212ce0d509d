"""What the backward methods share, row by row: D, and dQ cleared before and rounded after.

`rowsum`   D = rowsum(dO o O), less dL where the loss has a gradient by L: dL_i/dS_ij = P_ij, so
           that dS = P o (dP - D) has both.  Grid: one warp a row.
           HBM: reads dO, O and dL, writes D.
`clear`    dQ = 0, for the methods that add to it.  Grid: one block for each row tile.
`finish`   dQ in fp16 or bf16, from the accumulator in fp32 to which they add.  Grid: as `clear`.
"""

from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import cache, hbm
from fa2_numba.formats import FORMATS
from fa2_numba.launch import Operands
from fa2_numba.problem import Problem
from fa2_numba.softmax import row_reductions
from fa2_numba.tile import u32
from fa2_numba.tiling import BOX_COLUMNS, Tiling, ceil_div, vector_width

WARP = 32
ROWSUM_WARPS = 4  # rows of a block
HOPPER = ("fa3_backward", "fa3_backward_deterministic")
ADDING = ("fa1_backward", "fa2_backward")  # methods that add to dQ, row by row


@cache.built
def build_rowsum(d: int, dtype: str, width: int) -> Any:
    """Kernel ``rowsum(dO, O, dL, D)``; dL may be None. `width` elements of dO and O at once.

    A lane sums the same columns for every `width`, so D has the same bits.
    """
    fmt = FORMATS[dtype]
    acc_type, storage, to_acc = fmt.acc, fmt.storage, fmt.to_acc
    ZERO = acc_type(0)
    load = hbm.vector_load(width)
    C = vector_width(dtype)  # neighbours of a lane
    steps = ceil_div(d, WARP * C)
    _, row_sum = row_reductions(WARP)

    def rowsum(dO, O, dL, D):
        H, N_q = O.shape[1], O.shape[2]
        row_of_all = np.int64(cuda.blockIdx.x) * ROWSUM_WARPS + cuda.threadIdx.x // WARP
        lane = cuda.threadIdx.x % WARP
        row = row_of_all % N_q
        h = row_of_all // N_q % H
        b = row_of_all // (N_q * H)
        inside = b < O.shape[0]
        x = cuda.local.array(width, storage)
        y = cuda.local.array(width, storage)
        total = ZERO
        for t in range(steps):
            for c in range(0, C, width):
                col = (t * WARP + lane) * C + c
                if inside and col < d:
                    load(dO, (b, h, row, col), x, 0)
                    load(O, (b, h, row, col), y, 0)
                    for n in range(width):
                        total += to_acc(x[n]) * to_acc(y[n])
        total = row_sum(total)
        if inside and lane == 0:
            if dL is not None:
                total -= dL[b, h, row]
            D[b, h, row] = total

    return hbm.jit(rowsum, "backward_rowsum")


@cache.built
def build_prepare(tiling: Tiling, d: int, dtype: str, width: int, clears: bool) -> Any:
    """Kernel ``prepare(dO, O, dL, D, dQ_acc)``, for fa3: D, and with `clears` dQ_acc = 0.

    A block a row tile, four lanes a row; `width` elements of dO and O at once. dL may be None.
    """
    fmt = FORMATS[dtype]
    storage, to_acc = fmt.storage, fmt.to_acc
    B_r, C = tiling.B_r, vector_width(dtype)  # neighbours of a lane
    threads, steps = 4 * B_r, ceil_div(d, 4 * C)
    held = steps * C
    ZERO = np.float32(0)
    tile = B_r * ceil_div(d, BOX_COLUMNS) * BOX_COLUMNS
    load, store = hbm.vector_load(width), hbm.vector_store(4)
    _, row_sum = row_reductions(4)

    def prepare(dO, O, dL, D, dQ_acc):
        H, N_q = u32(O.shape[1]), O.shape[2]
        T_r = u32((N_q + B_r - 1) // B_r)
        block, tid = u32(cuda.blockIdx.x), np.int64(cuda.threadIdx.x)
        i, head = np.int64(block % T_r), u32(block // T_r)
        h, b = np.int64(head % H), np.int64(head // H)
        row, lane = i * B_r + tid // 4, tid % 4
        x, y = cuda.local.array(held, storage), cuda.local.array(held, storage)
        for t in range(steps):
            for c in range(0, C, width):
                col = C * (4 * t + lane) + c
                for n in range(width):
                    x[C * t + c + n], y[C * t + c + n] = 0, 0
                if row < N_q and col < d:
                    load(dO, (b, h, row, col), x, C * t + c)
                    load(O, (b, h, row, col), y, C * t + c)
        if clears:  # while the loads are on their way
            zeros = cuda.local.array(4, np.float32)
            for c in range(4):
                zeros[c] = ZERO
            for n in range(tile // (4 * threads)):
                store(dQ_acc, (b, h, i, 4 * (tid + n * threads)), zeros, 0)
        total = ZERO
        for n in range(held):
            total += to_acc(x[n]) * to_acc(y[n])
        total = row_sum(total)
        if row < N_q and lane == 0:
            if dL is not None:
                total -= dL[b, h, row]
            D[b, h, row] = total

    return hbm.jit(prepare, "fa3_backward_prepare", threads)


@cache.built
def build_clear(tiling: Tiling, d: int, dtype: str, width: int) -> Any:
    """Kernel ``clear(dQ)``: zeros, `width` at once."""
    B_r, threads = tiling.B_r, tiling.threads
    acc_type = FORMATS[dtype].acc
    ZERO = acc_type(0)
    pieces = d // width
    steps = ceil_div(B_r * pieces, threads)
    store = hbm.vector_store(width)

    def clear(dQ):
        H, N_q = dQ.shape[1], dQ.shape[2]
        T_r = (N_q + B_r - 1) // B_r
        block = cuda.blockIdx.x
        i, h, b = block % T_r, block // T_r % H, block // (T_r * H)
        zeros = cuda.local.array(width, acc_type)
        for c in range(width):
            zeros[c] = ZERO
        for t in range(steps):
            e = cuda.threadIdx.x + t * threads
            row = i * B_r + e // pieces
            if e < B_r * pieces and row < N_q:
                store(dQ, (b, h, row, e % pieces * width), zeros, 0)

    return hbm.jit(clear, "backward_clear", threads)


@cache.built
def build_finish(tiling: Tiling, d: int, dtype: str, width: int) -> Any:
    """Kernel ``finish(dQ_acc, dQ)``: dQ in its own dtype, `width` elements at once."""
    B_r, threads = tiling.B_r, tiling.threads
    fmt = FORMATS[dtype]
    acc_type, storage, from_acc = fmt.acc, fmt.storage, fmt.from_acc
    pieces = d // width
    steps = ceil_div(B_r * pieces, threads)
    load, store = hbm.vector_load(width), hbm.vector_store(width)

    def finish(dQ_acc, dQ):
        H, N_q = dQ.shape[1], dQ.shape[2]
        T_r = (N_q + B_r - 1) // B_r
        block = cuda.blockIdx.x
        i, h, b = block % T_r, block // T_r % H, block // (T_r * H)
        wide = cuda.local.array(width, acc_type)
        narrow = cuda.local.array(width, storage)
        for t in range(steps):
            e = cuda.threadIdx.x + t * threads
            row, col = i * B_r + e // pieces, e % pieces * width
            if e < B_r * pieces and row < N_q:
                load(dQ_acc, (b, h, row, col), wide, 0)
                for c in range(width):
                    narrow[c] = from_acc(wide[c])
                store(dQ, (b, h, row, col), narrow, 0)

    return hbm.jit(finish, "backward_finish", threads)


def before(problem: Problem, A: Operands) -> None:
    """D, where the method takes it from memory, and dQ = 0, where it adds to dQ."""
    p, t = problem, problem.tiling
    if p.method in HOPPER:
        A.workspace("D")
        if p.adds_dQ:
            A.workspace("dQ_acc")
        A.run(
            build_prepare(t, p.d, p.dtype, p.d_width, p.adds_dQ),
            t.T_r(p.N_q) * p.H * p.B,
            4 * t.B_r,
            0,
            A.array("dO", "D = rowsum(dO o O)"),
            A.array("O", "D = rowsum(dO o O)"),
            A.array("dL", "D = rowsum(dO o O)") if p.dlse else None,
            A.array("D", "D = rowsum(dO o O)"),
            A.array("dQ_acc", "dQ = 0") if p.adds_dQ else None,
        )
    elif p.method != "fa1_backward":
        A.workspace("D")
        A.run(
            build_rowsum(p.d, p.dtype, p.d_width),
            ceil_div(p.B * p.H * p.N_q, ROWSUM_WARPS),
            ROWSUM_WARPS * WARP,
            0,
            A.array("dO", "D = rowsum(dO o O)"),
            A.array("O", "D = rowsum(dO o O)"),
            A.array("dL", "D = rowsum(dO o O)") if p.dlse else None,
            A.array("D", "D = rowsum(dO o O)"),
        )
    if p.method in ADDING:
        if p.rounds:
            A.workspace("dQ_acc")
        A.run(
            build_clear(t, p.d, p.dtype, p.dq_row_width),
            t.T_r(p.N_q) * p.H * p.B,
            t.threads,
            0,
            A.array(p.dq_acc_name, "dQ = 0"),
        )


def after(problem: Problem, A: Operands) -> None:
    """dQ in its own dtype."""
    p, t = problem, problem.tiling
    if p.method in ADDING and p.rounds:
        A.run(
            build_finish(t, p.d, p.dtype, p.dq_row_width),
            t.T_r(p.N_q) * p.H * p.B,
            t.threads,
            0,
            A.array("dQ_acc", "finish"),
            A.array("dQ", "finish"),
        )
