"""What each tile of a boolean mask holds: nothing visible, everything, or some.

Grid       one block for each (row tile, key tile) of each head and batch of the mask.
HBM        reads each element of the mask once, writes one byte a tile.

The attention kernels read the map to skip empty tiles and to mask only partial ones. The map is
made once a call, for the mask's own batch and head sizes: a mask that broadcasts is read once.
"""

from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import cache, hbm
from fa2_numba.launch import Operands
from fa2_numba.masking import EMPTY, FULL, PARTIAL, BooleanArray
from fa2_numba.problem import Problem
from fa2_numba.tiling import Tiling, ceil_div


@cache.built
def build(tiling: Tiling) -> Any:
    """Kernel ``tile_map(mask, kinds)``: mask (B', H', N_q, N_k), kinds (B', H', T_r, T_c)."""
    B_r, B_c, threads = tiling.B_r, tiling.B_c, tiling.threads
    steps = ceil_div(B_r * B_c, threads)
    kind_empty, kind_partial, kind_full = np.uint8(EMPTY), np.uint8(PARTIAL), np.uint8(FULL)

    def tile_map(mask, kinds):
        H, N_q, N_k = mask.shape[1], mask.shape[2], mask.shape[3]
        T_r, T_c = kinds.shape[2], kinds.shape[3]
        block = cuda.blockIdx.x
        j = block % T_c
        i = block // T_c % T_r
        h = block // (T_c * T_r) % H
        b = block // (T_c * T_r * H)
        seen, hidden = np.int32(0), np.int32(0)
        for t in range(steps):
            e = cuda.threadIdx.x + t * threads
            row, col = i * B_r + e // B_c, j * B_c + e % B_c
            if e < B_r * B_c and row < N_q and col < N_k:
                if mask[b, h, row, col]:
                    seen = np.int32(1)
                else:
                    hidden = np.int32(1)
        any_seen = cuda.syncthreads_or(seen)
        any_hidden = cuda.syncthreads_or(hidden)
        if cuda.threadIdx.x == 0:
            kind = kind_partial
            if not any_seen:
                kind = kind_empty
            elif not any_hidden:
                kind = kind_full
            kinds[b, h, i, j] = kind

    return hbm.jit(tile_map, "tile_map", threads)


def launch(problem: Problem, A: Operands, mask: BooleanArray) -> None:
    """Make the tile map of a boolean mask that is among the operands `A`."""
    t = problem.tiling
    B, H, N_q, N_k = A.arrays[mask.name].shape
    shape = (B, H, t.T_r(N_q), t.T_c(N_k))
    A.arrays[mask.map_name] = A.allocate(shape, np.uint8)
    A.run(
        build(t),
        B * H * t.T_r(N_q) * t.T_c(N_k),
        t.threads,
        0,
        A.array(mask.name, "tile map"),
        A.array(mask.map_name, "tile map"),
    )
