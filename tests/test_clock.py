"""The clock's marks: they change no bit, cover a block, and are as many as the algorithm says.

On the simulator a clock read is a step, so only what holds for any clock is tested here; what the
cycles of a GPU must satisfy is marked ``gpu``. The counts of marks are derived from the algorithm:
tiles that a row tile sees, batches of loads that a tile takes.
"""

import io
import itertools
import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from rich.console import Console
from strategies import Backend, Case, Kernel, bits, cases, forall

from fa2_numba import api, clock, problem, simulator
from fa2_numba.accounting import timing, trace
from fa2_numba.clock import LONGEST, MAX_PHASES, PhaseClock, Timeline
from fa2_numba.tile import LOADS_IN_FLIGHT
from fa2_numba.tiling import Tiling, ceil_div

every_method = pytest.mark.parametrize("method", api.PORTABLE)
on_simulator = pytest.mark.skipif(
    not simulator.ACTIVE, reason="runs on the simulator: NUMBA_ENABLE_CUDASIM=1"
)
ALL = {"standard": 600, "fa1": 10_000, "fa2": 600}  # marks: more than any warp here makes

# One warp and two; several rows, columns and batches of a thread; fewer threads than a warp.
TILINGS = (Tiling(4, 8, 4, 8), Tiling(8, 8, 8, 8), Tiling(6, 5, 3, 1), Tiling(16, 16, 4, 2))
MASKS = ((), ("causal",), ("skip",), ("window",), ("boolean",), ("bound", "window"))


def kernels(masks: tuple[tuple[str, ...], ...] = MASKS) -> Any:
    if simulator.ACTIVE:
        sizes = {"d": st.sampled_from((3, 8)), "tiling": st.sampled_from(TILINGS)}
    else:
        sizes = {"d": st.just(48), "tiling": st.just(Tiling(16, 32, 8, 8))}
        masks = masks[1:5:3]
    return st.builds(Kernel, mask=st.sampled_from(masks), **sizes)


def traced(backend: Backend, method: str, case: Case, capacity: int | None = None) -> api.Trace:
    """A timed call; it keeps all marks unless there is a `capacity`."""
    capacity = ALL[method] if capacity is None else capacity
    options = case.options("fp32", backend.to_device)
    q, k, v = backend.operands(case, "fp32")
    return api.trace(q, k, v, method=method, capacity=capacity, **options)


# ---- what the algorithms say ------------------------------------------------------------------


def batches(rows: int, columns: int, width: int, threads: int) -> int:
    """Times that a thread asks for up to `LOADS_IN_FLIGHT` pieces of a tile and stores them."""
    of_a_thread = ceil_div(rows * (columns // width), threads)
    return ceil_div(of_a_thread, min(of_a_thread, LOADS_IN_FLIGHT))


def seen_tiles(case: Case, p: problem.Problem) -> np.ndarray:
    """Whether any row of a row tile sees any key of a key tile: (B, H, T_r, T_c)."""
    t, mask = p.tiling, case.dense_mask()
    seen = np.broadcast_to(True if mask is None else mask, (p.B, p.H, p.N_q, p.N_k))
    tiles = np.zeros((p.B, p.H, t.T_r(p.N_q), t.T_c(p.N_k)), bool)
    for i, j in np.ndindex(tiles.shape[2:]):
        rows, keys = slice(i * t.B_r, (i + 1) * t.B_r), slice(j * t.B_c, (j + 1) * t.B_c)
        tiles[:, :, i, j] = seen[:, :, rows, keys].any(axis=(2, 3))
    return tiles


def expected_marks(method: str, case: Case, p: problem.Problem) -> dict[str, np.ndarray]:
    """Kernel to the marks of each phase in each block: (blocks, phases)."""
    t, tiles = p.tiling, seen_tiles(case, p)
    Q, K = (batches(rows, p.d, p.load_width, t.threads) for rows in (t.B_r, t.B_c))
    T_c = t.T_c(p.N_k)
    if method == "fa2":  # last row tiles first; each batch is asked for, then lands
        n = tiles.sum(axis=3)[:, :, ::-1].reshape(-1, 1)
        per_block = [2 * Q + 0 * n, 2 * K * n, 2 * K * n + n, n, n, n, 1 + 0 * n]
        return {"fa2": np.hstack(per_block)}
    if method == "fa1":  # a key tile is loaded when the first row tile needs it
        n = tiles.sum(axis=(2, 3)).reshape(-1, 1)
        loaded = tiles.any(axis=2).sum(axis=2).reshape(-1, 1)
        found = np.hstack([4 * K * loaded, (2 * Q + 1) * n, n, n, n, n])
        return {"fa1_loop": found if p.N_q and p.N_k else found[:0]}
    row_tiles = p.B * p.H * t.T_r(p.N_q)
    P = batches(t.B_r, t.B_c, p.p_width, t.threads)
    return {
        "standard_scores": np.tile([2 * Q + 2 * K + 1, 1, 1], (row_tiles * T_c, 1)),
        "standard_softmax": np.tile([1, 1], (ceil_div(p.B * p.H * p.N_q, 4), 1)),
        "standard_output": np.tile([(2 * P + 2 * K + 1) * T_c, T_c, 1], (row_tiles, 1)),
    }


def marks(seen: Timeline) -> np.ndarray:
    """Kept marks of each phase: (blocks, warps, phases)."""
    phase = np.where(seen.events >= 0, seen.events % 16, -1)
    return np.stack([(phase == p).sum(axis=2) for p in range(len(seen.phases))], axis=-1)


@every_method
@forall(6, cases(kernels()))
def test_every_warp_marks_what_the_algorithm_says(
    backend: Backend, method: str, case: Case
) -> None:
    got = traced(backend, method, case)
    expected = expected_marks(method, case, got.problem)
    assert {t.kernel: len(t.smid) for t in got.timelines} == {
        kernel: len(rows) for kernel, rows in expected.items()
    }
    for t in got.timelines:
        blocks, warps = t.count.shape
        assert warps == ceil_div(128 if "softmax" in t.kernel else got.problem.tiling.threads, 32)
        np.testing.assert_array_equal(
            marks(t), np.broadcast_to(expected[t.kernel][:, None], (blocks, warps, len(t.phases)))
        )
        np.testing.assert_array_equal(t.count, marks(t).sum(axis=2))
        assert t.dropped == 0


# ---- what marks must not and must do ----------------------------------------------------------


@every_method
@pytest.mark.parametrize("capacity", [0, 3, None])
@forall(3, cases(kernels(MASKS + (("documents", "custom"),))))
def test_a_clock_changes_no_bit(
    backend: Backend, method: str, capacity: int | None, case: Case
) -> None:
    got = traced(backend, method, case, capacity)
    plain = backend.run(method, "fp32", case)
    assert bits(backend.to_host(got.out), backend.to_host(got.lse)) == bits(*plain)


@every_method
@forall(6, cases(kernels()))
def test_phases_cover_the_block(backend: Backend, method: str, case: Case) -> None:
    """Stamps grow, and phases sum to the time from a warp's begin to its last mark, exactly."""
    for t in traced(backend, method, case).timelines:
        assert (t.cycles >= 0).all()
        assert (t.end > t.start).all() and (t.residency > 0).all()
        assert (np.diff(t.ns) > 0).all() and (np.diff(t.pair) > 0).all()
        stamps = t.events // 16
        both = (t.events[:, :, 1:] >= 0) & (t.events[:, :, :-1] >= 0)
        assert (np.diff(stamps)[both] > 0).all()
        last = np.where(t.events >= 0, stamps, t.start[:, :, None]).max(axis=2, initial=0)
        np.testing.assert_array_equal(t.cycles.sum(axis=2), last - t.start)
        assert (last <= t.end).all()
        for p in range(len(t.phases)):
            begins = np.concatenate([t.start[:, :, None], stamps[:, :, :-1]], axis=2)
            mine = (t.events >= 0) & (t.events % 16 == p)
            durations = np.where(mine, stamps - begins, 0).sum(axis=2)
            np.testing.assert_array_equal(durations, t.cycles[:, :, p])


@every_method
@forall(3, cases(kernels(), empty=False), st.integers(1, 40))
def test_marks_beyond_the_capacity_are_counted(
    backend: Backend, method: str, case: Case, capacity: int
) -> None:
    whole, cut = (traced(backend, method, case, c).timelines for c in (None, capacity))
    for full, some in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(some.count, full.count)
        phases = np.where(full.events >= 0, full.events % 16, -1)[:, :, :capacity]
        np.testing.assert_array_equal(np.where(some.events >= 0, some.events % 16, -1), phases)
        assert some.dropped == sum(max(0, n - capacity) for n in full.count.ravel().tolist())


@every_method
@pytest.mark.parametrize(("N_q", "N_k"), [(0, 9), (5, 0), (0, 0)])
def test_a_problem_without_blocks_or_without_keys(
    backend: Backend, method: str, N_q: int, N_k: int
) -> None:
    case = Case(N_q=N_q, N_k=N_k)
    got = traced(backend, method, case)
    expected = expected_marks(method, case, got.problem)
    for t in got.timelines:
        np.testing.assert_array_equal(marks(t)[:, 0], expected[t.kernel])
        assert t.residency.shape == t.smid.shape == (len(expected[t.kernel]),)
        assert t.dropped == 0
        assert trace.alignment(t) is None or len(t.smid)


@on_simulator
def test_sums_survive_the_wrap_of_the_low_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases are summed in 32 bits, and the counter may pass a multiple of 2**32 meanwhile."""
    case = Case(N_q=9, N_k=17)
    q, k, v = case.arrays("fp32")
    found = []
    for first in (1, 2**32 - 40):
        monkeypatch.setattr(simulator, "_ticks", itertools.count(first))
        found.append(api.trace(q, k, v, tiling=case.kernel.tiling).timelines[0])
    assert found[1].start[0, 0] < 2**32 < found[1].end[0, 0]
    np.testing.assert_array_equal(found[0].cycles, found[1].cycles)


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("phases", [1, MAX_PHASES])
def test_up_to_15_phases(phases: int) -> None:
    if not simulator.ACTIVE:
        pytest.skip("needs no GPU")
    PhaseClock("k", ("p",) * phases, 1, 32)


def test_a_16th_phase_is_refused() -> None:
    assert MAX_PHASES == 15  # an event has 4 bits for it, and -1 is none
    with pytest.raises(ValueError, match="phases: got 16, accepted: at most 15"):
        PhaseClock("k", ("p",) * 16, 1, 32)


@on_simulator
@pytest.mark.parametrize(("capacity", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_a_capacity_that_is_no_number_of_marks_is_refused(capacity: Any, error: Any) -> None:
    q = np.zeros((4, 4), np.float32)
    with pytest.raises(error, match=r"^capacity: got"):
        api.trace(q, q, q, capacity=capacity)


@on_simulator
def test_a_block_that_ran_too_long_is_refused() -> None:
    """Its sums have wrapped: better no number than a wrong one."""
    long = PhaseClock("k", ("p",), 1, 32)
    long._rows[0, 0, [clock.START, clock.END]] = 5, 5 + LONGEST
    with pytest.raises(RuntimeError, match=f"k: a block ran for {LONGEST} cycles"):
        long.timeline()
    long._rows[0, 0, clock.END] -= 1
    assert long.timeline().residency == LONGEST - 1


# ---- the table --------------------------------------------------------------------------------


@on_simulator
@every_method
def test_a_table_of_phases(method: str) -> None:
    """On the simulator a mark costs one step, and rows are means of the blocks'."""
    case = Case(Kernel(tiling=Tiling(8, 8, 8, 8), mask=("causal",)), N_q=20, N_k=20)
    case = replace(case, mask=(("causal",),))
    q, k, v = case.arrays("fp32")
    options = case.options("fp32", lambda x: x)
    found = timing.time_phases(q, k, v, method=method, repeats=2, **options)
    expected = expected_marks(method, case, api.trace(q, k, v, method=method, **options).problem)
    assert [k.kernel for k in found.kernels] == list(expected)
    for kernel, t in zip(found.kernels, found.timelines, strict=True):
        rows = [row for row in found.rows if row.kernel == kernel.kernel]
        assert [row.phase for row in rows] == list(t.phases)
        per_block = expected[kernel.kernel].mean(axis=0)
        np.testing.assert_allclose([row.visits for row in rows], per_block, rtol=1e-12)
        assert kernel.mark_cycles == kernel.kept_mark_cycles == 1
        for row in rows:
            assert row.cycles == pytest.approx(row.share * kernel.residency)
            assert row.corrected == pytest.approx(max(0, row.cycles - row.visits))
            assert row.cycles_per_visit == pytest.approx(row.cycles / row.visits)
            assert row.ns is None
        assert sum(row.share for row in rows) == pytest.approx(kernel.covered)
        rest = kernel.unmarked + kernel.idle
        assert sum(row.cycles for row in rows) + rest == pytest.approx(kernel.residency)
        assert kernel.plain is not None and kernel.plain.blocks == kernel.blocks == len(t.smid)
    assert found.emulated and found.overhead is None
    assert found.warnings == ("emulated steps of the simulator: they measure no time",)


@on_simulator
def test_a_table_without_blocks() -> None:
    q, k = np.zeros((0, 4), np.float32), np.zeros((5, 4), np.float32)
    for method in api.PORTABLE:
        found = timing.time_phases(q, k, k, method=method, repeats=1)
        assert all(row.cycles == row.share == row.visits == 0 for row in found.rows)
        assert all(kernel.alignment is None and kernel.plain is None for kernel in found.kernels)
        assert trace.chrome_trace(found.timelines)["traceEvents"] == []


@on_simulator
@pytest.mark.parametrize("argument", ["repeats", "capacity"])
def test_a_table_of_nothing_is_refused(argument: str) -> None:
    q = np.zeros((4, 4), np.float32)
    with pytest.raises(ValueError, match=f"^{argument}: got -1"):
        timing.time_phases(q, q, q, **{argument: -1})


@on_simulator
def test_visits_are_unknown_where_marks_were_lost() -> None:
    q, k, v = Case().arrays("fp32")
    full, cut = (api.trace(q, k, v, capacity=c).timelines[0] for c in (600, 4))
    assert timing.visits(cut) is None
    known = timing.visits(full)
    assert known is not None and known.sum() == full.count.mean()


# ---- what only a GPU has, on stand-ins ---------------------------------------------------------


class Event:
    """An event of a GPU whose time is what its kernels add to `now` (ms)."""

    now = 0.0

    def record(self, stream: Any) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        pass


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's events on that GPU."""
    module = SimpleNamespace(
        Event=Event,
        get_elapsed_time=lambda start, end: end.at - start.at,
        ExternalStream=lambda handle: handle,
        Stream=SimpleNamespace(null=0),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=module))
    monkeypatch.setattr(Event, "now", 0.0)


def taking(*milliseconds: float) -> Any:
    """A call whose kernels take these times, the last one from then on."""
    times = itertools.chain(milliseconds, itertools.repeat(milliseconds[-1]))

    def call() -> None:
        Event.now += next(times)

    return call


@pytest.mark.parametrize("stream", [0, 77])
def test_overhead_is_the_median_ratio_of_turns(events: None, stream: int) -> None:
    """A disturbance hits a turn; ratios are taken within turns, and bursts last 10 ms or more."""
    calls = {"plain": taking(1, 1, 2, 9), "timed": taking(1, 1.1, 4, 9), "kept": taking(30)}
    found = timing._overhead(calls, stream, 3)
    assert (found.burst, found.repeats) == (1, 3)
    assert found.milliseconds == pytest.approx({"plain": 2, "timed": 4, "kept": 30})
    assert found.ratio == pytest.approx({"plain": 0, "timed": 0.1, "kept": 14})
    assert found.iqr == pytest.approx({"plain": 4, "timed": 3.95, "kept": 0})
    assert 0 <= found.host < 0.5
    calls = {"plain": taking(2), "timed": taking(2.1), "kept": taking(2.5)}
    found = timing._overhead(calls, stream, 20)
    assert found.burst == 4
    assert found.milliseconds == pytest.approx({"plain": 2, "timed": 2.1, "kept": 2.5})


@pytest.mark.parametrize(
    ("said", "clock_"), [("1980\n", 1980.0), ("[N/A]\n", None), ("", None), (None, None)]
)
def test_the_sm_clock_is_what_nvidia_smi_says(
    monkeypatch: pytest.MonkeyPatch, said: str | None, clock_: float | None
) -> None:
    monkeypatch.setattr(timing.shutil, "which", lambda name: name if said is not None else None)
    monkeypatch.setattr(
        timing.subprocess, "run", lambda command, **how: SimpleNamespace(stdout=said)
    )
    monkeypatch.setattr(
        "numba.cuda.get_current_device", lambda: SimpleNamespace(uuid="GPU-1"), raising=False
    )
    assert timing.sm_clock() == clock_


@on_simulator
def test_the_way_of_a_gpu_from_a_call_to_tables(
    events: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator's kernels, timed as if they were a GPU's."""
    monkeypatch.setattr(timing, "simulator", SimpleNamespace(ACTIVE=False))
    monkeypatch.setattr(timing, "_sm_count", lambda: 2)
    monkeypatch.setattr(timing, "TURNS", 1)
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.01)
    clocks = iter((1980.0, 1500.0))
    monkeypatch.setattr(timing, "sm_clock", lambda: next(clocks))
    launch = timing.launch

    def timed_launch(*args: Any) -> None:
        Event.now += 1.0
        launch(*args)

    monkeypatch.setattr(timing, "launch", timed_launch)
    q, k, v = Case(N_q=9, N_k=9).arrays("fp32")
    found = timing.time_phases(q, k, v, method="fa1", repeats=2, tiling=Tiling(4, 8, 4, 8))
    assert not found.emulated and found.sm_clock == (1980.0, 1500.0)
    assert found.overhead is not None
    assert found.overhead.milliseconds == {"plain": 3.0, "timed": 3.0, "kept": 3.0}  # kernels
    assert "the SM clock was 1980 MHz before and 1500 MHz after" in found.warnings
    assert all(row.ns == pytest.approx(row.cycles) for row in found.rows)  # a step is a ns there
    text = "".join(shown(table) for table in timing.tables(found))
    for part in ("cycles", "ns", "alignment", "registers, plain / timed / kept"):
        assert part in text
    assert "3 ms plain (+0.0%), 3 ms timed (+0.0%), 3 ms kept" in timing.summary(found.overhead)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["repeats"] == 2


def shown(table: Any) -> str:
    with io.StringIO() as text:
        Console(file=text, width=200).print(table)
        return text.getvalue()


# ---- on a GPU ---------------------------------------------------------------------------------


@pytest.fixture
def large() -> Any:
    """fa2 in fp32, N = 4096, d = 64, 32 heads: a full GPU."""
    import cupy

    rng = cupy.random.default_rng(0)
    yield [rng.standard_normal((1, 32, 4096, 64), dtype=cupy.float32) for _ in range(3)]
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.gpu
@pytest.mark.alone
def test_cycles_of_a_gpu(large: Any) -> None:
    """Phases cover at least 95 % of a block; marks lie within their block on the common axis."""
    for _ in range(3):  # the last of three: compiled, and the clock is up
        got = api.trace(*large, capacity=1000)
    (t,) = got.timelines
    aligned = trace.alignment(t)
    assert aligned is not None and t.dropped == 0
    assert 0.3 < aligned.slope < 4  # cycles a ns: GPUs run at some 100 MHz to some GHz
    assert 0 < aligned.tick <= 1024
    assert aligned.error < 0.01 * (t.ns[:, 1] - t.ns[:, 0]).mean()
    assert (t.cycles >= 0).all()
    assert t.cycles.sum() / t.cycles.shape[1] >= 0.95 * t.residency.sum()
    origin = int(t.ns.min())
    at, (begin, end) = trace.align(t, origin)[:, 0], (t.ns - origin).T[:, :, None]
    kept = ~np.isnan(at)
    assert (at >= begin - aligned.error)[kept].all()
    assert (at <= end + aligned.error)[kept].all()
    out, lse = api.attention(*large, return_lse=True)
    assert bool((out == got.out).all()) and bool((lse == got.lse).all())


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("keep", [False, True])
def test_a_mark_costs_some_cycles(keep: bool) -> None:
    costs = [timing.mark_cycles(threads, keep) for threads in (32, 128, 256)]
    assert all(1 < cost < 500 for cost in costs)
    assert timing.mark_cycles(128, keep) == pytest.approx(costs[1], rel=0.5)


@pytest.mark.gpu
@pytest.mark.alone
def test_the_clock_slows_fa2_by_5_percent_at_most(large: Any) -> None:
    """Bursts of plain and timed kernels in turns, between events; the median of 20 ratios.

    Other tests may share the GPU: the best of three tables counts.
    """
    found = [timing.time_phases(*large, method="fa2") for _ in range(3)]
    best = min(found, key=lambda table: table.overhead.ratio["timed"] if table.overhead else 1.0)
    assert best.overhead is not None
    assert best.overhead.ratio["timed"] <= 0.05
    (kernel,) = best.kernels
    assert kernel.covered >= 0.95
    assert kernel.plain and kernel.timed
    assert kernel.timed.local_bytes == 0
    assert kernel.timed.blocks_per_sm == kernel.plain.blocks_per_sm
    assert all(row.corrected is not None and 0 <= row.corrected <= row.cycles for row in best.rows)
