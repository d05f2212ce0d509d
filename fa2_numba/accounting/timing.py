"""Phase timing: where the cycles of a kernel go, and what the measurement itself costs.

Not "cycle accurate": of each warp, the SM's own cycle counter is read where a phase ends
(`clock.PhaseClock`). `time_phases` repeats that on a warm GPU and puts beside the cycles what one
has to know to believe them: what a mark costs, what no phase covers, how much slower the timed
kernels are than the plain ones, and how well the clocks of the SMs can be compared.
"""

import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from fa2_numba import api, masking, simulator
from fa2_numba.accounting.terminal import new_table
from fa2_numba.accounting.trace import PHASES, UNEVEN, Alignment, alignment
from fa2_numba.clock import EMPTY_MARKS, PhaseClock, Timeline, build_empty_marks
from fa2_numba.launch import Launch, Operands, launch, on_device
from fa2_numba.tiling import Tiling

COVERED = 0.95  # of a block's residency, by its phases
OVERHEAD = 0.05  # of the plain kernels' time
CLOCK_CHANGE = 0.02  # of the SM clock, over all repeats
OUTLIER = 3  # times the median residency
HOST_BOUND = 0.9  # of a burst's time, spent by the host on launching it

TURNS = 128  # of `EMPTY_MARKS` marks each: 1024 marks of each warp
KEPT_BYTES = 2**28  # for the marks of one kernel that are kept
WARM_UP_SECONDS = 0.2  # an idle GPU takes that long to raise its clock
BURST_MILLISECONDS = 10
LONGEST_BURST = 16  # calls


# What is found -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """One phase of one kernel. Cycles are those of a block: the mean of its warps.

    Attributes
    ----------
    kernel, phase : str
        Names.
    cycles, iqr : float
        Median over the repeats of the mean over the blocks, and interquartile range.
    corrected : float or None
        `cycles` less what the phase's marks cost, at least 0.
    share : float
        Of the block's residency.
    visits : float or None
        Marks that closed the phase, mean over the warps. None if they were too many to keep.
    cycles_per_visit : float or None
        `cycles` / `visits`.
    ns : float or None
        `cycles` in nanoseconds, by the measured slope. None under the simulator.
    """

    kernel: str
    phase: str
    cycles: float
    iqr: float
    corrected: float | None
    share: float
    visits: float | None
    cycles_per_visit: float | None
    ns: float | None


@dataclass(frozen=True)
class Kernel:
    """One timed kernel. Cycles are medians over the repeats of means over the blocks.

    Attributes
    ----------
    kernel : str
        Its name.
    blocks, warps : int
        Blocks of the launch, warps of a block.
    residency, residency_iqr : float
        Cycles from the begin of a block's first warp to the end of its last.
    covered : float
        Sum of the phases / residency.
    unmarked : float
        Cycles of a warp after its last mark.
    idle : float
        Cycles in which the block ran and the warp did not, at its begin and end.
    marks : float
        Of one warp.
    mark_cycles, kept_mark_cycles : float
        What one costs, calibrated in this process: summed only (as in this table), and kept as
        well (as in a timeline).
    alignment : Alignment or None
        The worst over the repeats, its slope their median; None if no block ran.
    plain, timed, kept : Launch or None
        The launch without a clock, with sums, and with marks that are kept; None if no block ran.
    """

    kernel: str
    blocks: int
    warps: int
    residency: float
    residency_iqr: float
    covered: float
    unmarked: float
    idle: float
    marks: float
    mark_cycles: float
    kept_mark_cycles: float
    alignment: Alignment | None
    plain: Launch | None
    timed: Launch | None
    kept: Launch | None


@dataclass(frozen=True)
class Overhead:
    """Times of all kernels of a call between CUDA events, the variants taking turns in bursts.

    Attributes
    ----------
    milliseconds, iqr : dict
        Variant ("plain", "timed" with sums alone, "kept" with marks kept) to the median and the
        interquartile range of one call.
    ratio : dict
        Variant to the median of its time / plain time of the same turn, less 1.
    burst, repeats : int
        Calls in a burst, bursts of each variant.
    host : float
        Largest of the variants' median shares of a burst that the host needed to launch it.
    """

    milliseconds: dict[str, float]
    iqr: dict[str, float]
    ratio: dict[str, float]
    burst: int
    repeats: int
    host: float


@dataclass(frozen=True)
class PhaseTable:
    """What `time_phases` returns.

    Attributes
    ----------
    problem : dict
        Columns of the problem, as in a traffic row.
    emulated : bool
        Whether the simulator ran it: then "cycles" are steps and measure no time.
    repeats : int
        Launches of each timed kernel that were read.
    rows : tuple of Phase
        One for each phase of each timed kernel.
    kernels : tuple of Kernel
        One for each timed kernel.
    overhead : Overhead or None
        None under the simulator, or if no block ran.
    sm_clock : (float or None, float or None)
        SM clock in MHz before and after, as nvidia-smi says.
    warnings : tuple of str
        Why these numbers may mislead; empty if nothing was found.
    timelines : tuple of Timeline
        Of one more launch, with its marks.
    """

    problem: dict[str, Any]
    emulated: bool
    repeats: int
    rows: tuple[Phase, ...]
    kernels: tuple[Kernel, ...]
    overhead: Overhead | None
    sm_clock: tuple[float | None, float | None]
    warnings: tuple[str, ...]
    timelines: tuple[Timeline, ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the timelines, as JSON takes it."""
        found = asdict(replace(self, timelines=()))
        del found["timelines"]
        return found


# One call, launched again and again --------------------------------------------------------------


class _Again(Operands):
    """The launches of a call that ran, made again on its arrays, with a clock or without.

    Nothing is allocated after the first time, so that launches can follow each other closely.

    Parameters
    ----------
    ran : Operands
        What the call ran with; keeps the arrays alive.
    capacities : mapping, optional
        Kernel to marks that are kept of each of its warps. Without it, no clock.
    """

    def __init__(self, ran: Operands, capacities: Mapping[str, int] | None = None):
        super().__init__(
            ran.problem,
            ran.arrays,
            None,
            ran.stream,
            ran.scale,
            counted=False,
            timed=capacities is not None,
        )
        self.ran, self.capacities = ran, capacities or {}
        self._calls: list[tuple[Any, ...]] = []
        api.METHODS[ran.problem.method](ran.problem, self)

    def workspace(self, name: str) -> None:
        """It is among the arrays."""

    def clock(self, kernel: str, phases: tuple[str, ...], blocks: int, threads: int) -> Any:
        self.capacity = self.capacities.get(kernel, 0)
        return super().clock(kernel, phases, blocks, threads)

    def run(self, kernel: Any, blocks: int, threads: int, shared_bytes: int, *args: Any) -> None:
        super().run(kernel, blocks, threads, shared_bytes, *args)
        if blocks:
            self._calls.append((kernel, blocks, threads, self.stream, shared_bytes, *args))

    def __call__(self) -> None:
        for call in self._calls:
            launch(*call)


def mark_cycles(threads: int, keep: bool = False) -> float:
    """Cycles of one mark: the median of 1024 in each warp, one block on each SM.

    Parameters
    ----------
    threads : int
        Of a block, as in the kernel that is timed.
    keep : bool
        Whether each mark is kept as well.
    """
    blocks, turns = (1, 2) if simulator.ACTIVE else (_sm_count(), TURNS)
    phases = ("mark",) * EMPTY_MARKS
    clock = PhaseClock("empty_marks", phases, blocks, threads, keep * turns * EMPTY_MARKS)
    for _ in range(1 if simulator.ACTIVE else 3):  # the last is read: the others warm up
        launch(build_empty_marks(), blocks, threads, 0, 0, clock.argument, turns)
    return float(np.median(clock.timeline().cycles)) / turns


def _sm_count() -> int:
    from numba import cuda

    return int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


def time_phases(
    q: Any,
    k: Any,
    v: Any,
    *,
    method: str = "auto",
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    mask: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score: masking.Score | None = None,
    scale: float | None = None,
    tiling: Tiling | None = None,
    repeats: int = 20,
    capacity: int | None = None,
) -> PhaseTable:
    """Time the phases of a call's kernels, and what timing them costs.

    The parameters that are not listed are those of `attention`. On a GPU it needs CuPy, whose
    events time the plain and the timed kernels, and takes some seconds of launches.

    Parameters
    ----------
    repeats : int
        Launches of each kernel to read, and bursts to time.
    capacity : int, optional
        Marks of each warp that the returned timelines hold. Default: all of them, as far as
        `KEPT_BYTES` for a kernel reach.

    Returns
    -------
    PhaseTable

    Raises
    ------
    TypeError, ValueError
        As `attention`; or repeats below 1, capacity below 0.
    """
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}, accepted: 1 or more")
    if capacity is not None and capacity < 0:
        raise ValueError(f"capacity: got {capacity}, accepted: 0 or more")
    call = api._Call(q, k, v, method=method, tiling=tiling, scale=scale, out=None)
    call.change(causal, window, mask, softcap, alibi_slopes, score)
    with on_device(call.like.device):
        return _time(call.run(), call.like.stream, repeats, capacity)


def _time(ran: Operands, stream: int, repeats: int, capacity: int | None) -> PhaseTable:
    plain, timed = _Again(ran), _Again(ran, {})
    kept = _Again(ran, {t.kernel: _capacity(t) for t in timed.timelines()})
    variants = {"plain": plain, "timed": timed, "kept": kept}
    on_gpu = not simulator.ACTIVE and bool(plain.launches)
    if on_gpu:
        _warm_up(variants.values())
    before = sm_clock() if on_gpu else None
    readings = []
    for n in range(repeats):
        if n:  # the first is the last of the warm-up
            timed()
        readings.append([_read(t) for t in timed.timelines()])
    overhead = _overhead(variants, stream, repeats) if on_gpu else None
    after = sm_clock() if on_gpu else None
    timelines = kept.timelines()

    launches = [{each.kernel: each for each in again.launches} for again in variants.values()]
    kernels, rows, warnings = [], [], _warnings_of_the_call(overhead, before, after)
    for seen, timeline in zip(zip(*readings, strict=True), timelines, strict=True):
        kernel = _kernel(timeline, seen, [each.get(timeline.kernel) for each in launches])
        closed = visits(timeline)
        kernels.append(kernel)
        rows += _rows(kernel, timeline.phases, seen, closed)
        warnings += _warnings_of(kernel, seen)
        if closed is None:
            warnings.append(f"{kernel.kernel}: too many marks to keep: visits are not known")
    if simulator.ACTIVE:
        warnings = ["emulated steps of the simulator: they measure no time"]
    return PhaseTable(
        ran.problem.columns(),
        simulator.ACTIVE,
        repeats,
        tuple(rows),
        tuple(kernels),
        overhead,
        (before, after),
        tuple(warnings),
        tuple(replace(t, events=t.events[:, :, :capacity]) for t in timelines),
    )


def _capacity(timeline: Timeline) -> int:
    """How many marks of each warp there are to keep, and memory for."""
    warps = timeline.count.size
    return min(int(timeline.count.max()), KEPT_BYTES // (8 * warps)) if warps else 0


def _warm_up(calls: Iterable[_Again]) -> None:
    from numba import cuda

    until = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < until:
        for call in calls:
            call()
        cuda.synchronize()


def sm_clock() -> float | None:
    """The SM clock of the current GPU in MHz, or None where nvidia-smi does not tell."""
    from numba import cuda

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    command += ["-i", cuda.get_current_device().uuid]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    try:
        return float(said)
    except ValueError:
        return None


def _overhead(calls: Mapping[str, _Again], stream: int, repeats: int) -> Overhead:
    """Time bursts of the calls, taking turns."""
    import cupy

    on = cupy.cuda.ExternalStream(stream) if stream else cupy.cuda.Stream.null
    start, end = cupy.cuda.Event(), cupy.cuda.Event()

    def burst(call: _Again, length: int) -> tuple[float, float]:
        """Milliseconds of one call on the GPU, and of the host that launches it."""
        start.record(on)
        begin = time.perf_counter()
        for _ in range(length):
            call()
        host = 1e3 * (time.perf_counter() - begin)
        end.record(on)
        end.synchronize()
        return cupy.cuda.get_elapsed_time(start, end) / length, host / length

    one = max(burst(call, 1)[0] for call in calls.values())
    length = max(1, min(LONGEST_BURST, math.ceil(BURST_MILLISECONDS / one)))
    turns = np.array([[burst(call, length) for call in calls.values()] for _ in range(repeats)])
    ms, host = turns[:, :, 0], turns[:, :, 1]

    def named(values: NDArray[Any]) -> dict[str, float]:
        return dict(zip(calls, values.tolist(), strict=True))

    return Overhead(
        named(np.median(ms, axis=0)),
        named(np.subtract(*np.quantile(ms, (0.75, 0.25), axis=0))),
        named(np.median(ms / ms[:, :1], axis=0) - 1),
        length,
        repeats,
        float(np.median(host / ms, axis=0).max()),
    )


# From launches to rows ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """One timed launch: means over its blocks, and what looks wrong."""

    residency: float
    run: float  # of a warp, from its begin to its end
    phases: tuple[float, ...]
    alignment: Alignment | None
    late: int


def _read(timeline: Timeline) -> _Reading:
    return _Reading(
        _mean(timeline.residency),
        _mean(timeline.end - timeline.start),
        tuple(_mean(timeline.cycles[:, :, p]) for p in range(len(timeline.phases))),
        alignment(timeline),
        outliers(timeline),
    )


def _mean(x: NDArray[Any]) -> float:
    return float(x.mean()) if x.size else 0.0


def _iqr(values: Sequence[float]) -> float:
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high - low)


def outliers(timeline: Timeline) -> int:
    """Blocks that took over `OUTLIER` times the median of the blocks with as many marks."""
    marks, found = timeline.count.sum(axis=1), 0
    for n in np.unique(marks):
        alike = timeline.residency[marks == n]
        found += int((alike > OUTLIER * np.median(alike)).sum())
    return found


def visits(timeline: Timeline) -> NDArray[np.float64] | None:
    """Marks that closed each phase, mean over the warps; None if the timeline lacks some."""
    if (timeline.count > timeline.events.shape[2]).any():
        return None
    closed = np.bincount(timeline.events[timeline.events >= 0] % PHASES, minlength=PHASES)
    return np.asarray(closed[: len(timeline.phases)] / max(timeline.count.size, 1))


def _kernel(
    timeline: Timeline, seen: Sequence[_Reading], launches: Sequence[Launch | None]
) -> Kernel:
    blocks, warps = timeline.count.shape
    threads = launches[0].threads if launches[0] else 0
    aligned = [r.alignment for r in seen if r.alignment]
    return Kernel(
        timeline.kernel,
        blocks,
        warps,
        statistics.median(r.residency for r in seen),
        _iqr([r.residency for r in seen]),
        statistics.median(sum(r.phases) / r.residency if r.residency else 1.0 for r in seen),
        statistics.median(r.run - sum(r.phases) for r in seen),
        statistics.median(r.residency - r.run for r in seen),
        _mean(timeline.count),
        mark_cycles(threads) if threads else 0.0,
        mark_cycles(threads, keep=True) if threads else 0.0,
        Alignment(
            statistics.median(a.slope for a in aligned),
            min(a.tick for a in aligned),
            max(a.spread for a in aligned),
            max(a.uneven for a in aligned),
        )
        if aligned
        else None,
        *launches,
    )


def _rows(
    kernel: Kernel,
    phases: Sequence[str],
    seen: Sequence[_Reading],
    closed: NDArray[np.float64] | None,
) -> list[Phase]:
    rows = []
    for p, phase in enumerate(phases):
        means = [r.phases[p] for r in seen]
        cycles = statistics.median(means)
        n = None if closed is None else float(closed[p])
        timed = kernel.alignment is not None and not simulator.ACTIVE
        rows.append(
            Phase(
                kernel.kernel,
                phase,
                cycles,
                _iqr(means),
                None if n is None else max(0.0, cycles - n * kernel.mark_cycles),
                cycles / kernel.residency if kernel.residency else 0.0,
                n,
                cycles / n if n else None,
                cycles / kernel.alignment.slope if kernel.alignment and timed else None,
            )
        )
    return rows


# What may be wrong -------------------------------------------------------------------------------


def _warnings_of_the_call(
    overhead: Overhead | None, before: float | None, after: float | None
) -> list[str]:
    said = []
    if overhead and (before is None or after is None):
        said.append("nvidia-smi did not tell the SM clock")
    if before and after and abs(after / before - 1) > CLOCK_CHANGE:
        said.append(f"the SM clock was {before:.0f} MHz before and {after:.0f} MHz after")
    if overhead and overhead.ratio["timed"] > OVERHEAD:
        slower = f"{overhead.ratio['timed']:.1%}"
        said.append(f"the timed kernels are {slower} slower than the plain, over {OVERHEAD:.0%}")
    if overhead and overhead.host > HOST_BOUND:
        said.append("launching took the host as long as the GPU: the overhead is that of the host")
    return said


def _warnings_of(kernel: Kernel, seen: Sequence[_Reading]) -> list[str]:
    said = []
    slopes = [r.alignment.slope for r in seen if r.alignment]
    late = max(r.late for r in seen)
    if kernel.alignment and kernel.alignment.uneven:
        said.append(
            f"the slopes of up to {kernel.alignment.uneven} blocks are more than {UNEVEN:.0%} off: "
            "the clock changed while they ran"
        )
    if slopes and max(slopes) > (1 + CLOCK_CHANGE) * min(slopes):
        said.append(
            f"{min(slopes):.3f} to {max(slopes):.3f} cycles a ns over the repeats: the clock "
            "changed between them"
        )
    if late:
        said.append(
            f"up to {late} blocks took over {OUTLIER} times the median of those with as many "
            "marks: preempted, or a cold start"
        )
    if kernel.covered < COVERED:
        said.append(
            f"phases cover {kernel.covered:.1%} of the residency, less than {COVERED:.0%}: "
            f"{kernel.unmarked:,.0f} cycles follow a warp's last mark, and for {kernel.idle:,.0f} "
            "the block runs without it"
        )
    plain, timed = kernel.plain, kernel.timed
    if plain and timed and plain.blocks_per_sm != timed.blocks_per_sm:
        said.append(
            f"{timed.blocks_per_sm} blocks on an SM, of the plain kernel {plain.blocks_per_sm}: "
            "these are the cycles of another kernel"
        )
    if plain and timed and timed.local_bytes > plain.local_bytes:
        said.append(
            f"{timed.local_bytes} bytes of local memory, the plain kernel {plain.local_bytes}: "
            "the clock takes registers away"
        )
    return [f"{kernel.kernel}: {text}" for text in said]


# In the terminal ---------------------------------------------------------------------------------


def tables(found: PhaseTable) -> list[Table]:
    """The phases, and the kernels with what the measurement costs."""
    return [_phase_table(found), _kernel_table(found)]


def _number(x: float | None, digits: int = 0) -> str:
    return "" if x is None else f"{x:,.{digits}f}"


def _phase_table(found: PhaseTable) -> Table:
    unit = "steps" if found.emulated else "cycles"
    header = ["kernel", "phase", f"{unit}\nof a block", "IQR", "less marks", "share\nof block"]
    header += ["visits", f"{unit}\nper visit", "ns"]
    table = new_table("Phases", header[: 8 if found.emulated else 9], 2)
    for row in found.rows:
        cells = [
            row.kernel,
            row.phase,
            _number(row.cycles),
            _number(row.iqr),
            _number(row.corrected),
            f"{row.share:.1%}",
            _number(row.visits, 1),
            _number(row.cycles_per_visit),
            _number(row.ns),
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def _kernel_table(found: PhaseTable) -> Table:
    header = ["", *(k.kernel for k in found.kernels)]
    table = new_table("Kernels", header, 1)

    def line(name: str, *cells: str) -> None:
        if any(cells):
            table.add_row(name, *cells)

    unit = "steps" if found.emulated else "cycles"
    line("blocks × warps", *(f"{k.blocks:,} × {k.warps}" for k in found.kernels))
    line(f"residency, {unit}", *(_number(k.residency) for k in found.kernels))
    line("covered by phases", *(f"{k.covered:.2%}" for k in found.kernels))
    line("after the last mark", *(_number(k.unmarked) for k in found.kernels))
    line("warp not running", *(_number(k.idle) for k in found.kernels))
    line(f"one mark, {unit}", *(_number(k.mark_cycles, 1) for k in found.kernels))
    line(f"one mark kept, {unit}", *(_number(k.kept_mark_cycles, 1) for k in found.kernels))
    if found.emulated:
        return table
    aligned = [k.alignment for k in found.kernels]
    line("cycles a ns", *(_number(a.slope, 4) if a else "" for a in aligned))
    line("timer step, ns", *(_number(a.tick) if a else "" for a in aligned))
    line("alignment, ± ns", *(_number(a.error, 1) if a else "" for a in aligned))
    for name in ("registers", "local_bytes", "blocks_per_sm"):
        shown = [
            " / ".join(str(getattr(each, name)) for each in (k.plain, k.timed, k.kept) if each)
            for k in found.kernels
        ]
        line(f"{name.replace('_', ' ')}, plain / timed / kept", *shown)
    return table


def summary(overhead: Overhead) -> str:
    """What timing costs, in one line."""
    times = (f"{overhead.milliseconds[n]:.4g} ms {n} ({r:+.1%})" for n, r in overhead.ratio.items())
    bursts = f"medians of {overhead.repeats} bursts of {overhead.burst}"
    return f"One call takes {', '.join(times)}; {bursts}"
