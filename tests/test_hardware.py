"""Counted numbers against the hardware's: what ncu prints, who launched what, what is compared.

Without a GPU, ncu is a Python script that prints what ncu prints, and runs the process it is given
on the simulator. What only a GPU can say is in the last test.
"""

import dataclasses
import itertools
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from fa2_numba import api, backward, cli, io_model, masking, simulator, traffic
from fa2_numba.accounting import hardware, verify
from fa2_numba.accounting.hardware import COUNTERS, Case, HardwareError, NotPermitted
from fa2_numba.accounting.inputs import DTYPES
from fa2_numba.cli import main
from fa2_numba.problem import METHODS, METHODS_BACKWARD, PORTABLE_BACKWARD, Problem
from fa2_numba.tiling import choose_hopper, hopper_backward

on_simulator = pytest.mark.skipif(
    not simulator.ACTIVE, reason="runs on the simulator: NUMBA_ENABLE_CUDASIM=1"
)

BYTES, SECTORS = "smsp__sass_data_bytes_mem_global_op_ld.sum", "l1tex__t_sectors.sum"
SMALL = Case("fa2", "fp32", 1, 2, 1, 20, 18, 4)
METRICS = [c.metric for c in COUNTERS]

BEFORE = """\
==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "fa2[v1,cw51cXTLSUw]" - 0: 0%....50%....100% - 5 passes
a line of the program, with a quotation mark: 6" of rain, "fa2"
"""
AFTER = "==PROF== Disconnected from process 4242\n"
NO_KERNELS = """\
==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Disconnected from process 4242
==WARNING== No kernels were profiled.
"""
NO_PERMISSION = """\
==PROF== Connected to process 4242 (/usr/bin/python3.11)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance \
Counters on the target device 0. For instructions on enabling permissions and to get more \
information see https://developer.nvidia.com/ERR_NVGPUCTRPERM
==ERROR== The application returned an error code (1).
"""


def printed(kernels, metrics, numbers):
    """What ``ncu --csv --page raw`` prints of some launches; a row of numbers for each."""
    fixed = "ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size"
    header = [*fixed.split(","), "Device", "CC", *metrics]
    lines = [header, [""] * 11 + ["byte"] * len(metrics)]
    for n, (kernel, row) in enumerate(zip(kernels, numbers, strict=True)):
        name = f"{kernel}[v1,cw51cXTLSUwv1sDU](Array<float, 4, C, mutable, aligned>, float)"
        place = [n, 4242, "python3.11", "127.0.0.1", name, 1, 7, "(256, 1, 1)", "(8, 1, 1)"]
        shown = [x if isinstance(x, str) else f"{x:,}" for x in row]
        lines.append([str(x) for x in (*place, 0, "9.0", *shown)])
    quoted = "".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines)
    return BEFORE + quoted + AFTER


def script(path, body):
    """An executable Python script."""
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def canned(tmp_path):
    """Make an ncu that runs nothing: it prints what it is told to, and writes the process's log."""
    numbers = itertools.count()

    def make(stdout="", stderr="", launched=None, code=0):
        return script(
            tmp_path / f"ncu{next(numbers)}",
            f"import json, pathlib, sys\n"
            f"pathlib.Path({str(tmp_path / 'argv.json')!r}).write_text(json.dumps(sys.argv[1:]))\n"
            f"print({stdout!r}, end='')\n"
            f"print({stderr!r}, end='', file=sys.stderr)\n"
            f"if {launched!r} is not None:\n"
            f"    pathlib.Path(sys.argv[-1]).write_text(json.dumps({launched!r}))\n"
            f"sys.exit({code})\n",
        )

    return make


# --- what ncu prints -------------------------------------------------------------------------


def test_rows_are_read_with_separators_units_and_noise_around_them():
    text = printed(
        ["fa1_init", "fa2"], [BYTES, SECTORS], [(17_180_917_760, 0), (540_672, "1,234.5")]
    )
    assert hardware.parse(text) == [
        {"kernel": "fa1_init", BYTES: 17_180_917_760, SECTORS: 0},
        {"kernel": "fa2", BYTES: 540_672, SECTORS: 1234.5},
    ]
    assert all(type(row[BYTES]) is int for row in hardware.parse(text))


def test_a_header_that_is_printed_again_is_no_row():
    first = printed(["fa2"], [BYTES], [(1_000,)])
    assert [row[BYTES] for row in hardware.parse(first + first)] == [1000, 1000]


@pytest.mark.parametrize("cell", ["n/a", "(!) n/a", "nan", ""])
def test_what_is_not_available_is_no_number(cell):
    (row,) = hardware.parse(printed(["fa2"], [BYTES, SECTORS], [(cell, 7)]))
    assert row == {"kernel": "fa2", BYTES: None, SECTORS: 7}


def test_a_row_that_does_not_fit_its_header_is_refused():
    text = printed(["fa2"], [BYTES], [(540_672,)])
    with pytest.raises(HardwareError, match="a row of 11 cells under a header of 12"):
        hardware.parse(text.replace(',"540,672"', ""))


@pytest.mark.parametrize("text", ["", NO_KERNELS, NO_PERMISSION, BEFORE])
def test_output_without_a_table_has_no_rows(text):
    assert hardware.parse(text) == []


# --- who launched what -----------------------------------------------------------------------

FA1 = ["fa1_init", "fa1_loop", "fa1_finish"]


def readings(*kernels):
    return [{"kernel": kernel, BYTES: n} for n, kernel in enumerate(kernels)]


def test_rows_go_to_the_case_that_launched_them():
    found = hardware.attribute(readings(*FA1, "tile_map", "fa2"), [FA1, [], ["tile_map", "fa2"]])
    assert [row["case"] for row in found] == [0, 0, 0, 2, 2]
    assert [row[BYTES] for row in found] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("seen", "launched", "message"),
    [
        (FA1[:2], [FA1], "profiled 2 launches of 3"),
        ([*FA1, "fa2"], [FA1], "profiled 4 launches of 3"),
        ([], [FA1], "does its filter match fa1_init, fa1_loop, fa1_finish"),
        (["fa2"], [[]], "profiled 1 launches of 0"),
        (["fa2", "tile_map"], [["tile_map", "fa2"]], "launch 0 is fa2, where case 0 launched tile"),
        (["fa2", "fa1_init"], [["fa2"], ["fa2"]], "launch 1 is fa1_init, where case 1 launched"),
    ],
)
def test_launches_that_do_not_match_are_refused(seen, launched, message):
    with pytest.raises(HardwareError, match=message):
        hardware.attribute(readings(*seen), launched)


# --- running ncu -----------------------------------------------------------------------------


def test_the_command_is_the_recipe(canned, tmp_path):
    ncu = canned(printed(["fa2"], [BYTES, SECTORS], [(5, 6)]), launched=[["fa2"]])
    found = hardware.profile(
        [SMALL], [BYTES, SECTORS], ncu=ncu, cache_control="none", kernels="^fa2"
    )
    assert found == [{"case": 0, "kernel": "fa2", BYTES: 5, SECTORS: 6}]
    argv = json.loads((tmp_path / "argv.json").read_text())
    options = "--clock-control none --cache-control none --csv --page raw --print-units base"
    options += f" --kernel-name regex:^fa2 --metrics {BYTES},{SECTORS}"
    assert argv[: -len("python -m module cases log".split())] == options.split()
    assert argv[-5:-2] == [sys.executable, "-m", "fa2_numba.accounting.launches"]


def test_nothing_to_run_is_no_run():
    assert hardware.profile([], [BYTES], ncu="no such program") == []


TABLE = printed(["fa2"], [BYTES, SECTORS], [(5, "n/a")])
TRACEBACK = "Traceback (most recent call last)\n  File\nValueError: q: got a list\n"


@pytest.mark.parametrize(
    ("stdout", "stderr", "launched", "code", "message"),
    [
        (NO_PERMISSION, TRACEBACK, None, 1, "may not read the GPU's counters .ERR_NVGPUCTRPERM"),
        (NO_KERNELS, "", [["fa2"]], 0, "profiled 0 launches of 1; does its filter match fa2"),
        (TABLE, "", [["fa2"]], 0, "l1tex__t_sectors.sum is not available on this GPU"),
        (TABLE.replace("l1tex__t", "x__y"), "", [["fa2"]], 0, "l1tex__t_sectors.sum is not avail"),
        (TABLE, "", [["fa2", "fa2"]], 0, "profiled 1 launches of 2"),
        (
            "==ERROR== The application returned an error code (1).\n",
            TRACEBACK + "==ERROR== later\n",
            None,
            1,
            "did not finish: ValueError: q: got a list$",
        ),
        (
            "==ERROR== The application returned an error code (1).\n==WARNING== No kernels.\n",
            "UserWarning: of the program\n==ERROR== Failed to connect to the driver.\n",
            None,
            1,
            "did not finish: Failed to connect to the driver.$",
        ),
        ("==ERROR== LaunchFailed\n", "", [["fa2"]], 1, "LaunchFailed; ncu: profiled 0 launches"),
        ("", "", None, 7, "exit code 7"),
        ("", "", None, 0, "says nothing"),
    ],
)
def test_what_cannot_be_read_is_said(canned, stdout, stderr, launched, code, message):
    with pytest.raises(HardwareError, match=message) as caught:
        hardware.profile([SMALL], [BYTES, SECTORS], ncu=canned(stdout, stderr, launched, code=code))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, NotPermitted) == (stdout == NO_PERMISSION)


def test_an_optional_metric_may_be_missing(canned):
    ncu = canned(TABLE, launched=[["fa2"]])
    found = hardware.profile([SMALL], [BYTES, SECTORS], ncu=ncu, optional={SECTORS})
    assert found == [{"case": 0, "kernel": "fa2", BYTES: 5}]


def test_ncu_is_the_given_one_or_in_path_or_the_newest_installed(tmp_path, monkeypatch):
    places = [
        tmp_path / name / "ncu" for name in ("given", "path", "2024.3.2", "2025.1", "2024.10")
    ]
    for place in places:
        place.parent.mkdir()
        script(place, "")
    given, in_path, _, newest, _ = map(str, places)
    monkeypatch.setattr(hardware, "PLACES", (f"{tmp_path}/20*/ncu",))
    monkeypatch.setenv("PATH", str(places[1].parent))
    assert hardware.find_ncu(given) == given
    assert hardware.find_ncu() == in_path
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.find_ncu() == newest


def test_without_ncu_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "PLACES", (f"{tmp_path}/*/ncu",))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HardwareError, match="install NVIDIA Nsight Compute"):
        hardware.find_ncu()
    with pytest.raises(HardwareError, match="ncu: got 'absent', accepted: the path"):
        hardware.find_ncu("absent")


def test_the_version_is_what_ncu_says(tmp_path):
    said = "NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 3) (public)"
    assert hardware.version(script(tmp_path / "a", f"print('{said}')")) == "2025.3.1.0"
    assert hardware.version(script(tmp_path / "b", "")) == ""


def test_without_permission_all_but_the_instructions_of_loads_and_stores_can_be_patched():
    for counter in COUNTERS:
        assert counter.metric.endswith(".sum")
        assert not counter.patched or "__sass_" in counter.patched
        assert counter.op in verify.OPS.values() or counter.quantity == "instructions"
    hardware_alone = {(c.quantity, c.op) for c in COUNTERS if not c.patched}
    issued = set(itertools.product(("instructions", "requests"), verify.ISSUED))
    others = {("requests", "reduction"), ("box copies", "load"), ("box bytes", "load")}
    others |= {("box bytes", "store"), ("box sectors", "store"), ("bulk bytes", "reduction")}
    assert hardware_alone == issued | others
    assert len({(c.quantity, c.op) for c in COUNTERS}) == len(set(METRICS)) == len(COUNTERS)


# --- cases -----------------------------------------------------------------------------------


def test_a_case_survives_json():
    case = Case("fa2", "bf16", 1, 2, 1, 5, 7, 4, "skip", (3, -1), "boolean", (16, 16, 4, 8))
    assert Case.from_json(json.loads(json.dumps(dataclasses.asdict(case)))) == case


@pytest.mark.parametrize("method", PORTABLE_BACKWARD)
@pytest.mark.parametrize("dtype", ["fp16", "fp64"])
def test_a_backward_case_calls_the_backward_pass(method, dtype):
    case = Case(method, dtype, 1, 2, 1, 5, 7, 4, mask="softcap")
    assert Case.from_json(json.loads(json.dumps(dataclasses.asdict(case)))) == case
    options = case.options()
    assert options["deterministic"] == (method == "fa2_backward_deterministic")
    sizes = {"shape": (1, 2, 5, 4), "heads_kv": 1, "n_k": 7, "dtype": dtype}
    assert {row.method for row in backward.predict_backward(**sizes, **options)} == {method}
    if simulator.ACTIVE:
        *arrays, lse = case.arrays()
        of_q, kv = (1, 2, 5, 4), (1, 1, 7, 4)
        assert [x.shape for x in arrays] == [of_q, of_q, kv, kv, of_q]
        assert {DTYPES[x.dtype] for x in arrays} == {dtype}
        assert (lse.shape, DTYPES[lse.dtype]) == ((1, 2, 5), "fp64" if dtype == "fp64" else "fp32")


def test_an_unknown_mask_is_refused():
    with pytest.raises(
        ValueError, match="mask: got 'checkers', accepted: \"\", boolean, documents"
    ):
        dataclasses.replace(SMALL, mask="checkers")


@on_simulator
@pytest.mark.parametrize("mask", hardware.MASKS)
def test_every_mask_runs_and_does_something(mask):
    case = Case("fa2", "fp32", 2, 2, 1, 20, 40, 4, mask=mask, tiling=(8, 16, 4, 8))
    q, k, v = case.arrays()
    measured = api.measure(q, k, v, **case.options())
    columns = measured.problem.columns()
    assert (columns["block_r"], columns["block_c"]) == (8, 16)
    assert (columns["mask"] == "none") == (mask == "")
    plain = api.attention(q, k, v, **dataclasses.replace(case, mask="").options())
    assert np.array_equal(plain, measured.out) == (mask == "")


@on_simulator
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
def test_arrays_are_the_same_each_time_and_normal(dtype):
    case = Case("fa2", dtype, 2, 4, 2, 30, 20, 8)
    first, second = case.arrays(), case.arrays()
    assert [x.shape for x in first] == [(2, 4, 30, 8), (2, 2, 20, 8), (2, 2, 20, 8)]
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a, b)
        assert 0.8 < np.std(a.astype(np.float64)) < 1.2
    assert api.measure(*first, **case.options()).problem.dtype == dtype


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
def test_arrays_for_a_gpu_have_the_dtype(dtype, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", np)  # what is used of CuPy, NumPy has as well
    for x, shape in zip(hardware._on_device([(2, 50), (7,)], dtype), [(2, 50), (7,)], strict=True):
        assert DTYPES[x.dtype] == dtype and x.shape == shape
        exact = np.random.default_rng(0).standard_normal(shape, np.float32)
        if shape == (2, 50):  # the first array of the generator
            assert np.allclose(x.astype(np.float64), exact, rtol=2**-7)


def test_without_cupy_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(HardwareError, match="CuPy is not installed"):
        hardware._on_device([(2, 3)], "fp32")


@pytest.mark.parametrize("shape", [(20, 40), (512, 512), (333, 517), (1, 2048), (1000, 517)])
def test_the_boolean_mask_has_tiles_of_every_kind(shape):
    n_q, n_k = shape
    case = dataclasses.replace(SMALL, n_q=n_q, n_k=n_k, mask="boolean")
    mask = case.options()["mask"]
    assert mask.shape == shape and np.array_equal(mask, case.options()["mask"])
    side = 64 if max(shape) > 64 else 8
    tiles = [
        mask[r : r + side, c : c + side].mean()
        for r in range(0, n_q, side)
        for c in range(0, n_k, side)
    ]
    kinds = {share if share in (0, 1) else "some" for share in tiles}
    assert kinds == {0, 1, "some"}


# --- counting --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases():
    """Kernels of all methods, in few launches."""
    if not simulator.ACTIVE:
        pytest.skip("runs on the simulator: NUMBA_ENABLE_CUDASIM=1")
    return [
        dataclasses.replace(SMALL, method="fa1", dtype="fp16"),
        dataclasses.replace(SMALL, mask="boolean", causal=True),
        dataclasses.replace(SMALL, n_q=0),
        dataclasses.replace(SMALL, method="standard"),
    ]


@pytest.fixture(scope="module")
def counted(cases):
    return verify.count(cases)


def test_each_launch_has_its_own_totals(cases, counted):
    kernels = [(launch.case, launch.kernel) for launch in counted]
    standard = ["standard_scores", "standard_softmax", "standard_output"]
    names = {0: FA1, 1: ["tile_map", "fa2"], 3: standard}
    assert kernels == [(case, name) for case, group in names.items() for name in group]
    assert all(set(launch.totals) == set(counted[0].totals) for launch in counted)
    for case, options in ((case, case.options()) for case in cases):
        rows = api.measure(*case.arrays(), **options).rows
        mine = [launch.totals for launch in counted if cases[launch.case] == case]
        for op, (quantity, column) in itertools.product(verify.ISSUED, verify.COUNTED.items()):
            total = sum(getattr(row, column) for row in rows if row.op == op)
            assert sum(totals[quantity, op] for totals in mine) == total
    init = counted[0]  # O_acc, l and m of 2 heads of 20 rows, in fp32
    assert init.totals["bytes", "store"] == 4 * 2 * 20 * (SMALL.d + 2)
    assert init.totals["bytes", "load"] == init.totals["sectors", "load"] == 0
    tile_map = counted[3]
    assert tile_map.totals["bytes", "load"] == SMALL.n_q * SMALL.n_k
    assert tile_map.problem["mask"] == "causal&boolean"


@pytest.fixture(scope="module")
def gradients():
    """A case of each backward method, ragged and grouped; dQ of the first is rounded."""
    if not simulator.ACTIVE:
        pytest.skip("runs on the simulator: NUMBA_ENABLE_CUDASIM=1")
    dtypes = {"fa2_backward": "fp16", "fa1_backward": "fp64"}
    methods = ("fa2_backward", "fa2_backward_deterministic", "fa1_backward", "standard_backward")
    return [
        dataclasses.replace(SMALL, method=m, dtype=dtypes.get(m, "fp32"), causal=n % 2 == 1)
        for n, m in enumerate(methods)
    ]


@pytest.fixture(scope="module")
def counted_gradients(gradients):
    return verify.count(gradients)


def test_each_launch_of_a_backward_pass_has_its_own_totals(gradients, counted_gradients):
    kernels = {
        0: ["backward_rowsum", "backward_clear", "fa2_backward_columns", "backward_finish"],
        1: ["backward_rowsum", "fa2_backward_columns", "fa2_backward_rows"],
        2: ["backward_clear", "fa1_backward"],
        3: ["backward_rowsum", *(f"standard_backward_{x}" for x in ("scores", "columns", "rows"))],
    }
    launched = [(launch.case, launch.kernel) for launch in counted_gradients]
    assert launched == [(case, name) for case, group in kernels.items() for name in group]
    for n, case in enumerate(gradients):
        rows = backward.measure_backward(*case.arrays(), **case.options()).rows
        mine = [launch.totals for launch in counted_gradients if launch.case == n]
        for (op, name), (quantity, column) in itertools.product(
            verify.OPS.items(), verify.COUNTED.items()
        ):
            total = sum(getattr(row, column) for row in rows if row.op == op)
            assert sum(totals[quantity, name] for totals in mine) == total
    rowsum, clear, columns, finish = (launch.totals for launch in counted_gradients[:4])
    rows, visits, d = 2 * 20, 2, SMALL.d  # of 2 heads; each row tile visits both key tiles
    assert rowsum["bytes", "load"] == 2 * 2 * rows * d and rowsum["bytes", "store"] == 4 * rows
    assert clear["bytes", "store"] == 4 * rows * d == finish["bytes", "load"]
    assert finish["bytes", "store"] == 2 * rows * d
    assert columns["bytes", "reduction"] == 4 * rows * d * visits
    others = (
        totals for totals in (rowsum, clear, finish, *(x.totals for x in counted_gradients[4:]))
    )
    assert {totals["requests", "reduction"] for totals in others} == {0}
    assert columns["requests", "reduction"] == columns["instructions", "reduction"] > 0


def test_the_model_says_the_same_of_each_launch(counted, counted_gradients):
    for launch in (*counted, *counted_gradients):
        assert launch.predicted.items() <= launch.totals.items()
        missing = {(q, op) for q in ("bytes", *verify.COUNTED) for op in verify.OPS.values()}
        missing -= set(launch.predicted)
        # The kernel of a boolean mask: its lanes read the kind of a tile together.
        assert missing == (
            {("bytes", "load")} if (launch.case, launch.kernel) == (1, "fa2") else set()
        )


def row(array, phase, op, *numbers, method="fa2_backward"):
    """A counted traffic row."""
    columns = dict.fromkeys(traffic.COLUMNS, 0) | {"array": array, "phase": phase, "op": op}
    columns["method"] = method
    names = ("elements", "bytes", "requests", "sectors")
    return traffic.Traffic(**columns | dict(zip(names, numbers, strict=True)))


class Counting:
    """What `verify` asks of operands, with the rows of boxes and of all else."""

    def __init__(self, plain, boxes=()):
        self.plain, self.copied = plain, boxes

    def rows(self, boxes=None):
        parts = {None: [*self.plain, *self.copied], True: self.copied, False: self.plain}
        return list(parts[boxes])

    def distinct_bytes(self):
        sums = dict.fromkeys(verify.OPS, 0)
        for each in self.plain:
            sums[each.op] += each.bytes
        return sums

    def on_chip_rows(self):
        return []


def test_boxes_count_as_copies_and_nothing_else_does():
    """A kernel with copies of boxes, loads, stores and adds.

    The bytes of boxes are those of their sectors.
    """
    found = verify.totals(
        Counting(
            [
                row("L", "load L", "load", 64, 256, 2, 8),
                row("dQ", "add", "atomic", 4096, 16384, 32, 512),
                row("dK", "epilogue", "store", 4096, 8192, 16, 256),
            ],
            [
                row("Q", "load Q_i", "load", 8192, 16384, 2, 512),
                row("K", "load K_j", "load", 5120, 10240, 2, 321),
                row("O", "epilogue", "store", 3000, 6000, 3, 200),
            ],
        )
    )
    moved = {key: n for key, n in found.items() if n}
    assert moved == {
        ("bytes", "load"): 256, ("requests", "load"): 2, ("instructions", "load"): 2,
        ("sectors", "load"): 8,
        ("bytes", "reduction"): 16384, ("requests", "reduction"): 32,
        ("instructions", "reduction"): 32, ("sectors", "reduction"): 512,
        ("bytes", "store"): 8192, ("requests", "store"): 16, ("instructions", "store"): 16,
        ("sectors", "store"): 256,
        ("instructions", "TMA"): 7, ("box copies", "load"): 4, ("box bytes", "load"): 32 * 833,
        ("box copies", "store"): 3, ("box bytes", "store"): 32 * 200, ("box sectors", "store"): 200,
    }  # fmt: skip


def test_adds_of_fa3_are_those_of_the_copy_unit():
    """No lane asks for them: the counters of reductions read none of it."""
    add = row("dQ_acc", "add", "atomic", 8192, 32768, 2, 1024, method="fa3_backward")
    load = row("L", "load", "load", 64, 256, 2, 8, method="fa3_backward")
    box = row("Q", "load Q_i", "load", 8192, 16384, 2, 512, method="fa3_backward")
    moved = {key: n for key, n in verify.totals(Counting([add, load], [box])).items() if n}
    assert moved == {
        ("bytes", "load"): 256, ("requests", "load"): 2, ("instructions", "load"): 2,
        ("sectors", "load"): 8, ("instructions", "TMA"): 4, ("box copies", "load"): 2,
        ("box bytes", "load"): 16384, ("bulk adds", "reduction"): 2,
        ("bulk bytes", "reduction"): 32768,
    }  # fmt: skip


def test_local_memory_of_the_gradients_of_fa3_is_shown_and_not_compared():
    p = Problem("fa3_backward", "bf16", 1, 1, 1, 64, 64, 128, hopper_backward(128))
    local = [c for c in COUNTERS if c.op in verify.LOCAL]
    assert len(local) == 2
    for kernel, exact in (("fa3_backward", False), ("fa3_backward_finish", True)):
        launch = verify.CountedLaunch(0, p.columns(), kernel, {})
        reading = {"case": 0, "kernel": kernel} | {c.metric: 6 for c in local}
        rows = verify.compare([launch], [reading], local)
        assert [(row.hardware, row.exact) for row in rows] == [(6, exact)] * 2


def launches_of(*launches):
    """Counts of launches, a list of rows each."""
    found = []
    for n, rows in enumerate(launches):
        operands = Counting(rows)
        found.append(
            verify._Counts(f"k{n}", verify.totals(operands), verify._rows(rows), frozenset())
        )
    return found


S, O = ("S", "softmax", "load"), ("O", "epilogue", "store")


@pytest.mark.parametrize(
    ("model", "requests"),
    [
        ([row(*S, 8, 32, 5, 1), row(*O, 8, 32, 7, 1)], [(2, 0), (3, 7)]),
        # more of S than both launches counted: the last one differs
        ([row(*S, 8, 32, 6, 1), row(*O, 8, 32, 7, 1)], [(2, 0), (4, 7)]),
        # an array that no launch stored
        (
            [
                row(*S, 8, 32, 5, 1),
                row(*O, 8, 32, 7, 1),
                row("L", "epilogue", "store", 8, 32, 1, 1),
            ],
            [(2, 0), (3, 8)],
        ),
        # one that was counted and is not predicted
        ([row(*S, 8, 32, 5, 1)], [(2, 0), (3, 0)]),
    ],
)
def test_a_row_is_predicted_for_the_launch_that_counted_it(model, requests):
    counts = launches_of([row(*S, 4, 16, 2, 1)], [row(*S, 4, 16, 3, 1), row(*O, 8, 32, 7, 1)])
    said = verify._predictions(counts, verify._rows(model))
    assert [(x["requests", "load"], x["requests", "store"]) for x in said] == requests


def test_a_wrong_prediction_differs_and_is_told(counted_gradients):
    at = next(n for n, x in enumerate(counted_gradients) if x.kernel == "fa2_backward_columns")
    launches = list(counted_gradients)
    of = ("sectors", "reduction")
    wrong = {of: launches[at].predicted[of] + 1}
    launches[at] = dataclasses.replace(launches[at], predicted=launches[at].predicted | wrong)
    rows = verify.compare(launches, as_read(launches), COUNTERS)
    found = verify.Verification(rows, list(COUNTERS))
    (differing,) = found.differing
    assert (differing.launch, differing.difference) == (at, 0)
    numbers = (differing.predicted, differing.counted, differing.hardware)
    assert str(differing).endswith(
        "sectors (reduction) predicted {:,}, counted {:,}, hardware {:,}".format(*numbers)
    )
    predicted, equal = verify.summary(found)[-2:]
    said = sum(len(x.predicted) for x in launches)
    shown = sum(not c.exact for c in COUNTERS)
    assert predicted == (
        f"{said - 1 - shown * len(launches)} of {said - shown * len(launches)} predicted numbers "
        "equal the counted."
    )
    numbers = len(COMPARED) * len(launches)
    assert equal.startswith(f"{numbers} of {numbers} counted numbers equal the hardware's")


def test_watching_ends_with_its_block():
    from fa2_numba.accounting.launches import watched
    from fa2_numba.launch import Operands

    run = Operands.run
    with pytest.raises(ZeroDivisionError), watched(lambda operands, name: None):
        assert Operands.run is not run
        raise ZeroDivisionError
    assert Operands.run is run


def test_the_filter_matches_every_kernel_and_none_of_cupy():
    sources = Path(api.__file__).parent.joinpath("kernels").glob("*.py")
    text = "".join(path.read_text() for path in sources)
    names = re.findall(r'hbm\.jit\(\w+, f?"([\w{}]+)"', text)
    assert len(names) == text.count("hbm.jit(") >= 8
    for name in names:
        assert re.search(hardware.OUR_KERNELS, f"{name}[v1,cw51c](Array)")
    for name in ("cupy_copy__float32_float32", "execute_dist", "init_curand", "fill", "void fa2x"):
        assert not re.search(hardware.OUR_KERNELS, name)


# --- comparing -------------------------------------------------------------------------------


def as_read(counted, counters=COUNTERS):
    """Readings that agree with the counts."""
    return [
        {
            "case": launch.case,
            "kernel": launch.kernel,
            **{c.metric: launch.totals.get((c.quantity, c.op), 0) for c in counters},
        }
        for launch in counted
    ]


def test_equal_numbers_have_no_difference(counted):
    rows = verify.compare(counted, as_read(counted), COUNTERS)
    found = verify.Verification(rows, list(COUNTERS))
    assert len(rows) == len(counted) * len(COUNTERS)
    assert (found.launches, found.differing) == (len(counted), [])
    assert sum(row.counted > 0 for row in rows) > 40
    row = next(row for row in rows if (row.launch, row.quantity, row.op) == (0, "bytes", "store"))
    assert row.as_dict() == {
        "case": 0, "launch": 0, "method": "fa1", "dtype": "fp16", "batch": 1, "heads": 2,
        "heads_kv": 1, "n_q": 20, "n_k": 18, "d": 4, "causal": False, "mask": "none",
        "block_r": 16, "block_c": 16, "kernel": "fa1_init", "quantity": "bytes", "op": "store",
        "counted": 960, "hardware": 960, "difference": 0, "exact": True, "predicted": 960,
    }  # fmt: skip


COMPARED = [c for c in COUNTERS if c.exact]


@pytest.mark.parametrize("counter", COMPARED, ids=lambda c: f"{c.quantity} {c.op}")
def test_a_planted_difference_is_found(counted, counter):
    read = as_read(counted)
    read[4][counter.metric] += 1
    found = verify.Verification(verify.compare(counted, read, COUNTERS), list(COUNTERS))
    (row,) = found.differing
    assert (row.launch, row.kernel, row.difference) == (4, "fa2", 1)
    assert (row.quantity, row.op) == (counter.quantity, counter.op)
    told = verify.summary(found)
    assert told[0].startswith("differs: fa2, fp32, causal&boolean, 1 × 2/1 × 20 × 18, d 4, fa2: ")
    assert told[0].endswith(f"hardware {row.hardware:,}")
    compared = len(counted) * len(COMPARED)
    assert told[-1].startswith(f"{compared - 1} of {compared} counted numbers equal")


def test_a_store_in_place_of_an_add_is_found(counted_gradients):
    """An add and a store of the same places move the same bytes, in other counters."""
    read = as_read(counted_gradients)
    at = next(n for n, x in enumerate(counted_gradients) if x.kernel == "fa2_backward_columns")
    names = {(c.quantity, c.op): c.metric for c in COUNTERS}
    for quantity in ("bytes", "requests", "sectors"):
        moved = read[at][names[quantity, "reduction"]]
        assert moved > 0
        read[at][names[quantity, "reduction"]] -= moved
        read[at][names[quantity, "store"]] += moved
    found = verify.Verification(verify.compare(counted_gradients, read, COUNTERS), [*COUNTERS])
    assert {(row.launch, row.quantity, row.op) for row in found.differing} == set(
        itertools.product([at], ("bytes", "requests", "sectors"), ("reduction", "store"))
    )


# What an H200 read of fa3 for 8 heads of 1,024 rows, d = 128, without a mask.
COPIES, COPIED = 2_304, 35_651_584


def fa3_launch(n=0, d=128):
    """A launch of fa3 that counted what the model predicts; nothing is run."""
    tiling = choose_hopper(d, 1024)
    p = Problem("fa3", "bf16", 1, 8, 8, 1024, 1024, d, tiling, masking.none())
    rows = io_model.predict(p)
    boxes = [each for each in rows if each.array in ("QKVO" if d <= 64 else "QKV")]
    totals = verify.totals(Counting([each for each in rows if each not in boxes], boxes))
    return verify.CountedLaunch(n, p.columns(), "fa3", totals, totals)


def test_the_counters_of_boxes_are_read_and_compared(canned):
    launch = fa3_launch()
    numbers = [launch.totals.get((c.quantity, c.op), 0) for c in COUNTERS]
    at = {(c.quantity, c.op): n for n, c in enumerate(COUNTERS)}
    assert numbers[at["box copies", "load"]] == numbers[at["instructions", "TMA"]] == COPIES
    assert numbers[at["box bytes", "load"]] == COPIED
    assert numbers[at["bytes", "load"]] == numbers[at["sectors", "load"]] == 0
    stored = 8 * 1024 * (128 * 2 + 4)  # O in bf16, L in fp32
    assert numbers[at["bytes", "store"]] == stored == 32 * numbers[at["sectors", "store"]]
    case = Case("fa3", "bf16", 1, 8, 8, 1024, 1024, 128)
    ncu = canned(printed(["fa3"], METRICS, [numbers]), launched=[["fa3"]])
    found = verify.verify([case], ncu=ncu, counted=[launch])
    assert (found.launches, found.differing) == (1, [])
    assert [*verify.table(found).columns[-2].cells] == [f"{COPIED:,}"]
    numbers[at["box bytes", "load"]] += 32
    ncu = canned(printed(["fa3"], METRICS, [numbers]), launched=[["fa3"]])
    (wrong,) = verify.verify([case], ncu=ncu, counted=[launch]).differing
    assert str(wrong).endswith("box bytes (load) counted 35,651,584, hardware 35,651,616")


def test_an_output_that_is_stored_in_boxes_is_compared(canned):
    """d = 64: 8 heads of 6 row tiles of 192 rows, of which each of 12 warps has a box."""
    launch = fa3_launch(d=64)
    numbers = [launch.totals.get((c.quantity, c.op), 0) for c in COUNTERS]
    at = {(c.quantity, c.op): n for n, c in enumerate(COUNTERS)}
    assert numbers[at["box copies", "store"]] == 8 * 6 * 12
    assert numbers[at["box bytes", "store"]] == 8 * 1024 * 64 * 2
    assert numbers[at["box sectors", "store"]] == 8 * 1024 * 4
    assert numbers[at["bytes", "store"]] == 8 * 1024 * 4  # L
    loads = numbers[at["box copies", "load"]]
    assert numbers[at["instructions", "TMA"]] == loads + numbers[at["box copies", "store"]]
    case = Case("fa3", "bf16", 1, 8, 8, 1024, 1024, 64)
    for quantity in ("box copies", "box bytes", "box sectors"):
        read = list(numbers)
        read[at[quantity, "store"]] += 1
        ncu = canned(printed(["fa3"], METRICS, [read]), launched=[["fa3"]])
        (wrong,) = verify.verify([case], ncu=ncu, counted=[launch]).differing
        assert (wrong.quantity, wrong.op, wrong.difference) == (quantity, "store", 1)


def test_what_addresses_do_not_decide_is_shown_and_not_compared(counted):
    """On an H200 a warp with lanes in another branch counts as an instruction, not a request."""
    read = as_read(counted)
    (shown,) = [c for c in COUNTERS if not c.exact and c.op == "load"]
    read[4][shown.metric] += 3
    found = verify.Verification(verify.compare(counted, read, COUNTERS), list(COUNTERS))
    assert [r.difference for r in found.rows if r.difference] == [3] and found.differing == []


def test_other_launches_are_refused(counted):
    read = as_read(counted)
    with pytest.raises(HardwareError, match=f"counted {len(read)}, profiled {len(read) - 1}"):
        verify.compare(counted, read[:-1], COUNTERS)
    with pytest.raises(HardwareError, match="counted fa1_init in case 0, where the plain run"):
        verify.compare(counted, read[1:], COUNTERS)
    del read[2][METRICS[0]]
    with pytest.raises(HardwareError, match=f"{METRICS[0]} is missing in launch 2"):
        verify.compare(counted, read, COUNTERS)


def test_nothing_launched_is_nothing_verified(cases, canned):
    with pytest.raises(HardwareError, match="nothing to compare"):
        verify.verify([cases[2]], ncu=canned())


# --- an ncu that runs the process --------------------------------------------------------------

# Runs what it is given, and reads "counters" that agree with the counts; FAULT spoils one.
HONEST = """
import json, pathlib, subprocess, sys
sys.path[:0] = {path!r}
from fa2_numba.accounting import hardware, verify
from test_hardware import NO_PERMISSION, as_read, printed

at = sys.argv.index("--metrics")
metrics, command = sys.argv[at + 1].split(","), sys.argv[at + 2 :]
if {permitted} or all("__sass_" in metric for metric in metrics):
    subprocess.run(command, check=True)
    cases = map(hardware.Case.from_json, json.loads(pathlib.Path(command[-2]).read_text()))
    known = hardware.COUNTERS + hardware.ON_CHIP
    names = {{c.metric: c for c in known}} | {{c.patched: c for c in known if c.patched}}
    rows = []
    for launch in verify.count(list(cases), any("shared" in metric for metric in metrics)):
        row = [launch.totals.get((names[m].quantity, names[m].op), 0) for m in metrics]
        rows.append(["n/a" if names[m].op in {absent!r} else x for m, x in zip(metrics, row)])
    if {fault}:
        rows[-1][0] += 1
    print(printed([name for names in json.loads(pathlib.Path(command[-1]).read_text())
                   for name in names], metrics, rows))
else:
    print(NO_PERMISSION)
"""


def honest(tmp_path, permitted=True, fault=False, absent=("TMA",)):
    path = [os.path.dirname(__file__)]
    return script(
        tmp_path / "ncu",
        HONEST.format(path=path, permitted=permitted, fault=fault, absent=absent),
    )


def test_a_run_from_end_to_end(cases, counted, tmp_path):
    found = verify.verify(cases, ncu=honest(tmp_path), counted=counted)
    assert (found.launches, found.differing, found.unread) == (len(counted), [], [])
    assert {(row.quantity, row.op) for row in found.rows} == {
        (c.quantity, c.op) for c in COUNTERS if c.op != "TMA"
    }


def test_without_permission_patched_instructions_are_compared(cases, counted, tmp_path):
    found = verify.verify(
        cases, ncu=honest(tmp_path, permitted=False, absent=("TMA", "cp.async")), counted=counted
    )
    assert not found.differing
    assert {(c.quantity, c.op) for c in found.unread} == set(
        [*itertools.product(("instructions", "requests"), verify.ISSUED), ("requests", "reduction")]
    )
    refusal, compared, missing, *_ = verify.summary(found)
    assert "ERR_NVGPUCTRPERM" in refusal and "NVreg_RestrictProfilingToAdminUsers=0" in refusal
    assert compared.startswith("Compared, by patched instructions: bytes (load), bytes (store), s")
    assert missing.startswith("Not compared: instructions (load), instructions (store), requests")


def test_a_backward_pass_from_end_to_end(gradients, counted_gradients, tmp_path):
    found = verify.verify(gradients, ncu=honest(tmp_path), counted=counted_gradients)
    assert (found.launches, found.differing, found.unread) == (13, [], [])
    moved = {(row.quantity, row.op) for row in found.rows if row.hardware and row.exact}
    assert moved == set(itertools.product(("bytes", "requests", "sectors"), verify.OPS.values()))


def test_without_any_permission_the_refusal_stands(cases, counted, canned):
    with pytest.raises(NotPermitted, match="run as root"):
        verify.verify(cases, ncu=canned(NO_PERMISSION, code=1), counted=counted)


# --- the command -----------------------------------------------------------------------------


@pytest.fixture
def as_if_gpu(monkeypatch):
    """The command on the simulator."""
    if not simulator.ACTIVE:
        pytest.skip("runs on the simulator: NUMBA_ENABLE_CUDASIM=1")
    monkeypatch.setattr(hardware, "require_gpu", lambda: None)


def test_the_command_shows_every_launch_and_ends_with_0(as_if_gpu, tmp_path, capsys):
    argv = ["verify", "--ncu", honest(tmp_path), "--n", "12", "--d", "4"]
    assert main([*argv, "--causal"]) == 0
    out = capsys.readouterr().out
    for text in ("fa1_loop", "standard_softmax", "1 × 2 × 12 × 12, d 4", "causal", "0 of 20"):
        assert text in out
    assert "140 of 140 counted numbers equal the hardware's, in 7 launches." in out
    assert "112 of 112 predicted numbers equal the counted." in out
    assert "reduction" not in out


def test_the_command_takes_backward_methods_and_shows_reductions(as_if_gpu, tmp_path, capsys):
    argv = ["verify", "--ncu", honest(tmp_path), "--n", "12", "--d", "4"]
    assert main([*argv, "--method", "fa2_backward"]) == 0
    out = capsys.readouterr().out
    assert "reduction" in out and "60 of 60 counted numbers" in out and "in 3 launches." in out
    assert set(cli.VERIFIED) == {*METHODS, *METHODS_BACKWARD}


def test_the_command_ends_with_1_if_a_number_differs(as_if_gpu, tmp_path, capsys):
    ncu = honest(tmp_path, fault=True)
    argv = f"verify --ncu {ncu} --n 8 --d 4 --method fa2 --dtype fp16".split()
    assert main([*argv, "--json"]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [row["difference"] for row in found] == [1] + [0] * 22
    assert found[0]["hardware"] == found[0]["counted"] + 1 and found[0]["dtype"] == "fp16"
    assert "differs: fa2, fp16, none" in printed.err


def test_the_command_says_what_permission_keeps_it_from(as_if_gpu, tmp_path, capsys):
    ncu = honest(tmp_path, permitted=False)
    argv = f"verify --ncu {ncu} --n 8 --d 4 --method fa2 --json".split()
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)) == 13
    assert "Not compared: instructions (load)" in printed.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--ncu absent", "ncu: got 'absent'"),
        ("--ncu NCU", "may not read the GPU's counters"),
        ("--ncu NCU --n 0", "--n: got 0"),
        ("--ncu NCU --d 300", "--d: got 300"),
        ("--ncu NCU --grid --n 5", "--grid: got it beside --n"),
        ("--ncu NCU --method fa9", "--method"),
        ("--ncu NCU --method fa3 --dtype bf16", "method: got fa3"),
        ("--ncu NCU --method fa3 --on-chip", "method: on_chip with fa3"),
    ],
)
def test_the_command_refuses_in_one_line_with_2(as_if_gpu, canned, capsys, argv, message):
    ncu = canned(NO_PERMISSION, code=1)
    small = [] if "--n " in argv else ["--n", "4", "--d", "300" if "300" in argv else "4"]
    assert main(["verify", *argv.replace("NCU", ncu).split(), *small]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    *progress, line = printed.err.splitlines()
    assert line.startswith("fa2-numba verify: ") and message in line
    assert len(progress) <= 1


def test_without_a_gpu_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(hardware.doctor, "gpu_usable", lambda: False)
    assert main(["verify"]) == 2
    assert "no GPU can be used by this process" in capsys.readouterr().err


def test_the_grid_is_a_dozen_cases_of_every_method():
    grid = verify.grid(("standard", "fa1", "fa2"))
    assert len(grid) == 13 == len(set(grid))
    assert {case.dtype for case in grid} == {"fp32", "fp64", "fp16", "bf16"}
    assert {case.method for case in verify.grid(("fa1",))} == {"fa1"}


# --- the benchmark ---------------------------------------------------------------------------


@pytest.fixture
def benchmark(as_if_gpu, tmp_path, monkeypatch):
    """The benchmark on the simulator; its records in `tmp_path`."""
    from benchmarks import verify as benchmark

    monkeypatch.setattr(benchmark, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr(benchmark, "results_folder", lambda gpu: tmp_path)

    def run(ncu, *arguments):
        monkeypatch.setattr(sys, "argv", ["verify", "--ncu", ncu, "--workers", "1", *arguments])
        return benchmark.main()

    return run


def test_the_benchmark_has_more_than_a_hundred_launches_of_few_kernels():
    from benchmarks.verify import SUITES

    assert len({suite.file for suite in SUITES.values()}) == len(SUITES)
    groups, deep = SUITES["forward"].groups, SUITES["forward"].on_chip
    cases = [case for group in groups for case in group]
    assert len(groups) <= 16 and len(cases) == len(set(cases)) >= 100
    assert {case.method for group in deep for case in group} == {"fa2", "fa1", "standard"}
    assert {case.dtype for case in cases} == {"fp32", "fp64", "fp16", "bf16"}
    assert max(max(case.n_q, case.n_k) for case in cases) <= 2048


def test_the_benchmark_has_few_small_cases_of_fa3_and_of_the_backward_pass():
    from benchmarks.verify import SUITES

    found = {
        name: [case for group in SUITES[name].groups for case in group]
        for name in ("fa3", "backward", "fa3_backward")
    }
    assert sum(len(SUITES[name].groups) for name in found) <= 26
    assert sum(map(len, found.values())) <= 90
    assert {case.method for case in found["backward"]} == set(PORTABLE_BACKWARD)
    assert {case.method for case in found["fa3_backward"]} == set(METHODS_BACKWARD) - set(
        PORTABLE_BACKWARD
    )
    assert {case.method for case in found["fa3"]} == {"fa3"}
    assert {case.d for case in found["fa3"]} == {40, 64, 72, 96, 128, 256}
    assert {case.d for case in found["fa3_backward"]} == {40, 64, 128, 256}
    for cases in found.values():
        assert {bool(case.causal) for case in cases} == {True, False}
        assert any(case.heads > case.heads_kv and case.n_q % 64 and case.n_k % 64 for case in cases)
        assert any(case.n_q > case.n_k and case.causal for case in cases)  # rows without keys
    for name in ("fa3", "fa3_backward"):
        assert {case.dtype for case in found[name]} == {"fp16", "bf16"}
    assert {case.dtype for case in found["backward"]} == {"fp32", "bf16"}
    assert any(case.window for case in found["fa3"])


@pytest.mark.codegen
def test_fa3_takes_the_cases_of_the_benchmark():
    from benchmarks.verify import SUITES

    if simulator.ACTIVE:
        pytest.skip("fa3 is no method of the simulator")
    groups = SUITES["fa3"].groups + SUITES["fa3_backward"].groups
    for case in (case for group in groups for case in group):
        sizes = {"shape": (case.batch, case.heads, case.n_q, case.d), "heads_kv": case.heads_kv}
        predict = backward.predict_backward if case.backward else api.predict
        rows = predict(**sizes, n_k=case.n_k, dtype=case.dtype, **case.options())
        assert {row.method for row in rows} == {case.method}
        assert {row.array for row in rows} >= set("QKVOL")


def test_the_benchmark_records_every_number(benchmark, tmp_path, monkeypatch, cases, capsys):
    from benchmarks.verify import SUITES, Suite

    suite = Suite("verify.json", [cases[:1], cases[1:3]], [cases[1:2]])
    monkeypatch.setitem(SUITES, "forward", suite)
    assert benchmark(honest(tmp_path, fault=True), "--cases", "forward") == 1
    record = json.loads((tmp_path / "verify.json").read_text())
    # 5 launches with 20 numbers each; 2 more with 6 of shared memory besides. Not compared: 3
    # numbers of each launch, and 2 more of shared memory.
    assert (record["launches"], record["numbers"], record["differences"]) == (7, 152, 2)
    assert [Case.from_json(case) for case in record["cases"]] == [*cases[:3], cases[1]]
    assert len(record["rows"]) == 177
    assert sum(row.get("exact") is False for row in record["rows"]) == 25
    assert [(row["case"], row["kernel"]) for row in record["rows"] if row["difference"]] == [
        (1, "fa2"),
        (3, "fa2"),
    ]
    shared = [r for r in record["rows"] if r["quantity"] == "shared bytes" and r["counted"]]
    assert [(row["kernel"], row["op"]) for row in shared] == [("fa2", "load"), ("fa2", "store")]
    assert not any("predicted" in row for row in shared)
    assert set(record["metrics"].values()) < {*METRICS, *(c.metric for c in hardware.ON_CHIP)}
    assert "99 of 100 counted numbers" in capsys.readouterr().out


def test_the_benchmark_records_what_is_chosen(benchmark, tmp_path, monkeypatch, gradients, capsys):
    """What fails, as fa3 does on the simulator, leaves the others alone."""
    from benchmarks.verify import SUITES

    few = dataclasses.replace(SUITES["backward"], groups=[gradients[:1], gradients[2:3]])
    monkeypatch.setitem(SUITES, "backward", few)
    tiny = Case("fa3", "bf16", 1, 1, 1, 8, 8, 64)
    one = dataclasses.replace(SUITES["fa3"], groups=[[tiny]])
    monkeypatch.setitem(SUITES, "fa3", one)
    assert benchmark(honest(tmp_path), "--cases", "backward,fa3") == 2
    printed = capsys.readouterr()
    assert "verify: verify_fa3.json is not written: method: got fa3, accepted" in printed.err
    assert [path.name for path in tmp_path.glob("*.json")] == ["verify_backward.json"]
    record = json.loads((tmp_path / "verify_backward.json").read_text())
    assert (record["launches"], record["differences"], len(record["cases"])) == (6, 0, 2)
    assert record["numbers"] == 6 * 20 and record["not_on_this_gpu"] == ["instructions (TMA)"]
    said = [row for row in record["rows"] if "predicted" in row]
    assert all(row["predicted"] == row["counted"] == row["hardware"] for row in said)
    assert {row["kernel"] for row in said if row["op"] == "reduction" and row["predicted"]} == {
        "fa2_backward_columns"
    }


def test_the_benchmark_knows_its_cases(benchmark, canned, capsys):
    with pytest.raises(SystemExit):
        benchmark(canned(), "--cases", "fa3,fa4")
    assert "got 'fa4', accepted: forward, backward, fa3, fa3_backward" in capsys.readouterr().err


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_counted_numbers_equal_the_hardwares():
    try:
        hardware.find_ncu()
    except HardwareError as error:
        pytest.skip(str(error))
    cases = [
        Case("fa2", "fp32", 2, 4, 2, 333, 517, 64, causal=True),
        Case("fa2", "fp32", 1, 2, 2, 512, 512, 64, causal=True),
        Case("standard", "bf16", 1, 2, 1, 100, 131, 33),
    ]
    for on_chip in (False, True):
        try:
            found = verify.verify(cases, on_chip=on_chip)
        except NotPermitted as error:
            pytest.skip(str(error))
        if found.unread:
            pytest.skip(f"only a part could be read: {found.refusal}")
        assert [str(row) for row in found.differing] == []
        assert found.launches == 5
        assert any("shared" in row.quantity for row in found.rows) == on_chip


@pytest.mark.gpu
def test_counted_numbers_of_a_backward_pass_equal_the_hardwares():
    try:
        hardware.find_ncu()
    except HardwareError as error:
        pytest.skip(str(error))
    cases = [
        Case("fa2_backward", "fp32", 2, 4, 2, 333, 257, 64, causal=True),
        Case("standard_backward", "bf16", 1, 2, 1, 100, 131, 33),
    ]
    try:
        found = verify.verify(cases)
    except NotPermitted as error:
        pytest.skip(str(error))
    if found.unread:
        pytest.skip(f"only a part could be read: {found.refusal}")
    assert [str(row) for row in found.differing] == []
    assert found.launches == 7
    assert any(row.hardware for row in found.rows if row.op == "reduction")


# --- what was recorded -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["verify_fa3", "verify_fa3_backward"])
def test_boxes_are_predicted_as_the_hardware_was_read_to_count_them(name):
    """Of each recorded call: the sectors predicted of its boxes, and the counter's bytes."""
    results = Path(__file__).parent.parent / "benchmarks" / "results"
    records = sorted(results.glob(f"*/{name}.json"))
    assert records
    for path in records:
        record = json.loads(path.read_text())
        read = [0] * len(record["cases"])
        for row in record["rows"]:
            if (row["quantity"], row["op"]) == ("box bytes", "load"):
                read[row["case"]] += row["hardware"]
        for case, hardware_bytes in zip(record["cases"], read, strict=True):
            assert hardware_bytes == predicted_box_bytes(case)


def predicted_box_bytes(case):
    mask = masking.causal() if case["causal"] else masking.none()
    if case["window"]:
        mask = masking.window(*case["window"])
    d, sizes = case["d"], [case[name] for name in ("batch", "heads", "heads_kv", "n_q", "n_k", "d")]
    backward = "backward" in case["method"]
    tiling = hopper_backward(d) if backward else choose_hopper(d, case["n_q"], mask.rule.bounded)
    rows = io_model.predict(Problem(case["method"], case["dtype"], *sizes, tiling, mask))
    boxes = [row for row in rows if "load" in row.phase and row.array in ("Q", "K", "V", "dO")]
    return 32 * sum(row.sectors for row in boxes)
