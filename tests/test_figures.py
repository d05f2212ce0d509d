"""The README's generated parts, from records made up here."""

import gzip
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from fa2_numba.accounting import levels
from fa2_numba.accounting.hardware import Case
from fa2_numba.tiling import Tiling

figures = pytest.importorskip("benchmarks.figures")
report = pytest.importorskip("benchmarks.report")

ABOUT = {
    "gpu": "a GPU",
    "driver": "1.2",
    "versions": {"numba-cuda": "0.30"},
    "commit": "abc",
    "date": "2026-01-01",
}
WHERE = "a GPU, driver 1.2, numba-cuda 0.30, commit abc, 2026-01-01."


def verified():
    rows = [
        {"case": n, "launch": n, "kernel": "fa2", "quantity": quantity, "op": "load",
         "counted": 1000 * n, "hardware": 1000 * n + off, "difference": off, **more}
        for n in (1, 2)
        for quantity, off, more in (
            ("bytes", 0, {}), ("sectors", n - 1, {}), ("instructions", 7, {"exact": False})
        )
    ]  # fmt: skip
    case = asdict(Case("fa2", "fp32", 1, 1, 1, 8, 8, 4))
    metrics = {"bytes (load)": "b.sum", "sectors (load)": "s.sum", "instructions (load)": "i.sum"}
    return {
        **ABOUT, "ncu": "2025.3", "metrics": metrics, "not_compared": ["requests (load)"],
        "launches": 2, "numbers": 4, "differences": 1, "cases": [case, case], "rows": rows,
    }  # fmt: skip


def predicted():
    """Two launches: one all the same, one with fewer adds predicted than were counted and read."""
    kernels = ("backward_rowsum", "fa2_backward_columns")
    rows = [
        {"case": 0, "launch": n, "kernel": kernel, "quantity": quantity, "op": "reduction",
         "counted": 64 * n, "hardware": 64 * n, "difference": 0, **said}
        for n, kernel in enumerate(kernels)
        for quantity, said in (
            ("bytes", {"predicted": 63 * n}), ("sectors", {"predicted": 0} if n == 0 else {})
        )
    ]  # fmt: skip
    metrics = {"bytes (reduction)": "b.sum", "sectors (reduction)": "s.sum"}
    case = asdict(Case("fa2_backward", "fp32", 1, 1, 1, 8, 8, 4))
    return {
        **ABOUT, "ncu": "2025.3", "metrics": metrics, "not_compared": [], "launches": 2,
        "numbers": 4, "differences": 1, "cases": [case], "rows": rows,
    }  # fmt: skip


def at_levels():
    points = []
    for method, causal, N in (("fa2", False, 4096), ("fa2", False, 1024), ("fa2", True, 1024)):
        p = levels.problem(method, causal, N, Tiling(128, 64, 16, 8))
        metrics = dict.fromkeys(levels.METRICS, 300 * N)
        rows = levels.hardware_rows(p, [{"case": 0, "kernel": "fa2", **metrics}])
        points.append(levels.point(p, rows, {"fa2": 264}, 2**26))
    return {**ABOUT, "points": points, "fits": levels.fits(points)}


def phases():
    """Two head dimensions; other methods and masks and a smaller N are not shown."""

    def table(method, d, warnings=(), causal=False, N=4096):
        rows = [
            {"kernel": method, "phase": phase, "share": share, "cycles": cycles, "visits": visits}
            for phase, share, cycles, visits in (
                ("load Q_i", 0.05, 500.0, 4.0),
                ("issue K_j, V_j", 0.2, 2468.0, 16.0),
                ("S = Q K^T", 0.7, 8000.0, 8.0),
            )
        ]
        problem = {"method": method, "d": d, "causal": causal, "batch": 1, "heads": 32,
                   "n_q": N, "dtype": "fp32"}  # fmt: skip
        kernels = [{"kernel": method, "covered": 0.987, "mark_cycles": 11.6}]
        overhead = {"ratio": {"plain": 0.0, "timed": 0.021, "kept": 0.3}}
        return {"problem": problem, "rows": rows, "kernels": kernels, "overhead": overhead,
                "warnings": warnings}  # fmt: skip

    others = [table("fa1", 64), table("fa2", 64, causal=True), table("fa2", 64, N=1024)]
    return {**ABOUT, "tables": [table("fa2", 64), table("fa2", 128, ["a wind"]), *others]}


def ablation():
    side = {"blocks": 1024, "tiles_computed": 65_536, "rescaling_multiplications": 3 * 2**29,
            "shared_wavefronts_a_tile": 6672.0, "exchanged_bytes_a_tile": 0.0,
            "milliseconds": 6.0}  # fmt: skip
    after = side | {"rescaling_multiplications": 2**29, "milliseconds": 4.0}
    row = {"idea": "normalised once", "batch": 1, "heads": 32, "n": 4096, "d": 64, "speedup": 1.5}
    return {**ABOUT, "rows": [{**row, "before": side, "after": after}]}


def cycles():
    rows = [{"method": m} for m in ("standard", "fa1", "fa2", "fa2")]
    return {**ABOUT, "setting": "fp32, batch x N = 16384", "configurations": 4, "rows": rows,
            "mean_absolute_error": 0.045, "largest_ratio": 0.86,
            "by_method": {"standard": 0.043, "fa1": 0.071, "fa2": 0.021}}  # fmt: skip


def timed(name, n, milliseconds, **more):
    return {"implementation": name, "d": 64, "causal": False, "n": n, "regime": "sustained",
            "tflops": 800 / milliseconds, "milliseconds": milliseconds, **more}  # fmt: skip


def forward():
    """Three implementations, two sizes, one of them in the second regime, too."""
    speeds = [("fa3", 512, 2.0), ("cudnn", 512, 1.6), ("fa3", 1024, 1.0), ("cudnn", 1024, 1.25)]
    rows = [timed(*speed) for speed in [*speeds, ("fa4", 1024, 0.8)]]
    rows.append(timed("fa3", 512, 1.0) | {"regime": "burst"})
    found = {"extra_bytes": 2_500_000, "max_error": 1.5e-3, "rms_relative": 2.23e-3}
    return {
        **ABOUT,
        "setting": {"tokens": 16384, "hidden": 2048, "dtype": "bf16",
                    "regimes": {"sustained": {}, "burst": {}}},
        "matrix_product": [{"size": 8192, "regime": "sustained", "tflops": 900.0},
                           {"size": 16384, "regime": "sustained", "tflops": 1000.0},
                           {"size": 16384, "regime": "burst", "tflops": 2000.0}],
        "headline": [timed("fa3", 4096, 2.0, rows_compared=128, **found)],
        "rows": rows,
        "crossover": [timed("fa3", 128, 1.0), timed("standard", 128, 0.5),
                      timed("fa3", 256, 1.0), timed("standard", 256, 4.0)],
        "host": {"problem": "a small one",
                 "rows": [{"implementation": "fa3", "microseconds": 9.8}]},
        "memory": {"problem": "a large one", "output_bytes": 2_000_000,
                   "rows": [{"implementation": "cudnn", "extra_bytes": 2_500_000}]},
    }  # fmt: skip


def long_context():
    row = timed("fa3", 2**20, 3750.0, heads=8, extra_bytes=1040, out_lse_bytes=1000,
                max_error=1.5e-3, rms_relative=2.23e-3, right=True)  # fmt: skip
    return {**ABOUT, "setting": {"dtype": "bf16", "d": 128}, "rows": [row]}


def sanitized():
    return {
        **ABOUT, "compute_sanitizer": "2026.4",
        "tools": [{"tool": "memcheck", "cases_right": 4, "errors": 0}],
        "faults": [{"fault": "past the end", "tool": "memcheck", "errors": 1},
                   {"fault": "a hole", "tool": "memcheck", "errors": 0},
                   {"fault": "a hang", "tool": "memcheck", "errors": None},
                   {"fault": "a race", "tool": "racecheck", "errors": 1}],
    }  # fmt: skip


def backward():
    """Two sizes; the deterministic form takes 1.25 and 2 times as long."""
    ours, again, readable = "fa3_backward", "fa3_backward_deterministic", "fa2_backward"
    rows = [timed(ours, 1024, 2.0), timed("cudnn", 1024, 1.6), timed(ours, 2048, 1.0)]
    errors = {"n": 1024, "rows": 2048, "dk_rms": 2e-3, "dv_rms": 3e-3}
    accuracy = [
        {"implementation": name, "d": d, "dq_rms": rms, **errors}
        for name, d, rms in ((ours, 64, 1e-3), (ours, 128, 4e-3), ("fa4", 64, 1e-3))
    ]
    deterministic = [
        timed(ours, 1024, 1.0),
        timed(again, 1024, 1.25, equal_bits=True),
        timed(ours, 2048, 1.0),
        timed(again, 2048, 2.0, equal_bits=True),
    ]
    fp32 = [timed(readable, 1024, 4.0), timed("torch-efficient", 1024, 2.0)]
    return forward() | {"rows": rows, "accuracy": accuracy, "deterministic": deterministic,
                        "fp32": fp32, "headline": None, "crossover": None}  # fmt: skip


def training():
    """Ours 0.001 above torch's, torch's other seeds 0.1 and 0.2."""
    runs = [
        {"attention": name, "seed": seed, "step_milliseconds": 12.345, "tokens_per_second": 98765,
         "peak_bytes": 2_500_000, "losses": [5 - 0.01 * n + above for n in range(40)]}
        for name, seed, above in (
            ("fa2_numba", 0, 0.001), ("torch, FlashAttention-2", 0, 0.0),
            ("torch, FlashAttention-2", 1, 0.1), ("torch, FlashAttention-2", 2, 0.2),
        )
    ]  # fmt: skip
    setting = {"layers": 4, "heads": 4, "head_dim": 128, "context": 1024, "batch": 32, "width": 512,
               "steps": 40, "dtype": "bf16 autocast", "text": "a text",
               "text_bytes": 1000}  # fmt: skip
    return {**ABOUT, "setting": setting, "runs": runs,
            "overlay": figures.loss_curves.overlay(runs)}  # fmt: skip


SECTIONS = {  # more than one table, or a heading
    "forward": forward(),
    "long_context": long_context(),
    "backward": backward(),
    "training": training(),
}
DRAWN = {
    "forward": ["crossover.svg", "forward.svg"],
    "backward": ["backward.svg"],
    "training": ["training.svg"],
}
RECORDS = {
    "sanitizer": sanitized(),
    "verify": verified(),
    "levels": at_levels(),
    "phases": phases(),
    "ablation": ablation(),
    "cycles": cycles(),
}


def parts_of(page, name):
    """`cells` of the part `name` of a page."""
    return cells(page.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->")[0])


def cells(text):
    """The rows of a Markdown table, the header first, and the paragraph below it."""
    rows, below = text.rstrip("\n").split("\n\n")
    head, rule, *others = rows.splitlines()
    found = [[c.strip() for c in line[1:-1].split("|")] for line in (head, *others)]
    assert rule == "|---" * len(found[0]) + "|"
    assert {len(line) for line in found} == {len(found[0])}
    return found, below


def parts(text):
    """`cells`, and below them where it was measured."""
    found, below = cells(text)
    assert below.endswith(WHERE)
    return found, below


def part(name):
    file, written = figures.GENERATED[name]
    assert file == f"{name}.json"
    return parts(written(json.loads(json.dumps(RECORDS[name]))))


def test_a_tool_is_shown_with_its_own_faults():
    (_, row), below = part("sanitizer")
    assert row == ["memcheck", "4", "0", "past the end", "a hole; a hang"]
    assert below.startswith("compute-sanitizer 2026.4. ")


def run_of_tests(**more):
    """A record of `python -m benchmarks.test_gpu`."""
    return {
        **ABOUT, "command": "pytest -m gpu --durations=9", "part": None, "passed": 1200,
        "failed": 0, "skipped": 3, "not_reached": 2, "examples": 21_600, "seconds": 99.6,
        "failures": [], **more,
    }  # fmt: skip


def test_a_record_of_tests_is_a_row_the_oldest_first():
    records = [
        run_of_tests(part="1/2", commit="0123456789", failed=1, failures=["tests/a::b", "c"]),
        run_of_tests(date="2025-01-01", examples_left_out=1000),
        run_of_tests(
            files=["tests/a.py", "b.py"], command="pytest tests/a.py b.py -m gpu -k 'not c'"
        ),
    ]
    (_, *rows), below = cells(figures.tests_table(records))
    numbers = ["3", "2", "21,600", "100 s"]
    assert rows == [
        ["all", "1,200", "0", "3", "2", "21,600, 1,000 left out", "100 s", "abc"],
        ["part 1/2 of all", "1,200", "1", *numbers, "0123456"],
        ["`a.py`, `b.py`, -k 'not c'", "1,200", "0", *numbers, "abc"],
    ]
    where = WHERE.split(", commit")[0]
    assert below == (
        f"Failed: a::b, c (commit 0123456). 2025-01-01 to {ABOUT['date']}, the last day on {where}."
    )


def test_numbers_of_the_verification_are_added_up_by_counter():
    (_, *rows), below = part("verify")
    assert rows == [
        ["bytes, load", "`b.sum`", "2", "3,000", "3,000", "0"],
        ["sectors, load", "`s.sum`", "2", "3,000", "3,001", "1"],
    ]
    assert below.startswith(
        "3 of 4 numbers of 2 kernel launches (2 cases) are the same integers, counted and read by "
        "ncu 2025.3. Read and not compared, since addresses alone do not decide: "
    )


def test_numbers_that_were_left_out_are_told():
    _, below = part("verify")
    assert re.search(r"\w+ \(\w+\), other than counted in 2 of 2 launches\. Not comp", below)


def test_predictions_stand_beside_the_counts():
    (header, *rows), below = parts(figures.verify_table(predicted()))
    assert header[2:] == ["launches", "predicted", "counted", "hardware", "launches that differ"]
    assert rows == [
        ["bytes, reduction", "`b.sum`", "2", "63", "64", "64", "1"],
        ["sectors, reduction", "`s.sum`", "2", "1 of 1 launches as counted", "64", "64", "0"],
    ]
    assert below.startswith("3 of 4 numbers of 2 kernel launches (1 cases) are the same integers, ")
    assert "predicted where the model speaks of them, counted and read by ncu 2025.3." in below


def test_levels_are_those_of_full_fa2_in_the_order_of_n():
    (header, *rows), below = part("levels")
    assert header[1:5] == list(levels.LEVELS)
    assert [row[0] for row in rows] == ["1,024", "4,096"]
    first = dict(zip(header, rows[0], strict=True))
    assert first["DRAM"] == "307 kB"
    assert first["model of DRAM"] == "786 kB"
    assert first["DRAM / model"] == "0.391"
    assert "DRAM 1.00" in below and "(one wave) 1.00" in below


def test_phases_have_columns_for_each_head_dimension_of_full_fa2():
    (header, *rows), below = part("phases")
    assert header == ["", "d = 64: share", "cycles", "d = 128: share", "cycles"]
    assert rows == [
        ["load Q_i", *["5.0%", "500 a block"] * 2],
        ["issue K_j, V_j", *["20.0%", "308 a tile"] * 2],
        ["S = Q K^T", *["70.0%", "1,000 a tile"] * 2],
    ]
    for text in (
        "cover 98.7%",
        "a mark takes 12 cycles",
        "+2.1% of the plain one's time more",
        "; a wind.",
    ):
        assert text in below


def test_an_idea_is_a_row_and_what_it_leaves_alone_is_one_number():
    (header, row), _ = part("ablation")
    assert dict(zip(header, row, strict=True)) == {
        "idea": "normalised once", "batch × heads, N": "1 × 32, 4,096", "blocks": "1,024",
        "tiles computed": "65,536", "products that rescale O": "1,610,612,736 → 536,870,912",
        "passes over the banks a tile": "6,672", "bytes exchanged a tile": "0", "ms": "6 → 4",
        "times faster": "1.50",
    }  # fmt: skip


def test_errors_of_the_cycle_model_are_by_method_and_in_all():
    (_, *rows), below = part("cycles")
    assert rows == [
        ["standard", "1", "4.3%"], ["fa1", "1", "7.1%"], ["fa2", "2", "2.1%"], ["all", "4", "4.5%"],
    ]  # fmt: skip
    assert "farthest from 1 is 0.86" in below


def test_speed_has_a_headline_a_comparison_and_what_is_said_of_them():
    heading, picture, headline, below, cells, means, drawn, crossing, memory, host = (
        figures.speed.forward_part(SECTIONS["forward"]).split("\n\n")
    )
    assert heading == "## Speed on tensor cores"
    assert "(docs/figures/forward.svg)" in picture and "(docs/figures/crossover.svg)" in drawn
    (_, row), _ = parts(f"{headline}\n\n{below}")
    assert row == ["64", "fa3", "400.0", "40%", "2.50 MB", "1.5e-03", "2.23e-03"]
    (_, *rows), _ = parts(f"{cells}\n\n{means}")
    assert rows == [
        ["64", "full", "512", "400", "500", "", "", "0.80", ""],
        ["64", "full", "1,024", "800", "640", "1000", "", "1.25", "0.80"],
    ]
    for text in ("fa3 / cuDNN: geometric mean 1.000 over 2 cells", "worst 0.800", "1000 TFLOP/s"):
        assert text in means
    assert crossing == (
        "Of N = 128 and more (d = 64, no mask): fa3 is faster than standard from N = 256 on."
    )
    assert "of which the output is 2.00 MB: cuDNN 2.50 MB (a large one)." in memory
    assert host == "Host microseconds of one call: fa3 10 (a small one)."


def test_sections_that_were_not_run_are_not_shown():
    record = forward()
    for name in ("rows", "headline", "crossover", "host", "memory"):
        del record[name]
    assert figures.speed.forward_part(record) == "## Speed on tensor cores"
    assert figures.speed.draw(record) == figures.speed.draw(None) == []


def test_speed_is_drawn_with_the_peak():
    bars, crossover = figures.speed.draw(SECTIONS["forward"])
    assert (bars.name, crossover.name) == ("forward", "crossover")
    (ax,) = bars.figure.axes
    heights = {round(bar.get_height()) for bar in ax.patches}
    assert heights == {400, 500, 0, 800, 640, 1000}
    assert {y for line in ax.lines for y in line.get_ydata()} == {1000.0}
    left, right = crossover.figure.axes
    assert [list(line.get_ydata()) for line in left.lines] == [[1.0, 1.0], [0.5, 4.0]]
    assert [list(line.get_ydata()) for line in right.lines][:2] == [[0.5, 4.0], [1.0, 1.0]]


def test_long_sequences_say_what_is_not_output():
    heading, rows, below = figures.speed.long_context_part(SECTIONS["long_context"]).split("\n\n")
    assert heading == "### Long sequences"
    (_, row), _ = parts(f"{rows}\n\n{below}")
    assert row == [
        "1,048,576", "8", "3,750", "0", "1,040", "40", "1.5e-03", "2.23e-03", "yes"
    ]  # fmt: skip


def test_gradients_have_a_comparison_errors_and_what_equal_bits_cost():
    record = SECTIONS["backward"]
    heading, picture, cells, means, errors, told, equal, fp32, said, memory, host = (
        figures.speed_backward.backward_part(record).split("\n\n")
    )
    assert heading == "## Speed of the gradients on tensor cores"
    assert "(docs/figures/backward.svg)" in picture
    (header, *rows), _ = parts(f"{cells}\n\n{means}")
    assert header[3] == "fa3" and header[-2:] == ["fa3 / cuDNN", "fa3 / FlashAttention-4"]
    assert rows == [
        ["64", "full", "1,024", "400", "500", "", "", "0.80", ""],
        ["64", "full", "2,048", "800", "", "", "", "", ""],
    ]
    assert "fa3 / cuDNN: geometric mean 0.800 over 1 cells" in means
    assert "fa3 / the faster of cuDNN and FlashAttention-4: worst 0.800" in means
    (_, *rows), _ = parts(f"{errors}\n\n{told}")
    assert rows == [
        ["fa3", "64, 128", "4.00e-03", "2.00e-03", "3.00e-03"],
        ["FlashAttention-4", "64", "1.00e-03", "2.00e-03", "3.00e-03"],
    ]
    assert "takes 1.58 times as long (geometric mean of 2 cells, 1.25 to 2.00; d = 64)" in equal
    assert equal.endswith("the same bits in 2 of 2.")
    (_, *rows), _ = parts(f"{fp32}\n\n{said}")
    assert rows == [["64", "full", "1,024", "200.0", "400.0", "0.50"]]
    assert "of which the gradients are 2.00 MB" in memory
    assert host.startswith("Host microseconds of one call: fa3 10")
    (drawing,) = figures.speed_backward.draw(record)
    assert drawing.name == "backward"
    (ax,) = drawing.figure.axes
    assert {round(bar.get_height()) for bar in ax.patches} == {400, 500, 800, 0}


def test_gradients_without_any_section_are_a_heading():
    record = {**ABOUT, "rows": [], "deterministic": [timed("fa3_backward", 1024, 1.0)]}
    assert figures.speed_backward.backward_part(record).count("\n") == 0
    assert figures.speed_backward.draw(record) == figures.speed_backward.draw(None) == []


def test_training_says_whether_the_curves_are_the_same():
    heading, picture, rows, below = figures.loss_curves.training_part(SECTIONS["training"]).split(
        "\n\n"
    )
    assert heading == "## Training with it" and "(docs/figures/training.svg)" in picture
    (_, *rows), below = parts(f"{rows}\n\n{below}")
    assert rows[0] == ["fa2_numba", "0", "4.7060", "12.35", "98,765", "2.50 MB"]
    assert "Within the noise of the seed" in below
    assert "at most 0.0010 apart, in the second half 0.0010; torch's of two seeds" in below
    assert "at least 0.1000 apart, in the second half up to 0.2000. " in below
    (drawing,) = figures.loss_curves.draw(SECTIONS["training"])
    left, right = drawing.figure.axes
    assert (len(left.lines), len(right.lines)) == (4, 3)
    assert figures.loss_curves.draw(None) == []


@pytest.mark.parametrize("name", SECTIONS)
def test_a_record_of_speed_fills_its_part_and_is_drawn(readme, name, monkeypatch):
    (readme.parent / "gpu" / f"{name}.json").write_text(json.dumps(SECTIONS[name]))
    figures.main()
    text = readme.read_text()
    assert text.count("Not measured yet.") == len(figures.GENERATED) + 1
    written = figures.GENERATED[name][1]
    assert f"<!-- {name} -->\n{written(SECTIONS[name])}\n<!-- /{name} -->" in text
    drawn = sorted(path.name for path in (readme.parent / "figures").iterdir())
    assert drawn == DRAWN.get(name, [])
    monkeypatch.setattr("sys.argv", ["figures", "--gpu", "gpu", "--check"])
    with pytest.raises(SystemExit) as end:
        figures.main()
    assert end.value.code == 0


@pytest.fixture
def readme(tmp_path, monkeypatch):
    """A README with every marker, and a folder without results."""
    path = tmp_path / "README.md"
    names = [*figures.GENERATED, "tests", "counts"]
    (tmp_path / "gpu").mkdir()
    marked = {name: "Not measured yet." for name in names}
    marked["proof"] = figures.proof_table(tmp_path / "gpu")
    path.write_text("\n".join(f"<!-- {n} -->\n{x}\n<!-- /{n} -->" for n, x in marked.items()))
    counting = tmp_path / "counting.md"
    empty = f"\n{figures.UNRECORDED}\n"
    counting.write_text("\n".join(f"<!-- {n} -->{empty}<!-- /{n} -->" for n in figures.COUNTED))
    monkeypatch.setattr(figures, "README", path)
    monkeypatch.setattr(figures, "COUNTING", counting)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(figures, "draw_recorded", lambda *records: [])
    monkeypatch.setattr("sys.argv", ["figures", "--gpu", "gpu"])
    return path


def test_without_records_the_readme_stays_as_it_is(readme):
    before = readme.read_text()
    figures.main()
    assert readme.read_text() == before
    assert before.count("Not recorded yet.") == len(figures.PROVEN)
    assert figures.COUNTING.read_text().count("Not recorded yet.") == len(figures.COUNTED)


def test_what_is_compared_is_what_the_benchmark_records():
    from benchmarks.verify import SUITES

    assert [suite.file for suite in SUITES.values()] == list(figures.PROVEN)
    assert set(figures.COUNTED.values()) == set(figures.PROVEN) - {"verify.json"}


def check(monkeypatch):
    """The exit code of ``--check``, or what it says."""
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["figures", "--gpu", "gpu", "--check"])
        with pytest.raises(SystemExit) as end:
            figures.main()
    return end.value.code


def test_a_record_of_gradients_is_told_on_both_pages_until_it_is_gone(readme, monkeypatch):
    record, path = predicted(), readme.parent / "gpu" / "verify_backward.json"
    path.write_text(json.dumps(record))
    assert check(monkeypatch) == "README.md and docs/counting.md: out of date; run make figures"
    figures.main()
    assert check(monkeypatch) == 0
    (_, *rows), below = parts_of(readme.read_text(), "proof")
    by_what = {row[0]: row[1:] for row in rows}
    assert by_what.pop("readable kernels, backward") == [
        "`backward_rowsum`, `fa2_backward_columns`", "2", "4", "1",
        "a GPU, commit abc, 2026-01-01",
    ]  # fmt: skip
    assert set(map(tuple, by_what.values())) == {("Not recorded yet.", "", "", "", "")}
    assert below == "A kernel that is not named here was not compared."
    text = figures.COUNTING.read_text()
    assert parts_of(text, "verify_backward")[0][1][0] == "bytes, reduction"
    assert text.count("Not recorded yet.") == len(figures.COUNTED) - 1
    path.unlink()
    assert "README.md and docs/counting.md" in check(monkeypatch)
    figures.main()
    assert figures.COUNTING.read_text().count("Not recorded yet.") == len(figures.COUNTED)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_fills_its_part_alone(readme, name, monkeypatch):
    (readme.parent / "gpu" / f"{name}.json").write_text(json.dumps(RECORDS[name]))
    figures.main()
    text = readme.read_text()
    written = re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- /\1 -->", text, re.DOTALL)
    assert len(written) == text.count("<!-- /") == len(figures.GENERATED) + 3
    for other, content in written:
        assert (content == "Not measured yet.") is (other not in (name, "proof"))
    assert parts(dict(written)[name]) == part(name)
    monkeypatch.setattr("sys.argv", ["figures", "--gpu", "gpu", "--check"])
    with pytest.raises(SystemExit) as end:
        figures.main()
    assert end.value.code == 0


def test_the_readme_has_a_place_for_every_part():
    text = (Path(figures.__file__).parent.parent / "README.md").read_text()
    for name in (*figures.GENERATED, "tests", "counts", "proof"):
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- /{name} -->") == 1
    text = figures.COUNTING.read_text()
    for name in figures.COUNTED:
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- /{name} -->") == 1


def test_a_table_of_another_report_is_refused(tmp_path, monkeypatch):
    made, target = tmp_path / "made", tmp_path / "none" / "report"
    (made / "figures").mkdir(parents=True)
    (made / "traffic.json").write_text("[]")
    (made / "trace.json").write_text("{}")
    report.keep(made, target, dict(ABOUT))
    assert json.loads((target / "about.json").read_text())["gpu"] == ABOUT["gpu"]
    assert gzip.decompress((target / "trace.json.gz").read_bytes()) == b"{}"
    (target / "traffic.json").write_text("[1]")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures", "--gpu", "none", "--check"])
    with pytest.raises(SystemExit, match="another report"):
        figures.main()
