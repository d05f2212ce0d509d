"""The caller's arrays in, the caller's array type out.

An `Operand` is what the rest of the package needs to know of an array: its place in memory, its
dtype, the device and stream it belongs to, and how to make another of its kind.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from fa2_numba import simulator
from fa2_numba.problem import ALLOCATION_ALIGNMENT, Layout

DTYPE_NAMES = {
    np.dtype(np.float32): "fp32",
    np.dtype(np.float64): "fp64",
    np.dtype(np.float16): "fp16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.bool_): "bool",
}
_NUMPY_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_NUMPY_OF["bf16"] = np.dtype(np.uint16)  # inside kernels bf16 is its bits
_NUMPY_OF["bool"] = np.dtype(np.uint8)


@dataclass(frozen=True, eq=False)
class Operand:
    """One array of the caller.

    Attributes
    ----------
    layout : Layout
        Shape, strides and address.
    dtype : str
        "fp32", "fp64", "fp16", "bf16", "bool", or the array's own name for another dtype.
    family : str
        "numpy", "cupy", "torch", "numba" or "other".
    device : int or None
        GPU number; None on the host.
    stream : int
        CUDA stream handle that is current for this family, 0 for the default stream.
    owner : object
        The array itself.
    empty : callable ``(shape, dtype name) -> array``
        A new array of the same family on the same device.
    """

    layout: Layout
    dtype: str
    family: str
    device: int | None
    stream: int
    owner: Any
    empty: Callable[[tuple[int, ...], str], Any]


def operand(name: str, array: Any) -> Operand:
    """Look at an array of the caller.

    Raises
    ------
    TypeError
        Not an array that this machine's kernels can take; the message names the argument.
    """
    module = type(array).__module__.split(".")[0]
    if isinstance(array, np.ndarray):
        if not simulator.ACTIVE:
            raise TypeError(
                f"{name}: got a NumPy array, accepted: CuPy, torch or Numba arrays on the GPU "
                "(NumPy arrays run under NUMBA_ENABLE_CUDASIM=1)"
            )
        return _numpy(array)
    if simulator.ACTIVE:
        raise TypeError(
            f"{name}: got {type(array).__qualname__}, accepted under the simulator: NumPy arrays"
        )
    if module == "torch":
        return _torch(name, array)
    if module == "cupy":
        return _cupy(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _interface(array, "numba" if module == "numba" else "other")
    if hasattr(array, "__dlpack__"):
        return _dlpack(name, array)
    raise TypeError(
        f"{name}: got {type(array).__qualname__}, accepted: CuPy, torch or Numba arrays, or any "
        "array with __cuda_array_interface__ or __dlpack__ on a GPU"
    )


def _numpy(array: np.ndarray) -> Operand:
    def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return aligned_empty(shape, ml_dtypes.bfloat16 if dtype == "bf16" else _NUMPY_OF[dtype])

    address = array.__array_interface__["data"][0]
    layout = Layout(array.shape, array.strides, array.itemsize, address)
    return Operand(layout, _dtype_name(array.dtype), "numpy", None, 0, array, empty)


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """``np.empty`` at an address as round as a CUDA allocator's."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALLOCATION_ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALLOCATION_ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _torch(name: str, tensor: Any) -> Operand:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__qualname__}, accepted: torch.Tensor")
    if tensor.device.type != "cuda":
        raise TypeError(f"{name}: got a tensor on {tensor.device}, accepted: a CUDA device")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name}: requires grad, and this function is not recorded by autograd; "
            "detach the tensor, run under torch.no_grad() or call fa2_numba.adapters.torch"
        )
    names = {
        torch.float32: "fp32",
        torch.float64: "fp64",
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.bool: "bool",
    }
    kinds = {v: k for k, v in names.items()}

    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        return torch.empty(shape, dtype=kinds[dtype], device=tensor.device)

    size = tensor.element_size()
    layout = Layout(
        tuple(tensor.shape), tuple(s * size for s in tensor.stride()), size, tensor.data_ptr()
    )
    dtype = names.get(tensor.dtype, str(tensor.dtype))
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    return Operand(layout, dtype, "torch", tensor.device.index, stream, tensor, empty)


def _cupy(array: Any) -> Operand:
    import cupy

    device = array.device.id

    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        # Only where it changes something: leaving a CuPy device inside Numba's `cuda.gpus[device]`
        # would tell the CUDA runtime that `device` is the caller's own.
        current = cupy.cuda.runtime.getDevice() == device
        with contextlib.nullcontext() if current else cupy.cuda.Device(device):
            return cupy.empty(shape, ml_dtypes.bfloat16 if dtype == "bf16" else _NUMPY_OF[dtype])

    layout = Layout(array.shape, array.strides, array.itemsize, array.data.ptr)
    stream = cupy.cuda.get_current_stream(device).ptr
    dtype = _dtype_name(array.dtype)
    return Operand(layout, dtype, "cupy", device, stream, array, empty)


def _interface(array: Any, family: str) -> Operand:
    from numba import cuda
    from numba.cuda.cudadrv import driver

    about = array.__cuda_array_interface__
    if about.get("mask") is not None:
        raise TypeError("a masked array: accepted are arrays without a mask of their own")
    if about.get("stream"):
        cuda.external_stream(about["stream"]).synchronize()
    dtype = np.dtype(about["typestr"])
    pointer = about["data"][0] or 0
    shape = tuple(about["shape"])
    strides = about.get("strides") or Layout.contiguous(shape, dtype.itemsize).strides
    if family == "numba":
        strides = array.strides  # its interface calls a broadcast (stride 0) array contiguous
    device = cuda.get_current_device().id
    if pointer:
        attribute = driver.binding.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        device = int(driver.driver.cuPointerGetAttribute(attribute, pointer))

    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        with cuda.gpus[device]:
            new = cuda.device_array(shape, _NUMPY_OF[dtype])
        if family == "numba":
            return new
        import cupy

        return cupy.asarray(new)

    layout = Layout(shape, tuple(strides), dtype.itemsize, pointer)
    return Operand(layout, _dtype_name(dtype), family, device, 0, array, empty)


def _dlpack(name: str, array: Any) -> Operand:
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            f"{name}: got {type(array).__qualname__}; its DLPack needs CuPy to be installed"
        ) from error
    try:
        view = _cupy(cupy.from_dlpack(array))
    except Exception as error:
        raise TypeError(f"{name}: got {type(array).__qualname__}, not a GPU array") from error
    namespace = getattr(array, "__array_namespace__", None)

    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        new = view.empty(shape, dtype)
        return namespace().from_dlpack(new) if namespace else new

    return Operand(view.layout, view.dtype, "other", view.device, view.stream, array, empty)


def _dtype_name(dtype: Any) -> str:
    return DTYPE_NAMES.get(np.dtype(dtype), str(dtype))


# ---- what kernels take ------------------------------------------------------------------------


def kernel_array(
    view: Operand, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
) -> Any:
    """`view`'s memory with another shape, as a kernel takes it.

    Strides of axes of size 1 mean nothing; they are set as in C order, so that an array that is
    contiguous but for them does not compile a kernel of its own.
    """
    itemsize = view.layout.itemsize
    contiguous = Layout.contiguous(shape, itemsize).strides
    strides = tuple(
        c if size == 1 else s for size, s, c in zip(shape, strides, contiguous, strict=True)
    )
    if view.family == "numpy":
        bits = view.owner.view(_NUMPY_OF[dtype]) if view.owner.size else view.owner
        if bits.dtype != _NUMPY_OF[dtype]:
            bits = np.empty(shape, _NUMPY_OF[dtype])
        return np.lib.stride_tricks.as_strided(bits, shape, strides)
    return device_view(view.layout.address, shape, strides, _NUMPY_OF[dtype])


def device_view(
    pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype
) -> Any:
    """Numba's device array over memory that somebody else owns."""
    from numba import cuda

    return cuda.as_cuda_array(_Memory(pointer, shape, strides, dtype.str), sync=False)


class _Memory:
    """Device memory as ``__cuda_array_interface__`` describes it."""

    def __init__(
        self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], typestr: str
    ):
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "version": 3,
        }


@lru_cache(maxsize=64)
def numba_stream(handle: int) -> Any:
    """What Numba launches on: the default stream, or a wrapper of a stream handle."""
    if handle == 0 or simulator.ACTIVE:
        return 0
    from numba import cuda

    return cuda.external_stream(handle)


def to_host(array: Any) -> np.ndarray:
    """A NumPy copy of any array that `operand` takes; bf16 becomes ml_dtypes.bfloat16."""
    if isinstance(array, np.ndarray):
        return array
    module = type(array).__module__.split(".")[0]
    if module == "torch":
        import torch

        array = array.detach().cpu()
        if array.dtype == torch.bfloat16:
            return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return np.asarray(array.numpy())
    if module == "cupy":
        return np.asarray(array.get())
    if hasattr(array, "copy_to_host"):
        return np.asarray(array.copy_to_host())
    import cupy

    return np.asarray(cupy.asarray(array).get())


def overlaps_itself(layout: Layout) -> bool:
    """Whether two elements of an array may share a byte."""
    if 0 in layout.shape:
        return False
    extent = layout.itemsize
    pairs = zip(layout.shape, layout.strides, strict=True)
    for step, size in sorted((abs(step), size) for size, step in pairs if size > 1):
        if step < extent:
            return True
        extent += step * (size - 1)
    return False


def span(x: Layout) -> tuple[int, int]:
    """The first byte of an array, and the one behind its last."""
    if 0 in x.shape:
        return x.address, x.address
    reach = [(size - 1) * step for size, step in zip(x.shape, x.strides, strict=True)]
    low = x.address + sum(r for r in reach if r < 0)
    return low, x.address + sum(r for r in reach if r > 0) + x.itemsize


def overlap(a: Layout, b: Layout) -> bool:
    """Whether the memory ranges that two arrays span have a byte in common."""
    (a_low, a_high), (b_low, b_high) = span(a), span(b)
    return a_low < b_high and b_low < a_high
