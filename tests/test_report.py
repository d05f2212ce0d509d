"""The sweep, its figures, what the hardware saw, and the report's folder, on a plan of seconds."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fa2_numba import simulator
from fa2_numba.accounting import (
    hardware,
    levels,
    plots,
    proof,
    report,
    sweep,
    tables,
    timing,
    verify,
)
from fa2_numba.accounting.hardware import Case, HardwareError, NotPermitted
from fa2_numba.accounting.inputs import Inputs
from fa2_numba.accounting.page import FILES, TRACE, VERIFY, worst
from fa2_numba.accounting.page import page as write_page
from fa2_numba.accounting.proof import COUNTERS, LEVELS, PHASES, Proof, compile_ahead
from fa2_numba.accounting.tables import Setting
from fa2_numba.cli import main
from fa2_numba.problem import PORTABLE
from fa2_numba.tiling import Tiling
from fa2_numba.traffic import COLUMNS

pytestmark = pytest.mark.skipif(
    not simulator.ACTIVE, reason="runs on the simulator: NUMBA_ENABLE_CUDASIM=1"
)


def tiny_plan(backend="simulator", machine="the simulator (test)"):
    return sweep.Plan(
        backend,
        machine,
        Setting(4, Tiling(4, 4, 4, 4)),
        sizes=(4, 8, 12),
        curve=(4, 8, 12, 16, 4096, 8192, 16384),
        other=Setting(64, Tiling(128, 64, 16, 8)),
        bars_N=8,
        tile_N=8,
        tile_tilings=(
            *(Tiling(B_r, 4, 2, 4) for B_r in (2, 4, 8)),
            *(Tiling(4, B_c, 4, 4) for B_c in (8, 12)),
        ),
        small_N=8,
        timed=(1, 8),
        level_sizes=(4, 8),
        limits=(1, 1, 8),
    )


def real_input():
    return Inputs("own.npz", *sweep.random_qkv(20, 4, seed=1))


def tiny_sweep():
    return sweep.Sweep(tiny_plan(), [real_input()])


@pytest.fixture(scope="module")
def finished():
    """A sweep that ran to its end."""
    found = tiny_sweep()
    list(found.run())
    return found


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory):
    """Its report."""
    path = tmp_path_factory.mktemp("report")
    assert report.write(finished, path) == path / "index.html"
    return path


# --- the sweep -------------------------------------------------------------------------------


def test_every_method_ran_at_every_size_and_is_exact(finished):
    ran = {(c.method, c.mask, c.n_q) for c in finished.comparisons if c.experiment == "random"}
    for method in PORTABLE:
        for mask in ("none", "causal"):
            assert {(method, mask, N) for N in (4, 8, 12)} <= ran
    assert ("fa2", "causal-skip", 8) in ran
    assert finished.all_exact, [e.message for e in finished.exactness if not e.exact]
    assert finished.done == finished.total == len(finished.comparisons)
    assert finished.stopped == ""
    assert finished.notes == []


def test_counted_rows_equal_predicted_ones(finished):
    assert [c.first for c in finished.comparisons if c.differences] == []
    assert finished.all_equal
    counted = tables.select(finished.table, source="counted")
    predicted = {r.key: r.numbers for r in tables.select(finished.table, source="predicted")}
    assert counted
    assert all(predicted[r.key] == r.numbers for r in counted)


def test_the_real_input_is_cut_for_the_simulator_and_says_so(finished):
    names = {e.input for e in finished.exactness}
    assert names == {"random", "own.npz (token 0-7 of 20)"}


def test_skipping_moves_what_the_bound_moves(finished):
    found = [
        tables.select(finished.table, method="fa2", mask=mask, n_q=8, source="counted", block_r=4)
        for mask in ("causal", "causal-skip")
    ]
    numbers = [{(r.array, r.op): r.elements for r in rows} for rows in found]
    assert numbers[0] == numbers[1]


def test_progress_is_said_before_each_experiment():
    labels = []
    found = tiny_sweep()
    for label in found.run():
        labels.append((label, found.done))
        if len(labels) == 4:
            break
    assert labels[0] == ("predictions", 0)
    assert labels[1:] == [
        ("standard, N = 4, 4 × 4, random", 0),
        ("fa1, N = 4, 4 × 4, random", 1),
        ("fa2, N = 4, 4 × 4, random", 2),
    ]


def test_the_plans_are_what_they_claim():
    small, large = (sweep.plan(kind, "x") for kind in ("simulator", "gpu"))
    assert small.limits is not None
    assert large.limits is None
    assert (min(large.sizes), max(large.sizes)) == (512, 32_768)
    for plan in (small, large):
        assert max(plan.curve) == sweep.MILLION
        assert set(plan.sizes) <= set(plan.curve)
        assert plan.bars_N in plan.sizes
        assert len({t.B_c for t in plan.tile_tilings[:4]}) == 1
        assert len({t.B_r for t in plan.tile_tilings[4:]}) == 1
        assert plan.tile_tilings[-1].B_r in {t.B_r for t in plan.tile_tilings[:4]}


# --- the folder ------------------------------------------------------------------------------


def test_the_table_is_written_twice_and_alike(finished, folder):
    rows = json.loads((folder / "traffic.json").read_text())
    assert [list(row) for row in rows] == [COLUMNS] * len(finished.table)
    with (folder / "traffic.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == COLUMNS
    for line, row in zip(lines, rows, strict=True):
        assert line == ["" if value is None else str(value) for value in row.values()]


def test_the_checks_are_json(finished, folder):
    checks = json.loads((folder / "checks.json").read_text())
    assert checks["finished"] is True
    assert checks["machine"] == "the simulator (test)"
    assert len(checks["exactness"]) == len(checks["comparisons"]) == finished.total
    assert {g["quantity"] for g in checks["growth"]} == set(tables.QUANTITIES)
    assert "numpy" in checks["versions"]


def test_every_figure_is_written_in_both_formats(folder):
    for name in plots.NAMES:
        assert (folder / "figures" / f"{name}.svg").read_text().startswith("<?xml")
        assert (folder / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_captions_name_level_source_and_machine(finished):
    for drawing in plots.draw(finished.table, finished.plan):
        assert "level: issued" in drawing.caption
        if drawing.name != "growth_gpu_tiles":
            assert "counted on the simulator (test)" in drawing.caption
        for ax in drawing.figure.axes:
            assert ax.get_xlabel()
            assert ax.get_ylabel() or ax.get_yticklabels()


def test_a_figure_without_its_rows_is_left_out():
    assert plots.draw([], tiny_plan()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (512, "512 B"), (1000, "1.00 kB"), (184_576, "185 kB"), (1.08e9, "1.08 GB")],
)
def test_sizes_are_in_si_units(value, text):
    assert plots.size(value) == text


# --- the page --------------------------------------------------------------------------------


class Page(HTMLParser):
    """Balanced tags, ids, links and the cells of every table."""

    VOID = frozenset({"meta", "br", "link", "img", "hr"})

    def __init__(self, text):
        super().__init__()
        self.stack, self.ids, self.links, self.tables, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [
            attributes[name] for name in ("href", "src", "xlink:href") if name in attributes
        ]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if "td" in self.stack or "th" in self.stack:
            self.tables[-1][-1][-1] += data

    def table(self, *header):
        """The rows of the table whose header has these cells, as dicts."""
        for head, *rows in self.tables:
            if set(header) <= set(head):
                return [dict(zip(head, row, strict=True)) for row in rows]
        raise AssertionError(f"no table has {header}")


@pytest.fixture(scope="module")
def page(folder):
    return Page((folder / "index.html").read_text())


def test_the_page_has_every_figure_and_no_id_twice(page):
    assert set(plots.NAMES) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    inner = {link[1:] for link in page.links if link.startswith("#")}
    assert inner <= set(page.ids)


def test_the_page_loads_nothing(page, folder):
    text = (folder / "index.html").read_text()
    assert re.findall(r"https?:|//[a-z]|@import|<script|<link", text) == []
    assert re.findall(r"url\((?!#)", text) == []
    assert {link for link in page.links if not link.startswith("#")} == set(FILES)
    assert all((folder / name).exists() for name in FILES)


def test_bytes_on_the_page_are_the_tables(page, finished):
    shown = page.table("input", "Br × Bc", "bytes counted", "bytes predicted")
    assert len(shown) == finished.total
    names = {v.label: v.method for v in tables.VARIANTS if not v.causal}
    for row in shown:
        if row["input"] != "random":
            continue
        B_r, B_c = map(int, row["Br × Bc"].split(" × "))
        for source in ("counted", "predicted"):
            found = tables.select(
                finished.table,
                method=names[row["method"]],
                mask=row["mask"],
                n_q=int(row["N"]),
                d=4,
                block_r=B_r,
                block_c=B_c,
                source=source,
            )
            assert int(row[f"bytes {source}"].replace(",", "")) == tables.total(found)


def test_closed_forms_on_the_page_are_what_was_counted(page, finished):
    for row in page.table("closed form", "its value", "counted"):
        assert row["its value"] == row["counted"]


def test_errors_on_the_page_are_the_checks(page, finished):
    shown = page.table("error of O", "error of L")
    found = worst(finished.exactness)
    assert len(shown) == len(found)
    for row, e in zip(shown, found, strict=True):
        assert float(row["error of O"]) == pytest.approx(e.out_error, rel=0.06)
        assert row[""] == "exact"


def test_the_page_says_where_linear_is_false(page):
    rows = {row["what"]: row for row in page.table("what", "elements")}
    assert rows["stores of O and L"]["predicted"] == "1.00 ± 0.00"
    assert rows["loads of K and V"]["predicted"] == "2.00 ± 0.00"
    assert rows["traffic of S and P"]["counted"] == "nothing moves"
    text = " ".join(" ".join(page.text).split())
    for phrase in ("is not true", "level is issued", "L2 and DRAM are neither measured"):
        assert phrase in text


# --- what goes wrong -------------------------------------------------------------------------


def without_figures(found):
    """The page of a sweep, quicker."""
    growth = tables.growth(found.table, found.plan.setting)
    return Page(write_page(found, Proof(found), [], [], growth))


def test_an_interrupted_sweep_keeps_its_finished_part(tmp_path, monkeypatch):
    found, run = tiny_sweep(), sweep.Experiment.run

    def interrupted(self):
        if found.done == 3:
            raise KeyboardInterrupt
        return run(self)

    monkeypatch.setattr(sweep.Experiment, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(found.run())
    found.stopped = "Interrupted"
    report.write(found, tmp_path)
    assert len(found.comparisons) == 3
    assert {r.n_q for r in tables.select(found.table, source="counted")} == {4}
    checks = json.loads((tmp_path / "checks.json").read_text())
    assert checks["finished"] is False
    assert checks["experiments"] == {"done": 3, "planned": found.total}
    text = " ".join("".join(Page((tmp_path / "index.html").read_text()).text).split())
    assert f"Interrupted. 3 of {found.total} experiments were finished." in text


def test_a_sweep_stopped_before_its_first_row_still_has_a_page(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "growth.svg").write_text("of an earlier report")
    found = tiny_sweep()
    found.stopped = "Interrupted"
    page = Page(report.write(found, tmp_path).read_text())
    assert list((tmp_path / "figures").iterdir()) == []
    assert json.loads((tmp_path / "traffic.json").read_text()) == []
    assert all(row["counted"] == "not run" for row in page.table("what", "elements"))


def test_what_is_wrong_is_on_the_page(monkeypatch):
    def off_by_one(problem, honest=sweep.predict):
        row, *rest = honest(problem)
        return [*rest, replace(row, elements=row.elements + 1)]

    monkeypatch.setattr(sweep, "predict", off_by_one)
    found = sweep.Sweep(tiny_plan(), [])
    for _, _ in zip(range(3), found.run(), strict=False):
        pass
    assert not found.all_equal
    first = found.comparisons[0]
    assert first.differences == 1
    assert "counted (" in first.first
    page = without_figures(found)
    shown = page.table("input", "Br × Bc", "bytes counted")[0]
    assert shown["differ"].startswith("1: ")


def test_a_matrix_that_does_not_fit_the_gpu_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(
        sweep, "obstacle", lambda e: "S and P need 8.0 GiB" if e.method == "standard" else ""
    )
    found = tiny_sweep()
    for _, _ in zip(range(4), found.run(), strict=False):
        pass
    assert found.notes == ["standard, N = 4, 4 × 4, random: not run, S and P need 8.0 GiB"]
    page = without_figures(found)
    assert found.notes[0] in " ".join(page.text)


def test_an_inexact_output_is_called_so(finished):
    bad = replace(finished.exactness[0], exact=False, out_error=1.0, message="out: <far> off")
    found = replace(finished, exactness=[bad])
    assert not found.all_exact
    page = without_figures(found)
    assert page.table("error of O")[0][""] == "out: <far> off"


# --- what the hardware saw -------------------------------------------------------------------

TINY = (1, 2, 1, 7, 9, 4)  # d as in the tiny plan
L2 = 2**20


@pytest.fixture
def no_figures(monkeypatch):
    """Figures of the counts are drawn elsewhere."""
    monkeypatch.setattr("fa2_numba.accounting.plots.draw", lambda rows, plan: [])


@pytest.fixture
def as_if_gpu(monkeypatch, no_figures):
    """A GPU with ncu whose counters read what was counted, and of DRAM what was issued, halved."""

    def profile(cases, metrics, *, ncu=None, cache_control="all", optional=()):
        assert (ncu, cache_control) == ("somewhere/ncu", "all")
        if metrics == levels.METRICS:
            problems = [
                levels.problem("fa2", False, c.n_q, Tiling(*c.tiling), d=c.d) for c in cases
            ]
            return [
                {"case": n, "kernel": "fa2", **dict.fromkeys(metrics, 64 * p.N_q)}
                for n, p in enumerate(problems)
            ]
        names = {c.metric: (c.quantity, c.op) for c in hardware.COUNTERS}
        return [
            {"case": each.case, "kernel": each.kernel}
            | {m: each.totals.get(names[m], 0) for m in metrics}
            for each in verify.count(cases)
        ]

    def grid(methods):
        cases = [Case(m, "fp32", *TINY, causal=True) for m in methods]
        return [*cases, Case("fa2", "fp16", *TINY), Case("fa2", "fp32", *TINY, mask="boolean")]

    monkeypatch.setattr(hardware, "require_gpu", lambda: None)
    monkeypatch.setattr(hardware, "find_ncu", lambda given=None: "somewhere/ncu")
    monkeypatch.setattr(hardware, "version", lambda ncu: "2025.3")
    monkeypatch.setattr(hardware, "profile", profile)
    monkeypatch.setattr(verify, "grid", grid)
    monkeypatch.setattr(levels, "device", lambda: (132, L2))
    monkeypatch.setattr(levels, "slots", lambda launches, SMs: {"fa2": 2 * SMs})


def proved(found):
    """The proof beside a sweep, run."""
    made = Proof(found, "somewhere/ncu")
    assert list(made.run()) == list(proof.PARTS)
    assert set(made.seconds) == set(proof.PARTS)
    return made


def words(page):
    return " ".join("".join(page.text).split())


def test_without_a_gpu_the_simulator_counts_shared_memory_and_shows_the_phases(
    finished, tmp_path, monkeypatch
):
    monkeypatch.setattr(proof, "compile_ahead", lambda jobs: pytest.fail("nothing to compile"))
    found = Proof(finished)
    list(found.run())
    index = report.write(finished, tmp_path, found)
    page = Page(index.read_text())
    assert {link for link in page.links if not link.startswith("#")} == {*FILES, TRACE}
    assert "timeline" in page.ids and len(page.ids) == len(set(page.ids))
    assert re.findall(r"https?:|//[a-z]|@import|<script|<link|url\((?!#)", index.read_text()) == []
    for name in ("timeline.svg", "timeline.png"):
        assert (tmp_path / "figures" / name).exists()

    shared = page.table("tile", "wavefronts", "conflicts")
    assert [(r["tile"], r[""]) for r in shared] == [
        (x, f"{op}s") for x in ("Q_i", "K_j", "V_j", "P_ij") for op in ("load", "store")
    ]
    # Each of 8 x 8 scores is stored once, and all of K, 8 x 4, by both row tiles.
    by = {(r["tile"], r[""]): int(r["elements"].replace(",", "")) for r in shared}
    assert (by["P_ij", "stores"], by["K_j", "stores"]) == (8 * 8, 2 * 8 * 4)
    phases = page.table("phase", "steps of a block", "share")
    assert sum(float(r["share"].rstrip("%")) for r in phases) == pytest.approx(100, abs=5)
    assert "emulated steps, no time" in words(page)
    events = json.loads((tmp_path / TRACE).read_text())
    assert events["metadata"]["source"] == "emulated steps, no time"
    assert {e["name"] for e in events["traceEvents"] if e["ph"] == "X"} >= {"softmax", "P V"}

    assert set(found.missing) == {COUNTERS, LEVELS}
    assert "only a GPU has counters; fa2-numba doctor says why" in words(page)
    assert "Not read, for the same reason." in words(page)
    assert not (tmp_path / VERIFY).exists()
    assert found.all_equal
    (line,) = found.lines()
    assert line.startswith("Hardware counters, memory levels: no GPU can be used")


def test_counters_that_agree_are_on_the_page_and_in_the_folder(finished, tmp_path, as_if_gpu):
    found = proved(finished)
    assert found.missing == {}
    # Of the grid, what the sweep's kernels can run, in its tiling.
    assert [(c.method, c.tiling) for c in found.cases] == [
        (method, (4, 4, 4, 4)) for method in PORTABLE
    ]
    page = Page(report.write(finished, tmp_path, found).read_text())
    assert {link for link in page.links if not link.startswith("#")} == {*FILES, VERIFY, TRACE}
    launches = page.table("kernel", "bytes, loads", "differ")
    names = ["standard_scores", "standard_softmax", "standard_output"]
    names += ["fa1_init", "fa1_loop", "fa1_finish", "fa2"]
    assert [row["kernel"] for row in launches] == names
    exact = sum(counter.exact for counter in hardware.COUNTERS)
    assert {row["differ"] for row in launches} == {f"0 of {exact}"}
    record = json.loads((tmp_path / VERIFY).read_text())
    numbers = [record[n] for n in ("ncu", "launches", "numbers", "differences")]
    assert numbers == ["2025.3", 7, 7 * exact, 0]
    assert [Case.from_json(case) for case in record["cases"]] == found.cases
    for row, name in zip(launches, names, strict=True):
        (read,) = (
            r["hardware"] for r in record["rows"]
            if (r["kernel"], r["quantity"], r["op"]) == (name, "sectors", "load")
        )  # fmt: skip
        assert row["sectors, loads"] == f"{read:,}"
    text = words(page)
    told = f"{7 * exact} of {7 * exact} counted numbers equal the hardware's, in 7 launches."
    assert text.count(told) == 2
    assert "Read by ncu 2025.3" in text
    assert found.lines()[1] == told


def test_levels_are_in_the_table_with_the_model_beside_them(finished, tmp_path, as_if_gpu):
    found = proved(finished)
    page = Page(report.write(finished, tmp_path, found).read_text())
    rows = page.table("N", "L2 to SM", "DRAM / model")
    assert [row["N"] for row in rows] == ["4", "8"]
    for row, point in zip(rows, found.points, strict=True):
        N = point["n_q"]
        assert point["counted"]
        assert row["issued"] == plots.size(point["loads"]["issued"])
        assert row["DRAM"] == plots.size(64 * N)
        assert row["DRAM / model"] == f"{64 * N / (3 * N * 4 * 4):.3f}"
        assert row["in domain"] == "yes"
    assert "issued: counted" in words(page)
    assert "Section 3 has what DRAM sent" in words(page)
    assert "not measured here" not in words(page)
    written = json.loads((tmp_path / "traffic.json").read_text())
    seen = [row for row in written if row["source"] == "hardware"]
    assert [(r["n_q"], r["level"], r["op"]) for r in seen] == [
        (N, level, op) for N in (4, 8) for level in levels.LEVELS[1:] for op in ("load", "store")
    ]
    assert len(written) == len(finished.table) + len(seen)
    checks = json.loads((tmp_path / "checks.json").read_text())
    assert checks["hardware"]["levels"] == found.points
    assert "1.333 at N = 4" in found.lines()[2]


def test_an_issued_level_that_was_not_counted_is_called_predicted(as_if_gpu, tmp_path):
    found = proved(tiny_sweep())
    assert [point["counted"] for point in found.points] == [False, False]
    page = Page(report.write(found.sweep, tmp_path, found).read_text())
    assert "issued: predicted" in words(page)


def test_a_difference_is_shown_and_ends_with_1(as_if_gpu, tmp_path, capsys, monkeypatch):
    honest = hardware.profile

    def off_by_one(cases, metrics, **options):
        read = honest(cases, metrics, **options)
        read[-1][hardware.COUNTERS[0].metric] = read[-1].get(hardware.COUNTERS[0].metric, 0) + 1
        return read

    monkeypatch.setattr(hardware, "profile", off_by_one)
    monkeypatch.setattr(sweep, "plan", lambda *here: tiny_plan(*here))
    monkeypatch.setattr(sweep, "shipped", list)
    assert main(["report", "--output", str(tmp_path), "--ncu", "somewhere/ncu"]) == 1
    out = capsys.readouterr().out
    assert "differs: fa2, fp32, causal, 1 × 2/1 × 7 × 9, d 4, fa2: bytes (load) counted" in out
    exact = sum(counter.exact for counter in hardware.COUNTERS)
    assert f"{7 * exact - 1} of {7 * exact} counted numbers" in out
    page = Page((tmp_path / "index.html").read_text())
    assert [r["differ"] for r in page.table("kernel", "bytes, loads")][-1] == f"1 of {exact}"
    assert "differs: fa2, fp32" in words(page)
    assert 'class="verdict no"' in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    "error",
    [
        NotPermitted("this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root"),
        HardwareError("ncu: not in PATH; install NVIDIA Nsight Compute"),
    ],
)
def test_counters_that_cannot_be_read_stop_no_report(
    as_if_gpu, tmp_path, capsys, monkeypatch, error
):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(hardware, "profile", refuse)
    monkeypatch.setattr(sweep, "plan", lambda *here: tiny_plan(*here))
    monkeypatch.setattr(sweep, "shipped", list)
    assert main(["report", "--output", str(tmp_path), "--ncu", "somewhere/ncu"]) == 0
    assert f"Hardware counters, memory levels: {error}." in capsys.readouterr().out
    text = words(Page((tmp_path / "index.html").read_text()))
    assert f"Not compared with the hardware: {error}." in text
    assert "counted numbers equal the hardware's" not in text
    checks = json.loads((tmp_path / "checks.json").read_text())
    assert checks["hardware"]["missing"] == {COUNTERS: str(error), LEVELS: str(error)}


def test_what_permission_keeps_back_is_said(finished, tmp_path, as_if_gpu, monkeypatch):
    honest = hardware.profile

    def patched_only(cases, metrics, **options):
        if not all("__sass_" in metric for metric in metrics):
            raise NotPermitted("this user may not read the GPU's counters")
        plain = {c.patched: c.metric for c in hardware.COUNTERS if c.patched}
        read = honest(cases, [plain[m] for m in metrics], **options)
        return [
            {"case": r["case"], "kernel": r["kernel"], **{m: r[plain[m]] for m in metrics}}
            for r in read
        ]

    monkeypatch.setattr(hardware, "profile", patched_only)
    found = proved(finished)
    page = Page(report.write(finished, tmp_path, found).read_text())
    assert "Not compared: instructions (load)" in words(page)
    assert {row["requests, loads"] for row in page.table("kernel", "bytes, loads")} == {""}
    assert found.missing == {LEVELS: "this user may not read the GPU's counters"}
    assert "Not read: this user may not read the GPU's counters." in words(page)


def test_any_other_failure_is_shown_with_its_kind_and_stops_no_part(
    finished, tmp_path, as_if_gpu, monkeypatch
):
    def broken(*arguments, **options):
        raise ValueError("fa2: the timer stood still while a block ran")

    monkeypatch.setattr(timing, "time_phases", broken)
    found = proved(finished)
    assert set(found.missing) == {PHASES}
    page = Page(report.write(finished, tmp_path, found).read_text())
    told = "ValueError: fa2: the timer stood still while a block ran"
    assert f"Not timed: {told}." in words(page)
    assert f"Phases: {told}." in found.lines()
    assert not (tmp_path / TRACE).exists()
    assert page.table("tile", "conflicts")


def test_a_timed_gpu_has_cycles_and_what_they_cost(finished, tmp_path, as_if_gpu, monkeypatch):
    honest = timing.time_phases

    def timed(*arrays, **options):
        found = honest(*arrays, **options)
        ms = {"plain": 2.0, "timed": 2.1, "kept": 2.5}
        ratio = {"plain": 0.0, "timed": 0.05, "kept": 0.25}
        cost = timing.Overhead(ms, dict.fromkeys(ms, 0.0), ratio, 5, 20, 0.1)
        return replace(found, emulated=False, overhead=cost, warnings=("fa2: the clock changed",))

    monkeypatch.setattr(timing, "time_phases", timed)
    found = proved(finished)
    page = Page(report.write(finished, tmp_path, found).read_text())
    for row, phase in zip(page.table("cycles of a block", "ns"), found.phases.rows, strict=True):
        assert row["phase"] == phase.phase
        assert row["cycles of a block"] == f"{phase.cycles:,.0f}"
    text = words(page)
    assert f"{timing.summary(found.phases.overhead)}." in text
    assert "fa2: the clock changed." in text
    assert "Phases: fa2: the clock changed." in found.lines()


def test_a_trace_of_many_marks_has_the_first_of_each_warp(
    finished, tmp_path, no_figures, monkeypatch
):
    monkeypatch.setattr(report, "TRACE_MARKS", 8)
    found = Proof(finished)
    list(found.run())
    report.write(finished, tmp_path, found)
    (timeline,) = found.phases.timelines
    (kernel,) = json.loads((tmp_path / TRACE).read_text())["metadata"]["kernels"]
    assert timeline.dropped == 0
    assert kernel["kept"] == 2 * 5 < timeline.count.sum()  # two blocks of one warp
    assert kernel["kept"] + kernel["dropped"] == timeline.count.sum()


def test_files_of_an_earlier_report_are_gone(finished, tmp_path, no_figures):
    for name in (VERIFY, TRACE):
        (tmp_path / name).write_text("of an earlier report")
    page = Page(report.write(finished, tmp_path).read_text())
    assert not (tmp_path / VERIFY).exists() and not (tmp_path / TRACE).exists()
    assert words(page).count("the report ended before") == 4


def test_a_report_interrupted_at_the_hardware_keeps_the_sweep(
    tmp_path, capsys, monkeypatch, no_figures
):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Proof, "_time", interrupted)
    monkeypatch.setattr(sweep, "plan", lambda *here: tiny_plan(*here))
    monkeypatch.setattr(sweep, "shipped", list)
    assert main(["report", "--output", str(tmp_path)]) == 130
    checks = json.loads((tmp_path / "checks.json").read_text())
    assert checks["experiments"]["done"] == checks["experiments"]["planned"] > 0
    assert checks["hardware"]["shared"] and checks["hardware"]["phases"] is None


def test_on_a_gpu_every_kernel_is_compiled_ahead(as_if_gpu, monkeypatch):
    jobs = []
    monkeypatch.setattr(proof, "compile_ahead", lambda some: jobs.extend(some) or [])
    found = Proof(sweep.Sweep(tiny_plan("gpu", "a GPU"), []))
    next(parts := found.run())
    next(parts)  # the first part is done
    wanted = {"counted on chip", "timed", "timed and kept", "plain"}
    assert {how for how, _ in jobs} == wanted == set(proof._RUNS)
    assert [case for how, case in jobs if how == "plain"][1:] == found.cases
    for how, case in jobs:
        proof._run(how, case)  # what a process of the pool does


def test_kernels_are_compiled_by_other_processes_which_say_what_failed(as_if_gpu, monkeypatch):
    case = Case("fa2", "fp32", *TINY, tiling=(4, 4, 4, 4))
    bad = replace(case, method="fa9")
    (error,) = compile_ahead([("plain", case), ("plain", bad), ("timed", case)])
    assert "fa9" in str(error)
    monkeypatch.setattr(proof, "compile_ahead", lambda jobs: [error])
    found = Proof(sweep.Sweep(tiny_plan("gpu", "a GPU"), []))
    next(parts := found.run())
    next(parts)
    assert found.missing == {proof.COMPILING: f"ValueError: {error}"}
