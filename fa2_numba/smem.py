"""Shared-memory tiles: named places in the block's one dynamic allocation, plain or counted.

``cuda.shared.array`` takes at most 48 KB and cannot place two arrays in dynamic shared memory. A
`Tile` is a (rows, columns) array at a fixed byte offset of the dynamic allocation, so ptxas sees
plain shared accesses with known alignment.

Counting is an argument type here too. A kernel makes its tiles with ``Q_tile(shared)``. With
``shared=None`` they are plain arrays; with a `SharedTally` every access of the same source adds

* elements: one per active lane and component;
* requests: one per warp instruction;
* bytes: those of the distinct words that the instruction asks for;
* wavefronts: passes over the 32 banks that it takes;
* conflicts: the passes beyond those that its width needs (`wavefronts` has the rule).

What moves in one instruction is said, not hoped for: `vector_load` and `vector_store` move up to 16
bytes a lane.
"""

import operator
from typing import Any

import numpy as np

from fa2_numba import hbm, simulator
from fa2_numba.hbm import LOAD, STORE

ALIGNMENT = 128  # bytes: one line of the 32 four-byte banks
BANK_BYTES = 4
BANKS = 32
SIZES = (4, 8, 16)  # bytes of one lane's access
WIDEST = SIZES[-1]
ELEMENTS, REQUESTS, BYTES, WAVEFRONTS, CONFLICTS, KINDS = range(6)


class SharedTally:
    """Counts of the shared-memory accesses of one launch, by tile.

    Parameters
    ----------
    tiles : int
        Number of tiles; `shared_tile` says which is whose.
    """

    def __init__(self, tiles: int):
        self.tiles = tiles
        if simulator.ACTIVE:
            self._log: dict[Any, tuple[int, int, dict[int, int]]] = {}
            self.argument: Any = self
        else:
            from numba import cuda

            self.argument = cuda.to_device(np.zeros((tiles, 2, KINDS), np.int64))
            cuda.synchronize()  # it is zero before a kernel on any stream adds to it

    def counts(self) -> np.ndarray:
        """The tally so far: int64 ``(tile, LOAD or STORE, kind)``."""
        if not simulator.ACTIVE:
            from numba import cuda

            cuda.synchronize()
            return np.asarray(self.argument.copy_to_host())
        counts = np.zeros((self.tiles, 2, KINDS), np.int64)
        for (tile, op, *_), (width, itemsize, lanes) in self._log.items():
            moved = len(set(lanes.values())) * width * itemsize
            counts[tile, op] += (
                width * len(lanes),
                1,
                moved,
                *wavefronts(lanes, width * itemsize),
            )
        return counts


def wavefronts(lanes: dict[int, int], size: int) -> tuple[int, int]:
    """Passes over the banks of one warp instruction, and those beyond its need.

    An access of 4, 8 or 16 bytes a lane is served for 32, 16 or 8 neighbouring lanes at a time,
    which cover one line of the banks. Two such groups side by side are served as one if every lane
    asks for the word of the lane beside it (``lane ^ 1``), or every lane for that of ``lane ^ 2``.
    A group takes as many passes as its most asked bank has distinct words.

    Parameters
    ----------
    lanes : dict
        Active lane to byte address.
    size : int
        Bytes of a lane's access: 4, 8 or 16.

    Notes
    -----
    Read off the counters of an H200 for 163 access patterns of whole warps (`benchmarks.banks`;
    tests/test_smem.py replays them); NVIDIA does not document it. That a lane which is off agrees
    with any neighbour was not read by itself, but `fa2-numba verify` compares tiles with rows that
    end within a warp. Two lanes that store to one word were not read.

    Raises
    ------
    ValueError
        Another size.
    """
    if size not in SIZES:
        raise ValueError(f"size: got {size}, accepted: {', '.join(map(str, SIZES))} bytes")
    together = WIDEST * 8 // size  # lanes that one pass can serve
    passes = needed = 0
    for first in range(0, 32, min(32, 2 * together)):
        pair = {n: a for n, a in lanes.items() if first <= n < first + 2 * together}
        merged = any(all(pair.get(n ^ step, a) == a for n, a in pair.items()) for step in (1, 2))
        width = 2 * together if merged else together
        for start in range(first, min(32, first + 2 * together), width):
            words = {a // size for n, a in pair.items() if start <= n < start + width}
            if words:
                banks = [word % (ALIGNMENT // size) for word in words]
                passes += max(banks.count(bank) for bank in banks)
                needed += 1
    return passes, passes - needed


class _CountedTile:
    """Under the simulator: a tile whose accesses are logged."""

    def __init__(self, data: np.ndarray, offset: int, tally: SharedTally, row: int):
        self.data, self.offset, self.tally, self.row = data, offset, tally, row

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        self.touch(index, LOAD, 1, 3)
        return self.data[index]

    def __setitem__(self, index: tuple[Any, ...], value: Any) -> None:
        self.touch(index, STORE, 1, 3)
        self.data[index] = value

    def touch(self, index: tuple[Any, ...], op: int, width: int, depth: int) -> None:
        block = simulator.Block.current
        assert block is not None
        warp = block.thread.thread_id // simulator.WARP
        r, k = (int(i) for i in index)
        address = self.offset + r * self.data.strides[0] + k * self.data.strides[1]
        key = (self.row, op, block.number, warp, simulator.dynamic_instruction(depth))
        *_, lanes = self.tally._log.setdefault(key, (width, self.data.itemsize, {}))
        if simulator.lane() in lanes:
            raise RuntimeError(
                "one lane executes one access twice in the same iteration of every for loop around "
                "it; loops around a counted access must be for loops over one counter"
            )
        lanes[simulator.lane()] = address


def shared_tile(rows: int, columns: int, dtype: Any, offset: int, row: int = 0) -> Any:
    """A device function ``tile(shared)`` that returns the tile at byte `offset`.

    Parameters
    ----------
    rows, columns : int
        Shape of the C-contiguous tile.
    dtype : np.dtype
        Element type.
    offset : int
        Bytes from the start of the dynamic shared memory; a multiple of 16.
    row : int
        Where a `SharedTally` counts the tile's accesses.

    Raises
    ------
    TypeError
        In a kernel that counts: elements that are not of 4 or 8 bytes. How the banks serve
        narrower ones was not measured.
    """
    narrow = np.dtype(dtype).itemsize not in SIZES[:2]
    refusal = f"a counted tile has elements of 4 or 8 bytes, got {np.dtype(dtype)}"
    if simulator.ACTIVE:

        def emulated(shared: SharedTally | None) -> Any:
            if narrow and shared is not None:
                raise TypeError(refusal)
            data = simulator.shared_tile((rows, columns), dtype, offset)
            return data if shared is None else _CountedTile(data, offset, shared, row)

        return emulated

    element = from_dtype(np.dtype(dtype))
    itemsize = np.dtype(dtype).itemsize

    @intrinsic
    def tile(typingctx, shared):
        plain = types.Array(element, 2, "C")
        counted = not isinstance(shared, types.NoneType)
        if counted and narrow:
            raise TypingError(refusal)

        def codegen(context, builder, signature, args):
            memory = shared_memory(builder.module, ALIGNMENT)
            i32, i64 = ir.IntType(32), ir.IntType(64)
            start = builder.gep(memory, [i32(0), i32(offset)], inbounds=True)
            llvm_type = context.get_data_type(element)
            pointer = builder.bitcast(start, ir.PointerType(llvm_type, 3))
            array = context.make_array(plain)(context, builder)
            context.populate_array(
                array,
                data=builder.addrspacecast(pointer, ir.PointerType(llvm_type)),
                shape=cgutils.pack_array(builder, [i64(rows), i64(columns)]),
                strides=cgutils.pack_array(builder, [i64(columns * itemsize), i64(itemsize)]),
                itemsize=i64(itemsize),
                meminfo=None,
            )
            if not counted:
                return array._getvalue()
            struct = cgutils.create_struct_proxy(signature.return_type)(context, builder)
            struct.data, struct.tally, struct.row = array._getvalue(), args[0], i64(row)
            return struct._getvalue()

        return (_CountedTileType(plain, shared) if counted else plain)(shared), codegen

    return tile


if simulator.ACTIVE:

    def _vector_access(width: int, op: int) -> Any:
        plain = hbm.vector_load(width) if op == LOAD else hbm.vector_store(width)

        def access(T, index, values, at):
            if isinstance(T, _CountedTile):
                T.touch(index, op, width, 3)
                T = T.data
            plain(T, index, values, at)

        return access

else:
    from llvmlite import ir
    from numba import cuda
    from numba.cuda import cgutils, types
    from numba.cuda.core.errors import TypingError
    from numba.cuda.extending import (
        intrinsic,
        make_attribute_wrapper,
        models,
        overload,
        register_model,
    )
    from numba.cuda.np.numpy_support import from_dtype

    from fa2_numba.ptx.emit import shared_memory

    class _CountedTileType(types.Type):
        """A tile, its tally and its row there."""

        def __init__(self, array: Any, tally: Any):
            self.array, self.tally = array, tally
            super().__init__(name=f"CountedTile({array}, {tally})")

    @register_model(_CountedTileType)
    class _CountedTileModel(models.StructModel):
        def __init__(self, manager, counted):
            members = [("data", counted.array), ("tally", counted.tally), ("row", types.int64)]
            super().__init__(manager, counted, members)

    for _member in ("data", "tally", "row"):
        make_attribute_wrapper(_CountedTileType, _member, _member)

    @cuda.jit(device=True)
    def _count(tally, row, op, address, size, elements):
        """Add one access of each active lane, `size` bytes at `address`; see `wavefronts`."""
        active = np.uint32(cuda.activemask())
        lane = cuda.laneid
        below = (np.uint32(1) << np.uint32(lane)) - np.uint32(1)
        together = WIDEST * 8 // size
        word = address // size
        same_word = np.uint32(cuda.match_any_sync(active, word))
        distinct = cuda.popc(cuda.ballot_sync(active, (same_word & below) == 0))

        # Two groups side by side are one if all their lanes agree with lane ^ 1, or with lane ^ 2.
        group = lane // together
        if together < 32:
            pair = lane // (2 * together)
            in_pair = np.uint32(cuda.match_any_sync(active, pair))
            for step in (1, 2):
                beside = np.uint32(1) << np.uint32(lane ^ step)
                agrees = (active & beside) == 0 or (same_word & beside) != 0
                if (np.uint32(cuda.ballot_sync(active, agrees)) & in_pair) == in_pair:
                    group = 2 * pair

        # The most asked bank of each group: how many distinct words, each told by one lane.
        speaks = (np.uint32(cuda.match_any_sync(active, word * 4 + group)) & below) == 0
        speakers = np.uint32(cuda.ballot_sync(active, speaks))
        bank = word % (ALIGNMENT // size)
        same_bank = np.uint32(cuda.match_any_sync(active, bank * 4 + group)) & speakers
        mine = np.int64(cuda.popc(same_bank)) if speaks else np.int64(0)
        passes, needed = np.int64(0), np.int64(0)
        for g in range(32 // together):
            most = np.int64(0)
            for bit in range(6):  # the greatest of 1 to 32, from its highest bit down
                more = most + (np.int64(32) >> np.int64(bit))
                if cuda.ballot_sync(active, group == g and mine >= more) != 0:
                    most = more
            passes += most
            needed += 1 if most > 0 else 0
        if (active & below) == 0:
            cuda.atomic.add(tally, (row, op, ELEMENTS), elements * cuda.popc(active))
            cuda.atomic.add(tally, (row, op, REQUESTS), 1)
            cuda.atomic.add(tally, (row, op, BYTES), size * distinct)
            cuda.atomic.add(tally, (row, op, WAVEFRONTS), passes)
            cuda.atomic.add(tally, (row, op, CONFLICTS), passes - needed)

    @cuda.jit(device=True)
    def _offset(T, index, itemsize):
        """Byte offset within the tile; tiles start on a line of the banks."""
        return (np.int64(index[0]) * T.shape[1] + np.int64(index[1])) * itemsize

    @overload(operator.getitem, target="cuda")
    def _getitem(T, index):
        if isinstance(T, _CountedTileType) and isinstance(index, types.BaseTuple):
            size = T.array.dtype.bitwidth // 8

            def getitem(T, index):
                _count(T.tally, T.row, LOAD, _offset(T.data, index, size), size, 1)
                return T.data[index]

            return getitem

    @overload(operator.setitem, target="cuda")
    def _setitem(T, index, value):
        if isinstance(T, _CountedTileType) and isinstance(index, types.BaseTuple):
            size = T.array.dtype.bitwidth // 8

            def setitem(T, index, value):
                _count(T.tally, T.row, STORE, _offset(T.data, index, size), size, 1)
                T.data[index] = value

            return setitem

    def _vector_access(width: int, op: int) -> Any:
        plain = hbm.vector_load(width) if op == LOAD else hbm.vector_store(width)

        def access(T, index, values, at):
            raise NotImplementedError("called in kernels only")

        @overload(access, target="cuda")
        def _access(T, index, values, at):
            if isinstance(T, _CountedTileType):
                size = T.array.dtype.bitwidth // 8

                def counted(T, index, values, at):
                    offset = _offset(T.data, index, size)
                    _count(T.tally, T.row, op, offset, size * width, width)
                    plain(T.data, index, values, at)

                return counted
            return lambda T, index, values, at: plain(T, index, values, at)

        return access


def widest(elements: int, itemsize: int) -> int:
    """How many of `elements` neighbours one access moves: a divisor of them, up to 16 bytes."""
    return next(w for w in (4, 2, 1) if w * itemsize <= WIDEST and elements % w == 0)


def vector_load(width: int) -> Any:
    """A device function ``load(T, index, out, at)``: ``out[at + c] = T[index + c]``, c < `width`.

    One shared load of a tile, plain or counted; `index` is a multiple of `width` in its last axis.
    """
    return _vector_access(width, LOAD)


def vector_store(width: int) -> Any:
    """A device function ``store(T, index, values, at)``: ``T[index + c] = values[at + c]``."""
    return _vector_access(width, STORE)
