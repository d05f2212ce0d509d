"""fa3's backward pass where there is no GPU: its machine code for sm_90a, and which calls it takes.

A product that ptxas cannot keep in flight costs half the speed and no error: it shows as a warning
and as waits (``WARPGROUP.DEPBAR``) more. Which products those are depends on ptxas's version
(docs/decisions/0014); these tests see the one that is installed.
"""

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_codegen import ATOMIC, FP64, Code
from test_codegen import hopper as hopper
from test_fa3_code import Hopper
from test_fa3_code import elsewhere as elsewhere

from fa2_numba import backward, io_model, masking
from fa2_numba.kernels import fa3_gradients
from fa2_numba.problem import Layout, Problem
from fa2_numba.tiling import HOPPER_SHARED_BYTES, Tiling, gradient_layout, hopper_backward

pytestmark = pytest.mark.codegen

NONE, CAUSAL, WINDOW = masking.none(), masking.causal(), masking.window(100, 20)
REGISTERS = 168  # of a thread at the launch of 384, before setmaxnreg moves them


@pytest.fixture(scope="module")
def compiled(hopper: Path) -> Any:
    """``compiled(method, dtype, d, mask) -> {kernel: Code}``, each compiled once."""

    @cache
    def build(
        method: str, dtype: str, d: int, mask: masking.Mask, counted: bool = False
    ) -> dict[str, Code]:
        problem = Problem(method, dtype, 1, 2, 1, 64, 64, d, hopper_backward(d), mask)
        operands = Hopper(problem, hopper, counted)
        operands.scale = np.float32(1.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fa3_gradients, "processors", lambda device: 132)
            backward.launch(problem, operands)
        return {code.name: code for code in operands.codes}

    return build


def consumers_loop(code: Code) -> tuple[str, ...]:
    """From where the consumers take registers to the last product."""
    ops = code.opcodes
    first = next(n for n, op in enumerate(ops) if op.startswith("USETMAXREG.TRY_ALLOC"))
    return tuple(ops[first : max(n for n, op in enumerate(ops) if op.startswith("HGMMA")) + 1])


def assert_in_flight(code: Code, waits: int, products: set[str], dtype: str) -> None:
    suffix = ".BF16" if dtype == "bf16" else ""
    assert set(code.using("HGMMA")) == {f"HGMMA.64x{n}x16.F32{suffix}" for n in products}
    assert set(code.using("UTMALDG")) == {"UTMALDG.4D"}
    assert not re.search(r"C75\d\d", code.log)  # products wait for each other
    assert len(code.using(r"WARPGROUP\.DEPBAR\.LE")) == waits
    assert len(code.using("USETMAXREG")) == 2
    assert set(code.using(r"STG\.E\.128")) == {"STG.E.128"}
    assert code.using(ATOMIC) == [] and code.using(FP64) == []
    assert code.registers <= REGISTERS and code.threads == 384
    assert not [op for op in consumers_loop(code) if op.startswith(("LDL", "STL"))]
    assert code.code_bytes < 160_000  # as long as it compiles in 5 to 8 s


def assert_addresses_are_uniform(code: Code, others: int = 8) -> None:
    """A few come from a thread's registers. In a loop of which ptxas does not see that all lanes
    leave it together, each k16 brings one or two more: at least 24."""
    assert consumers_loop(code).count("R2UR") <= others


def unfenced_at_meetings(code: Code) -> list[int]:
    """Stores to shared memory since the last fence, at each meeting of the consumers."""
    found, stores = [], 0
    for text in code.instructions:
        if re.search(r"STSM|STS\.128", text):
            stores += 1
        elif "FENCE.VIEW.ASYNC" in text:
            stores = 0
        elif re.search(r"BAR\.SYNC\S* 0x3, 0x100", text):
            found.append(stores)
    return found


# ---- dK, dV and dQ at once --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "d", "mask", "waits"),
    [
        ("bf16", 64, NONE, 12),
        ("fp16", 64, CAUSAL, 12),
        ("bf16", 40, WINDOW, 12),
        ("bf16", 128, NONE, 8),
        ("bf16", 128, CAUSAL, 8),
        ("bf16", 96, WINDOW, 8),
    ],
    ids=lambda x: x.name or "none" if isinstance(x, masking.Mask) else None,
)
def test_dQ_is_added_by_the_copy_unit(
    compiled: Any, dtype: str, d: int, mask: masking.Mask, waits: int
) -> None:
    codes = compiled("fa3_backward", dtype, d, mask)
    assert [*codes] == ["fa3_backward_prepare", "fa3_backward", "fa3_backward_finish"]
    code, width = codes["fa3_backward"], -(-d // 16) * 16
    assert_in_flight(code, waits, {64, width}, dtype)
    # One place of the code, where there are bounds; else libNVVM writes the loop out three times.
    assert code.using("UBLKRED") == ["UBLKRED.G.S.ADD.F32.RN"] * (1 if mask.rule.bounded else 3)
    assert_addresses_are_uniform(code)
    # The consumers meet in the first step, in the loop and behind it.
    assert unfenced_at_meetings(code) == [0] * 3
    # They take and pass turns: in the first step and in the loop at each half, and the first is
    # passed, the last taken.
    turns = [re.search(r"BAR\.(SYNC|ARV)\S* (R\d+|0x[12]), 0x100", x) for x in code.instructions]
    assert sum(map(bool, turns)) == 4 * (2 if d <= 64 else 1) + 2
    assert code.using(r"STSM\.16\.MT88\.4") and code.using(r"STS\.128") and code.using(r"LDS\.64")
    # K_j and V_j of up to 64 columns become registers, in pieces of 16 columns, once.
    assert len(code.using(r"LDSM\.16\.M88\.4")) == (2 * width // 16 if d <= 64 else 0)
    assert code.stack == code.local == 0
    for name in ("fa3_backward_prepare", "fa3_backward_finish"):
        other = codes[name]
        assert (other.stack, other.using(ATOMIC), other.using("HGMMA|UBLKRED|UTMALDG")) == (
            0, [], []
        )  # fmt: skip
        assert other.using(r"LDG\.E\.128") and other.using(r"STG\.E\.128")


# ---- the same bits each time ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "d", "mask", "waits"),
    [("bf16", 64, CAUSAL, 10), ("bf16", 128, NONE, 6), ("fp16", 128, CAUSAL, 6)],
    ids=lambda x: x.name or "none" if isinstance(x, masking.Mask) else None,
)
def test_the_deterministic_form_adds_nothing(
    compiled: Any, dtype: str, d: int, mask: masking.Mask, waits: int
) -> None:
    codes = compiled("fa3_backward_deterministic", dtype, d, mask)
    assert [*codes] == ["fa3_backward_prepare", "fa3_backward", "fa3_dQ"]
    assert_in_flight(codes["fa3_backward"], waits, {64, d}, dtype)
    assert_in_flight(codes["fa3_dQ"], 6, {64, d}, dtype)
    if d == 128:  # with fewer k16, more of their addresses are in registers before the loop
        assert_addresses_are_uniform(codes["fa3_dQ"])
    assert codes["fa3_backward"].stack == codes["fa3_dQ"].stack == 0
    for code in codes.values():
        assert code.using(f"UBLKRED|UTMAREDG|{ATOMIC}") == []


@pytest.mark.parametrize(
    ("dtype", "mask"), [("bf16", NONE), ("fp16", CAUSAL)], ids=["none", "causal"]
)
def test_large_heads_have_a_kernel_a_gradient(compiled: Any, dtype: str, mask: Any) -> None:
    codes = compiled("fa3_backward", dtype, 256, mask)
    assert [*codes] == ["fa3_backward_prepare", "fa3_dV", "fa3_dK", "fa3_dQ"]
    for name in ("fa3_dV", "fa3_dK", "fa3_dQ"):
        assert_in_flight(codes[name], 6 if name != "fa3_dV" else 4, {64, 256}, dtype)
        assert_addresses_are_uniform(codes[name], 9 if name == "fa3_dV" else 8)
        # The producer, and what computes rows again, have 40 registers and the values that all
        # warps begin with: some of these go to memory, once, and come back there.
        assert codes[name].stack <= 64
        assert codes[name].using("UBLKRED|UTMAREDG") == []


# ---- shared memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("d", range(8, 257, 8))
def test_a_block_has_space(d: int) -> None:
    parts = [gradient_layout(gradient, d) for gradient in ("dQ", "dK", "dV")]
    if d <= 128:
        parts.append(hopper_backward(d).hopper_backward_layout(d))
    for rings, _ in parts[:3]:  # dV frees Y while a slow warp may still read L
        assert rings["L, D"].places == 2 * rings["Y"].places
    for rings, end in parts:
        assert end <= HOPPER_SHARED_BYTES
        places = sorted((r.start, r.start + r.size * r.places) for r in rings.values() if r.size)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
        for name, ring in rings.items():
            if name in ("K", "V", "Q", "dO", "dS", "X", "Z", "Y", "W"):  # the swizzle's pattern
                assert ring.start % 1024 == ring.size % 1024 == 0
            if name in ("dQ", "L, D"):  # whole pieces of 16 bytes
                assert ring.start % 16 == ring.size % 16 == 0
            if name.endswith(("full", "empty", "open")):
                assert ring.start % 8 == 0 and ring.size == 8
    for method in ("fa3_backward", "fa3_backward_deterministic"):
        hopper_backward(d).check(d, "bf16", method, HOPPER_SHARED_BYTES)
        need = hopper_backward(d).shared_bytes(d, "bf16", method)
        with pytest.raises(ValueError, match=f"needs {need} bytes of shared memory"):
            hopper_backward(d).check(d, "bf16", method, need - 1)


# ---- counting ---------------------------------------------------------------------------------


def test_counting_adds_of_the_copy_unit(compiled: Any) -> None:
    """The counted kernel has the copies, the products and the adds of the plain one, and counts."""
    plain = compiled("fa3_backward", "fp16", 64, CAUSAL)["fa3_backward"]
    counted = compiled("fa3_backward", "fp16", 64, CAUSAL, True)["fa3_backward"]
    for what in ("HGMMA", "UBLKRED"):
        assert set(counted.using(what)) == set(plain.using(what)) != set()
    assert counted.using(ATOMIC) and not plain.using(ATOMIC)


# ---- which calls it takes ---------------------------------------------------------------------

SHAPE = (2, 4, 300, 64)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 256])
def test_a_prediction_needs_no_gpu(d: int, deterministic: bool) -> None:
    shape = (2, 4, 300, d)
    sizes = {"shape": shape, "dtype": "bf16", "heads_kv": 2, "n_k": 500, "causal": True}
    how = {"dlse": True, "deterministic": deterministic}
    rows = backward.predict_backward(**sizes, **how, method="fa3")
    name = "fa3_backward_deterministic" if deterministic else "fa3_backward"
    problem = Problem(name, "bf16", 2, 4, 2, 300, 500, d, hopper_backward(d), CAUSAL, dlse=True)
    assert rows == io_model.predict(problem) == backward.predict_backward(**sizes, **how)
    assert {(row.method, row.block_r, row.block_c) for row in rows} == {
        (name, 128 if d == 64 else 64, 128)
    }
    adds = {row.array for row in rows if row.op == "atomic"}
    assert adds == (set() if deterministic or d > 128 else {"dQ_acc"})


def steps(args: Any, i: Any, j: Any, s: Any) -> Any:
    return s + args[0][j]


def one(args: Any, i: Any, j: Any, s: Any) -> Any:
    return 1.0


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"dtype": "fp32"}, TypeError, "q: got dtype fp32 .*accepted: fp16, bf16"),
        ({"n_k": 0}, NotImplementedError, "k: got no keys"),
        ({"shape": (2, 4, 0, 64), "n_k": 5}, NotImplementedError, "q: got no rows"),
        ({"mask": np.ones((300, 300), bool)}, NotImplementedError, "mask: got an array"),
        ({"alibi_slopes": np.ones(4)}, NotImplementedError, "alibi_slopes: got an array"),
        (
            {"score": masking.score(steps, masking.Table("own", np.zeros(300)), derivative=one)},
            NotImplementedError,
            "score: got an array",
        ),
        ({"shape": (1, 4, 300, 60)}, ValueError, "q: got strides .*multiples of 16 bytes"),
        ({"tiling": Tiling(64, 128, 64, 4)}, ValueError, "tiling: .*accepted backward: Tiling"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_what_it_refuses(options: dict[str, Any], error: type, said: str) -> None:
    """And "auto" takes fa2 for it: then there is no tiling without a GPU, and so no prediction."""
    given = {"shape": SHAPE, "dtype": "bf16"} | options
    with pytest.raises(error, match=f"^{said}"):
        backward.predict_backward(method="fa3", **given)
    if "score" in options:
        return  # of whose table no model knows who reads what
    given.setdefault("tiling", Tiling(64, 64, 8, 16))
    rows = backward.predict_backward(method="auto", **given)
    assert {row.method for row in rows} == {"fa2_backward"}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout.contiguous(SHAPE, 2, 8), "got address 0x8, accepted: multiples of 16"),
        (Layout(SHAPE, (0, 0, 0, 0), 2), "got strides .* 2 bytes in the last axis"),
    ],
)
@pytest.mark.parametrize(("name", "argument"), [("Q", "q"), ("K", "k"), ("V", "v"), ("dO", "dout")])
def test_what_the_hardware_cannot_copy(name: str, argument: str, layout: Layout, said: str) -> None:
    """Named by the argument; "auto" takes fa2 for it."""

    def call(method: str) -> backward._BackwardShape:
        tiling = hopper_backward(64) if method == "fa3" else Tiling(64, 64, 8, 16)
        made = backward._BackwardShape(SHAPE, None, None, "bf16", method, tiling)
        made.turn(False, False)
        made.layouts[name] = layout
        made.change(False, None, None, None, None, None)
        return made

    with pytest.raises(ValueError, match=f"^{argument}: {said}"):
        call("fa3")
    assert call("auto").method == "fa2_backward"
