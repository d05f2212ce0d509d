"""Numba's CUDA simulator, with the threads of a block run as coroutines.

Without a GPU the kernels of this package run as plain Python under
``NUMBA_ENABLE_CUDASIM=1``. Numba's simulator starts one OS thread per CUDA thread and polls them at
every barrier, which costs tens of milliseconds a barrier. Here each CUDA thread is a greenlet: it
runs until it reaches a barrier or a warp exchange, then the next one runs. That is

* fast: a switch costs about a microsecond;
* repeatable: `thread_order` fixes the order, and running the same kernel in two orders exposes a
  missing barrier;
* strict: a block whose threads do not all reach the same barrier raises `BarrierDivergence` (on a
  GPU it would hang), and shared memory starts as NaN in every block;
* complete: warp shuffles, which Numba's simulator lacks, are an `exchange` among 32 greenlets.

`dynamic_instruction` tells which executions of one line of source are *one* warp instruction; the
counted arrays of `hbm.py` group their accesses by it.
"""

import contextlib
import dis
import functools
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np
from numba import config

ACTIVE = bool(config.ENABLE_CUDASIM)
if ACTIVE:
    import greenlet

WARP = 32

_order = "forward"
_ticks = itertools.count(1)


class BarrierDivergence(RuntimeError):
    """Threads of one block do not meet at one barrier: on a GPU this is a hang."""


@contextlib.contextmanager
def thread_order(order: str) -> Iterator[None]:
    """Run the threads of every block in this order between barriers: "forward" or "reversed"."""
    global _order
    if order not in ("forward", "reversed"):
        raise ValueError(f'order: got {order!r}, accepted: "forward", "reversed"')
    previous, _order = _order, order
    try:
        yield
    finally:
        _order = previous


class _Thread:
    """One CUDA thread: a greenlet and what it waits for."""

    def __init__(self, block: "Block", thread_id: int, index: tuple[int, int, int], body: Any):
        self.block = block
        self.thread_id = thread_id
        self.index = index
        self.coroutine = greenlet.greenlet(body)
        self.waits_for: tuple[str, Any, Any] | None = None  # (scope, site, value)
        self.answer: Any = None

    def wait(self, scope: str, site: Any, value: Any) -> Any:
        """Leave the coroutine until every thread of `scope` has arrived."""
        return self.coroutine.parent.switch((scope, site, value))


class Block:
    """Runs one thread block; takes the place of the simulator's own `BlockManager`."""

    current: "Block | None" = None
    launches = 0
    thread: _Thread

    def __init__(self, fn: Any, grid_dim: Any, block_dim: Any, debug: bool):
        self.fn = fn
        self.grid_dim = grid_dim
        self.block_dim = block_dim
        self.shared: dict[Any, np.ndarray] = {}
        self.shared_bytes = np.empty(0, np.uint8)

    def run(self, grid_point: tuple[int, ...], *args: Any) -> None:
        """Run all threads of block `grid_point` to their end."""
        from numba.cuda.simulator import kernel
        from numba.cuda.simulator.kernelapi import Dim3

        context = kernel._get_kernel_context()
        # 0xff bytes are NaN in every floating format: a read of unwritten shared memory shows.
        self.shared_bytes = np.full(context.shared._dynshared_size, 0xFF, np.uint8)
        x_dim, y_dim, z_dim = self.block_dim
        self.index = Dim3(*grid_point)
        if not any(grid_point):
            Block.launches += 1
        self.number = Block.launches, *grid_point
        points = [(x, y, z) for z in range(z_dim) for y in range(y_dim) for x in range(x_dim)]

        def body() -> None:
            with np.errstate(all="ignore"):  # a GPU computes with NaN and infinity in silence
                self.fn(*args)

        threads = [_Thread(self, n, p, body) for n, p in enumerate(points)]
        host, previous = threading.current_thread(), Block.current
        Block.current = self
        host.syncthreads = lambda: self._barrier(None)  # type: ignore[attr-defined]
        host.syncthreads_or = lambda v: int(any(self._barrier(v)))  # type: ignore[attr-defined]
        host.syncthreads_and = lambda v: int(all(self._barrier(v)))  # type: ignore[attr-defined]
        host.syncthreads_count = lambda v: sum(map(bool, self._barrier(v)))  # type: ignore[attr-defined]
        host.blockIdx = self.index  # type: ignore[attr-defined]
        dims = [Dim3(*p) for p in points]
        try:
            while live := [t for t in threads if not t.coroutine.dead]:
                for t in live if _order == "forward" else reversed(live):
                    if t.waits_for is None:
                        self.thread = t
                        host.threadIdx = dims[t.thread_id]  # type: ignore[attr-defined]
                        host.thread_id = t.thread_id  # type: ignore[attr-defined]
                        self._resume(t)
                self._release(threads)
        finally:
            Block.current = previous

    def _barrier(self, value: Any) -> list[Any]:
        frame = sys._getframe(3)  # past the lambda and the simulator's cuda module
        site = frame.f_code, _instruction_start(frame.f_code, frame.f_lasti)
        return self.thread.wait("block", site, value)

    def _resume(self, thread: _Thread) -> None:
        answer, thread.answer = thread.answer, None
        try:
            state = thread.coroutine.switch(*(() if answer is None else (answer,)))
        except Exception as error:
            error.add_note(f"in thread {thread.index} of block {tuple(self.index)}")
            raise
        if not thread.coroutine.dead:
            thread.waits_for = state

    def _release(self, threads: list[_Thread]) -> None:
        """Let go of every warp, else the block, whose threads have all arrived."""
        waiting = [t for t in threads if not t.coroutine.dead]
        if not waiting:
            return
        released = False
        for first in range(0, len(threads), WARP):
            warp = threads[first : first + WARP]
            places = [t.waits_for[:2] if t.waits_for else ("", None) for t in warp]
            if len(set(places)) == 1 and places[0][0] == "warp":
                self._answer(warp)
                released = True
        if released:
            return
        sites = {t.waits_for[:2] for t in waiting if t.waits_for is not None}
        if len(waiting) < len(threads) or len(sites) > 1:
            ended = len(threads) - len(waiting)
            where = sorted(f"{s[0].co_name} ({k})" for k, s in sites)
            raise BarrierDivergence(
                f"block {tuple(self.index)}: {ended} of {len(threads)} threads ended, the others "
                f"wait at {', '.join(where)}; every thread must reach the same barrier"
            )
        self._answer(threads)

    @staticmethod
    def _answer(group: list[_Thread]) -> None:
        values = [t.waits_for[2] for t in group]  # type: ignore[index]
        for t in group:
            t.waits_for, t.answer = None, values


def argument(value: Any) -> Any:
    """A kernel argument as the simulator takes it without copying it in and out.

    (Its copy refuses arrays that are not contiguous.)
    """
    if not isinstance(value, np.ndarray):
        return value
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(value)


def exchange(value: Any) -> list[Any]:
    """All values given by the threads of this warp, by lane; every lane of the warp must call."""
    assert Block.current is not None
    frame = sys._getframe(2)
    site = frame.f_code, _instruction_start(frame.f_code, frame.f_lasti)
    return Block.current.thread.wait("warp", site, value)


def lane() -> int:
    """This thread's place in its warp."""
    assert Block.current is not None
    return Block.current.thread.thread_id % WARP


def ticks() -> int:
    """A clock for emulated kernels: it steps each time it is read, and measures no time."""
    return next(_ticks)


def shared_tile(shape: tuple[int, int], dtype: Any, offset: int) -> np.ndarray:
    """This block's dynamic shared memory from byte `offset` on, as an array."""
    block = Block.current
    assert block is not None
    key = (offset, shape, dtype)
    if key not in block.shared:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = block.shared_bytes[offset : offset + size]
        if raw.size < size:
            raise RuntimeError(
                f"shared tile of {size} bytes at {offset} exceeds {block.shared_bytes.size}"
            )
        block.shared[key] = raw.view(dtype).reshape(shape)
    return block.shared[key]


@functools.cache
def _instruction_start(code: CodeType, at: int) -> int:
    """Where the instruction at `at` begins: the interpreter counts its inline caches or not."""
    return max(i.offset for i in dis.get_instructions(code) if i.offset <= at)


@functools.cache
def _loops(code: CodeType) -> tuple[tuple[int, int, str], ...]:
    """The ``for`` loops of a function: first and last bytecode offset, name of the counter."""
    found = []
    instructions = list(dis.get_instructions(code))
    for here, after in itertools.pairwise(instructions):
        if here.opname == "FOR_ITER" and after.opname.startswith("STORE_FAST"):
            name = after.argval if isinstance(after.argval, str) else after.argval[0]
            found.append((here.offset, int(here.argval), name))
    return tuple(found)


def _is_simulator(frame: FrameType) -> bool:
    return os.sep + "simulator" in frame.f_code.co_filename


def dynamic_instruction(depth: int) -> tuple[Any, ...]:
    """Identity of the warp instruction that the caller's caller executes.

    A warp executes one instruction together when its lanes are at the same place in the code, in
    the same iteration of every loop around it. So the identity is, for each frame from the access
    up to the kernel, the place in the bytecode and the counters of the enclosing ``for`` loops.
    It follows that a loop around a global access must count the same in every lane of a warp
    (guards inside may differ); `hbm.Counted` raises if one lane shows the same identity twice.
    """
    frame: FrameType | None = sys._getframe(depth)
    key: list[Any] = []
    while frame is not None:
        if not _is_simulator(frame):
            at = _instruction_start(frame.f_code, frame.f_lasti)
            names = [name for first, last, name in _loops(frame.f_code) if first < at < last]
            values = frame.f_locals if names else {}
            key.append((frame.f_code, at, tuple(int(values[name]) for name in names)))
        elif frame.f_code is Block.run.__code__:
            break
        frame = frame.f_back
    return tuple(key)


def install() -> None:
    """Make Numba's simulator run its blocks on `Block`."""
    from numba.cuda.simulator import kernel

    kernel.BlockManager = Block


if ACTIVE:
    install()
