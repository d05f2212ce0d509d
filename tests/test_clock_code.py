"""The machine code of timed kernels, read without a GPU: what a mark is, and where it stands.

The plain kernels' code is the business of ``test_codegen.py``; its tools are used here.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_codegen import H200_SHARED_BYTES, Code, Compiled, compile_kernel
from test_codegen import assert_clean as assert_clean
from test_codegen import hopper as hopper

from fa2_numba import api, clock, masking
from fa2_numba.problem import Problem
from fa2_numba.tiling import choose

pytestmark = pytest.mark.codegen

N = 64
READ = re.compile(r"(S2UR|CS2R(\.32)?) \w+, SR_CLOCKLO")
ROWS = np.zeros((1, 1, 1), np.int64)
ARGUMENTS = {"sums": ROWS, "kept": (ROWS, ROWS)}  # as a PhaseClock gives them


class Timed(Compiled):
    """Operands that compile timed kernels."""

    kind = "sums"

    def clock(self, kernel: str, phases: tuple[str, ...], blocks: int, threads: int) -> Any:
        return ARGUMENTS[self.kind]


@pytest.fixture(scope="module")
def timed(hopper: Path) -> Any:
    """``timed(kind, method, d) -> list of Code``, without the kernels that have no clock."""
    found: dict[Any, list[Code]] = {}

    def build(kind: str, method: str, d: int = 64) -> list[Code]:
        if (kind, method, d) not in found:
            tiling = choose(d, "fp32", method, H200_SHARED_BYTES)
            sizes = (1, 2, 1, N, N, d)
            problem = Problem(method, "fp32", *sizes, tiling, masking.none(), masking.unchanged())
            operands = Timed(problem, hopper, counted=False)
            operands.kind = kind
            api.PORTABLE[method](problem, operands)
            found[kind, method, d] = [c for c in operands.codes if reads(c)]
        return found[kind, method, d]

    return build


def reads(code: Code) -> list[int]:
    """Where the code reads the cycle counter."""
    return [n for n, line in enumerate(code.instructions) if READ.match(line)]


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("method", api.PORTABLE)
def test_a_clock_needs_no_memory_and_no_atomics(timed: Any, kind: str, method: str) -> None:
    codes = timed(kind, method)
    assert len(codes) == {"standard": 3}.get(method, 1)
    assert_clean(codes, "fp32")


@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.parametrize("method", ["fa2", "fa1"])
def test_a_barrier_is_followed_by_its_mark(timed: Any, kind: str, method: str) -> None:
    """No access to memory and no arithmetic of the next phase comes between the two."""
    (code,) = timed(kind, method)
    barriers = [n for n, line in enumerate(code.instructions) if line.startswith("BAR.")]
    assert len(barriers) >= 3
    work = re.compile(r"LD|ST[GS]|FFMA|FADD|FMUL|MUFU|SHFL")
    for n in barriers:
        read = next(m for m in reads(code) if m > n)
        assert not [line for line in code.instructions[n + 1 : read] if work.match(line)]


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_the_products_stay_between_their_marks(timed: Any, kind: str) -> None:
    """Hundreds of multiply-adds before the mark of Q K^T, and before that of P V."""
    (code,) = timed(kind, "fa2")
    places = [-1, *reads(code)]
    between = [
        sum(line.startswith("FFMA") for line in code.instructions[a:b])
        for a, b in itertools.pairwise(places)
    ]
    assert len([n for n in between if n >= 200]) == 2


def test_empty_marks_are_those_of_the_kernels(timed: Any, hopper: Path) -> None:
    """What a mark costs is calibrated with the instruction that fa2's marks are made of."""
    kernel = clock.build_empty_marks()
    for kind, argument in ARGUMENTS.items():
        types = tuple(kernel.typeof_pyval(arg) for arg in (argument, 1))
        empty = compile_kernel(kernel, types, 128, hopper)
        assert (empty.stack, empty.local) == (0, 0)
        (fa2,) = timed(kind, "fa2")
        used = [[code.instructions[n].split()[0] for n in reads(code)] for code in (empty, fa2)]
        most = [max(set(ops), key=ops.count) for ops in used]
        assert most[0] == most[1]
