"""Tensor maps: how the hardware that copies boxes of arrays is told where an array lies.

A map is 128 bytes in global memory; a kernel gets their address (`ptx.cp_async_bulk_tensor_2d_load`
and its like). Numba cannot pass 128 bytes by value, as CUDA C++ does: so a block's first use of a
map follows `ptx.fence_proxy_tensormap`.

A map is made of numbers alone, so equal calls share one. Its memory is written anew only when no
kernel can read it any more:

* whoever launches with a map holds its `TensorMap` until the launch is enqueued;
* memory that nobody holds waits until the device has been idle once;
* a map that is asked for while its stream is captured is held for ever, for the graph may be.

The driver takes microseconds to say whether a stream is captured. So the first maps of a device
that a `Group` finds are held for ever too, and it need not ask about those again.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fa2_numba import simulator
from fa2_numba.problem import Layout
from fa2_numba.tiling import BOX_COLUMNS

DTYPES = ("bf16", "fp16")
ITEMSIZE = 2
LARGEST_BOX = 256  # elements along the other axes
ALIGNMENT = 16  # bytes, of the array and of its strides
MAP_BYTES = 128
SLAB_MAPS = 4096  # allocated together, 512 KiB
STAYING = 8192  # maps of a device that stay for ever without being captured, 1 MiB
GROUPS = 256  # kept by a `Group`
LEGACY_STREAM = 1  # CU_STREAM_LEGACY: the default stream, by a name of its own


class Boxes(NamedTuple):
    """What a map says besides the address; `strides` are those of all axes but the last."""

    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    dtype: str


class TensorMap:
    """A tensor map in a device's memory.

    Attributes
    ----------
    address : int
        What kernels take. It is good for what is launched while this object is held.
    boxes : Boxes
        What the map says of its array.
    """

    def __init__(self, address: int, boxes: Boxes, retired: list[int]):
        self.address, self.boxes = address, boxes
        self._retired = retired

    def __del__(self) -> None:
        self._retired.append(self.address)


def tensor_map(
    name: str, layout: Layout, box: tuple[int, ...], dtype: str, stream: int = 0
) -> TensorMap:
    """The map of an array on the current device that is copied in boxes, with 128-byte swizzle.

    Elements of a box outside of the array are read as 0 and not written.

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
    stream : int
        Handle of the stream of the kernels that will read the map.

    Raises
    ------
    ValueError
        The hardware cannot copy this array, or this box.
    NotImplementedError
        Under the simulator.
    """
    check(name, layout, box, dtype)
    if simulator.ACTIVE:
        raise NotImplementedError("tensor_map: needs a GPU with sm_90")
    from numba import cuda

    device = cuda.get_current_device().id
    return find(
        layout.address, Boxes(device, layout.shape, _strides(layout), tuple(box), dtype), stream
    )


def find(address: int, boxes: Boxes, stream: int) -> TensorMap:
    """The map of an array at `address`, whose device is current; `tensor_map` has checked it."""
    return _store(boxes.device).find(address, boxes, stream)


class Found(NamedTuple):
    """Maps that are used together; their addresses are good while this is held."""

    maps: tuple[TensorMap, ...]
    addresses: tuple[int, ...]


class Group:
    """The maps of arrays that are used together, at little cost where they were used before.

    Parameters
    ----------
    boxes : sequence of Boxes
        What `tensor_map` has checked, all of one device.
    """

    def __init__(self, boxes: Sequence[Boxes]):
        self._boxes = boxes
        self._stay: dict[tuple[int, ...], Found] = {}  # whatever the stream: they stay for ever

    def find(self, addresses: tuple[int, ...], stream: int) -> Found:
        """The maps of arrays at these addresses, whose device is current."""
        found = self._stay.get(addresses)
        if found is None:
            store = _store(self._boxes[0].device)
            maps = store.find_all(zip(addresses, self._boxes, strict=True), stream)
            found = Found(maps, tuple([one.address for one in maps]))
            if store.keep(maps):
                if len(self._stay) >= GROUPS:
                    self._stay.clear()
                self._stay[addresses] = found
        return found


def _store(device: int) -> "Store":
    """The maps of a device, which is current."""
    store = _stores.get(device)
    if store is None:
        with _first:
            store = _stores.get(device) or _stores.setdefault(device, Store(Device()))
    return store


def check(name: str, layout: Layout, box: tuple[int, ...], dtype: str) -> None:
    """Raise `ValueError`, naming the array, where the hardware cannot copy it, or this box."""

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


# ---- the maps of a device -----------------------------------------------------------------------


class Store:
    """The maps of one device, for any number of threads.

    Parameters
    ----------
    device : Device
        Where they lie.
    slab_maps : int
        How many are allocated together, and about how many are kept, but those that stay for ever.
    staying : int
        How many stay for ever at most, but those of captured streams.
    """

    def __init__(self, device: Any, slab_maps: int = SLAB_MAPS, staying: int = STAYING):
        self._device, self._slab_maps, self._staying = device, slab_maps, staying
        self._lock = threading.Lock()
        self._latest: OrderedDict[tuple[int, Boxes], TensorMap] = OrderedDict()
        self._stay: set[TensorMap] = set()
        self._free: list[int] = []
        self._retired: list[int] = []  # held by nobody, but the device may still read it
        self.slabs = 0

    def find(self, address: int, boxes: Boxes, stream: int) -> TensorMap:
        """The map for an address; complete in memory, for kernels on any stream."""
        return self.find_all([(address, boxes)], stream)[0]

    def find_all(self, keys: Iterable[tuple[int, Boxes]], stream: int) -> tuple[TensorMap, ...]:
        """The maps for several addresses."""
        capturing = self._device.capturing(stream)
        found: list[TensorMap] = []  # holds the first while room is made for the next
        with self._lock:
            for key in keys:
                one = self._latest.get(key)
                if one is None:
                    one = self._latest[key] = self._make(*key, capturing)
                else:
                    self._latest.move_to_end(key)
                found.append(one)
            if capturing:
                self._stay.update(found)
        return tuple(found)

    def keep(self, maps: Iterable[TensorMap]) -> bool:
        """Whether maps, which the caller holds, stay for ever from now on."""
        with self._lock:
            new = {one for one in maps if one not in self._stay}
            room = len(self._stay) + len(new) <= self._staying
            if room:
                self._stay |= new
        return room

    def _make(self, address: int, boxes: Boxes, capturing: bool) -> TensorMap:
        words = _encode(address, boxes.shape, boxes.strides, boxes.box, boxes.dtype)
        others = self.slabs * self._slab_maps - len(self._stay)
        # Worth a wait only where it can free as many as a wait should.
        if not self._free and not capturing and 2 * others >= self._slab_maps:
            self._reclaim()
        if not self._free:
            slab = self._device.allocate(self._slab_maps * MAP_BYTES)
            self._free += range(slab, slab + self._slab_maps * MAP_BYTES, MAP_BYTES)
            self.slabs += 1
        self._device.write(self._free[-1], words)
        return TensorMap(self._free.pop(), boxes, self._retired)

    def _reclaim(self) -> None:
        """Let go of the oldest half, and free what nobody holds: now the device is idle."""
        mine = [key for key, held in self._latest.items() if held not in self._stay]
        for key in mine[: (len(mine) + 1) // 2]:
            del self._latest[key]
        count = len(self._retired)  # what retires later may be read later
        if self._device.idle():
            self._free += self._retired[:count]
            del self._retired[:count]


class Device:
    """What a `Store` asks of the device that is current when it is made and asked.

    Another thread may be capturing a stream. Then this one may not allocate or copy, unless it says
    that it knows what it does; and never in the legacy stream, which synchronous copies use.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        with self._relaxed():
            self._stream = _ask(
                driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            )

    @contextlib.contextmanager
    def _relaxed(self) -> Iterator[None]:
        exchange = self._driver.cuThreadExchangeStreamCaptureMode
        mode = _ask(exchange(self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            yield
        finally:
            _ask(exchange(mode))

    def capturing(self, stream: int) -> bool:
        """Whether a graph may get what is launched on the stream.

        The legacy stream cannot say no while a blocking stream is captured, and then counts too.
        """
        status, mode = self._driver.cuStreamIsCapturing(stream)[:2]
        return bool(status) or bool(mode)

    def allocate(self, size: int) -> int:
        """Bytes of the device's memory."""
        with self._relaxed():
            return int(_ask(self._driver.cuMemAlloc(size)))

    def write(self, address: int, words: list[int]) -> None:
        """Copy 64-bit words to an address, and wait for it."""
        host = np.array(words, np.uint64)
        with self._relaxed():
            _ask(
                self._driver.cuMemcpyHtoDAsync(address, host.ctypes.data, host.nbytes, self._stream)
            )
            _ask(self._driver.cuStreamSynchronize(self._stream))

    def idle(self) -> bool:
        """Wait for all work of the device; False where a capture forbids it."""
        if self.capturing(LEGACY_STREAM):
            return False
        (status,) = self._driver.cuCtxSynchronize()
        if "CAPTURE" in status.name:
            return False
        _ask((status,))
        return True


_stores: dict[int, Store] = {}
_first = threading.Lock()


def _ask(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call."""
    status, *values = answer
    if status:
        raise RuntimeError(f"tensor_map: the driver says {status.name}")
    return values[0] if values else None


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
