"""The tensor-core benchmarks without a GPU: arguments, records, comparisons, clock readings."""

import itertools
import json
import math
import time

import pytest

comparison = pytest.importorskip("benchmarks.comparison")
environment = pytest.importorskip("benchmarks.environment")
forward = pytest.importorskip("benchmarks.forward")
long_context = pytest.importorskip("benchmarks.long_context")
summary = pytest.importorskip("benchmarks.summary")
watch = pytest.importorskip("benchmarks.watch")
peers = pytest.importorskip("benchmarks.peers")


# --- arguments -------------------------------------------------------------------------------


def test_everything_is_the_default():
    given = forward.arguments([])
    assert (given.dims, given.sizes) == ([128, 64, 256], [512, 1024, 2048, 4096, 8192, 16384])
    assert (given.causal, given.regime, given.dtype) == (["full", "causal"], ["sustained"], "bf16")
    assert set(given.implementations) < set(peers.IMPLEMENTATIONS)
    assert tuple(given.sections) == forward.SECTIONS
    assert all(hasattr(forward.Run, section) for section in given.sections)


def test_parts_are_chosen_by_name():
    argv = "--dims 64,128 --sizes 1024 --causal causal --implementations fa3,cudnn,fa3"
    given = forward.arguments([*argv.split(), "--regime", "burst,sustained", "--rounds", "2"])
    assert (given.dims, given.sizes, given.causal) == ([64, 128], [1024], ["causal"])
    assert (given.implementations, given.rounds) == (["fa3", "cudnn"], 2)
    assert given.regime == ["burst", "sustained"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dims", "64,96"], "argument --dims: got '96', accepted: 128, 64, 256"),
        (["--sizes", ""], "argument --sizes: got ''"),
        (["--implementations", "fa3,fa5"], "argument --implementations: got 'fa5'"),
        (["--regime", "cold"], "argument --regime: got 'cold', accepted: sustained, burst"),
        (["--rounds", "0"], "argument --rounds: got '0', accepted: 1 or more"),
        (["--dtype", "fp32"], "argument --dtype: invalid choice: 'fp32'"),
    ],
)
def test_what_is_refused_is_named(capsys, argv, message):
    with pytest.raises(SystemExit) as end:
        forward.arguments(argv)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_cells_share_tokens_and_hidden_size():
    for n, d in itertools.product(forward.SIZES, comparison.DIMS):
        cell = comparison.tokens_cell(n, d, False, "bf16")
        assert (cell.batch * cell.n, cell.heads * cell.d) == (16384, 2048)
    cell = comparison.tokens_cell(16384, 128, True, "bf16")
    assert (cell.batch, cell.heads, cell.causal) == (1, 16, True)


def test_what_is_timed_is_compiled_before():
    given = forward.arguments(["--dims", "64", "--sizes", "2048,1024", "--causal", "causal"])
    jobs = forward.to_compile(given)
    assert jobs[0] == ("flex", comparison.tokens_cell(1024, 64, True, "bf16"))
    assert ("fa3", comparison.tokens_cell(1024, 64, True, "bf16")) in jobs
    assert {name for name, _ in jobs} == {"flex", "fa3", "fa4", "fa2", "standard", "fa1"}
    assert not [job for job in jobs if job[0] == "standard" and job[1].causal]


# --- a run -----------------------------------------------------------------------------------


class Asleep:
    """A watch that reads nothing."""

    def taken(self):
        return {}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose cells are made up: each implementation is as fast as its name is long."""
    monkeypatch.setattr(comparison, "holding", lambda regime: None)
    given = forward.arguments(["--dims", "64", "--sizes", "512,2048", "--causal", "causal"])
    made = forward.Run(given, {"gpu": "g"}, tmp_path / "f.json", Asleep(), time.monotonic())

    def rows_of(cell, names, rounds, regimes, rows=16):
        timed = [cell.row(name, [float(len(name))] * rounds) for name in names]
        return [{**row, "regime": regime} for row in timed for regime in regimes], {}

    made.rows_of = rows_of
    return made


def test_the_record_is_on_disk_after_each_cell(run, monkeypatch):
    written = []
    monkeypatch.setattr(run, "write", lambda: written.append(len(run.record["rows"])))
    run.cells()
    names = run.options.implementations
    assert "flex" in names
    assert written == [len(names) - 1, 2 * len(names) - 2]  # flex is at neither N
    monkeypatch.undo()
    run.write()
    record = json.loads(run.target.read_text())
    assert record["gpu"] == "g"
    row = record["rows"][0]
    assert (row["implementation"], row["n"], row["regime"]) == ("fa3", 512, "sustained")


def test_cells_after_the_time_are_told(run, capsys):
    run.begin -= 60 * run.options.minutes + 1
    run.cells()
    assert run.record["rows"] == []
    assert [skip["n"] for skip in run.record["skipped"]] == [512, 2048]
    assert {skip["reason"] for skip in run.record["skipped"]} == {
        "cells: not started within 4.5 minutes"
    }
    assert capsys.readouterr().out.count("skipped: all") == 2


def test_the_crossover_has_its_own_sizes(run):
    run.crossover()
    found = {(row["implementation"], row["n"]) for row in run.record["crossover"]}
    assert found == set(itertools.product(forward.CROSSOVER, forward.CROSSOVER_SIZES))
    assert forward.CROSSOVER_SIZES == (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def test_a_section_that_breaks_does_not_end_the_run(run, monkeypatch):
    def breaks():
        raise RuntimeError("an illegal\n memory access")

    monkeypatch.setattr(run, "matrix_product", lambda: None)
    monkeypatch.setattr(run, "headline", breaks)
    run.options.sections = ["headline", "crossover"]
    comparison.measured(run)
    record = json.loads(run.target.read_text())
    assert record["skipped"] == [
        {"section": "headline", "reason": "RuntimeError: an illegal memory access"}
    ]
    assert len(record["crossover"]) == len(forward.CROSSOVER) * len(forward.CROSSOVER_SIZES)


def test_the_older_methods_stand_beside_what_was_chosen(run):
    run.options.implementations = ["fa3", "fa2"]
    assert run.all_methods() == ["fa3", "fa2", "fa1", "standard"]


def test_the_first_calls_of_the_host_do_not_count():
    waits = []
    times = comparison.host_microseconds(lambda: None, lambda: waits.append(1))
    assert len(times) == comparison.HOST_CALLS
    assert len(waits) == (comparison.HOST_CALLS + comparison.HOST_SYNC) // comparison.HOST_SYNC


def test_quantiles_of_host_times():
    found = comparison.quantiles([float(n) for n in range(1, 101)])
    assert found["microseconds"] == 50.5
    assert found["microseconds_p10"] == pytest.approx(10, abs=1)
    assert found["microseconds_p90"] == pytest.approx(90, abs=1)


def test_what_long_sequences_should_need():
    cell = forward.Cell(1, 8, 2**20, 128, True, "bf16")
    assert long_context.out_lse_bytes(cell) == 8 * 2**20 * (128 * 2 + 4)


# --- comparisons -----------------------------------------------------------------------------


def row(name, n, tflops, causal=False, d=128, regime="sustained"):
    return {"implementation": name, "d": d, "causal": causal, "n": n, "tflops": tflops,
            "milliseconds": 1000 / tflops, "regime": regime}  # fmt: skip


ROWS = [
    row("fa3", 1024, 400.0), row("cudnn", 1024, 500.0), row("fa4", 1024, 320.0),
    row("fa3", 512, 300.0), row("cudnn", 512, 240.0),
    row("fa3", 512, 90.0, causal=True), row("fa4", 512, 100.0, causal=True),
    row("cudnn", 2048, 700.0), row("fa3", 512, 9.0, regime="burst"),
]  # fmt: skip


def test_cells_are_sorted_and_of_one_regime():
    found = summary.cells(ROWS, "sustained")
    assert list(found) == [
        (128, False, 512), (128, False, 1024), (128, False, 2048), (128, True, 512)
    ]  # fmt: skip
    assert found[128, False, 512] == {"fa3": 300.0, "cudnn": 240.0}
    assert summary.regimes(ROWS) == ["sustained", "burst"]


def test_ratios_are_of_cells_that_have_both():
    found = summary.cells(ROWS, "sustained")
    assert summary.ratios(found, "cudnn") == [1.25, 0.8]
    assert summary.ratios(found, "fa4") == [1.25, 0.9]
    assert summary.geometric_mean([1.25, 0.8]) == pytest.approx(1.0)
    assert math.isnan(summary.geometric_mean([]))


def test_the_worst_cell_is_against_the_faster_rival():
    assert summary.worst(summary.cells(ROWS, "sustained")) == (0.8, (128, False, 1024))
    assert summary.worst(summary.cells([row("fa3", 512, 1.0)])) is None


def test_means_are_said_in_words():
    lines = summary.means(summary.cells(ROWS, "sustained"))
    assert lines == [
        "fa3 / cudnn: geometric mean 1.000 over 2 cells, 0.800 to 1.250",
        "fa3 / fa4: geometric mean 1.061 over 2 cells, 0.900 to 1.250",
        "fa3 / the faster of cudnn and fa4: worst 0.800 (d = 128, full, N = 1,024)",
    ]
    more = [*ROWS, row("fa3", 512, 8.0, d=64), row("cudnn", 512, 4.0, d=64)]
    lines = summary.means(summary.cells(more, "sustained"))
    assert lines[0].endswith("over 3 cells, 0.800 to 2.000 (d = 64 2.000, 128 1.000)")
    assert lines[1].endswith("over 2 cells, 0.900 to 1.250")
    assert summary.means({}) == []
    labels = {"cudnn": "cuDNN", "fa4": "FA4"}
    assert "of cuDNN and FA4" in summary.means(summary.cells(ROWS, "sustained"), labels)[-1]


def test_the_table_leaves_out_what_is_missing():
    header, *lines = summary.table(summary.cells(ROWS, "sustained"))
    assert header.split() == ["cell", "fa3", "cudnn", "fa4", "torch-fa2", "/cudnn", "/fa4"]
    assert lines[0].split()[-6:] == ["300.0", "240.0", "-", "-", "1.250", "-"]
    assert lines[2].split()[-6:] == ["-", "700.0", "-", "-", "-", "-"]


def test_faster_from_is_for_all_larger_sizes():
    ours = [row("fa3", n, s) for n, s in ((128, 9), (256, 1), (512, 5), (1024, 8))]
    other = [row("standard", n, 4) for n in (128, 256, 512, 1024)]
    assert summary.faster_from([*ours, *other], "fa3", "standard") == 512
    assert summary.faster_from([*ours, row("standard", 1024, 99)], "fa3", "standard") is None
    assert summary.faster_from(ours, "fa3", "standard") is None


# --- the clock's readings --------------------------------------------------------------------


def readings(log):
    """1 to 3 for as long as somebody asks, then the end is logged."""
    try:
        for n in itertools.cycle((1, 2, 3)):
            yield float(n), 10.0 * n, float("nan")
            time.sleep(0.001)
    finally:
        log.append("closed")


def wait_until(true):
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")


def test_what_is_read_in_between_is_not_kept():
    log = []
    watching = watch.Watch(readings(log))
    time.sleep(0.02)
    assert watching.taken() == {
        "sm_clock_mhz": None, "power_w": None, "temperature_c": None, "samples": 0
    }  # fmt: skip
    for _ in range(2):  # may be entered again
        with watching:
            wait_until(lambda: len(watching._kept) >= 6)
    found = watching.taken()
    assert found["samples"] >= 6
    assert 1 <= found["sm_clock_mhz"] <= 3
    assert found["power_w"] == 10 * found["sm_clock_mhz"]
    assert found["temperature_c"] is None  # never known
    watching.close()
    assert log == ["closed"]
    assert watching.failure == ""


def test_a_source_that_fails_is_told():
    def broken():
        yield 1.0, 1.0, 1.0
        raise OSError("no nvidia-smi")

    watching = watch.Watch(broken())
    wait_until(lambda: watching.failure)
    assert watching.failure == "OSError: no nvidia-smi"
    watching.close()


def test_a_line_of_nvidia_smi():
    assert watch.sample("1980, 650.25, 61\n") == (1980.0, 650.25, 61.0)
    clock, watts, heat = watch.sample("1980, [N/A], 61\n")
    assert (clock, heat) == (1980.0, 61.0)
    assert math.isnan(watts)


@pytest.mark.parametrize(
    ("visible", "first"),
    [(None, "0"), ("", "0"), ("1", "1"), ("3,0", "3"), ("GPU-1f, GPU-2f", "GPU-1f")],
)
def test_the_gpu_of_the_record_is_the_one_that_runs(
    visible: str | None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.first_gpu() == first


# --- outputs that are right, and that are not ------------------------------------------------


def test_rows_are_the_first_the_last_and_some_between():
    exact = pytest.importorskip("benchmarks.exact", exc_type=ImportError)
    rows = exact.some_rows(1000)
    assert (len(rows), rows[0], rows[-1]) == (16, 0, 999)
    assert rows == sorted(set(rows)) == exact.some_rows(1000)
    assert exact.some_rows(1) == [0]
    assert exact.some_rows(3) == [0, 1, 2]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_rounded_output_is_right_and_a_wrong_one_is_not(causal, dtype):
    torch = pytest.importorskip("torch")
    from benchmarks import exact

    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, peers.DTYPES[dtype])
    q, k, v = (torch.randn(1, 2, 96, 32, generator=generator).to(kind) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention

    def full(q, k, v, causal=causal):
        return attention(q.double(), k.double(), v.double(), is_causal=causal)

    out = full(q, k, v).to(kind)
    S = q.double() @ k.double().transpose(-1, -2) / math.sqrt(32)
    if causal:
        S = S.masked_fill(torch.ones(96, 96, dtype=torch.bool).triu(1), -math.inf)
    found = exact.errors(out, q, k, v, causal, dtype, lse=S.logsumexp(-1))
    assert found["right"] and found["rows"] == 32
    assert 0.1 < found["error_of_bound"] < 1
    assert found["lse_error"] < 1e-12
    magnitude = full(q, k, v.abs())
    same = exact.differences(out, out, magnitude, dtype)
    assert same == {
        "max_difference": 0.0, "difference_of_bound": 0.0, "rms_difference": 0.0, "alike": True
    }  # fmt: skip
    other = full(q, k, v, causal=not causal).to(kind)
    nan = out.clone()
    nan[0, 0, 0, 0] = math.nan
    for wrong in (other, out * 1.02, torch.zeros_like(out), nan):
        assert not exact.errors(wrong, q, k, v, causal, dtype)["right"]
        assert not exact.differences(wrong, out, magnitude, dtype)["alike"]
