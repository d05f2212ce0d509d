"""Tensor maps: how the hardware that copies boxes of arrays is told where an array lies.

A map is 128 bytes in global memory; a kernel gets their address (`ptx.cp_async_bulk_tensor_2d_load`
and its like). Numba cannot pass 128 bytes by value, as CUDA C++ does: so a block's first use of a
map follows `ptx.fence_proxy_tensormap`.
"""

import functools
from dataclasses import dataclass
from typing import Any

from fa2_numba import simulator
from fa2_numba.problem import Layout

DTYPES = ("bf16", "fp16")
ITEMSIZE = 2
BOX_COLUMNS = 64  # one row of the 128-byte swizzle
LARGEST_BOX = 256  # elements along the other axes
ALIGNMENT = 16  # bytes, of the array and of its strides
KEPT = 256  # maps, 128 bytes each


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A tensor map on the current device.

    Attributes
    ----------
    address : int
        What kernels take. It is good as long as this object is.
    """

    address: int
    _owner: Any


def tensor_map(name: str, layout: Layout, box: tuple[int, ...], dtype: str) -> TensorMap:
    """The map of an array that is copied in boxes with the 128-byte swizzle.

    Elements of a box outside of the array are read as 0 and not written. Equal calls share a map;
    the 256 latest are kept.

    Parameters
    ----------
    name : str
        What errors call the array.
    layout : Layout
        Shape, strides and address: 2 to 5 axes, the last one contiguous; address and strides are
        multiples of 16 bytes.
    box : tuple of int
        Elements along each axis: 64 along the last, up to 256 along the others.
    dtype : {"bf16", "fp16"}

    Raises
    ------
    ValueError
        The hardware cannot copy this array, or this box.
    NotImplementedError
        Under the simulator.
    """
    _check(name, layout, box, dtype)
    if simulator.ACTIVE:
        raise NotImplementedError("tensor_map: needs a GPU with sm_90")
    from numba import cuda

    device = cuda.get_current_device().id
    return _map(device, layout.address, layout.shape, _strides(layout), tuple(box), dtype)


def _check(name: str, layout: Layout, box: tuple[int, ...], dtype: str) -> None:
    def refuse(what: str, got: Any, accepted: str) -> None:
        raise ValueError(f"{name}: got {what} {got}, accepted: {accepted}")

    shape, strides = layout.shape, layout.strides
    if dtype not in DTYPES:
        refuse("dtype", dtype, ", ".join(DTYPES))
    if len(shape) not in range(2, 6):
        refuse("shape", shape, "2 to 5 axes")
    if not all(0 < size <= 2**32 for size in shape):
        refuse("shape", shape, "1 to 2**32 elements along each axis")
    if shape[-1] > 1 and strides[-1] != ITEMSIZE:
        refuse("strides", strides, f"{ITEMSIZE} bytes in the last axis")
    steps = [step for size, step in zip(shape[:-1], strides[:-1], strict=True) if size > 1]
    if not all(step % ALIGNMENT == 0 and 0 <= step < 2**40 for step in steps):
        refuse("strides", strides, f"multiples of {ALIGNMENT} bytes below 2**40 before the last")
    if layout.address % ALIGNMENT:
        refuse("address", hex(layout.address), f"multiples of {ALIGNMENT} bytes")
    if len(box) != len(shape) or box[-1] != BOX_COLUMNS:
        refuse("box", box, f"{len(shape)} sizes, the last of them {BOX_COLUMNS}")
    if not all(0 < size <= LARGEST_BOX for size in box):
        refuse("box", box, f"sizes of 1 to {LARGEST_BOX}")


def _strides(layout: Layout) -> tuple[int, ...]:
    """Strides of all axes but the last. Those of axes of size 1 mean nothing, and become valid."""
    sizes, steps = layout.shape[:-1], layout.strides[:-1]
    return tuple(s if n > 1 else ALIGNMENT for n, s in zip(sizes, steps, strict=True))


@functools.lru_cache(maxsize=KEPT)
def _map(
    device: int,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: str,
) -> TensorMap:
    """A map is made of these numbers alone, so one for memory that was freed does no harm."""
    import numpy as np
    from numba import cuda

    words = cuda.to_device(np.array(_encode(address, shape, strides, box, dtype), np.uint64))
    # Now it is there for kernels on any stream; and none still reads a map that it takes the place
    # of in the cache.
    cuda.synchronize()
    return TensorMap(words.__cuda_array_interface__["data"][0], words)


def _encode(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: str,
) -> list[int]:
    """The 16 words of a map; the driver takes the axes in reverse."""
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    status, encoded = driver.cuTensorMapEncodeTiled(
        {
            "bf16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            "fp16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        }[dtype],
        len(shape),
        address,
        [driver.cuuint64_t(size) for size in reversed(shape)],
        [driver.cuuint64_t(step) for step in reversed(strides)],
        [driver.cuuint32_t(size) for size in reversed(box)],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {status.name} for {shape}, {strides}, {box}")
    return [int(word) for word in encoded.opaque]
