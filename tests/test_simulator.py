"""The simulator's promises: strict barriers, NaN in shared memory, warps, repeatable order."""

import warnings
from typing import Any

import numpy as np
import pytest

from fa2_numba import hbm, launch, ptx, simulator, smem

pytestmark = pytest.mark.skipif(
    not simulator.ACTIVE, reason="runs on the simulator: NUMBA_ENABLE_CUDASIM=1"
)

from numba import cuda  # noqa: E402


def run(kernel: Any, *args: Any, blocks: int = 1, threads: int = 32, shared_bytes: int = 0) -> None:
    launch.launch(hbm.jit(kernel), blocks, threads, 0, shared_bytes, *args)


# ---- threads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_threads_run_in_the_order_asked_for(order: str) -> None:
    seen: list[int] = []

    def kernel():
        seen.append(cuda.threadIdx.x)
        cuda.syncthreads()
        seen.append(cuda.threadIdx.x)

    with simulator.thread_order(order):
        run(kernel, threads=5)
    expected = list(range(5))[:: 1 if order == "forward" else -1]
    assert seen == expected * 2  # all five reach the barrier before one passes it


def test_the_order_is_restored_and_checked() -> None:
    with pytest.raises(RuntimeError, match="stop"), simulator.thread_order("reversed"):
        raise RuntimeError("stop")
    test_threads_run_in_the_order_asked_for("forward")
    with pytest.raises(ValueError, match="order: got 'sideways', accepted"):
        with simulator.thread_order("sideways"):
            pass


def test_a_missing_barrier_gives_two_results_in_two_orders() -> None:
    tile = smem.shared_tile(1, 8, np.float32, 0)

    def kernel(out, barrier):
        T = tile(None)
        t = cuda.threadIdx.x
        T[0, t] = t
        if barrier:
            cuda.syncthreads()
        out[t] = T[0, 7 - t]

    def both(barrier: bool) -> list[list[float]]:
        results = []
        for order in ("forward", "reversed"):
            out = np.empty(8, np.float32)
            with simulator.thread_order(order):
                run(kernel, out, barrier, threads=8, shared_bytes=128)
            results.append(out.tolist())
        return results

    assert both(True) == [[7, 6, 5, 4, 3, 2, 1, 0]] * 2
    forward, backward = both(False)
    assert forward != backward


def test_grid_block_and_thread_numbers() -> None:
    out = np.full((6, 32, 4), -1)

    def kernel(out):
        b, t = cuda.blockIdx.x, cuda.threadIdx.x
        out[b, t, 0], out[b, t, 1] = b, t
        cuda.syncthreads()
        out[b, t, 2], out[b, t, 3] = cuda.blockDim.x, cuda.gridDim.x

    run(kernel, out, blocks=6)
    b, t = np.indices((6, 32))
    np.testing.assert_array_equal(out, np.stack([b, t, 0 * b + 32, 0 * b + 6], -1))


# ---- barriers ---------------------------------------------------------------------------------


def test_barriers_with_votes() -> None:
    out = np.empty((3, 8), np.int64)

    def kernel(out):
        t = cuda.threadIdx.x
        out[0, t] = cuda.syncthreads_or(t == 3)
        out[1, t] = cuda.syncthreads_and(t < 8)
        out[2, t] = cuda.syncthreads_count(t % 2)

    run(kernel, out, threads=8)
    assert out.tolist() == [[1] * 8, [1] * 8, [4] * 8]


def some_return_early() -> None:
    if cuda.threadIdx.x > 2:
        cuda.syncthreads()


def two_barriers() -> None:
    if cuda.threadIdx.x % 2:
        cuda.syncthreads()
    else:
        cuda.syncthreads()


def one_iteration_more() -> None:
    for _ in range(2 if cuda.threadIdx.x == 0 else 1):
        cuda.syncthreads()


def half_a_warp_shuffles() -> None:
    if cuda.threadIdx.x < 16:
        ptx.shfl_bfly(1, 1)


@pytest.mark.parametrize(
    "kernel", [some_return_early, two_barriers, one_iteration_more, half_a_warp_shuffles]
)
def test_a_hang_on_a_gpu_raises(kernel: Any) -> None:
    with pytest.raises(simulator.BarrierDivergence, match=r"block \(0, 0, 0\)"):
        run(kernel)
    run(lambda: cuda.syncthreads())  # and leaves the simulator usable


def test_a_barrier_in_a_loop_is_one_barrier() -> None:
    count = np.zeros(1, np.int64)

    def kernel(count):
        for _ in range(50):  # long enough for the interpreter to specialise its instructions
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                count[0] += 1

    run(kernel, count, threads=64)
    assert count[0] == 50


def test_an_error_names_thread_and_block() -> None:
    def kernel(x):
        if cuda.blockIdx.x == 1 and cuda.threadIdx.x == 2:
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad") as error:
        run(kernel, np.zeros(1), blocks=2, threads=4)
    assert error.value.__notes__ == ["in thread (2, 0, 0) of block (1, 0, 0)"]


# ---- warps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("threads", [32, 96])
def test_shuffles_stay_in_their_warp(lanes: int, threads: int) -> None:
    out = np.empty(threads, np.int64)

    def kernel(out):
        t = cuda.threadIdx.x
        out[t] = ptx.shfl_bfly(t, lanes)

    run(kernel, out, threads=threads)
    assert out.tolist() == [t ^ lanes for t in range(threads)]


@pytest.mark.parametrize("threads", [32, 96])
def test_votes_and_values_of_a_lane(threads: int) -> None:
    out = np.empty((threads, 3), np.int64)

    def kernel(out):
        t = cuda.threadIdx.x
        out[t, 0] = ptx.shfl_idx(t, (t + 5) % 32)
        out[t, 1] = ptx.vote_ballot(t % 32 == 7 or t == 40)
        out[t, 2] = ptx.vote_any(t == 40)

    run(kernel, out, threads=threads)
    assert out[:, 0].tolist() == [t // 32 * 32 + (t + 5) % 32 for t in range(threads)]
    for t in range(threads):
        second = t // 32 == 1
        assert tuple(out[t, 1:]) == (1 << 7 | second << 8, second)


def test_warps_may_exchange_at_different_times() -> None:
    out = np.empty(64, np.int64)

    def kernel(out):
        t = cuda.threadIdx.x
        x = t
        for _ in range(1 + t // 32):  # the second warp exchanges twice
            x = ptx.shfl_bfly(x, 1)
        cuda.syncthreads()
        out[t] = x

    run(kernel, out, threads=64)
    assert out[:32].tolist() == [t ^ 1 for t in range(32)]
    assert out[32:].tolist() == list(range(32, 64))


def test_lanes_of_one_warp_at_two_exchanges() -> None:
    def kernel():
        if cuda.threadIdx.x % 2:
            ptx.shfl_bfly(1, 1)
        else:
            ptx.shfl_bfly(2, 1)

    with pytest.raises(simulator.BarrierDivergence):
        run(kernel)


# ---- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_shared_memory_starts_as_nan_in_every_block(dtype: Any) -> None:
    tile = smem.shared_tile(2, 4, dtype, 32)
    out = np.zeros((3, 2, 4), dtype)

    def kernel(out):
        T = tile(None)
        t = cuda.threadIdx.x
        out[cuda.blockIdx.x, t // 4, t % 4] = T[t // 4, t % 4]
        T[t // 4, t % 4] = 1

    run(kernel, out, blocks=3, threads=8, shared_bytes=128)
    assert np.isnan(out).all()


def test_a_tile_outside_the_allocation_raises() -> None:
    tile = smem.shared_tile(4, 4, np.float32, 16)
    with pytest.raises(RuntimeError, match="64 bytes at 16 exceeds 64"):
        run(lambda: tile(None), shared_bytes=64)


def test_tiles_may_overlap() -> None:
    """P_ij takes the place of K_j in fa2."""
    first, second = (smem.shared_tile(1, 4, np.int32, offset) for offset in (0, 8))
    out = np.empty(4, np.int32)

    def kernel(out):
        A, B = first(None), second(None)
        t = cuda.threadIdx.x
        A[0, t] = t
        cuda.syncthreads()
        if t < 2:
            out[t] = B[0, t]

    run(kernel, out, threads=4, shared_bytes=32)
    assert out[:2].tolist() == [2, 3]


def test_arrays_are_neither_copied_nor_refused() -> None:
    """Strided, stride 0, read-only: Numba's simulator copies arguments in and out."""
    source = np.arange(24.0).reshape(4, 6)
    shared = np.broadcast_to(np.float64(5), (4,))
    out = np.zeros((4, 8))

    def kernel(A, b, out):
        t = cuda.threadIdx.x
        out[t, 0] = A[t, 0] + b[t]

    run(kernel, source[:, ::-2], shared, out[:, 1::2], threads=4)
    np.testing.assert_array_equal(out[:, 1], source[:, 5] + 5)
    assert not np.delete(out, 1, axis=1).any()


def test_floating_point_is_silent_as_on_a_gpu() -> None:
    def kernel(out):
        out[0] = out[0] - out[0]  # inf - inf
        cuda.syncthreads()
        out[1] = out[1] * out[1]  # overflow
        out[2] = out[2] / (out[2] - out[2])

    out = np.array([np.inf, 3e38, 1], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(kernel, out, threads=1)
    assert np.isnan(out[0]) and np.isposinf(out[1:]).all()


def test_ptx_stand_ins() -> None:
    bits = ptx.cvt_rn_bf16_f32(np.float32(1.00390625))  # half way between two: to even
    assert (bits, bits.dtype) == (0x3F80, np.uint16)
    assert ptx.mov_f32_bf16(np.uint16(0xC040)) == np.float32(-3)
    two = ptx.ex2_approx_ftz_f32(np.float32(1))
    assert (two, two.dtype) == (2, np.float32)
    assert ptx.ex2_approx_ftz_f32(np.float32(-np.inf)) == 0
    quarter = ptx.rcp_approx_ftz_f32(np.float32(4))
    assert (quarter, quarter.dtype) == (0.25, np.float32)
    assert ptx.max_f32(np.float32(-2), np.float32(-3)) == np.float32(-2)
    for pair in ((np.nan, -1), (-1, np.nan)):  # the number, as in the instruction
        assert ptx.max_f32(*map(np.float32, pair)) == np.float32(-1)
    assert ptx.mov_b32(np.int32(-7)) == -7
    assert ptx.trap_if_negative(np.float32(0)) is None
    bytes_ = ptx.prmt_b32(np.uint32(0x83224110), np.uint32(0xC7A65544), np.uint32(0x6B90))
    assert (bytes_, bytes_.dtype) == (0xA6FF0010, np.uint32)  # 6, sign of 3, sign of 1, 0
