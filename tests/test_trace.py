"""Timelines: cycles of SMs on one axis of nanoseconds, and the files made of them.

`launch_like` makes what a GPU would write: SMs whose counters are millions of cycles apart, a timer
that steps, pairs that are read a little late. It knows when each mark was really made.
"""

import dataclasses
import json
import os
import shutil
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st
from strategies import forall

from fa2_numba import api, simulator
from fa2_numba.accounting import plots, timing, trace
from fa2_numba.cli import main
from fa2_numba.clock import Timeline

on_simulator = pytest.mark.skipif(
    not simulator.ACTIVE, reason="runs on the simulator: NUMBA_ENABLE_CUDASIM=1"
)
PHASES = ("load Q_i", "land K_j, V_j", "P V", "epilogue")


@dataclasses.dataclass(frozen=True)
class Launch:
    """What `launch_like` makes: a timeline, and the truth in ns since `epoch`."""

    timeline: Timeline
    epoch: int
    marks: np.ndarray


def launch_like(
    seed: int = 0,
    blocks: int = 24,
    warps: int = 4,
    visits: int = 20,
    slope: float = 1.98,
    tick: int = 32,
    late: float = 20,
    capacity: int | None = None,
) -> Launch:
    """Blocks of some tens of microseconds, two at a time on each of six SMs.

    Pairs are read up to `late` ns after the timer's step, where a read takes less than a step.
    """
    rng = np.random.default_rng(seed)
    sms, places = 6, 2
    offset = 10**12 + rng.integers(-50_000_000, 50_000_000, sms)  # cycles
    epoch = 1_790_000_000_000_000_000 // tick * tick
    sequence = [0, *[1, 2] * visits, 3]
    n = len(sequence)
    smid = np.arange(blocks) % sms
    start, end, count = (np.zeros((blocks, warps), np.int64) for _ in range(3))
    ns, pair = (np.zeros((blocks, 2), np.int64) for _ in range(2))
    cycles = np.zeros((blocks, warps, len(PHASES)), np.int64)
    events, marks = np.full((blocks, warps, n), -1, np.int64), np.zeros((blocks, warps, n))
    free = np.zeros((sms, places))

    def stamp(sm: int, at: float) -> int:
        return int(offset[sm]) + round(at * slope)

    def read_pair(sm: int, at: float) -> tuple[int, float]:
        step = (int(at) // tick + 1) * tick
        return step, step + rng.uniform(0, late)

    for b, sm in enumerate(smid.tolist()):
        place = free[sm].argmin()
        begin = free[sm, place] + rng.uniform(0, 300)
        step, read = read_pair(sm, begin)
        ns[b, 0], pair[b, 0] = epoch + step, stamp(sm, read)
        ends, barriers = [], read + np.cumsum(rng.uniform(100, 800, n))
        for w in range(warps):
            start[b, w] = last = stamp(sm, read if w == 0 else begin)
            for k, p in enumerate(sequence):
                at = barriers[k] + rng.uniform(0, 9)
                now = stamp(sm, at)
                events[b, w, k], marks[b, w, k] = now * 16 + p, at
                cycles[b, w, p] += now - last
                last = now
            end[b, w], count[b, w] = last + 5, n
            ends.append(at)
        step, read = read_pair(sm, ends[0] + 5)
        ns[b, 1], pair[b, 1] = epoch + step, stamp(sm, read)
        free[sm, place] = max(*ends, read)
    events, marks = events[:, :, :capacity], marks[:, :, :capacity]
    seen = Timeline("fa2", PHASES, smid, start, end, ns, pair, cycles, count, events)
    return Launch(seen, epoch, marks)


def empty(blocks: int = 0) -> Timeline:
    return launch_like(blocks=blocks, visits=0, capacity=0).timeline


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where times are times."""
    monkeypatch.setattr(simulator, "ACTIVE", False)


# ---- alignment --------------------------------------------------------------------------------


@forall(
    30,
    st.integers(0, 2**32),
    st.sampled_from((0.345, 1.0, 1.98)),
    st.sampled_from(((1, 0), (32, 0), (32, 20), (160, 20), (1000, 20))),
)
@example(4000, 0.345, (1, 0))  # cycles are whole numbers: with a slow counter that is 3 ns
def test_marks_come_back_within_the_stated_error(
    seed: int, slope: float, timer: tuple[int, int]
) -> None:
    tick, late = timer
    made = launch_like(seed, blocks=14, warps=2, slope=slope, tick=tick, late=late)
    found = trace.alignment(made.timeline)
    assert found is not None
    assert found.tick % tick == 0 and found.tick > 0
    assert found.slope == pytest.approx(slope, rel=3e-3)
    assert found.spread <= late + 3 / slope + 3e-3 * np.diff(made.timeline.ns).max()
    assert found.uneven == 0
    at = trace.align(made.timeline, made.epoch)
    assert np.abs(at - made.marks).max() <= found.error
    # marks of one block are a slope apart, whatever the pairs say
    apart = np.diff(made.timeline.events // 16, axis=2)
    np.testing.assert_allclose(np.diff(at, axis=2), apart / found.slope, rtol=1e-6)


def test_a_thousand_blocks_know_the_step_and_the_slope() -> None:
    found = trace.alignment(launch_like(blocks=300, warps=1).timeline)
    assert found is not None
    assert found.tick == 32
    assert found.slope == pytest.approx(1.98, rel=2e-4)


def test_the_origin_is_the_first_block() -> None:
    made = launch_like()
    first = int(made.timeline.ns[:, 0].min())
    np.testing.assert_array_equal(trace.align(made.timeline), trace.align(made.timeline, first))
    shifted = trace.align(made.timeline, first - 1000)
    np.testing.assert_allclose(shifted, trace.align(made.timeline) + 1000)


def test_long_blocks_weigh_more_than_short_ones() -> None:
    """The timer's step hides the slope of a block that is hardly longer than it."""
    made = launch_like(blocks=9, warps=1, visits=100).timeline
    ns, pair = made.ns.copy(), made.pair.copy()
    ns[:5, 1] = ns[:5, 0] + 32  # five of nine: so short that they show half the slope
    pair[:5, 1] = pair[:5, 0] + 32
    found = trace.alignment(dataclasses.replace(made, ns=ns, pair=pair))
    assert found is not None and found.slope == pytest.approx(1.98, rel=2e-3)


def test_marks_that_were_not_kept_have_no_time() -> None:
    made = launch_like()
    events = made.timeline.events.copy()
    events[3, 1, 5:] = -1
    at = trace.align(dataclasses.replace(made.timeline, events=events))
    np.testing.assert_array_equal(np.isnan(at), events < 0)


def test_no_blocks() -> None:
    assert trace.alignment(empty()) is None
    assert trace.align(empty()).shape == (0, 4, 0)
    assert list(trace.slices(empty())) == []


def test_a_timer_that_stands_still_is_refused() -> None:
    made = launch_like().timeline
    with pytest.raises(ValueError, match="fa2: the timer stood still while a block ran"):
        trace.alignment(dataclasses.replace(made, ns=made.ns[:, :1].repeat(2, axis=1)))


# ---- what looks wrong is said -----------------------------------------------------------------


def reading(made: Timeline) -> Any:
    """The warnings of two launches: an honest one, and `made`."""
    seen = [timing._read(launch_like().timeline), timing._read(made)]
    return timing._warnings_of(timing._kernel(made, seen, [None] * 3), seen)


def test_an_honest_launch_has_no_warnings() -> None:
    assert reading(launch_like(seed=1).timeline) == []


def test_a_clock_that_changes_is_said(measured: None) -> None:
    made = launch_like().timeline
    slow = made.pair.copy()
    slow[:3, 1] = slow[:3, 0] + (slow[:3, 1] - slow[:3, 0]) * 9 // 10
    assert "the slopes of up to 3 blocks" in " ".join(reading(dataclasses.replace(made, pair=slow)))
    assert "the clock changed between them" in " ".join(
        reading(launch_like(slope=1.98 * 1.03).timeline)
    )


def test_a_preempted_block_is_said() -> None:
    made = launch_like().timeline
    end = made.end.copy()
    end[7] += 10**6
    late = dataclasses.replace(made, end=end)
    assert timing.outliers(made) == 0 and timing.outliers(late) == 1
    assert "up to 1 blocks took over 3 times" in " ".join(reading(late))


def test_longer_blocks_of_more_marks_are_no_outliers() -> None:
    made = launch_like().timeline
    end, count = made.end.copy(), made.count.copy()
    end[:3] += 10**6
    count[:3] *= 10
    assert timing.outliers(dataclasses.replace(made, end=end, count=count)) == 0


def test_what_no_phase_covers_is_said() -> None:
    made = launch_like().timeline
    half = dataclasses.replace(made, cycles=made.cycles // 2)
    assert "phases cover 7" in " ".join(reading(half))  # of 100 and 50 %
    kernel = timing._kernel(half, [timing._read(half)], [None] * 3)
    phases = sum(row.cycles for row in timing._rows(kernel, PHASES, [timing._read(half)], None))
    alive = half.end - half.start
    assert kernel.unmarked == pytest.approx((alive - half.cycles.sum(axis=2)).mean())
    assert kernel.idle == pytest.approx((half.residency[:, None] - alive).mean())
    assert phases + kernel.unmarked + kernel.idle == pytest.approx(kernel.residency)
    assert kernel.covered == pytest.approx(phases / kernel.residency)


@pytest.mark.parametrize(
    ("before", "after", "ratio", "host", "said"),
    [
        (1980, 1980, 0.04, 0.5, ""),
        (1980, 1900, 0.04, 0.5, "the SM clock was 1980 MHz before and 1900 MHz after"),
        (1980, None, 0.04, 0.5, "nvidia-smi did not tell"),
        (1980, 1970, 0.06, 0.5, "6.0% slower than the plain, over 5%"),
        (1980, 1970, 0.04, 0.95, "the overhead is that of the host"),
    ],
)
def test_what_is_wrong_with_the_whole_call_is_said(
    before: float, after: float | None, ratio: float, host: float, said: str
) -> None:
    overhead = timing.Overhead({}, {}, {"timed": ratio}, 1, 20, host)
    found = timing._warnings_of_the_call(overhead, before, after)
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_ns_of_a_phase_come_from_the_measured_slope(measured: None) -> None:
    made = launch_like(slope=0.345).timeline
    seen = [timing._read(made)]
    kernel = timing._kernel(made, seen, [None] * 3)
    for row in timing._rows(kernel, PHASES, seen, timing.visits(made)):
        assert row.ns == pytest.approx(row.cycles / 0.345, rel=3e-3)
    visits = timing.visits(made)
    assert visits is not None
    np.testing.assert_array_equal(visits, [1, 20, 20, 1])


# ---- Chrome trace -----------------------------------------------------------------------------


def check(made: dict[str, Any], timelines: list[Timeline]) -> None:
    """All that the format asks for, and that every kept mark is there once."""
    made = json.loads(json.dumps(made, allow_nan=False))
    assert set(made) == {"traceEvents", "displayTimeUnit", "metadata"}
    assert made["displayTimeUnit"] == "ns"
    names: dict[Any, str] = {}
    tracks: dict[Any, list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
    for event in made["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["pid"] >= 0 and event["tid"] >= 0
        if event["ph"] == "M":
            if event["name"] != "process_sort_index":
                key = event["name"], event["pid"], event["tid"]
                assert key not in names
                names[key] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0 and event["dur"] >= 0
        begin, length = (round(event[k] * 1000) for k in ("ts", "dur"))
        assert begin == pytest.approx(event["ts"] * 1000, abs=1e-6)  # whole nanoseconds
        tracks[event["pid"], event["tid"]].append((begin, begin + length, event))
    assert len({tid for _, tid in tracks}) == len(tracks)  # a warp of a block ran on one SM
    blocks = {}
    for (pid, tid), on_track in tracks.items():
        assert names["process_name", pid, 0] == f"SM {pid}"
        kernel, _, block, _, warp = names["thread_name", pid, tid].split()
        open_until = []
        for begin, end, event in on_track:  # in the order of the file, as viewers read them
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "slices overlap without nesting"
            open_until.append(end)
            assert event["cat"] == kernel and event["args"]["block"] == int(block)
            if event["name"] == f"{kernel} block {block}":
                assert (kernel, block) not in blocks and warp == "0"
                blocks[kernel, block] = begin, end, event["args"]["cycles"]
            else:
                assert event["args"]["warp"] == int(warp)
                outer = blocks[kernel, block]
                assert outer[0] <= begin <= end <= outer[1]
    assert len(blocks) == sum(len(t.smid) for t in timelines)
    for t, about in zip(timelines, made["metadata"]["kernels"], strict=True):
        mine = [e for each in tracks.values() for *_, e in each if e["cat"] == t.kernel]
        phases = [e for e in mine if "visit" in e["args"]]
        assert len(phases) == (t.events >= 0).sum() == about["kept"]
        assert about["dropped"] == t.dropped and about["phases"] == list(t.phases)
        if t.events.shape[2] and not t.dropped:
            for p, name in enumerate(t.phases):
                cycles = sum(e["args"]["cycles"] for e in phases if e["name"] == name)
                assert cycles == t.cycles[:, :, p].sum()
            numbers = defaultdict(list)
            for e in phases:
                numbers[e["tid"], e["name"]].append(e["args"]["visit"])
            assert all(found == list(range(len(found))) for found in numbers.values())
    assert made["metadata"]["dropped"] == sum(t.dropped for t in timelines)


@forall(5, st.integers(0, 2**32), st.sampled_from((None, 0, 7)))
def test_a_trace_is_well_formed(seed: int, capacity: int | None) -> None:
    made = [launch_like(seed + n, 7, 2, 5, capacity=capacity).timeline for n in range(2)]
    second = dataclasses.replace(made[1], kernel="other", ns=made[1].ns + 10**6)
    timelines = [made[0], dataclasses.replace(empty(), kernel="nothing"), second]
    check(trace.chrome_trace(timelines), timelines)


@on_simulator
@pytest.mark.parametrize("method", api.PORTABLE)
@pytest.mark.parametrize("capacity", [0, 5, 600])
def test_a_trace_of_the_simulator(method: str, capacity: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, 4), np.float32) for _ in range(3))
    timelines = api.trace(q, k, v, causal=True, method=method, capacity=capacity).timelines
    made = trace.chrome_trace(timelines)
    check(made, timelines)
    assert made["metadata"]["source"] == "emulated steps, no time"


@pytest.mark.parametrize("timelines", [[], [empty()], [empty(), empty(3)]], ids=len)
def test_a_trace_of_little(timelines: list[Timeline]) -> None:
    made = trace.chrome_trace(timelines)
    check(made, timelines)


def test_a_trace_says_what_its_times_are(measured: None) -> None:
    made = launch_like(capacity=9).timeline
    about = trace.chrome_trace([made])["metadata"]
    found = trace.alignment(made)
    assert found is not None
    assert about["source"] == f"measured, cycles of each SM, aligned to ±{found.error:.0f} ns"
    (kernel,) = about["kernels"]
    assert kernel["cycles_per_ns"] == found.slope and kernel["timer_step_ns"] == 32
    assert kernel["alignment_error_ns"] == found.error
    assert about["dropped"] == kernel["dropped"] == made.count.sum() - 9 * made.count.size > 0


def test_perfetto_reads_a_trace(tmp_path: Any) -> None:
    """Slices, their nesting and the names, by Perfetto's own trace processor.

    The perfetto package would download that program: name one with ``TRACE_PROCESSOR=PATH``, or
    have ``trace_processor_shell`` in the path.
    """
    perfetto = pytest.importorskip("perfetto.trace_processor")
    program = os.environ.get("TRACE_PROCESSOR") or shutil.which("trace_processor_shell")
    if program is None:
        pytest.skip("needs TRACE_PROCESSOR=PATH of Perfetto's trace_processor_shell")
    made = launch_like(blocks=5, visits=3).timeline
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace.chrome_trace([made])))
    config = perfetto.TraceProcessorConfig(bin_path=program)
    with perfetto.TraceProcessor(trace=str(path), config=config) as read:
        rows = list(
            read.query(
                "select s.name, s.ts, s.dur, s.depth, t.name as thread, p.name as process "
                "from slice s join thread_track k on s.track_id = k.id "
                "join thread t using (utid) join process p using (upid)"
            )
        )
        errors = list(read.query("select name from stats where severity = 'error' and value > 0"))
    assert errors == []
    blocks = [row for row in rows if row.name.startswith("fa2 block")]
    phases = [row for row in rows if row.name in PHASES]
    assert len(rows) == len(blocks) + len(phases)
    assert len(blocks) == 5 and len(phases) == made.count.sum()
    assert {row.process for row in rows} == {f"SM {n}" for n in range(5)}
    assert all(row.depth == row.thread.endswith("warp 0") for row in phases)
    written = [e for e in trace.chrome_trace([made])["traceEvents"] if e["ph"] == "X"]
    expected = [(e["name"], round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in written]
    assert sorted((row.name, row.ts, row.dur) for row in rows) == sorted(expected)


# ---- figure -----------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def parsed(drawing: plots.Drawing, path: Any) -> Any:
    plots.save_svg(drawing, path)
    return ElementTree.parse(path).getroot()


@pytest.mark.parametrize("visits", [5, 60])
def test_a_figure_names_its_source_and_error(measured: None, tmp_path: Any, visits: int) -> None:
    made = launch_like(visits=visits).timeline
    drawing = trace.gantt(made)
    found = trace.alignment(made)
    assert found is not None
    said = f"source: measured, cycles of each SM, aligned to ±{found.error:.0f} ns"
    assert said in drawing.caption
    assert "4 of 6 SMs" in drawing.caption and "not kept" not in drawing.caption
    root = parsed(drawing, tmp_path / "figure.svg")
    assert root.tag == f"{SVG}svg"
    assert drawing.caption in "".join(root.itertext())
    axes = drawing.figure.axes
    assert len(axes) == (1 if visits == 5 else 2)
    bars = axes[-1].patches
    # 4 SMs with 2 blocks each; where one has shown its 60 phases, another may have shown more
    assert 8 * 12 <= len(bars) <= 8 * 1.2 * plots.GANTT_PHASES
    assert len({bar.get_facecolor() for bar in bars}) >= 3
    assert all(bar.get_width() >= 0 for bar in bars)
    labels = [label.get_text() for label in axes[-1].get_yticklabels()]
    assert labels == ["SM 0", "SM 1", "SM 2", "SM 3"]


def test_a_wave_is_the_blocks_that_ran_together(measured: None) -> None:
    drawing = trace.gantt(launch_like(blocks=24).timeline)  # four on each SM, two at a time
    assert len({bar.get_y() for bar in drawing.figure.axes[-1].patches}) == 8


def test_a_figure_says_that_marks_are_missing(measured: None) -> None:
    made = launch_like(capacity=3).timeline
    assert f"{made.dropped:,} marks were not kept" in trace.gantt(made).caption


@pytest.mark.parametrize("blocks", [0, 3])
def test_a_figure_of_little(tmp_path: Any, blocks: int) -> None:
    parsed(trace.gantt(empty(blocks)), tmp_path / "figure.svg")


def test_more_phases_than_colours(measured: None, tmp_path: Any) -> None:
    names = tuple(f"phase {n}" for n in range(15))
    looks = [tuple(sorted(plots._phase_look(n).items())) for n in range(15)]
    assert len(set(looks)) == 15
    bars = [plots.Bar(0, 0, 0.0, 15.0, tuple((n, n, n + 1.0) for n in range(15)))]
    parsed(plots.gantt(names, bars, "µs", "A caption."), tmp_path / "figure.svg")


# ---- the command ------------------------------------------------------------------------------


@on_simulator
def test_the_command_writes_a_trace_and_a_figure(tmp_path: Any, capsys: Any) -> None:
    files = ["--output", str(tmp_path / "t.json"), "--svg", str(tmp_path / "t.svg")]
    assert main(["trace", "--n", "20", "--d", "4", "--heads", "2", "--causal", *files]) == 0
    printed = capsys.readouterr()
    for text in ("land K_j, V_j", "steps", "covered by phases", "t.json", "t.svg"):
        assert text in printed.out
    assert "emulated steps of the simulator: they measure no time" in printed.err
    made = json.loads((tmp_path / "t.json").read_text())
    assert made["metadata"]["dropped"] == 0
    assert {e["name"] for e in made["traceEvents"]} > {"softmax", "P V", "fa2 block 0"}
    assert ElementTree.parse(tmp_path / "t.svg").getroot().tag == f"{SVG}svg"


@on_simulator
@pytest.mark.parametrize("method", api.PORTABLE)
def test_the_command_prints_rows_alone(
    tmp_path: Any, capsys: Any, monkeypatch: Any, method: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "--n", "9", "--d", "4", "--method", method, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [set(row) for row in rows] == [{f.name for f in dataclasses.fields(timing.Phase)}] * len(
        rows
    )
    assert {row["kernel"].split("_")[0] for row in rows} == {method}
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@on_simulator
def test_the_command_says_how_many_marks_were_lost(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "t.json"
    argv = ["trace", "--n", "20", "--d", "4", "--capacity", "5", "--output", str(path)]
    assert main(argv) == 0
    dropped = json.loads(path.read_text())["metadata"]["dropped"]
    assert dropped > 0
    assert f"{dropped:,} of " in capsys.readouterr().err


@on_simulator
@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ("--n 100000", "--n"),
        ("--n 0", "--n"),
        ("--n x", "--n"),
        ("--n 9 --d 300", "--d"),
        ("--n 9 --batch 0", "--batch"),
        ("--n 9 --capacity -1", "capacity"),
        ("--n 9 --method fa9", "--method"),
        ("--n 9 --dtype fp8", "--dtype"),
        ("--n 9 --output nowhere/t.json", "--output"),
        ("--n 9 --svg nowhere/t.svg", "--svg"),
        ("--n 9 --d 4 --output .", "cannot be written"),
    ],
)
def test_the_command_refuses_in_one_line(
    tmp_path: Any, capsys: Any, monkeypatch: Any, argv: str, names: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *argv.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    message = printed.err.splitlines()[-1]
    assert message.startswith("fa2-numba trace") and names in message
    assert "Traceback" not in printed.err


# ---- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "t.json"
    argv = ["trace", "--n", "512", "--heads", "16", "--output", str(path), "--json"]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["cycles"] > 0 and row["ns"] > 0 for row in rows)
    made = json.loads(path.read_text())
    assert made["metadata"]["source"].startswith("measured, cycles of each SM, aligned to ±")
    assert len({e["pid"] for e in made["traceEvents"]}) > 1


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("method", api.PORTABLE)
def test_a_trace_of_a_gpu(method: str) -> None:
    import cupy

    q, k, v = (cupy.random.standard_normal((8, 500, 64), dtype=cupy.float32) for _ in range(3))
    timelines = api.trace(q, k, v, causal=True, method=method, capacity=1000).timelines
    check(trace.chrome_trace(timelines), timelines)
    for t in timelines:
        trace.gantt(t)
