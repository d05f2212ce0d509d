"""The door to global memory: plain arrays, and arrays that count every access.

Counting is an argument type. ``kernel[...](Q, ...)`` compiles the plain kernel;
``kernel[...](Counted(Q), ...)`` compiles the same source, and each ``Q[b, h, row, k]`` in it first
adds to a tally:

* elements: one per active lane (a vector access: one per component);
* distinct: the same without those that another lane of the warp asks for in the same instruction;
* requests: one per warp instruction with an active lane;
* sectors: the distinct 32-byte pieces of memory that the warp instruction touches.

A kernel may do seven things with a global array, besides asking its shape: read it, write it,
`vector_load`, `vector_store`, `atomic_add`, and have the hardware copy boxes of it to and from
shared memory (`box_loader`, `box_storer`) or add shared memory to it (`bulk_add`).
Whatever else it tries with a `Counted` array is a typing error, so nothing is ever missed.

`phase(A, p)` is `A` with its accesses tallied in row `p`, for the few arrays that one kernel
touches in two roles (the softmax reads S once for its maximum and once to normalise). On a plain
array it is nothing.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from fa2_numba import ptx, simulator

LOAD, STORE, ATOMIC, OPS = range(4)
ELEMENTS, DISTINCT, REQUESTS, SECTORS, KINDS = range(5)
SECTOR_BYTES = 32


def jit(function: Callable, name: str | None = None, threads: int = 0) -> Any:
    """``cuda.jit`` for a kernel of this package: `Counted` arguments are allowed.

    `name` becomes the kernel's name in PTX and in the profiler. A block of more than 256 `threads`
    needs a bound on the registers of each to be launched at all.
    """
    from numba import cuda

    if name is not None:
        function.__name__ = function.__qualname__ = name
    if simulator.ACTIVE:
        return cuda.jit(function)
    # With the number of blocks beside it, ptxas takes it for the registers at the start, which
    # setmaxnreg needs; one block is what a kernel of more than 256 threads needs at least.
    bounds = {"launch_bounds": (threads, 1)} if threads > 256 else {}
    return cuda.jit(function, extensions=[_PrepareArguments], **bounds)


def device(function: Callable) -> Any:
    """``cuda.jit(device=True)``: a function that kernels call (and that libNVVM inlines)."""
    from numba import cuda

    return cuda.jit(function, device=True)


class Counted:
    """A global array whose every access in a kernel is counted.

    Parameters
    ----------
    data : array
        A device array (Numba's, or anything with ``__cuda_array_interface__``); under the
        simulator a NumPy array.
    phases : int
        Number of rows `phase` may select.

    Notes
    -----
    `counts` reads the tally: int64 of shape ``(phases, OPS, KINDS)``, indexed by phase,
    ``LOAD``, ``STORE`` or ``ATOMIC`` and ``ELEMENTS``, ``DISTINCT``, ``REQUESTS``, ``SECTORS``.
    """

    def __init__(self, data: Any, phases: int = 1):
        self.phases = phases
        self.row = 0
        if simulator.ACTIVE:
            self.data = data
            self._log: dict[Any, list[Any]] = {}
            interface = data.__array_interface__
            self._address = interface["data"][0]
            self.shape, self.strides, self.dtype = data.shape, data.strides, data.dtype
        else:
            from numba import cuda
            from numba.cuda.cudadrv.devicearray import DeviceNDArray

            # Not through __cuda_array_interface__: Numba's says that a broadcast (stride 0) array
            # is contiguous.
            numbas = isinstance(data, DeviceNDArray)
            self.data = data if numbas else cuda.as_cuda_array(data, sync=False)
            self.tally = cuda.to_device(np.zeros((phases, OPS, KINDS), np.int64))
            cuda.synchronize()  # it is zero before a kernel on any stream adds to it

    def counts(self) -> np.ndarray:
        """The tally so far, as int64 ``(phase, op, kind)``."""
        if not simulator.ACTIVE:
            from numba import cuda

            cuda.synchronize()  # the kernels may run on a stream that no copy waits for
            return np.asarray(self.tally.copy_to_host())
        counts = np.zeros((self.phases, OPS, KINDS), np.int64)
        for (row, op, *_), (lanes, elements, addresses) in self._log.items():
            sectors = {address // SECTOR_BYTES for address in addresses}
            all_lanes, distinct = lanes.bit_count(), len(addresses)
            counts[row, op] += (elements * all_lanes, elements * distinct, 1, len(sectors))
        return counts

    # Under the simulator the object itself is the kernel's argument.

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        self._touch(index, LOAD, 1, 3)
        return self.data[index]

    def __setitem__(self, index: tuple[Any, ...], value: Any) -> None:
        self._touch(index, STORE, 1, 3)
        self.data[index] = value

    def _touch(self, index: Any, op: int, elements: int, depth: int) -> None:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != len(self.shape):
            raise TypeError(f"a Counted array takes its full index, got {index}")
        for place, size in zip(index, self.shape, strict=True):
            if not 0 <= place < size:
                raise IndexError(f"index {index} is outside the shape {self.shape}")
        block = simulator.Block.current
        assert block is not None, "a Counted array is indexed inside a kernel only"
        lane, warp = simulator.lane(), block.thread.thread_id // simulator.WARP
        instruction = simulator.dynamic_instruction(depth)
        entry = self._log.setdefault(
            (self.row, op, block.number, warp, instruction), [0, elements, set()]
        )
        if entry[0] >> lane & 1:
            raise RuntimeError(
                "one lane executes one access twice in the same iteration of every for loop around "
                "it; loops around a counted access must be for loops over one counter"
            )
        entry[0] |= 1 << lane
        offset = sum(int(i) * s for i, s in zip(index, self.strides, strict=True))
        entry[2].add(self._address + offset)

    def _with_row(self, row: int) -> "Counted":
        view = object.__new__(Counted)
        view.__dict__.update(self.__dict__, row=row)
        return view

    @property
    def _numba_type_(self) -> Any:
        from numba.cuda.typing.typeof import typeof

        return _CountedType(typeof(self.data), typeof(self.tally))


class CountedBoxes:
    """The boxes of a global array, each of whose copies is counted.

    Parameters
    ----------
    counted : Counted
        The array, in whose tally copies count.
    address : int
        Of its tensor map.

    Notes
    -----
    The copy of a box is one request. Elements are those of the box that exist. Sectors are those
    of these elements, row by row. Loads have more, as the hardware counts them: what is outside of
    the array comes as zeros, in pieces of 32 bytes of each row.
    """

    def __init__(self, counted: Counted, address: int):
        self.counted, self.address = counted, address

    @property
    def _numba_type_(self) -> Any:
        return _CountedBoxesType(self.counted._numba_type_)


if simulator.ACTIVE:

    def phase(A: Any, row: int) -> Any:
        """`A`, its accesses from here on tallied in row `row`; a plain array is itself."""
        return A._with_row(row) if isinstance(A, Counted) else A

    def atomic_add(A: Any, index: tuple[Any, ...], value: Any) -> None:
        """``A[index] += value``, as one step that no other thread comes between."""
        if isinstance(A, Counted):
            A._touch(index, ATOMIC, 1, 3)
            A = A.data
        A[index] += value

    def _vector_access(width: int, op: int) -> Any:
        def access(A, index, values, at):
            data = A
            if isinstance(A, Counted):
                A._touch(index, op, width, 3)
                data = A.data
            for c in range(width):
                place = (*index[:-1], index[-1] + c)
                if op == LOAD:
                    values[at + c] = data[place]
                else:
                    data[place] = values[at + c]

        return access

else:
    from llvmlite import ir
    from numba import cuda
    from numba.cuda import cgutils, nvvmutils, types
    from numba.cuda.core.errors import TypingError
    from numba.cuda.extending import (
        intrinsic,
        make_attribute_wrapper,
        models,
        overload,
        overload_attribute,
        register_model,
    )

    class _CountedType(types.Type):
        """The type of `Counted`: an array, its tally and the tally's row."""

        def __init__(self, array: Any, tally: Any):
            self.array, self.tally = array, tally
            super().__init__(name=f"Counted({array}, {tally})")

        @property
        def dtype(self) -> Any:
            """Asked for by Numba's own array functions, atomics among them: they do not count."""
            raise TypingError("a Counted array is read, written or an operand of this module only")

    @register_model(_CountedType)
    class _CountedModel(models.StructModel):
        def __init__(self, manager, counted):
            members = [("data", counted.array), ("tally", counted.tally), ("row", types.int64)]
            super().__init__(manager, counted, members)

    for _member in ("data", "tally", "row"):
        make_attribute_wrapper(_CountedType, _member, _member)

    class _CountedBoxesType(types.Type):
        """The type of `CountedBoxes`."""

        def __init__(self, counted: Any):
            self.counted = counted
            super().__init__(name=f"CountedBoxes({counted})")

    @register_model(_CountedBoxesType)
    class _CountedBoxesModel(models.StructModel):
        def __init__(self, manager, boxes):
            members = [("counted", boxes.counted), ("address", types.uint64)]
            super().__init__(manager, boxes, members)

    for _member in ("counted", "address"):
        make_attribute_wrapper(_CountedBoxesType, _member, _member)

    class _PrepareArguments:
        """Dispatcher extension: how arguments that Numba does not know travel to the GPU.

        A `Counted` array goes as its array, tally and row; None as the null pointer that Numba
        compiles it to.
        """

        @staticmethod
        def prepare_args(ty, val, **_):
            if isinstance(ty, _CountedType):
                parts = types.Tuple((ty.array, ty.tally, types.int64))
                return parts, (val.data, val.tally, val.row)
            if isinstance(ty, _CountedBoxesType):
                of = ty.counted
                parts = types.Tuple((of.array, of.tally, types.int64, types.uint64))
                A = val.counted
                return parts, (A.data, A.tally, A.row, np.uint64(val.address))
            if isinstance(ty, types.NoneType):
                return types.CPointer(types.uint8), 0
            return ty, val

    @overload_attribute(_CountedType, "shape", target="cuda")
    def _counted_shape(A):
        return lambda A: A.data.shape

    def _element_pointer(context, builder, array_type, array, index_type, index):
        """LLVM pointer to ``array[index]``; the index is full and not negative."""
        struct = context.make_array(array_type)(context, builder, array)
        places = [
            context.cast(builder, place, ty, types.intp)
            for place, ty in zip(cgutils.unpack_tuple(builder, index), index_type, strict=True)
        ]
        return cgutils.get_item_pointer2(
            context,
            builder,
            data=struct.data,
            shape=cgutils.unpack_tuple(builder, struct.shape),
            strides=cgutils.unpack_tuple(builder, struct.strides),
            layout=array_type.layout,
            inds=places,
            wraparound=False,
            boundscheck=False,
        )

    @intrinsic
    def _address(typingctx, A, index):
        """Byte address of ``A[index]``."""

        def codegen(context, builder, signature, args):
            pointer = _element_pointer(
                context, builder, signature.args[0], args[0], signature.args[1], args[1]
            )
            return builder.ptrtoint(pointer, ir.IntType(64))

        return types.int64(A, index), codegen

    @cuda.jit(device=True)
    def _count(tally, row, op, address, elements):
        """Add one access of each active lane to the tally: four atomics a warp, not a lane."""
        active = cuda.activemask()
        lane = np.uint32(1) << np.uint32(cuda.laneid)
        same_sector = cuda.match_any_sync(active, address >> 5)
        # The lowest lane of each group of lanes in one sector, or at one address, speaks for it.
        speaks = (np.uint32(same_sector) & (lane - np.uint32(1))) == 0
        sectors = cuda.popc(cuda.ballot_sync(active, speaks))
        same_place = cuda.match_any_sync(active, address)
        speaks = (np.uint32(same_place) & (lane - np.uint32(1))) == 0
        distinct = cuda.popc(cuda.ballot_sync(active, speaks))
        if (np.uint32(active) & (lane - np.uint32(1))) == 0:
            cuda.atomic.add(tally, (row, op, ELEMENTS), elements * cuda.popc(active))
            cuda.atomic.add(tally, (row, op, DISTINCT), elements * distinct)
            cuda.atomic.add(tally, (row, op, REQUESTS), 1)
            cuda.atomic.add(tally, (row, op, SECTORS), sectors)

    @cuda.jit(device=True)
    def _count_copy(tally, row, op, elements, sectors):
        """Add one request to the copy unit, which one thread makes, to the tally."""
        cuda.atomic.add(tally, (row, op, ELEMENTS), elements)
        cuda.atomic.add(tally, (row, op, DISTINCT), elements)
        cuda.atomic.add(tally, (row, op, REQUESTS), 1)
        cuda.atomic.add(tally, (row, op, SECTORS), sectors)

    @cuda.jit(device=True)
    def _sectors(address, size):
        """Sectors in which `size` bytes from an address on lie."""
        return ((address + size - 1) >> 5) - (address >> 5) + 1

    def _counts(A, index):
        """Whether this is a counted array at its full index: anything else does not compile."""
        return (
            isinstance(A, _CountedType)
            and isinstance(index, types.BaseTuple)
            and len(index) == A.array.ndim
            and all(isinstance(place, types.Integer) for place in index)
        )

    @overload(operator.getitem, target="cuda")
    def _counted_getitem(A, index):
        if _counts(A, index):

            def getitem(A, index):
                _count(A.tally, A.row, LOAD, _address(A.data, index), 1)
                return A.data[index]

            return getitem

    @overload(operator.setitem, target="cuda")
    def _counted_setitem(A, index, value):
        if _counts(A, index):

            def setitem(A, index, value):
                _count(A.tally, A.row, STORE, _address(A.data, index), 1)
                A.data[index] = value

            return setitem

    @intrinsic
    def _with_row(typingctx, A, row):
        def codegen(context, builder, signature, args):
            struct = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0])
            struct.row = context.cast(builder, args[1], signature.args[1], types.int64)
            return struct._getvalue()

        return A(A, row), codegen

    def phase(A: Any, row: int) -> Any:
        """`A`, its accesses from here on tallied in row `row`; a plain array is itself."""
        raise NotImplementedError("phase is called in kernels only")

    @overload(phase, target="cuda")
    def _phase(A, row):
        if isinstance(A, _CountedType):
            return lambda A, row: _with_row(A, row)
        return lambda A, row: A

    @intrinsic
    def _add(typingctx, A, index, value):
        """A reduction: the old value is not asked for (``red.global.add``)."""
        dtype = A.dtype
        if dtype not in (types.float32, types.float64):
            raise TypingError(f"atomic_add adds to float32 and float64, got {dtype}")

        def codegen(context, builder, signature, args):
            pointer = _element_pointer(context, builder, A, args[0], index, args[1])
            term = context.cast(builder, args[2], value, dtype)
            add = getattr(nvvmutils, f"declare_atomic_add_{dtype}")(builder.module)
            builder.call(add, (pointer, term))
            return context.get_dummy_value()

        return types.void(A, index, value), codegen

    def atomic_add(A: Any, index: tuple[Any, ...], value: Any) -> None:
        """``A[index] += value``, as one step that no other thread comes between."""
        raise NotImplementedError("called in kernels only")

    @overload(atomic_add, target="cuda")
    def _atomic_add(A, index, value):
        if isinstance(A, _CountedType):

            def counted(A, index, value):
                _count(A.tally, A.row, ATOMIC, _address(A.data, index), 1)
                _add(A.data, index, value)

            return counted
        return lambda A, index, value: _add(A, index, value)

    def _vector_access(width: int, op: int) -> Any:
        """Two overloads of one name: the access of a plain array and of a counted one."""

        @intrinsic
        def move(typingctx, A, index, values, at):
            def codegen(context, builder, signature, args):
                array_type, index_type, values_type, at_type = signature.args
                # 16-bit elements move in pairs, as 32-bit words: libNVVM would split a vector of 8
                # of them in two, and one request would be two.
                bits = array_type.dtype.bitwidth
                pair = 2 if bits == 16 and width % 2 == 0 else 1
                i32, part = ir.IntType(32), ir.IntType(bits)
                word = ir.IntType(bits * pair)
                vector = ir.VectorType(word, width // pair)
                remote = builder.bitcast(
                    _element_pointer(context, builder, array_type, args[0], index_type, args[1]),
                    vector.as_pointer(),
                )
                align = width * bits // 8  # the caller's promise: the host checked the address
                local = context.make_array(values_type)(context, builder, args[2]).data
                first = builder.gep(local, [context.cast(builder, args[3], at_type, types.intp)])
                first = builder.bitcast(first, part.as_pointer())
                slots = [builder.gep(first, [i32(c)]) for c in range(width)]
                if op == LOAD:
                    moved = builder.load(remote, align=align)
                    for c, slot in enumerate(slots):
                        value = builder.extract_element(moved, i32(c // pair))
                        value = builder.lshr(value, word(c % pair * bits))
                        builder.store(builder.trunc(value, part), slot)
                else:
                    moved = ir.Constant(vector, ir.Undefined)
                    for c in range(0, width, pair):
                        value = word(0)
                        for p in range(pair):
                            element = builder.zext(builder.load(slots[c + p]), word)
                            value = builder.or_(value, builder.shl(element, word(p * bits)))
                        moved = builder.insert_element(moved, value, i32(c // pair))
                    builder.store(moved, remote, align=align)
                return context.get_dummy_value()

            return types.void(A, index, values, at), codegen

        def access(A, index, values, at):
            raise NotImplementedError("called in kernels only")

        @overload(access, target="cuda")
        def _access(A, index, values, at):
            if isinstance(A, _CountedType):

                def counted(A, index, values, at):
                    _count(A.tally, A.row, op, _address(A.data, index), width)
                    move(A.data, index, values, at)

                return counted
            return lambda A, index, values, at: move(A, index, values, at)

        return access


def vector_load(width: int) -> Any:
    """A device function ``load(A, index, out, at)``: ``out[at + c] = A[index + c]``, c < `width`.

    The elements are neighbours in A's last axis and move in one aligned load of
    ``width * itemsize`` bytes (at most 16); that A allows it is the caller's promise
    (`problem.Layout.vectorises`). `out` is a local array.
    """
    return _vector_access(width, LOAD)


def vector_store(width: int) -> Any:
    """A device function ``store(A, index, values, at)``: ``A[index + c] = values[at + c]``."""
    return _vector_access(width, STORE)


if not simulator.ACTIVE:

    @device
    def _of_box(A, batch, head, row, column, rows, columns):
        """Of a box: its rows that exist, the elements of each that do, and the sectors of all."""
        first, end = np.int64(row), min(np.int64(row) + rows, A.shape[2])
        wide = min(np.int64(columns), A.shape[3] - np.int64(column))
        sectors = np.int64(0)
        for i in range(first, end):
            sectors += _sectors(_address(A, (batch, head, i, np.int64(column))), 2 * wide)
        return max(end - first, 0), wide, sectors


def box_loader(boxes: int, rows: int, columns: int) -> Any:
    """A device function ``load(A, at, full, row, head, batch)``: copies boxes to shared memory.

    `boxes` boxes of `rows` x `columns` elements beside each other, from row `row` and the first
    column on, to address `at` and behind it; their bytes arrive at the barrier `full`. One thread
    asks; the hardware copies, and writes 0 for what is outside of A.

    `A` is the address of a tensor map or a `CountedBoxes`.
    """
    copy = ptx.cp_async_bulk_tensor_4d_load
    size = rows * columns * 2  # bytes of a box: 16-bit elements

    def load(A, at, full, row, head, batch):
        raise NotImplementedError("called in kernels only")

    if simulator.ACTIVE:
        return load

    @overload(load, target="cuda")
    def _load(A, at, full, row, head, batch):
        if isinstance(A, _CountedBoxesType):

            def counted(A, at, full, row, head, batch):
                C = A.counted
                for box in range(boxes):
                    first = np.int64(box * columns)
                    exist, wide, sectors = _of_box(C.data, batch, head, row, first, rows, columns)
                    sectors += exist * ((2 * (columns - wide) + 31) >> 5)
                    sectors += (rows - exist) * ((2 * columns) >> 5)
                    _count_copy(C.tally, C.row, LOAD, exist * wide, sectors)
                    place = np.uint32(at + np.uint32(box * size))
                    copy(place, A.address, box * columns, row, head, batch, full)

            return counted

        def plain(A, at, full, row, head, batch):
            for box in range(boxes):
                place = np.uint32(at + np.uint32(box * size))
                copy(place, A, box * columns, row, head, batch, full)

        return plain

    return load


def box_storer(rows: int, columns: int) -> Any:
    """A device function ``store(A, at, row, column, head, batch)``: copies a box to memory.

    `rows` x `columns` elements of shared memory, from address `at` on, become those of A from `row`
    and `column` on; the hardware writes nothing outside of A. One thread asks, after
    `ptx.fence_proxy_async` of all that wrote the box; the copy is a group of its stores, for
    `ptx.cp_async_bulk_wait_group` and `ptx.cp_async_bulk_wait_group_read`.

    `A` is the address of a tensor map or a `CountedBoxes`.
    """
    copy, commit = ptx.cp_async_bulk_tensor_4d_store, ptx.cp_async_bulk_commit_group

    def store(A, at, row, column, head, batch):
        raise NotImplementedError("called in kernels only")

    if simulator.ACTIVE:
        return store

    @overload(store, target="cuda")
    def _store(A, at, row, column, head, batch):
        if isinstance(A, _CountedBoxesType):

            def counted(A, at, row, column, head, batch):
                C = A.counted
                exist, wide, sectors = _of_box(C.data, batch, head, row, column, rows, columns)
                _count_copy(C.tally, C.row, STORE, exist * wide, sectors)
                copy(A.address, column, row, head, batch, at)
                commit()

            return counted

        def plain(A, at, row, column, head, batch):
            copy(A, column, row, head, batch, at)
            commit()

        return plain

    return store


def use_boxes(A: Any) -> None:
    """Before a thread's first copy of boxes of `A`: its tensor map is read from memory anew."""
    raise NotImplementedError("called in kernels only")


def bulk_add(A: Any, index: tuple[Any, ...], at: Any, elements: int) -> None:
    """``A[index + c] += x[c]``, c < `elements`: x is float32 at address `at` of shared memory.

    One thread asks, the hardware adds; each element as `atomic_add`. `elements` neighbours in
    A's last axis, from a multiple of 16 bytes on. `ptx.cp_async_bulk_wait_group_read` waits
    until x may be replaced.
    """
    raise NotImplementedError("called in kernels only")


if not simulator.ACTIVE:

    @overload(use_boxes, target="cuda")
    def _use_boxes(A):
        fence = ptx.fence_proxy_tensormap
        if isinstance(A, _CountedBoxesType):
            return lambda A: fence(A.address)
        return lambda A: fence(A)

    @overload(bulk_add, target="cuda")
    def _bulk_add(A, index, at, elements):
        add, commit = ptx.cp_reduce_async_bulk_add_f32, ptx.cp_async_bulk_commit_group
        if isinstance(A, _CountedType):

            def counted(A, index, at, elements):
                place = _address(A.data, index)
                _count_copy(A.tally, A.row, ATOMIC, elements, _sectors(place, 4 * elements))
                add(place, at, np.uint32(4 * elements))
                commit()

            return counted

        def plain(A, index, at, elements):
            add(_address(A, index), at, np.uint32(4 * elements))
            commit()

        return plain
