"""fa3 where there is no GPU: its machine code for sm_90a, and which calls it takes.

The tilings are those that `choose_hopper` picks, and two others. A product that ptxas cannot keep
in flight costs half the speed and no error: it shows as a warning and as a wait
(``WARPGROUP.DEPBAR``) more.
"""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_codegen import ATOMIC, Code, Compiled, assert_clean, counted_array
from test_codegen import hopper as hopper

from fa2_numba import api, hbm, io_model, launch, masking, simulator
from fa2_numba.kernels import fa3
from fa2_numba.problem import Layout, Problem
from fa2_numba.tiling import Tiling, choose_hopper

pytestmark = pytest.mark.codegen

WAITS = 6  # for S, of the first step and of two loops; for P V, in two loops and of the last step
MOVES = 12  # to uniform registers, from the first product to the last
REGISTERS = {128: 168, 192: 128}  # of a thread at the launch, by B_r
SHORT, LONG = 1024, 8192


class Hopper(Compiled):
    """`Compiled`, its tensor maps at an address that nobody reads."""

    def boxes(self, name: str, box: tuple[int, ...], *phases: str) -> Any:
        address = np.uint64(1 << 40)
        if not self.counted:
            return address
        return hbm.CountedBoxes(counted_array(self.arrays[name], len(phases)), int(address))


def compiled(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    d: int,
    mask: masking.Mask,
    N_q: int = LONG,
    score: masking.Score | None = None,
    scale: float = 1.0,
    counted: bool = False,
    tiling: Tiling | None = None,
) -> tuple[Code, Tiling]:
    """The kernel for long or short problems, and its tiling."""
    monkeypatch.setattr(fa3, "processors", lambda device: 132)
    score = score or masking.unchanged()
    plain = score.change is masking.UNCHANGED and not mask.rule.elementwise
    tiling = tiling or choose_hopper(d, N_q, mask.rule.bounded, plain)
    problem = Problem("fa3", dtype, 1, 2, 1, 64, 64, d, tiling, mask, score)
    operands = Hopper(problem, folder, counted)
    operands.scale = np.float32(scale)
    fa3.launch(problem, operands)
    (code,) = operands.codes
    return code, tiling


def products(code: Code) -> list[str]:
    return code.using("HGMMA")


def beside_PV(code: Code) -> list[int]:
    """Exponentials between each wait for S and the next for P V, which runs meanwhile."""
    waits = [k for k, op in enumerate(code.opcodes) if op.startswith("WARPGROUP.DEPBAR")]
    return [
        sum(op.startswith("MUFU.EX2") for op in code.opcodes[S:PV])
        for S, PV in pairwise(waits)
        if code.instructions[S].endswith(" 0x1 ;")
    ]


# ---- the plain kernel -------------------------------------------------------------------------

NONE, CAUSAL, WINDOW = masking.none(), masking.causal(), masking.window(100, 20)
SOFTCAP = masking.softcap(30.0)


@pytest.mark.parametrize(
    ("dtype", "d", "mask", "options"),
    [
        ("bf16", 64, NONE, {}),
        ("fp16", 64, CAUSAL, {}),
        ("bf16", 64, CAUSAL, {"N_q": SHORT}),
        ("bf16", 72, WINDOW, {"score": SOFTCAP}),
        ("fp16", 96, CAUSAL, {"scale": -0.5}),
        ("bf16", 128, NONE, {}),
        ("fp16", 128, CAUSAL, {}),
        ("bf16", 128, CAUSAL, {"score": SOFTCAP}),
        ("bf16", 192, masking.causal_skip(), {}),
        ("bf16", 64, masking.causal_skip(), {"score": SOFTCAP}),
        ("bf16", 24, NONE, {}),
        ("fp16", 40, WINDOW, {"N_q": SHORT}),
        ("fp16", 256, NONE, {}),
        ("bf16", 256, WINDOW, {"scale": -0.5}),
        # A loop over columns that did not unroll for these kept the scores in memory.
        ("fp16", 64, CAUSAL, {"tiling": Tiling(128, 160, 64, 4)}),
        ("bf16", 128, CAUSAL, {"tiling": Tiling(192, 80, 96, 4)}),
    ],
    ids=lambda x: x.name or "none" if isinstance(x, masking.Mask) else None,
)
def test_products_stay_in_flight(
    hopper: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    d: int,
    mask: masking.Mask,
    options: dict[str, Any],
) -> None:
    code, tiling = compiled(hopper, monkeypatch, dtype, d, mask, **options)
    width, suffix = -(-d // 16) * 16, ".BF16" if dtype == "bf16" else ""
    S, O = (f"HGMMA.64x{n}x16.F32{suffix}" for n in (tiling.B_c, width))
    assert set(products(code)) == {S, O}
    assert set(code.using("UTMALDG")) == {"UTMALDG.4D"}
    in_boxes = d <= 64  # O, at the end of a row tile and of the last
    assert code.using("UTMASTG") == ["UTMASTG.4D"] * 2 * in_boxes
    assert len(code.using("STSM")) == 2 * width // 16 * in_boxes
    assert set(code.using(r"STG\.E\.128")) == (set() if in_boxes else {"STG.E.128"})

    assert_clean([code], dtype)  # no atomics, no spill, no float64
    assert code.registers <= REGISTERS[tiling.B_r]
    assert not re.search(r"C75\d\d", code.log)  # products wait for each other
    assert 0 < len(code.using(r"WARPGROUP\.DEPBAR\.LE")) <= WAITS
    # Both alphas, and half of a thread's scores; of 7/8 ptxas moves some behind the wait.
    share = 3 / 4 if d <= 64 else 1 / 2
    assert beside_PV(code) and min(beside_PV(code)) >= 2 + share * tiling.B_c / 2
    assert len(code.using("USETMAXREG")) == 2
    # Descriptors are made in uniform registers: moved there by lanes, they would be ten times more.
    first, *_, last = (k for k, op in enumerate(code.opcodes) if op.startswith("HGMMA"))
    assert code.opcodes[first:last].count("R2UR") <= MOVES


def test_an_output_that_is_not_aligned(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single stores, and no spill; that its products wait for each other is a known limit."""
    code, _ = compiled(hopper, monkeypatch, "bf16", 100, NONE)
    assert_clean([code], "bf16")
    assert code.using(r"STG\.E\.U16") and not code.using(r"STG\.E\.128")
    assert code.registers <= REGISTERS[128] and products(code)


def test_an_output_of_64_columns_that_is_not_aligned(
    hopper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single stores as well, and no boxes; that it spills, too, is a known limit."""
    code, _ = compiled(hopper, monkeypatch, "bf16", 60, NONE)
    assert code.using(r"STG\.E\.U16") and not code.using("UTMASTG|STSM")


@pytest.mark.parametrize("d", [64, 128])
def test_counting_boxes(hopper: Path, monkeypatch: pytest.MonkeyPatch, d: int) -> None:
    """The counted kernel has the copies and the products of the plain one, and counts."""
    plain, _ = compiled(hopper, monkeypatch, "fp16", d, CAUSAL)
    counted, _ = compiled(hopper, monkeypatch, "fp16", d, CAUSAL, counted=True)
    assert products(counted) == products(plain)
    assert set(counted.using("UTMALDG")) == set(plain.using("UTMALDG")) == {"UTMALDG.4D"}
    assert counted.using("UTMASTG") == plain.using("UTMASTG")
    assert counted.using(ATOMIC) and not plain.using(ATOMIC)


# ---- which calls it takes ---------------------------------------------------------------------


@pytest.fixture
def elsewhere() -> None:
    """Sizes are checked for a GPU that is not here, or for one of compute capability 9.0."""
    if simulator.ACTIVE:
        pytest.skip("not about the simulator")
    if launch.gpu_available() and launch.compute_capability(None) != (9, 0):
        pytest.skip("this GPU has no fa3")


SHAPE = (2, 4, 300, 64)


@pytest.mark.usefixtures("elsewhere")
def test_a_prediction_needs_no_gpu() -> None:
    rows = api.predict(shape=SHAPE, method="fa3", dtype="bf16", heads_kv=2, n_k=500, causal=True)
    t = choose_hopper(64, 300, True)
    problem = Problem("fa3", "bf16", 2, 4, 2, 300, 500, 64, t, masking.causal())
    assert rows == io_model.predict(problem)
    assert {(row.method, row.block_r, row.block_c) for row in rows} == {("fa3", t.B_r, t.B_c)}
    assert api.predict(shape=SHAPE, dtype="bf16") == api.predict(
        shape=SHAPE, method="fa3", dtype="bf16"
    )


def steps(args: Any, i: Any, j: Any, s: Any) -> Any:
    return s + args[0][j]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"dtype": "fp32"}, TypeError, "q: got dtype fp32 .*accepted: fp16, bf16"),
        ({"dtype": "fp64"}, TypeError, "q: got dtype fp64 .*accepted: fp16, bf16"),
        ({"n_k": 0}, NotImplementedError, "k: got no keys"),
        ({"mask": np.ones((300, 300), bool)}, NotImplementedError, "mask: got an array"),
        (
            {"mask": masking.documents(np.zeros(300, int))},
            NotImplementedError,
            "mask: got an array",
        ),
        ({"alibi_slopes": np.ones(4)}, NotImplementedError, "alibi_slopes: got an array"),
        (
            {"score": masking.score(steps, masking.Table("own", np.zeros(300)))},
            NotImplementedError,
            "score: got an array",
        ),
        ({"shape": (2**31, 1, 64, 64), "n_k": 1}, ValueError, "q: got 2147483648 tiles of 64 row"),
        ({"shape": (1, 1, 2**31 - 255, 8), "n_k": 1}, ValueError, "q: got length 2147483393 "),
        ({"n_k": 2**31}, ValueError, "k: got length 2147483648 "),
        ({"shape": (1, 4, 300, 60)}, ValueError, "q: got strides .*multiples of 16 bytes"),
        ({"tiling": Tiling(64, 64, 32, 4)}, ValueError, "tiling: .*accepted: B_r 128 or 192"),
        ({"tiling": Tiling(128, 128, 32, 4)}, ValueError, "tiling: .*accepted: n_r=64, n_c=4"),
        ({"tiling": Tiling(128, 240, 64, 4)}, ValueError, "tiling: .* registers"),
        (
            {"tiling": Tiling(128, 160, 64, 4), "shape": (1, 1, 64, 160)},
            ValueError,
            "tiling: .* bytes of shared memory",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_what_fa3_refuses(options: dict[str, Any], error: type, said: str) -> None:
    with pytest.raises(error, match=f"^{said}"):
        api.predict(method="fa3", **{"shape": SHAPE, "dtype": "bf16"} | options)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("Q", Layout.contiguous(SHAPE, 2, 8), "q: got address 0x8, accepted: multiples of 16"),
        ("K", Layout.contiguous((2, 4, 300, 60), 2), "k: got strides .* multiples of 16 bytes"),
        ("V", Layout(SHAPE, (512, 128, 1024, 4), 2), "v: got strides .* 2 bytes in the last axis"),
        ("V", Layout(SHAPE, (153600, 38400, -128, 2), 2), "v: got strides .* multiples of 16"),
    ],
)
def test_what_the_hardware_cannot_copy(name: str, layout: Layout, said: str) -> None:
    """Named by the argument; "auto" takes fa2 for it."""

    def call(method: str) -> api._Shape:
        made = api._Shape(SHAPE, None, None, "bf16", method, Tiling(128, 128, 64, 4))
        made.layouts[name] = layout
        made.change(False, None, None, None, None, None)
        return made

    with pytest.raises(ValueError, match=f"^{said}"):
        call("fa3")
    assert call("auto").method == "fa2"
