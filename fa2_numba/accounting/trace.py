"""Timelines of launches: cycles of every SM on one axis of nanoseconds.

SMs count cycles each from its own start, millions apart. So each block reads the GPU's nanosecond
timer together with its SM's cycle counter, when it begins and when it ends (`clock.PhaseClock`).
The slope comes from these pairs, and never from the clock that the GPU should have.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fa2_numba import simulator
from fa2_numba.clock import Timeline

if TYPE_CHECKING:
    from fa2_numba.accounting.plots import Drawing

UNEVEN = 0.03  # by which the slope of a block may differ from its launch's
PHASES = 16  # of an event, ``cycles * 16 + phase``
GANTT_SMS = 4  # in a figure that can be read


# From cycles to nanoseconds ----------------------------------------------------------------------


@dataclass(frozen=True)
class Alignment:
    """How a launch's cycles relate to nanoseconds.

    Attributes
    ----------
    slope : float
        Cycles of a nanosecond: median over the blocks, weighted by how long they ran.
    tick : int
        Step of the nanosecond timer, in ns: the smallest difference that was seen.
    spread : float
        Largest difference, in ns, between the timer at a block's end and what the pair at its
        begin and the slope predict.
    uneven : int
        Blocks whose own slope differs by more than `UNEVEN` and the timer's resolution.
    """

    slope: float
    tick: int
    spread: float
    uneven: int

    @property
    def error(self) -> float:
        """Bound, in ns, on the time of an event against events of other SMs.

        An event's cycle and the pair's are whole numbers: together they are up to a cycle off.
        """
        return self.tick + self.spread + 1 / self.slope


def alignment(timeline: Timeline) -> Alignment | None:
    """Slope of a launch's cycle counters, and how far it can be trusted; None without blocks.

    Raises
    ------
    ValueError
        The timer stood still between the begin and the end of a block.
    """
    if not len(timeline.ns):
        return None
    elapsed, cycles = np.diff(timeline.ns)[:, 0], np.diff(timeline.pair)[:, 0]
    if (elapsed <= 0).any():
        raise ValueError(f"{timeline.kernel}: the timer stood still while a block ran")
    slope = _weighted_median(cycles / elapsed, elapsed)
    tick = int(np.diff(np.unique(timeline.ns)).min())
    off = np.abs(cycles / slope - elapsed)
    uneven = int((off > UNEVEN * elapsed + 2 * tick).sum())
    return Alignment(slope, tick, float(off.max()), uneven)


def _weighted_median(values: NDArray[Any], weights: NDArray[Any]) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def align(timeline: Timeline, origin: int | None = None) -> NDArray[np.float64]:
    """When each kept mark was made.

    Parameters
    ----------
    timeline : Timeline
    origin : int, optional
        Zero of the result, on the GPU's nanosecond timer. Default: the first block's begin.

    Returns
    -------
    float64 (blocks, warps, capacity)
        Nanoseconds since `origin`; NaN where there is no mark. An event's error is at most
        ``alignment(timeline).error``.
    """
    at = _nanoseconds(timeline, timeline.events // PHASES, origin)
    return np.where(timeline.events >= 0, at, np.nan)


def _nanoseconds(
    timeline: Timeline, cycles: NDArray[Any], origin: int | None = None
) -> NDArray[np.float64]:
    """Nanoseconds since `origin` of stamps ``(blocks, ...)``, each from its block's first pair."""
    found = alignment(timeline)
    if found is None:
        return np.full(cycles.shape, np.nan)
    if origin is None:
        origin = int(timeline.ns[:, 0].min())
    column = (-1,) + (1,) * (cycles.ndim - 1)
    # Differences first, as integers: the timer's own numbers exceed what float64 resolves.
    since = (cycles - timeline.pair[:, 0].reshape(column)) / found.slope
    return np.asarray((timeline.ns[:, 0] - origin).reshape(column) + since)


# Slices ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """A phase of a warp, or a whole block.

    Attributes
    ----------
    sm, block, warp : int
        Where. A whole block is on its warp 0.
    phase : int or None
        Index of the phase, None for a whole block.
    visit : int
        How often the warp closed that phase before.
    begin, end : float
        Nanoseconds.
    cycles : int
        Between its two stamps.
    """

    sm: int
    block: int
    warp: int
    phase: int | None
    visit: int
    begin: float
    end: float
    cycles: int


def slices(timeline: Timeline, origin: int | None = None) -> Iterator[Slice]:
    """The blocks, each followed by the phases of its warps as far as their marks were kept."""
    starts, ends, marks = (
        _nanoseconds(timeline, x, origin)
        for x in (timeline.start, timeline.end, timeline.events // PHASES)
    )
    for block, sm in enumerate(timeline.smid.tolist()):
        begin, end = float(starts[block].min()), float(ends[block].max())
        yield Slice(sm, block, 0, None, 0, begin, end, int(timeline.residency[block]))
        for warp, events in enumerate(timeline.events[block]):
            at, stamp = float(starts[block, warp]), int(timeline.start[block, warp])
            visits: dict[int, int] = defaultdict(int)
            for n, event in enumerate(events[events >= 0].tolist()):
                now, phase = divmod(event, PHASES)
                next_at = float(marks[block, warp, n])
                yield Slice(sm, block, warp, phase, visits[phase], at, next_at, now - stamp)
                visits[phase] += 1
                at, stamp = next_at, now


# Chrome trace ------------------------------------------------------------------------------------


def source(timelines: Sequence[Timeline]) -> str:
    """What the times of these timelines are, in words."""
    if simulator.ACTIVE:
        return "emulated steps, no time"
    errors = [a.error for a in map(alignment, timelines) if a]
    within = f", aligned to ±{max(errors):.0f} ns" if errors else ""
    return f"measured, cycles of each SM{within}"


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Timelines of one call as a Chrome trace, which Perfetto and ``chrome://tracing`` read.

    A process is an SM, a thread is a warp of a block. Each block is one slice on its first warp's
    thread, around that warp's phases. Times are microseconds with three digits; under the simulator
    a step is shown as a nanosecond.

    Parameters
    ----------
    timelines : sequence of Timeline
        Launches in their order, with marks kept.

    Returns
    -------
    dict
        ``traceEvents``, ``displayTimeUnit`` and ``metadata``: what the times are, and for each
        kernel its phases, slope, alignment error, and how many marks were kept and dropped.
    """
    begins = [int(t.ns[:, 0].min()) for t in timelines if len(t.ns)]
    origin = min(begins, default=0)
    found = [(t, list(slices(t, origin))) for t in timelines]
    # Other warps begin while the first waits for the timer: they may be ahead of the origin.
    first = min((s.begin for _, each in found for s in each), default=0.0)
    events: list[dict[str, Any]] = []
    args: dict[str, Any]
    sms: set[int] = set()
    tid = 1  # of the next timeline's first warp
    for t, each in found:
        warps = t.count.shape[1]
        for s in each:
            begin, end = round(s.begin - first), round(s.end - first)
            here = {"pid": s.sm, "tid": tid + s.block * warps + s.warp}
            if s.phase is None:
                name = f"{t.kernel} block {s.block}"
                args = {"kernel": t.kernel, "block": s.block, "cycles": s.cycles}
                sms.add(s.sm)
                for warp in range(warps):
                    label = {"name": f"{t.kernel} block {s.block} warp {warp}"}
                    track = {**here, "tid": here["tid"] + warp}
                    events.append({"name": "thread_name", "ph": "M", **track, "args": label})
            else:
                name = t.phases[s.phase]
                args = {"block": s.block, "warp": s.warp, "visit": s.visit, "cycles": s.cycles}
            time = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
            events.append({"name": name, "cat": t.kernel, "ph": "X", **time, **here, "args": args})
        tid += t.count.size
    for sm in sorted(sms):
        for name, args in (
            ("process_name", {"name": f"SM {sm}"}),
            ("process_sort_index", {"sort_index": sm}),
        ):
            events.append({"name": name, "ph": "M", "pid": sm, "tid": 0, "args": args})
    metadata = {
        "source": source(timelines),
        "dropped": sum(t.dropped for t in timelines),
        "kernels": [_about(t) for t in timelines],
    }
    return {"traceEvents": events, "displayTimeUnit": "ns", "metadata": metadata}


def _about(timeline: Timeline) -> dict[str, Any]:
    found = alignment(timeline)
    blocks, warps = timeline.count.shape
    return {
        "kernel": timeline.kernel,
        "phases": list(timeline.phases),
        "blocks": blocks,
        "warps": warps,
        "kept": int((timeline.events >= 0).sum()),
        "dropped": timeline.dropped,
        "cycles_per_ns": found.slope if found else None,
        "timer_step_ns": found.tick if found else None,
        "alignment_error_ns": found.error if found else None,
    }


# Gantt chart -------------------------------------------------------------------------------------


def gantt(timeline: Timeline) -> "Drawing":
    """A wave of blocks on a few SMs, the phases of each block's first warp in colour."""
    from fa2_numba.accounting import plots

    scale, unit = (1.0, "steps") if simulator.ACTIVE else (1e-3, "µs")
    blocks: list[Slice] = []
    phases: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    for s in slices(timeline):
        if s.phase is None:
            blocks.append(s)
        elif s.warp == 0:
            phases[s.block].append((s.phase, s.begin * scale, s.end * scale))
    sms = sorted({b.sm for b in blocks})
    bars = [
        plots.Bar(sm, b.block, b.begin * scale, b.end * scale, tuple(phases[b.block]))
        for sm in sms[:GANTT_SMS]
        for b in _wave([b for b in blocks if b.sm == sm])
    ]
    caption = (
        f"{timeline.kernel}: a wave of blocks on {min(len(sms), GANTT_SMS)} of {len(sms)} SMs, "
        f"phases of each block's first warp. Level: the SMs' cycle counters; source: "
        f"{source([timeline])}."
    )
    if timeline.dropped:
        caption += f" Of the launch, {timeline.dropped:,} marks were not kept."
    return plots.gantt(timeline.phases, bars, unit, caption)


def _wave(blocks: Sequence[Slice]) -> list[Slice]:
    """Of the blocks of one SM, those that began before the first of them ended."""
    end = min(b.end for b in blocks)
    return sorted((b for b in blocks if b.begin < end), key=lambda b: b.begin)
