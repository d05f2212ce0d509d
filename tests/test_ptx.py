"""sm_90's instructions: bits by hand, and small products and copies on a GPU.

Operands are small integers, whose products and sums are exact in fp32 and, where they must be, in
16 bits: every comparison with NumPy is for equality.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import ptx_kernels
import pytest
from ptx_kernels import WARPGROUP

from fa2_numba import launch, ptx, simulator, tensor_map
from fa2_numba.problem import Layout

gpu = pytest.mark.gpu
NUMPY = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
CANARY = np.uint16(0xA5A5)


def on_host(function: Any) -> Callable:
    """A device function as the Python function that it was made of."""
    return getattr(function, "py_func", function)


# ---- places, by hand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "leading", "stride", "bits"),
    [
        (0x400, 0, 1024, 0x4000_0040_0000_0040),  # K-major: 1024 >> 4 is 0x40
        (0x420, 0, 1024, 0x4000_0040_0000_0042),  # its second k16
        (0x2C400, 16384, 1024, 0x4000_0040_0400_2C40),  # MN-major, boxes of 128 rows
        (0x38C00, 22528, 1024, 0x4000_0040_0580_38C0),  # of 176 rows, at the end of the memory
    ],
)
def test_matrix_descriptor(address: int, leading: int, stride: int, bits: int) -> None:
    assert on_host(ptx.matrix_descriptor)(address, leading, stride) == bits


def test_swizzle_moves_pieces_of_16_bytes_within_their_row() -> None:
    for offset in range(0, 64 * 128, 2):
        row, piece, rest = offset // 128, offset % 128 // 16, offset % 16
        assert on_host(ptx.swizzle_128b)(offset) == 128 * row + 16 * (piece ^ (row % 8)) + rest


def test_steps() -> None:
    assert ptx.k_major_steps(96, 8192) == (0, 32, 64, 96, 8192, 8224)
    assert ptx.mn_major_steps(48) == (0, 2048, 4096)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ptx.wgmma_mma_async(100, "bf16"), "n: got 100, accepted: multiples of 8"),
        (lambda: ptx.wgmma_mma_async(264, "bf16"), "n: got 264"),
        (lambda: ptx.wgmma_mma_async(64, "fp32"), "dtype: got 'fp32', accepted: bf16, fp16"),
        (lambda: ptx.wgmma_mma_async(64, "bf16", (0, 32), (0,)), "b_steps: got 1"),
        (
            lambda: ptx.wgmma_mma_async(64, "bf16", a_in_registers=True, transpose_a=True),
            "transpose_a: got True",
        ),
        (lambda: ptx.wgmma_wait_group(8), "pending: got 8, accepted: 0 to 7"),
        (lambda: ptx.setmaxnreg_inc(100), "registers: got 100, accepted: multiples of 8"),
        (lambda: ptx.setmaxnreg_dec(16), "registers: got 16"),
    ],
)
def test_instructions_that_do_not_exist(make: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (ptx.wgmma_mma_async(64, "bf16"), "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"),
        (ptx.wgmma_fence(32), "wgmma.fence.sync.aligned"),
        (ptx.mbarrier_try_wait_parity, "mbarrier.try_wait.parity.shared::cta.b64"),
        (ptx.cp_async_bulk_tensor_2d_load, "cp.async.bulk.tensor.2d"),
        (ptx.elect_sync, "elect.sync"),
        (ptx.stmatrix_x4_trans, "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"),
        (ptx.ldmatrix_x4, "ldmatrix.sync.aligned.m8n8.x4.shared.b16"),
        (ptx.ld_shared_v2_f32, "ld.shared.v2.f32"),
        (ptx.st_shared_v4_f32, "st.shared.v4.f32"),
        (ptx.cp_reduce_async_bulk_add_f32, "cp.reduce.async.bulk.global.shared::cta.bulk_group"),
        (ptx.smem_address, "smem_address"),
    ],
)
def test_the_simulator_has_none_of_them(function: Callable, name: str) -> None:
    if not simulator.ACTIVE:
        pytest.skip("about the simulator")
    with pytest.raises(NotImplementedError, match=f"^{name}.*: needs a GPU with sm_90$"):
        function(0)


# ---- tensor maps ------------------------------------------------------------------------------

LAYOUT = Layout.contiguous((2, 3, 50, 80), 2, 1 << 20)
BOX = (1, 1, 64, 64)


@pytest.mark.parametrize(
    ("layout", "box", "dtype", "message"),
    [
        (LAYOUT, BOX, "fp32", "K: got dtype fp32, accepted: bf16, fp16"),
        (Layout.contiguous((64,), 2), (64,), "bf16", r"K: got shape \(64,\), accepted: 2 to 5"),
        (Layout.contiguous((0, 64), 2), (8, 64), "bf16", r"K: got shape \(0, 64\), accepted: 1 to"),
        (Layout((9, 64), (2, 18), 2), (8, 64), "bf16", "accepted: 2 bytes in the last axis"),
        (Layout.contiguous((9, 60), 2), (8, 64), "bf16", "accepted: multiples of 16 bytes below"),
        (Layout((9, 64), (-128, 2), 2), (8, 64), "bf16", "accepted: multiples of 16 bytes below"),
        (Layout((9, 64), (2**40, 2), 2), (8, 64), "bf16", "accepted: multiples of 16 bytes below"),
        (replace(LAYOUT, address=8), BOX, "bf16", "K: got address 0x8, accepted: multiples of 16"),
        (LAYOUT, (64, 64), "bf16", r"K: got box \(64, 64\), accepted: 4 sizes"),
        (LAYOUT, (1, 1, 64, 32), "bf16", "accepted: 4 sizes, the last of them 64"),
        (LAYOUT, (1, 1, 257, 64), "bf16", "accepted: sizes of 1 to 256"),
        (LAYOUT, (1, 0, 64, 64), "bf16", "accepted: sizes of 1 to 256"),
    ],
)
def test_what_cannot_be_copied(layout: Layout, box: Any, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor_map.tensor_map("K", layout, box, dtype)


def test_tensor_maps_under_the_simulator() -> None:
    if not simulator.ACTIVE:
        pytest.skip("about the simulator")
    with pytest.raises(NotImplementedError, match="tensor_map: needs a GPU with sm_90"):
        tensor_map.tensor_map("K", LAYOUT, BOX, "bf16")


@pytest.mark.parametrize("failed", [False, True])
def test_what_the_driver_is_asked_for(monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    """Axes in reverse, the stride of the last one left out, that of an axis of size 1 valid."""
    from cuda.bindings import driver

    asked = []

    def encode(*args: Any) -> Any:
        asked.extend(args)
        result = driver.CUresult
        status = result.CUDA_ERROR_INVALID_VALUE if failed else result.CUDA_SUCCESS
        return status, driver.CUtensorMap()

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    layout = Layout((2, 1, 50, 80), (8000, 3, 160, 2), 2, 4096)
    numbers = layout.address, layout.shape, tensor_map._strides(layout), BOX
    if failed:
        with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE for \(2, 1, 50, 80\)"):
            tensor_map._encode(*numbers, "fp16")
        return
    assert tensor_map._encode(*numbers, "fp16") == [0] * 16
    kind, rank, address, sizes, strides, box, steps, *modes = asked
    assert kind == driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    assert (rank, address) == (4, 4096)
    assert [int(x) for x in sizes] == [80, 50, 1, 2]
    assert [int(x) for x in strides] == [160, 16, 8000]
    assert [int(x) for x in box] == [64, 64, 1, 1]
    assert [int(x) for x in steps] == [1] * 4
    assert [mode.name.removeprefix("CU_TENSOR_MAP_") for mode in modes] == [
        "INTERLEAVE_NONE",
        "SWIZZLE_128B",
        "L2_PROMOTION_L2_128B",
        "FLOAT_OOB_FILL_NONE",
    ]


# ---- on a GPU ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sm_90() -> None:
    from numba import cuda

    if cuda.get_current_device().compute_capability != (9, 0):
        pytest.skip("needs a GPU with sm_90")


def integers(rng: np.random.Generator, most: int, *shape: int) -> np.ndarray:
    return rng.integers(-most, most + 1, shape).astype(np.float64)


def to_device(x: np.ndarray, dtype: str) -> Any:
    """The 16-bit elements on the GPU, as their bits."""
    from numba import cuda

    return cuda.to_device(np.ascontiguousarray(x.astype(NUMPY[dtype])).view(np.uint16))


def map_of(array: Any, dtype: str, rows: int, valid: tuple[int, ...] | None = None) -> int:
    """A map of boxes of `rows` x 64 of a device array, or of its first `valid` elements."""
    pointer = array.__cuda_array_interface__["data"][0]
    layout = Layout(valid or array.shape, array.strides, 2, pointer)
    box = (1,) * (array.ndim - 2) + (rows, 64)
    return tensor_map.tensor_map("x", layout, box, dtype).address


def run(built: Any, threads: int, *args: Any) -> None:
    from numba import cuda

    kernel, shared_bytes = built
    launch.launch(kernel, 1, threads, 0, shared_bytes, *args)
    cuda.synchronize()


@gpu
@pytest.mark.parametrize(
    ("n", "k", "dtype", "a_mn", "b_mn"),
    [
        (64, 64, "bf16", False, False),
        (64, 128, "bf16", False, False),
        (128, 64, "bf16", False, False),
        (128, 128, "bf16", False, False),
        (256, 64, "bf16", False, False),
        (256, 128, "bf16", False, False),
        (128, 64, "fp16", False, False),
        (64, 128, "bf16", False, True),
        (256, 64, "fp16", False, True),
        (64, 64, "bf16", True, True),
    ],
)
def test_product(sm_90: None, n: int, k: int, dtype: str, a_mn: bool, b_mn: bool) -> None:
    rng = np.random.default_rng([n, k])
    A, B = integers(rng, 8, 64, k), integers(rng, 8, n, k)
    a, b = to_device(A.T if a_mn else A, dtype), to_device(B.T if b_mn else B, dtype)
    C = to_float32(np.full((64, n), np.nan))
    maps = map_of(a, dtype, a.shape[0]), map_of(b, dtype, b.shape[0])
    run(ptx_kernels.product(n, k, dtype, a_mn, b_mn), WARPGROUP, *maps, C)
    np.testing.assert_array_equal(C.copy_to_host(), A @ B.T)


def to_float32(x: np.ndarray) -> Any:
    from numba import cuda

    return cuda.to_device(x.astype(np.float32))


@gpu
@pytest.mark.parametrize(("n", "d", "dtype"), [(128, 128, "bf16"), (64, 64, "fp16")])
def test_second_product_from_registers(sm_90: None, n: int, d: int, dtype: str) -> None:
    """O = (Q K^T) V of 50 rows: the other rows of its buffer keep what they are."""
    rng = np.random.default_rng([n, d])
    Q, K, V = integers(rng, 1, 50, d), integers(rng, 1, n, d), integers(rng, 8, n, d)
    q, k, v = (to_device(x, dtype) for x in (Q, K, V))
    o = to_device(np.full((64, d), CANARY).view(NUMPY[dtype]), dtype)
    maps = [map_of(x, dtype, x.shape[0]) for x in (k, v)]
    q_map, o_map = map_of(q, dtype, 64), map_of(o, dtype, 64, valid=(50, d))
    run(ptx_kernels.two_products(n, d, dtype), WARPGROUP, q_map, *maps, o_map)
    got = o.copy_to_host()
    expected = (Q @ K.T @ V).astype(np.float32).astype(NUMPY[dtype])
    np.testing.assert_array_equal(got[:50].view(NUMPY[dtype]), expected)
    assert np.all(got[50:] == CANARY)


@gpu
def test_boxes_that_cross_the_border(sm_90: None) -> None:
    """What is outside arrives as 0 and is not written: other rows, columns, heads, batches."""
    rng = np.random.default_rng(4)
    valid = (2, 3, 50, 80)  # of buffers that go on in each direction
    buffer = rng.integers(1, 0x7F00, (2, 3, 61, 96)).astype(np.uint16)
    inside = np.zeros((2, 3, 61 + 64, 96 + 64), np.uint16)
    inside[:, :, :50, :80] = buffer[:, :, :50, :80]
    built = ptx_kernels.copy_box(64)
    source = to_device(buffer.view(NUMPY["bf16"]), "bf16")
    for batch, head, row, column in [(0, 0, 0, 0), (1, 2, 40, 64), (0, 2, 49, 64)]:
        target = to_device(np.full_like(buffer, CANARY).view(NUMPY["bf16"]), "bf16")
        seen = to_device(np.full((64, 64), CANARY).view(NUMPY["bf16"]), "bf16")
        maps = [map_of(x, "bf16", 64, valid) for x in (source, target)]
        run(built, 64, *maps, column, row, head, batch, seen)
        box = inside[batch, head, row : row + 64, column : column + 64]
        np.testing.assert_array_equal(seen.copy_to_host(), box)
        expected = np.full_like(buffer, CANARY)
        rows, columns = slice(row, min(row + 64, 50)), slice(column, min(column + 64, 80))
        expected[batch, head, rows, columns] = buffer[batch, head, rows, columns]
        np.testing.assert_array_equal(target.copy_to_host(), expected)


@gpu
def test_matrices_are_stored_transposed(sm_90: None) -> None:
    from numba import cuda

    source = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(32, 8)
    seen = cuda.to_device(np.full_like(source, CANARY))
    run(ptx_kernels.transposed_matrices(), 32, cuda.to_device(source), seen)
    expected = source.reshape(4, 8, 8).transpose(0, 2, 1)
    np.testing.assert_array_equal(seen.copy_to_host().reshape(4, 8, 8), expected)


@gpu
def test_matrices_to_registers(sm_90: None) -> None:
    from numba import cuda

    source = np.arange(256, dtype=np.uint16).reshape(32, 8) * np.uint16(251)
    seen = cuda.to_device(np.zeros_like(source))
    run(ptx_kernels.matrices(), 32, cuda.to_device(source), seen)
    np.testing.assert_array_equal(seen.copy_to_host(), source)


@gpu
def test_neighbours_in_shared_memory(sm_90: None) -> None:
    source, seen = np.arange(128.0).reshape(32, 4), to_float32(np.full((64, 2), np.nan))
    run(ptx_kernels.shared_vectors(), 32, to_float32(source), seen)
    np.testing.assert_array_equal(seen.copy_to_host(), source.reshape(64, 2))


@gpu
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("blocks", [1, 40])
def test_the_copy_unit_adds(sm_90: None, times: int, blocks: int) -> None:
    """Of many blocks, each add once; what is beside the piece stays."""
    from numba import cuda

    n = 128
    x, there = np.arange(n) - 5.0, np.arange(3.0 * n)
    array = to_float32(there)
    kernel, shared_bytes = ptx_kernels.bulk_adds(n, times)
    place = array.__cuda_array_interface__["data"][0] + 4 * n
    launch.launch(kernel, blocks, n, 0, shared_bytes, to_float32(x), place)
    cuda.synchronize()
    there[n : 2 * n] += times * blocks * x
    np.testing.assert_array_equal(array.copy_to_host(), there)


@gpu
def test_two_tiles_in_flight(sm_90: None) -> None:
    """One warpgroup copies, two multiply in turns; with fewer tiles, as many and more than two."""
    n, rng = 128, np.random.default_rng(5)
    built = ptx_kernels.pipeline(n)
    for tiles in (1, 2, 7):
        A, B = (integers(rng, 8, rows, 64 * tiles) for rows in (128, n))
        a, b = to_device(A, "bf16"), to_device(B, "bf16")
        C = to_float32(np.full((128, n), np.nan))
        run(built, 3 * WARPGROUP, map_of(a, "bf16", 128), map_of(b, "bf16", n), tiles, C)
        np.testing.assert_array_equal(C.copy_to_host(), A @ B.T)


@gpu
def test_equal_calls_share_a_map(sm_90: None) -> None:
    x = to_device(np.zeros((64, 64)), "bf16")
    one = map_of(x, "bf16", 64)
    assert one % 64 == 0
    assert map_of(x, "bf16", 64) == one
    assert map_of(x, "bf16", 32) != one
