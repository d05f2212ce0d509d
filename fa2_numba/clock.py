"""Phase marks: where the cycles of a kernel go.

Timing is an argument type, as counting is. A kernel takes a `clock` and marks the ends of its
phases where a barrier, or data that was waited for, makes them observable::

    begin, mark, finish = phase_marks(len(PHASES))
    ...
    cuda.syncthreads()                # all have read K_j
    mark(clock, ticks, SCORES)        # the time since the last mark was S = Q K^T

With ``clock=None`` the calls compile to nothing. With a `PhaseClock` each reads the SM's cycle
counter and adds the difference to a register; every warp writes one row when it ends. Nothing is
fenced and nothing is atomic. With a `capacity`, each mark is stored as well, for a timeline.

SMs count cycles each from its own start. So the first warp of a block reads the GPU's nanosecond
timer just when it steps, together with the cycle counter, when it begins and when it ends. Those
pairs align the SMs and measure how many cycles a nanosecond has.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from fa2_numba import cache, simulator
from fa2_numba.hbm import device, jit
from fa2_numba.ptx import (
    mov_u32_clock,
    mov_u32_smid,
    mov_u64_clock64,
    mov_u64_globaltimer,
)

if not simulator.ACTIVE:
    from numba.cuda import types
    from numba.cuda.extending import overload

WARP = 32
MAX_PHASES = 15  # an event is ``cycles * 16 + phase``
LONGEST = 2**32  # cycles of one block: sums of phases have 32 bits
EMPTY_MARKS = 8  # of one turn of `build_empty_marks`

# Columns of a row of the clock; those of the phases follow.
SMID, START, END, NS_0, CYCLES_0, NS_1, CYCLES_1, EVENTS, HEADER = range(9)


@dataclass(frozen=True)
class Timeline:
    """What a `PhaseClock` saw in one launch.

    Attributes
    ----------
    kernel : str
        Its name.
    phases : tuple of str
        Names of the phases.
    smid : int64 (blocks,)
        The SM that ran each block.
    start, end : int64 (blocks, warps)
        Cycle counter of that SM when each warp began and ended.
    ns, pair : int64 (blocks, 2)
        Nanosecond timer and cycle counter, read together, at a block's begin and end.
    cycles : int64 (blocks, warps, phases)
        Cycles of each phase. A mark closes a phase, so they sum to ``end - start``, but for what
        the marks did not cover.
    count : int64 (blocks, warps)
        Marks.
    events : int64 (blocks, warps, capacity)
        The first marks of each warp: ``cycles * 16 + phase``; -1 where there is none.
    """

    kernel: str
    phases: tuple[str, ...]
    smid: np.ndarray
    start: np.ndarray
    end: np.ndarray
    ns: np.ndarray
    pair: np.ndarray
    cycles: np.ndarray
    count: np.ndarray
    events: np.ndarray

    @property
    def dropped(self) -> int:
        """Marks that did not fit the capacity; 0 if none were to be kept."""
        capacity = self.events.shape[2]
        return int(np.maximum(self.count - capacity, 0).sum()) if capacity else 0

    @property
    def residency(self) -> np.ndarray:
        """Cycles from a block's first warp to its last, int64 (blocks,)."""
        return np.asarray(self.end.max(axis=1) - self.start.min(axis=1))


class PhaseClock:
    """The `clock` of one launch.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    phases : tuple of str
        Names of its phases, at most `MAX_PHASES`.
    blocks, threads : int
        The launch.
    capacity : int
        Marks to keep of each warp, the first ones; 0 for sums alone.
    """

    def __init__(
        self, kernel: str, phases: tuple[str, ...], blocks: int, threads: int, capacity: int = 0
    ):
        if len(phases) > MAX_PHASES:
            raise ValueError(f"phases: got {len(phases)}, accepted: at most {MAX_PHASES}")
        self.kernel, self.phases = kernel, phases
        warps = -(-threads // WARP)
        self._rows: Any
        self._events: Any
        rows = np.zeros((blocks, warps, HEADER + len(phases)), np.int64)
        events = np.full((blocks, warps, capacity), -1, np.int64)
        if simulator.ACTIVE:
            self._rows, self._events = rows, events
        else:
            self._rows = cuda.to_device(rows)
            self._events = cuda.to_device(events) if capacity else events
            cuda.synchronize()  # they are clear before a kernel on any stream writes

    @property
    def argument(self) -> Any:
        """What the kernel takes: its type says whether marks are summed or kept as well."""
        if simulator.ACTIVE:
            return self
        return (self._rows, self._events) if self._events.shape[2] else self._rows

    def timeline(self) -> Timeline:
        """What the launch wrote.

        Raises
        ------
        RuntimeError
            A block ran for 2**32 cycles or more, so its sums have wrapped.
        """
        rows, events = self._rows, self._events
        if not simulator.ACTIVE:
            cuda.synchronize()
            rows = rows.copy_to_host()
            events = events if isinstance(events, np.ndarray) else events.copy_to_host()
        seen = Timeline(
            self.kernel,
            self.phases,
            smid=rows[:, 0, SMID],
            start=rows[:, :, START],
            end=rows[:, :, END],
            ns=rows[:, 0, [NS_0, NS_1]],
            pair=rows[:, 0, [CYCLES_0, CYCLES_1]],
            cycles=rows[:, :, HEADER:],
            count=rows[:, :, EVENTS],
            events=events,
        )
        if rows.size and (seen.end - seen.start).max() >= LONGEST:
            raise RuntimeError(
                f"{self.kernel}: a block ran for {(seen.end - seen.start).max()} cycles; sums of "
                f"phases hold up to {LONGEST - 1}. Time a smaller problem"
            )
        return seen


def phase_marks(phases: int) -> tuple[Any, Any, Any]:
    """Device functions ``begin(clock, ticks)``, ``mark(clock, ticks, phase)``, ``finish(...)``.

    `ticks` is the kernel's ``cuda.local.array(phases + 2, np.uint32)``: the sums of the phases,
    the last mark, the number of marks. All lanes of a warp mark together.
    """
    LAST, COUNT = phases, phases + 1

    @device
    def timer_step():
        """The nanosecond timer when it steps, and the cycle counter right then."""
        before = mov_u64_globaltimer()
        ns = before
        while ns == before:
            ns = mov_u64_globaltimer()
        return np.int64(ns), np.int64(mov_u64_clock64())

    @device
    def begin_rows(rows, ticks):
        """Write the row's first columns, and start."""
        for p in range(phases):
            ticks[p] = np.uint32(0)
        ticks[COUNT] = np.uint32(0)
        block, warp = cuda.blockIdx.x, cuda.threadIdx.x // WARP
        first = cuda.threadIdx.x % WARP == 0
        if warp == 0:
            ns, cycles = timer_step()
            if first:
                rows[block, warp, SMID] = mov_u32_smid()
                rows[block, warp, NS_0] = ns
                rows[block, warp, CYCLES_0] = cycles
        start = mov_u64_clock64()
        if first:
            rows[block, warp, START] = start
        ticks[LAST] = np.uint32(start & np.uint64(0xFFFFFFFF))

    @device
    def finish_rows(rows, ticks):
        """Write the row's last columns and the sums."""
        end = mov_u64_clock64()
        block, warp = cuda.blockIdx.x, cuda.threadIdx.x // WARP
        first = cuda.threadIdx.x % WARP == 0
        if first:
            rows[block, warp, END] = end
            rows[block, warp, EVENTS] = ticks[COUNT]
            for p in range(phases):
                rows[block, warp, HEADER + p] = ticks[p]
        if warp == 0:
            ns, cycles = timer_step()
            if first:
                rows[block, warp, NS_1] = ns
                rows[block, warp, CYCLES_1] = cycles

    @device
    def mark_sum(ticks, phase, now):
        ticks[phase] += now - ticks[LAST]
        ticks[LAST] = now
        ticks[COUNT] += np.uint32(1)

    @device
    def keep(events, ticks, phase, now):
        n = np.int64(ticks[COUNT])
        if cuda.threadIdx.x % WARP == 0 and n < events.shape[2]:
            events[cuda.blockIdx.x, cuda.threadIdx.x // WARP, n] = np.int64(now) * 16 + phase

    if simulator.ACTIVE:
        return _emulated(begin_rows, mark_sum, keep, finish_rows)

    def begin(clock, ticks):
        raise NotImplementedError("called in kernels only")

    def mark(clock, ticks, phase):
        raise NotImplementedError("called in kernels only")

    def finish(clock, ticks):
        raise NotImplementedError("called in kernels only")

    def on_rows(name, function):
        """`name` becomes `function` of the rows, however the clock holds them."""

        @overload(name, target="cuda")
        def choose(clock, ticks):
            if isinstance(clock, types.NoneType):
                return lambda clock, ticks: None
            if isinstance(clock, types.Array):
                return lambda clock, ticks: function(clock, ticks)
            return lambda clock, ticks: function(clock[0], ticks)

    on_rows(begin, begin_rows)
    on_rows(finish, finish_rows)

    @overload(mark, target="cuda")
    def _mark(clock, ticks, phase):
        if isinstance(clock, types.NoneType):
            return lambda clock, ticks, phase: None
        if isinstance(clock, types.Array):
            return lambda clock, ticks, phase: mark_sum(ticks, phase, mov_u32_clock())

        def mark_and_keep(clock, ticks, phase):
            now = mov_u64_clock64()
            keep(clock[1], ticks, phase, now)
            mark_sum(ticks, phase, np.uint32(now & np.uint64(0xFFFFFFFF)))

        return mark_and_keep

    return begin, mark, finish


def _emulated(begin_rows: Any, mark_sum: Any, keep: Any, finish_rows: Any) -> tuple[Any, Any, Any]:
    """`phase_marks` under the simulator, where the clock itself is the kernel's argument."""

    def begin(clock, ticks):
        if clock is not None:
            begin_rows(clock._rows, ticks)

    def mark(clock, ticks, phase):
        if clock is not None:
            now = mov_u64_clock64()
            keep(clock._events, ticks, phase, now)
            mark_sum(ticks, phase, np.uint32(int(now) % 2**32))

    def finish(clock, ticks):
        if clock is not None:
            finish_rows(clock._rows, ticks)

    return begin, mark, finish


@cache.built
def build_empty_marks() -> Any:
    """Kernel ``empty_marks(clock, turns)``: `EMPTY_MARKS` marks a turn and nothing between them.

    What a mark costs is read from it. How many turns is told at run time, so that the marks compile
    to the instructions that they are in the kernels of attention.
    """
    begin, mark, finish = phase_marks(EMPTY_MARKS)
    TICKS = EMPTY_MARKS + 2

    def empty_marks(clock, turns):
        ticks = cuda.local.array(TICKS, np.uint32)
        begin(clock, ticks)
        for _ in range(turns):
            for phase in range(EMPTY_MARKS):
                mark(clock, ticks, phase)
        finish(clock, ticks)

    return jit(empty_marks, "empty_marks")
