"""The sweep, its figures and the report's folder, on a plan of seconds."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fa2_numba import simulator
from fa2_numba.accounting import plots, report, sweep, tables
from fa2_numba.accounting.inputs import Inputs
from fa2_numba.accounting.page import FILES, worst
from fa2_numba.accounting.page import page as write_page
from fa2_numba.accounting.tables import Setting
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
    for method in tables.METHODS:
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
    return Page(write_page(found, [], [], tables.growth(found.table, found.plan.setting)))


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
