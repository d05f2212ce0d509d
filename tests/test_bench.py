"""Timing without a GPU: what a cell costs, how turns are taken, how long the GPU is kept busy."""

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2_numba.accounting import bench
from fa2_numba.accounting.bench import Cell
from fa2_numba.accounting.hardware import HardwareError

CELL = Cell(2, 16, 4096, 128, False, "bf16")


def test_operations_of_a_cell():
    assert CELL.teraflop() == 4 * 4096**2 * 128 * 16 * 2 / 1e12
    assert Cell(2, 16, 4096, 128, True, "bf16").teraflop() == CELL.teraflop() / 2
    backward = Cell(2, 16, 4096, 128, False, "bf16", "backward")
    assert backward.teraflop() == 2.5 * CELL.teraflop()


def test_a_row_has_the_median_and_both_ends():
    row = CELL.row("fa2", [1.0, 4.0, 2.0])
    operations = CELL.teraflop()
    assert row == {
        "implementation": "fa2", "direction": "forward", "dtype": "bf16", "batch": 2, "heads": 16,
        "n": 4096, "d": 128, "causal": False, "tflops": round(operations / 2e-3, 2),
        "tflops_min": round(operations / 4e-3, 2), "tflops_max": round(operations / 1e-3, 2),
        "milliseconds": 2.0, "rounds": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("one", "calls"), [(0.1, 16), (4.0, 8), (30.0, 1), (500.0, 1), (7.0, 5)])
def test_a_burst_is_as_long_as_asked_up_to_a_number_of_calls(one, calls):
    assert bench.burst_length(one, 30, 16) == calls


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 64))
def test_after_the_lead_the_gpu_never_waits_and_a_shorter_one_does_not_do(host, one, burst):
    def waited(hold):
        free, idle = hold, 0
        for n in range(burst):
            ready = (n + 1) * host
            idle += max(0, ready - free)
            free = max(free, ready) + one
        return idle

    ahead = bench.lead(host, one, burst)
    assert waited(ahead) == 0
    assert waited(ahead - 1) > 0


@pytest.fixture
def clock(monkeypatch):
    """`bench.milliseconds` on a made-up GPU: calls append their name; "a" takes 2 ms, "b" 10."""
    log = []

    def milliseconds(call, burst=1):
        for _ in range(burst):
            call()
        return {"a": 2.0, "b": 10.0}[log[-1]]

    monkeypatch.setattr(bench, "milliseconds", milliseconds)
    return log, [lambda: log.append("a"), lambda: log.append("b")]


def test_calls_take_turns_in_bursts(clock):
    log, calls = clock
    assert bench.take_turns(calls, 2, 20, longest=4) == [[2.0, 2.0], [10.0, 10.0]]
    assert "".join(log) == "aabb" + 2 * "aaaabb"


def test_a_slow_call_may_take_fewer_turns(clock):
    log, calls = clock
    assert bench.take_turns(calls, [3, 1], 20, longest=2) == [[2.0] * 3, [10.0]]
    assert "".join(log) == "aabb" + "aabb" + "aa" + "aa"


def test_the_gpu_is_kept_busy_equally_long_before_each_turn(clock, monkeypatch):
    log, calls = clock
    ticks = iter([0.0, 0.003, 0.0, 0.001])  # of the host: 3 ms for a, 1 ms for b
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(ticks))
    held = []

    class Watch:
        def __enter__(self):
            log.append("<")

        def __exit__(self, *error):
            log.append(">")

    bench.take_turns(calls, 1, 20, longest=4, hold=held.append, watch=Watch())
    ahead = bench.AHEAD * bench.lead(3.0, 2.0, 4)
    assert held == pytest.approx([3 * bench.AHEAD, 1 * bench.AHEAD, ahead, ahead])
    assert "".join(log) == "aaabbb" + "<aaaa>" + "<bb>"


def test_the_gpu_is_busy_for_at_least_so_long(clock):
    log, (two_milliseconds, _) = clock
    hold = bench.keeping_busy(two_milliseconds)
    log.clear()
    hold(5.0)
    assert log == ["a"] * 3


@pytest.mark.parametrize(
    ("cell", "methods", "rounds", "message"),
    [
        (Cell(0, 1, 8, 8, False, "fp32"), ["fa2"], 1, "batch: got 0"),
        (Cell(1, 1, 8, -1, False, "fp32"), ["fa2"], 1, "d: got -1"),
        (CELL, ["fa2"], 0, "rounds: got 0"),
        (CELL, ["fa2", "x"], 1, "method: got 'x', accepted: standard, fa1, fa2"),
    ],
)
def test_what_cannot_be_compared_is_named(cell, methods, rounds, message):
    with pytest.raises(ValueError, match=message):
        bench.compare(cell, methods, rounds)


def test_comparing_needs_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(HardwareError, match="CuPy is not installed"):
        bench.compare(CELL, ["fa2"], 1)


def test_what_refuses_the_call_is_told_and_the_others_are_timed(clock, monkeypatch):
    _, (a, b) = clock

    def refuses():
        raise ValueError("d: got 128,\n  accepted: 64")

    fake = SimpleNamespace(
        empty=lambda *shape: None,
        uint8=None,
        copyto=lambda target, source: a(),
        cuda=SimpleNamespace(runtime=SimpleNamespace(deviceSynchronize=lambda: None)),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(bench, "_calls", lambda *given: {"fa2": a, "fa1": refuses, "peer": b})
    rows, refused = bench.compare(CELL, ["fa2", "fa1"], 2)
    assert [(row["implementation"], row["milliseconds"]) for row in rows] == [
        ("fa2", 2.0),
        ("peer", 10.0),
    ]
    assert refused == ["fa1: d: got 128, accepted: 64"]
