"""The machine code of the kernels for sm_90a, compiled and read without a GPU.

A launcher asks for its kernels with the argument types of a real call; instead of launching them,
`Compiled` compiles them and reads their SASS. So a new method is covered the day it is listed.
"""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import cuda

from fa2_numba import api, backward, clock, hbm, launch, masking, simulator, smem
from fa2_numba.kernels import (
    fa1,
    fa1_backward,
    fa2,
    fa2_backward,
    gradient_rows,
    standard,
    standard_backward,
    tile_map,
)
from fa2_numba.launch import Operands
from fa2_numba.masking import BooleanArray, Table
from fa2_numba.problem import Problem
from fa2_numba.tiling import REGISTERS_PER_SM, Tiling, choose

pytestmark = pytest.mark.codegen

H200_SHARED_BYTES = 232_448
N = 64
STORAGE = {"fp32": np.float32, "fp64": np.float64, "fp16": np.float16, "bf16": np.uint16}

KERNEL_FILES = (
    fa1, fa1_backward, fa2, fa2_backward, gradient_rows, standard, standard_backward, tile_map
)  # fmt: skip

# ---- compiling without a driver ---------------------------------------------------------------


def tool(name: str) -> str | None:
    """A disassembler from the wheels of the codegen extra, or from the path."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return shutil.which(name)
    return find_nvidia_binary_utility(name) or shutil.which(name)


@pytest.fixture(scope="module", autouse=True)
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A device of compute capability 9.0, as far as Numba's compiler asks."""
    if simulator.ACTIVE or not (tool("nvdisasm") and tool("cuobjdump")):
        pytest.skip("needs the codegen extra, and NUMBA_ENABLE_CUDASIM=0")
    from numba.cuda import codegen, dispatcher

    device = SimpleNamespace(compute_capability=(9, 0))
    context = SimpleNamespace(device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "get_current_device", lambda: device)
        patch.setattr(codegen, "devices", SimpleNamespace(get_context=lambda *_: context))
        yield tmp_path_factory.mktemp("cubins")


@dataclass(frozen=True)
class Code:
    """One compiled kernel."""

    name: str
    instructions: tuple[str, ...]  # opcode and operands, without predicate
    registers: int
    stack: int
    local: int
    threads: int
    code_bytes: int
    log: str  # what ptxas says

    @property
    def opcodes(self) -> list[str]:
        """First words: LDG.E.128, FFMA, ..."""
        return [line.split()[0].rstrip(";") for line in self.instructions]

    def using(self, pattern: str) -> list[str]:
        """Opcodes that match."""
        return [op for op in self.opcodes if re.match(pattern, op)]


def compile_kernel(kernel: Any, types: tuple[Any, ...], threads: int, folder: Path) -> Code:
    """Compile a dispatcher for argument types and disassemble it."""
    from numba.cuda import dispatcher

    compiled = dispatcher._Kernel(kernel.py_func, types, **kernel.targetoptions)
    cubin, code = folder / "kernel.cubin", bytes(compiled._codelibrary.get_cubin().code)
    cubin.write_bytes(code)

    def say(name: str, *options: str) -> str:
        command = [tool(name), *options, str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # type: ignore[arg-type]

    lines = re.findall(
        r"^\s+/\*[0-9a-f]{4,6}\*/\s+(?:@!?U?P\w+\s+)?(.*?;)", say("nvdisasm", "-c"), re.MULTILINE
    )
    use = say("cuobjdump", "-res-usage")
    numbers = (int(re.search(rf"{n}:(\d+)", use)[1]) for n in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    name, size = kernel.py_func.__name__, launch.machine_code_bytes(code)
    log = compiled._codelibrary.get_linkerinfo((9, 0, "a"))
    return Code(name, tuple(lines), *numbers, threads, size, log)


class Compiled(Operands):
    """Operands that compile where others launch."""

    def __init__(self, problem: Problem, folder: Path, counted: bool, clocks: int = -1):
        acc = np.float64 if problem.dtype == "fp64" else np.float32
        arrays = {
            n: np.empty(problem.layout(n).shape, acc if "L" in n else STORAGE[problem.dtype])
            for n in ("Q", "K", "V", "O", "L", "dO", "dL", "dQ", "dK", "dV")
        }
        super().__init__(problem, arrays, lambda s, t: (np.empty(s, t), None), 0, 1.0, counted)
        self.folder, self.clocks = folder, clocks
        self.codes: list[Code] = []
        self._own(problem.mask.args)
        self._own(problem.score.args)

    def _own(self, args: tuple[Any, ...]) -> None:
        for arg in args:
            if isinstance(arg, tuple):
                self._own(arg)
            elif isinstance(arg, Table):
                self.arrays[arg.name] = arg.values
            elif isinstance(arg, BooleanArray):
                self.arrays[arg.name] = arg.values.view(np.uint8)
                tile_map.launch(self.problem, self, arg)

    def _operand(self, name: str, array: Any, phases: tuple[str, ...]) -> Any:
        if not self.counted:
            return array
        return counted_array(array, len(phases))

    def clock(self, kernel: str, phases: tuple[str, ...], blocks: int, threads: int) -> Any:
        rows = np.zeros((1, 1, clock.HEADER + len(phases)), np.int64)
        return None if self.clocks < 0 else (rows, rows) if self.clocks else rows

    def shared(self, kernel: str, tiles: str) -> Any:
        return np.zeros((len(tiles), 2, smem.KINDS), np.int64) if self.counted else None

    def run(self, kernel: Any, blocks: int, threads: int, shared_bytes: int, *args: Any) -> None:
        types = tuple(kernel.typeof_pyval(arg) for arg in args)
        self.codes.append(compile_kernel(kernel, types, threads, self.folder))


@pytest.fixture(scope="module")
def compiled(hopper: Path) -> Any:
    """``compiled(method, dtype, d, ...) -> list of Code``, each compiled once."""

    @functools.cache
    def build(
        method: str,
        dtype: str,
        d: int,
        tiling: Tiling | None = None,
        mask: masking.Mask | None = None,
        score: masking.Score | None = None,
        counted: bool = False,
        clocks: int = -1,
        again: int = 0,
    ) -> list[Code]:
        tiling = tiling or choose(d, dtype, method, H200_SHARED_BYTES)
        mask, score = mask or masking.none(), score or masking.unchanged()
        problem = Problem(method, dtype, 1, 2, 1, N, N, d, tiling, mask, score)
        operands = Compiled(problem, hopper, counted, clocks)
        run = backward.launch if method in backward.METHODS_BACKWARD else api.METHODS[method]
        run(problem, operands)
        return operands.codes

    return build


# ---- what plain kernels may hold --------------------------------------------------------------

FP64 = r"D(ADD|MUL|FMA|SETP|MNMX|MMA)|.*\bF64\b|.*\.64H"
ATOMIC = r"ATOM|RED(?!UX)"  # ATOMG, ATOMS, REDG, ...; REDUX is a reduction within a warp


def assert_clean(codes: list[Code], dtype: str, adds: str = "") -> None:
    """No atomics but in the kernel `adds`, no spills, and float64 in fp64 kernels alone."""
    assert codes
    for code in codes:
        assert bool(code.using(ATOMIC)) == (code.name == adds), code.name
        assert (code.stack, code.local, code.using("LDL|STL")) == (0, 0, []), code.name
        if dtype != "fp64":
            assert code.using(FP64) == [], code.name
        assert code.registers * code.threads <= REGISTERS_PER_SM, code.name


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("method", api.PORTABLE)
def test_plain_kernels(compiled: Any, method: str, dtype: str) -> None:
    assert_clean(compiled(method, dtype, 64), dtype)


@pytest.mark.parametrize(
    ("method", "dtype", "d"),
    [
        ("fa2", "fp32", 128),
        ("fa2", "fp32", 256),
        ("fa2", "bf16", 128),
        ("fa2", "fp64", 256),
        ("fa1", "fp32", 128),
        ("standard", "fp32", 128),
    ],
)
def test_larger_heads(compiled: Any, method: str, dtype: str, d: int) -> None:
    assert_clean(compiled(method, dtype, d), dtype)


def test_a_head_that_is_no_whole_vector(compiled: Any) -> None:
    assert_clean(compiled("fa2", "fp32", 59), "fp32")


def test_fp64_computes_in_fp64(compiled: Any) -> None:
    """So the pattern above finds what it looks for."""
    (code,) = compiled("fa2", "fp64", 64)
    assert len(code.using("DFMA")) > 100
    assert code.using("FFMA") == []


# ---- the backward pass ------------------------------------------------------------------------

ADDS = {"fa2_backward": "fa2_backward_columns"}
BACKWARD = [
    *((method, "fp32", d) for method in backward.PORTABLE_BACKWARD for d in (64, 128)),
    ("fa2_backward", "fp64", 64),
    ("fa2_backward", "bf16", 64),
    ("fa2_backward", "fp32", 256),
    ("fa2_backward", "fp32", 59),
]


@pytest.mark.parametrize(("method", "dtype", "d"), BACKWARD)
def test_backward_kernels(compiled: Any, method: str, dtype: str, d: int) -> None:
    assert_clean(compiled(method, dtype, d), dtype, ADDS.get(method, ""))


@pytest.mark.parametrize("d", [64, 128])
def test_dQ_is_added_without_an_answer(compiled: Any, d: int) -> None:
    """A reduction (RED) does not bring the old value back, as an atomic operation (ATOM) does."""
    (code,) = (c for c in compiled("fa2_backward", "fp32", d) if c.name.endswith("columns"))
    tiling = choose(d, "fp32", "fa2_backward", H200_SHARED_BYTES)
    C, G = tiling.columns_of_O(d, "fp32")
    assert len(code.using("RED.*F32")) == tiling.R_r * C * G == len(code.using(ATOMIC))


@pytest.mark.parametrize("d", [64, 128])
def test_the_backward_pass_moves_16_bytes_at_once(compiled: Any, d: int) -> None:
    for code in compiled("fa2_backward_deterministic", "fp32", d):
        assert code.using(r"LDG\.E\.128")
        if code.name == "backward_rowsum":
            assert set(code.using("LDG")) == {"LDG.E.128"}
        else:  # L_i and D_i are single elements
            assert set(code.using("LDG")) == {"LDG.E.128", "LDG.E"}
            assert set(code.using("STG")) == {"STG.E.128"}
            assert len(code.using(r"LDS\.128")) >= 24 and code.using(r"STS\.128")


def test_a_product_is_one_loop_of_multiply_adds(compiled: Any) -> None:
    """S, dP, dV, dK and dQ, the last three also without masked terms: 128 of each unrolled."""
    (code,) = (c for c in compiled("fa2_backward", "fp32", 64) if c.name.endswith("columns"))
    assert len(code.using("FFMA")) == 8 * 128


@pytest.mark.parametrize("mask", ["window", "boolean", "own"])
def test_masks_of_the_backward_pass(compiled: Any, mask: str) -> None:
    assert_clean(
        compiled("fa2_backward", "fp32", 64, None, MASKS[mask]), "fp32", ADDS["fa2_backward"]
    )


@pytest.mark.parametrize("score", ["softcap", "alibi"])
def test_score_changes_of_the_backward_pass(compiled: Any, score: str) -> None:
    codes = compiled("fa2_backward", "fp32", 64, None, MASKS["causal"], SCORES[score])
    assert_clean(codes, "fp32", ADDS["fa2_backward"])


# ---- how memory is moved ----------------------------------------------------------------------


@pytest.mark.parametrize("method", api.PORTABLE)
@pytest.mark.parametrize("d", [64, 128])
def test_fp32_moves_16_bytes_at_once(compiled: Any, method: str, d: int) -> None:
    loads = {
        "standard_scores": {"LDG.E.128"},
        "standard_softmax": {"LDG.E.128"},
        "standard_output": {"LDG.E.128"},
        "fa1_loop": {"LDG.E.128", "LDG.E"},  # l and m are single elements
        "fa1_finish": {"LDG.E"},
        "fa2": {"LDG.E.128"},
    }
    for code in compiled(method, "fp32", d):
        assert set(code.using("LDG")) == loads.get(code.name, set()), code.name
        if code.name in ("fa2", "fa1_loop", "standard_scores"):
            assert len(code.using(r"LDS\.128")) >= 16, code.name
            assert code.using(r"STS\.128"), code.name
        if code.name in ("fa2", "fa1_loop", "standard_output"):
            assert code.using(r"STG\.E\.128"), code.name


def test_fp64_moves_16_bytes_at_once(compiled: Any) -> None:
    (code,) = compiled("fa2", "fp64", 64)
    assert set(code.using("LDG")) == {"LDG.E.128"}
    assert code.using(r"LDS\.128") and code.using(r"STG\.E\.128")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_8_narrow_elements_are_one_load(compiled: Any, dtype: str) -> None:
    """A request of 8 elements that is counted once has to be one instruction."""
    (code,) = compiled("fa2", dtype, 64)
    assert set(code.using("LDG")) == {"LDG.E.128"}


def test_unaligned_arrays_move_single_elements(compiled: Any) -> None:
    (code,) = compiled("fa2", "fp32", 59)
    assert set(code.using("LDG")) == {"LDG.E"}
    assert set(code.using("STG")) == {"STG.E"}


# ---- masks and score changes ------------------------------------------------------------------


def every_second(args: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i - j) % 2 == 0


def steps(args: Any, i: Any, j: Any, s: Any) -> Any:
    return s + np.float32(j % 3)


BOOLEAN = masking.Mask(
    "boolean",
    masking.boolean(np.ones(0)).rule,
    (masking.BooleanArray(np.ones((1, 2, N, N), bool)),),
)
DOCUMENTS = masking.documents(np.zeros(N, np.int32))
MASKS = {
    "causal": masking.causal(),
    "window": masking.window(3, 3),
    "causal documents": masking.causal() & DOCUMENTS,
    "boolean": BOOLEAN,
    "own": masking.custom(every_second),
}
SLOPES = np.ones(2, np.float32)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(compiled: Any, mask: str) -> None:
    codes = compiled("fa2", "fp32", 64, None, MASKS[mask])
    assert ("tile_map" in [code.name for code in codes]) == (mask == "boolean")
    assert_clean(codes, "fp32")


@pytest.mark.parametrize("method", ["standard", "fa1"])
def test_masks_of_the_others(compiled: Any, method: str) -> None:
    assert_clean(compiled(method, "fp32", 64, None, MASKS["window"]), "fp32")


def test_many_masks_at_once(compiled: Any) -> None:
    """No float64 and no atomics; but libNVVM stops unrolling, and S_ij leaves the registers."""
    many = DOCUMENTS & masking.causal_skip() & masking.prefix_lm(4) & BOOLEAN & MASKS["own"]
    for code in compiled("fa2", "fp32", 64, None, many):
        assert code.using(FP64) == code.using(ATOMIC) == []


SCORES = {
    "softcap": masking.softcap(5.0),
    "alibi": masking.alibi(SLOPES),
    "own": masking.score(steps),
}


@pytest.mark.parametrize(
    "score",
    [
        "softcap",
        "alibi",
        "own",
    ],
)
def test_score_changes(compiled: Any, score: str) -> None:
    assert_clean(compiled("fa2", "fp32", 64, None, MASKS["causal"], SCORES[score]), "fp32")


# ---- counting is an argument type -------------------------------------------------------------


@pytest.mark.parametrize("method", [*api.PORTABLE, *backward.PORTABLE_BACKWARD])
def test_counting_leaves_plain_kernels_as_they_are(compiled: Any, method: str) -> None:
    """The same SASS before and after the counted kernels were compiled from the same source."""
    what: Any = ("fp32", 16, Tiling(8, 8, 4, 8))  # small, to compile quickly
    what += (BOOLEAN,) if method == "fa2" else ()
    before = compiled(method, *what)
    if method == "fa2_backward":
        assert [code.name for code in before if code.using(ATOMIC)] == [ADDS[method]]
    counted = compiled(method, *what, counted=True)
    for module in KERNEL_FILES:
        for function in vars(module).values():
            if hasattr(function, "cache_clear") and function.__module__ == module.__name__:
                function.cache_clear()
    after = compiled(method, *what, again=1)
    assert [c.name for c in before] == [c.name for c in counted] == [c.name for c in after]
    for a, b in zip(before, after, strict=True):
        # the full name of a kernel, in its returns, holds the serial number of its compilation
        first, second = (re.sub(r"_ZN\w+", "", "\n".join(x.instructions)) for x in (a, b))
        assert first == second, a.name
    for code in counted:
        assert code.using(ATOMIC), code.name
        assert code.using("MATCH") and code.using("VOTE"), code.name


def test_code_is_as_long_as_its_instructions(compiled: Any) -> None:
    for code in compiled("fa1", "fp32", 64):
        assert code.code_bytes == 16 * len(code.instructions)


# ---- so is timing -----------------------------------------------------------------------------

CLOCK = "CS2R.*SR_CLOCKLO|S2UR.*SR_CLOCKLO"


@pytest.mark.parametrize("method", api.PORTABLE)
def test_plain_kernels_read_no_clock(compiled: Any, method: str) -> None:
    for code in compiled(method, "fp32", 64):
        assert not [x for x in code.instructions if re.search("SR_(CLOCK|GLOBALTIMER|SMID)", x)]


@pytest.mark.parametrize("d", [64, 128])
def test_a_clock_costs_no_spill_and_no_block(compiled: Any, d: int) -> None:
    """The registers of fa2 stay those of the plain kernel, so does its occupancy."""
    (plain,), (timed,) = compiled("fa2", "fp32", d), compiled("fa2", "fp32", d, clocks=0)
    assert_clean([timed], "fp32")
    assert timed.registers <= max(plain.registers, 255)
    blocks = [REGISTERS_PER_SM // (-(-c.registers // 8) * 8 * c.threads) for c in (plain, timed)]
    assert blocks[0] == blocks[1]


@pytest.mark.parametrize("clocks", [0, 1])
def test_marks_stay_where_they_are_written(compiled: Any, clocks: int) -> None:
    """Each mark follows its barrier at once, and loads and stores do not pass one.

    In fa2 a tile has: K_j asked for, K_j stored, V_j asked for, V_j stored; a barrier and a mark,
    four times.
    """
    (code,) = compiled("fa2", "fp32", 64, clocks=clocks)
    seen = []
    for x in code.instructions:
        for what, pattern in (
            ("clock", CLOCK), ("load", r"LDG\.E\.128"), ("store", r"STS\.128"), ("barrier", "BAR")
        ):  # fmt: skip
            if re.match(pattern, x) and (
                not seen or what in ("clock", "barrier") or seen[-1] != what
            ):
                seen.append(what)
    tile = ["load", "clock", "store", "clock"] * 2 + ["barrier", "clock"] * 4
    text, pattern = " ".join(seen), " ".join(tile)
    assert text.count(pattern) == 1, text
    assert seen.count("clock") == 2 + 2 + 8 + 1 + 2  # begin; Q_i; a tile; epilogue; finish


def counted_array(array: np.ndarray, phases: int = 1) -> hbm.Counted:
    """What ``Counted(array)`` is, without putting a tally on a device."""
    counted = object.__new__(hbm.Counted)
    tally = np.zeros((phases, 2, 3), np.int64)
    counted.__dict__.update(data=array, tally=tally, row=0, phases=phases)
    return counted


def ask_size(A, B):
    B[0, 0] = A.size


def take_a_slice(A, B):
    B[0, 0] = A[1:][0, 0]


def add_atomically(A, B):
    cuda.atomic.add(A, (0, 0), 1)


def add_atomically_to_integers(A, B):
    hbm.atomic_add(B, (0, 0), 1.0)
    A[0, 0] = 0


def loop_over(A, B):
    for x in A:
        B[0, 0] = x[0]


def index_a_row(A, B):
    B[0, 0] = A[0][0]


def index_with_too_few(A, B):
    B[0, 0] = A[0,][0]


def store_a_row(A, B):
    A[0] = 1


@pytest.mark.parametrize(
    "function",
    [
        ask_size,
        take_a_slice,
        loop_over,
        index_a_row,
        index_with_too_few,
        add_atomically,
        add_atomically_to_integers,
        store_a_row,
    ],
)
def test_other_uses_of_a_counted_array_do_not_compile(hopper: Path, function: Any) -> None:
    """So no access can be forgotten: what `hbm` does not define is a typing error."""
    import numba.core.errors
    import numba.cuda.core.errors

    kernel = hbm.jit(function)
    A, B = counted_array(np.zeros((4, 4), np.float32)), np.zeros((4, 4), np.float32)
    if function is add_atomically_to_integers:
        B = B.astype(np.int32)
    errors = numba.core.errors.TypingError, numba.cuda.core.errors.TypingError
    with pytest.raises(errors):
        compile_kernel(kernel, tuple(kernel.typeof_pyval(x) for x in (A, B)), 1, hopper)


# ---- what a tiling promises -------------------------------------------------------------------


def test_a_block_of_1024_threads_has_its_registers(compiled: Any) -> None:
    tiling = Tiling(64, 64, 32, 32)
    (code,) = compiled("fa2", "fp32", 128, tiling)
    assert code.threads == 1024
    assert code.registers * code.threads <= REGISTERS_PER_SM
