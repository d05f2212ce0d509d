"""Planted faults, to see which of them compute-sanitizer sees: ``python -m benchmarks.sanitizer``.

Without an argument, the names of the faults and the tool for each; with a name, that fault is made.
Each stays within memory that this process has mapped: without the tool nothing happens.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import ptx_kernels
from numba import cuda, float32, uint32

from fa2_numba import launch, ptx, smem, tensor_map
from fa2_numba.problem import Layout

THREADS = 64
ROWS = 64  # of a box
BOX_BYTES = ROWS * ptx.ROW_BYTES


def bf16_map(array: Any, rows: int) -> int:
    """A map of boxes of an array (rows, 64) of 16-bit elements, which may have fewer rows."""
    layout = Layout((rows, 64), array.strides, 2, array.__cuda_array_interface__["data"][0])
    return tensor_map.tensor_map("x", layout, (ROWS, 64), "bf16").address


def boxes(rows: int) -> Any:
    return cuda.to_device(np.ones((rows, 64), np.uint16))


def new(shape: int | tuple[int, int], dtype: Any = np.float32) -> Any:
    """An array that nobody has written."""
    return cuda.device_array(shape, dtype)


def run(kernel: Any, shared_bytes: int, *args: Any) -> None:
    launch.launch(kernel, 1, THREADS, 0, shared_bytes, *args)
    cuda.synchronize()


# ---- memcheck ---------------------------------------------------------------------------------


def thread_stores_past_the_end() -> None:
    @cuda.jit
    def kernel(x):
        x[cuda.threadIdx.x + THREADS] = float32(1)

    run(kernel, 0, new(THREADS))


stores_read = ptx.cp_async_bulk_wait_group_read(0)


@cuda.jit
def copy_second_box(source, target):
    """Rows 64 to 127, there and back."""
    at, full = ptx.smem_address(0), ptx.smem_address(BOX_BYTES)
    ptx_kernels.start_barrier(full, 1)
    if cuda.threadIdx.x == 0:
        ptx.fence_proxy_tensormap(source)
        ptx.fence_proxy_tensormap(target)
        ptx.mbarrier_arrive_expect_tx(full, BOX_BYTES)
        ptx.cp_async_bulk_tensor_2d_load(at, source, 0, ROWS, full)
    ptx.mbarrier_try_wait_parity(full, 0)
    if cuda.threadIdx.x == 0:
        ptx.cp_async_bulk_tensor_2d_store(target, 0, ROWS, at)
        ptx.cp_async_bulk_commit_group()
        stores_read()


def tensor_copy_loads_past_the_end() -> None:
    whole, short = boxes(2 * ROWS), boxes(ROWS)  # nothing behind the short one
    run(copy_second_box, BOX_BYTES + 8, bf16_map(short, 2 * ROWS), bf16_map(whole, 2 * ROWS))


def tensor_copy_stores_past_the_end() -> None:
    whole, short = boxes(2 * ROWS), boxes(ROWS)  # nothing behind the short one
    run(copy_second_box, BOX_BYTES + 8, bf16_map(whole, 2 * ROWS), bf16_map(short, 2 * ROWS))


# ---- racecheck --------------------------------------------------------------------------------


def threads_without_a_barrier() -> None:
    @cuda.jit
    def kernel(seen):
        tile = cuda.shared.array(THREADS, float32)
        t = cuda.threadIdx.x
        tile[t] = float32(t)
        seen[t] = tile[t ^ 32]

    run(kernel, 0, new(THREADS))


def threads_read_before_the_copy_is_there() -> None:
    box = smem.shared_tile(ROWS, 64, np.uint16, 0)

    @cuda.jit
    def kernel(source, seen):
        at, full = ptx.smem_address(0), ptx.smem_address(BOX_BYTES)
        ptx_kernels.start_barrier(full, 1)
        if cuda.threadIdx.x == 0:
            ptx.fence_proxy_tensormap(source)
            ptx.mbarrier_arrive_expect_tx(full, BOX_BYTES)
            ptx.cp_async_bulk_tensor_2d_load(at, source, 0, 0, full)
        seen[cuda.threadIdx.x] = box(None)[0, cuda.threadIdx.x]
        ptx.mbarrier_try_wait_parity(full, 0)  # the block does not end before

    run(kernel, BOX_BYTES + 8, bf16_map(boxes(ROWS), ROWS), new(THREADS, np.uint16))


# ---- synccheck --------------------------------------------------------------------------------


def half_a_warp_at_a_barrier() -> None:
    @cuda.jit
    def kernel(x):
        if cuda.threadIdx.x < THREADS - 16:
            cuda.syncthreads()
        x[cuda.threadIdx.x] = float32(1)

    run(kernel, 0, new(THREADS))


def an_mbarrier_that_was_not_initialised() -> None:
    @cuda.jit
    def kernel(x):
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_arrive(ptx.smem_address(uint32(0)))
        x[cuda.threadIdx.x] = float32(1)

    run(kernel, 8, new(THREADS))


# ---- initcheck --------------------------------------------------------------------------------


def thread_loads_what_nobody_wrote() -> None:
    @cuda.jit
    def kernel(x, seen):
        seen[cuda.threadIdx.x] = x[cuda.threadIdx.x]

    run(kernel, 0, *(new(THREADS) for _ in range(2)))


def tensor_copy_loads_what_nobody_wrote() -> None:
    unwritten = bf16_map(new((2 * ROWS, 64), np.uint16), 2 * ROWS)
    run(copy_second_box, BOX_BYTES + 8, unwritten, bf16_map(boxes(2 * ROWS), 2 * ROWS))


FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    "a thread stores past the end": ("memcheck", thread_stores_past_the_end),
    "a tensor copy loads past the end": ("memcheck", tensor_copy_loads_past_the_end),
    "a tensor copy stores past the end": ("memcheck", tensor_copy_stores_past_the_end),
    "threads without a barrier": ("racecheck", threads_without_a_barrier),
    "threads read before a tensor copy is there": (
        "racecheck",
        threads_read_before_the_copy_is_there,
    ),
    "half a warp at a barrier": ("synccheck", half_a_warp_at_a_barrier),
    "an mbarrier that was not initialised": ("synccheck", an_mbarrier_that_was_not_initialised),
    "a thread loads what nobody wrote": ("initcheck", thread_loads_what_nobody_wrote),
    "a tensor copy loads what nobody wrote": ("initcheck", tensor_copy_loads_what_nobody_wrote),
}

if __name__ == "__main__":
    if len(sys.argv) == 1:
        print("\n".join(f"{name}\t{tool}" for name, (tool, _) in FAULTS.items()))
    else:
        FAULTS[sys.argv[1]][1]()
