"""The model against the counting kernels, integer by integer, and against the papers' formulas.

`test_attention.py` compares what `measure` counts. Here every array, workspaces and mask arrays
included, is also put where sectors are hard to predict, and the model is checked without kernels.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st
from strategies import forall

from fa2_numba import backward, io_model, masking, simulator, traffic
from fa2_numba.kernels import fa1, fa2, standard, tile_map
from fa2_numba.launch import Operands
from fa2_numba.masking import Mask, Score
from fa2_numba.problem import METHODS_BACKWARD, PORTABLE, PORTABLE_BACKWARD, Layout, Problem
from fa2_numba.tiling import Tiling, acc_bytes, hopper_backward

LAUNCH: dict[str, Any] = {"standard": standard.launch, "fa1": fa1.launch, "fa2": fa2.launch}
LAUNCH |= dict.fromkeys(METHODS_BACKWARD, backward.launch)
DTYPES = {"fp32": np.float32, "fp64": np.float64, "fp16": np.float16, "bf16": np.uint16}
ONE_WARP = Tiling(8, 8, 4, 8)
TILINGS = (
    ONE_WARP,
    Tiling(4, 8, 4, 8),  # B_r < B_c, one row a thread
    Tiling(8, 16, 8, 4),  # 4 lanes a row
    Tiling(2, 2, 2, 2),  # a block of 4 threads
    Tiling(8, 8, 8, 8),  # two warps
    Tiling(6, 5, 3, 1),  # nothing is a power of two, or a whole vector
)


# --- arrays in any place ----------------------------------------------------------------------

Shape = tuple[int, ...]


def memory(shape: Shape, dtype: Any, offset: int = 0) -> np.ndarray:
    """Zeros in C order that start `offset` elements after a multiple of 256 bytes."""
    dtype = np.dtype(dtype)
    raw = np.zeros(256 + (math.prod(shape) + offset) * dtype.itemsize, np.uint8)
    start = -raw.ctypes.data % 256 + offset * dtype.itemsize
    return np.ndarray(shape, dtype, raw.data, start)


PLACES: dict[str, Callable[[Shape, Any, int], np.ndarray]] = {
    "contiguous": memory,
    "heads inside": lambda s, t, o: memory((s[0], s[2], s[1], s[3]), t, o).swapaxes(1, 2),
    "columns outside": lambda s, t, o: memory((s[0], s[1], s[3], s[2]), t, o).swapaxes(2, 3),
    "wider rows": lambda s, t, o: memory((*s[:3], s[3] + 5), t, o)[..., 1 : s[3] + 1],
    "wider aligned rows": lambda s, t, o: memory((*s[:3], s[3] + 8), t, o)[..., 8:],
    "every second column": lambda s, t, o: memory((*s[:3], 2 * s[3]), t, o)[..., ::2],
    "rows reversed": lambda s, t, o: memory(s, t, o)[:, :, ::-1],
    "all reversed": lambda s, t, o: memory(s, t, o)[::-1, ::-1, ::-1, ::-1],
}
SHARED_PLACES: dict[str, Callable[[Shape, Any, int], np.ndarray]] = {  # stride 0: inputs only
    "one head for all": lambda s, t, o: np.broadcast_to(memory((s[0], 1, *s[2:]), t, o), s),
    "one row for all": lambda s, t, o: np.broadcast_to(memory((*s[:2], 1, s[3]), t, o), s),
    "one element": lambda s, t, o: np.broadcast_to(memory((1, 1, 1, 1), t, o), s),
}


def layout_of(array: np.ndarray) -> Layout:
    address = array.__array_interface__["data"][0]
    return Layout(array.shape, array.strides, array.itemsize, address)


# --- masks and score changes, by name ---------------------------------------------------------


def every_third(args: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i + j + b + h) % 3 != 0


@dataclass(frozen=True)
class Case:
    """A problem in words and numbers, so that it can be printed and stand in an ``@example``."""

    method: str = "fa2"
    dtype: str = "fp32"
    tiling: Tiling = ONE_WARP
    B: int = 1
    H_k: int = 1
    group: int = 1
    N_q: int = 11
    N_k: int = 19
    d: int = 4
    mask: str = "none"
    score: str = ""
    seed: int = 0
    places: tuple[tuple[str, str, int], ...] = ()  # (array, place, offset in elements)

    @property
    def H(self) -> int:
        return self.H_k * self.group

    def mask_of(self) -> Mask:
        """The masks named, joined by ``&``; parameters and values from the seed."""
        rng = np.random.default_rng(self.seed)
        mask = masking.none()
        for name in self.mask.split(" & "):
            mask = mask & self._one_mask(name, rng)
        return mask

    def _one_mask(self, name: str, rng: np.random.Generator) -> Mask:
        if name == "window":
            return masking.window(*rng.integers(-1, 7, 2))
        if name == "prefix":
            return masking.prefix_lm(int(rng.integers(0, self.N_k + 2)))
        if name.startswith("documents"):
            rows = self.B if name.endswith("b") else 1
            return masking.documents(np.sort(rng.integers(0, 4, (rows, self.N_k)), axis=1))
        if name.startswith("boolean"):
            full = (self.B, self.H, self.N_q, self.N_k)
            axes = name.removeprefix("boolean ")
            shape = tuple(n if a in axes else 1 for a, n in zip("bhqk", full, strict=True))
            values = rng.random(shape) < rng.choice([0.05, 0.5, 0.97])
            values[..., : shape[-1] // 2] |= rng.random() < 0.5  # tiles of each kind
            values[..., shape[-1] // 2 + 1 :] &= rng.random() < 0.5
            return masking.boolean(values)
        simple = {"none": masking.none, "causal": masking.causal, "skip": masking.causal_skip}
        return simple[name]() if name in simple else masking.custom(every_third)

    def score_of(self) -> Score:
        score = masking.unchanged()
        for name in self.score.split():
            acc = np.float64 if self.dtype == "fp64" else np.float32
            shape = (self.B, self.H) if self.seed % 2 else (self.H,)
            slopes = masking.alibi(np.full(shape, 0.5, acc))
            score = score.then(slopes if name == "alibi" else masking.softcap(3.0))
        return score

    def problem(self) -> Problem:
        sizes = (self.B, self.H, self.H_k, self.N_q, self.N_k, self.d, self.tiling)
        dlse = "backward" in self.method and self.seed % 3 > 0
        return Problem(self.method, self.dtype, *sizes, self.mask_of(), self.score_of(), dlse=dlse)


MASKS = (
    "none", "causal", "skip", "window", "prefix", "documents", "documents b", "custom",
    "boolean bhqk", "boolean qk", "boolean bk", "boolean hqk", "boolean bq", "boolean ",
    "causal & window", "causal & documents", "skip & documents b", "custom & boolean qk",
    "causal & boolean bhqk", "skip & boolean qk", "boolean bk & custom", "window & prefix & skip",
    "documents & boolean hk", "window & documents b & boolean qk",
)  # fmt: skip


@st.composite
def cases(draw: Any, methods: tuple[str, ...] = PORTABLE) -> Case:
    """Any problem of up to 24 rows and keys: the simulator counts one in about 0.1 s."""

    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def length(tile: int) -> int:
        return draw(
            st.sampled_from((0, 1, tile - 1, tile, tile + 1, 2 * tile)) | st.integers(0, 24)
        )

    tiling = pick(*TILINGS)
    places = []
    for name in ("Q", "K", "V", "O", "L", *(("dO", "dL") if methods != PORTABLE else ())):
        kinds = (*PLACES, *SHARED_PLACES) if name in "QKVdO" and name != "O" else tuple(PLACES)
        kind = draw(st.just("contiguous") | st.sampled_from(kinds))
        places.append((name, kind, pick(0, 0, 1, 2, 4, 8, 16)))
    return Case(
        pick(*methods), pick(*DTYPES), tiling,
        pick(1, 2), pick(1, 2), pick(1, 2, 3),
        length(tiling.B_r), length(tiling.B_c), pick(1, 3, 4, 5, 8, 12),
        pick(*MASKS), pick("", "", "softcap", "alibi", "softcap alibi"),
        draw(st.integers(0, 999)), tuple(places),
    )  # fmt: skip


# --- counted and predicted --------------------------------------------------------------------


class Placed(Operands):
    """Operands whose workspaces and mask arrays start 16 bytes after a multiple of 32, or not."""

    shift = 0

    def workspace(self, name: str) -> None:
        layout = self.problem.layout(name)
        dtype = np.float64 if layout.itemsize == 8 else np.float32
        self.arrays[name] = memory(layout.shape, dtype, self.shift // layout.itemsize)

    def put(self, args: tuple[Any, ...]) -> None:
        """Copy the arrays of masks and score changes."""
        for arg in args:
            if isinstance(arg, tuple):
                self.put(arg)
            elif isinstance(arg, masking.Table | masking.BooleanArray):
                values = np.asarray(arg.values)
                values = values.view(np.uint8) if values.dtype == bool else values
                place = memory(values.shape, values.dtype, self.shift // values.itemsize)
                place[...] = values
                self.arrays[arg.name] = place
                if isinstance(arg, masking.BooleanArray):
                    tile_map.launch(self.problem, self, arg)


def count(
    problem: Problem, arrays: dict[str, np.ndarray], shift: int = 0
) -> tuple[list[traffic.Traffic], Problem]:
    """The rows that the kernels count, and the problem with the layouts of all arrays."""
    A = Placed(problem, dict(arrays), lambda s, t: (memory(s, t), None), 0, 1.0, counted=True)
    A.shift = shift
    A.put((problem.mask.args, problem.score.args))
    LAUNCH[problem.method](problem, A)
    layouts = {name: layout_of(array) for name, array in A.arrays.items()}
    return A.rows(), replace(problem, layouts=layouts)


def place(case: Case) -> tuple[Problem, dict[str, np.ndarray]]:
    """The problem and its arrays, where the case puts them."""
    p = case.problem()
    kernel_dtype, acc = DTYPES[p.dtype], np.float64 if acc_bytes(p.dtype) == 8 else np.float32
    arrays = {}
    where = {name: (PLACES | SHARED_PLACES)[kind] for name, kind, _ in case.places}
    offsets = {name: offset for name, _, offset in case.places}
    names = ["Q", "K", "V", "O", "L"]
    if p.method in METHODS_BACKWARD:
        names += ["dO", "dL", "dQ", "dK", "dV"]
    for name in names:
        heads, length = (p.H_k, p.N_k) if name[-1] in "KV" else (p.H, p.N_q)
        shape = (p.B, heads, length, 1 if name[-1] == "L" else p.d)
        dtype = acc if name[-1] == "L" else kernel_dtype
        arrays[name] = where.get(name, memory)(shape, dtype, offsets.get(name, 0))
        if name[-1] == "L":
            arrays[name] = arrays[name][..., 0]
    return replace(p, layouts={name: layout_of(a) for name, a in arrays.items()}), arrays


on_the_simulator = pytest.mark.skipif(not simulator.ACTIVE, reason="counts on the simulator")


@on_the_simulator
# N_k a multiple of 4, B_c not: P was loaded 4 columns of 2 at a time
@example(Case("standard", tiling=Tiling(2, 2, 2, 2), N_k=12))
# rows before the keys see nothing: `finish` left out their m, so traffic hung on values
@example(Case("fa1", N_q=19, N_k=11, mask="causal"))
# one request was counted as two: Python moved the place of a subscript while a warp ran
@example(Case("fa2", N_q=16, N_k=8, d=8, mask="documents", score="alibi"))
# no key: no tile, no kinds
@example(Case("fa1", N_q=1, N_k=0, mask="causal & boolean qk"))
@example(Case("standard", N_q=3, N_k=0, mask="documents & boolean hk"))
# no row, but a mask that broadcasts along the rows has one
@example(Case("fa2", N_q=0, mask="boolean bk"))
@forall(60, cases())
def test_counted_is_predicted(case: Case) -> None:
    problem, arrays = place(case)
    counted, _ = count(problem, arrays)
    predicted = io_model.predict(problem)
    assert traffic.differences(counted, predicted) == []
    assert {(row.source, row.level, row.cycles) for row in predicted} <= {
        ("predicted", "issued", None)
    }
    assert all(row.requests for row in predicted)


@on_the_simulator
@forall(60, cases(PORTABLE_BACKWARD))
def test_counted_is_predicted_backward(case: Case) -> None:
    problem, arrays = place(case)
    counted, _ = count(problem, arrays)
    predicted = io_model.predict(problem)
    assert traffic.differences(counted, predicted) == []
    assert all(row.requests for row in predicted)


@on_the_simulator
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize("method", [*PORTABLE, *PORTABLE_BACKWARD])
@pytest.mark.parametrize("mask", ["boolean bhqk", "skip & documents b & boolean hk"])
def test_workspaces_and_mask_arrays_have_places_too(method: str, dtype: str, mask: str) -> None:
    case = Case(method, dtype, B=2, H_k=2, N_q=9, N_k=12, mask=mask, score="alibi")
    counted, problem = count(*place(case), shift=16)
    assert traffic.differences(counted, io_model.predict(problem)) == []


@pytest.mark.parametrize("method", PORTABLE_BACKWARD)
def test_without_rows_the_gradients_of_keys_are_still_written(method: str) -> None:
    rows = io_model.predict(Case(method, N_q=0, N_k=19, H_k=2, group=3).problem())
    stored = {r.array: r.elements for r in rows if r.op == "store"}
    assert stored == {"dK": 2 * 19 * 4, "dV": 2 * 19 * 4}
    for empty in ("B", "H_k"):
        assert io_model.predict(replace(Case(method), **{empty: 0}).problem()) == []


@pytest.mark.parametrize("method", PORTABLE)
@pytest.mark.parametrize("empty", ["B", "H_k", "N_q"])
def test_nothing_moves_without_rows(method: str, empty: str) -> None:
    for mask in ("none", "skip", "documents", "custom", "boolean bhqk"):
        assert io_model.predict(replace(Case(method, mask=mask), **{empty: 0}).problem()) == []


def test_a_table_of_a_custom_function_is_refused() -> None:
    table = masking.Table("own", np.zeros(4))
    mask, score = masking.custom(every_third, table), masking.score(every_third, table)
    p = Case().problem()
    for problem in (
        replace(p, mask=masking.causal() & mask),
        replace(p, score=masking.softcap(2.0).then(score)),
    ):
        with pytest.raises(ValueError, match="'own'"):
            io_model.predict(problem)


# --- one case by brute force ------------------------------------------------------------------


def test_walking_the_warps_of_fa2_gives_the_same() -> None:
    """Grouped heads, ragged causal tiles, rows of 36 bytes: threads one by one, as fa2.py says."""
    t = Tiling(16, 16, 8, 8)
    p = Problem("fa2", "fp32", 2, 4, 2, 37, 41, 9, t, masking.causal())
    touched: dict[tuple[Any, ...], list[int]] = {}

    def touch(array: str, instruction: tuple[int, ...], tid: int, b: int, h: int, row: int, k: int):
        heads, N, d = p.layout(array).shape[1:] if array != "L" else (p.H, p.N_q, 1)
        address = 4 * (((b * heads + h) * N + row) * d + k)
        touched.setdefault((array, *instruction, tid // 32), []).append(address // 32)

    for b, h, i in np.ndindex(p.B, p.H, t.T_r(p.N_q)):
        last = min((i + 1) * t.B_r, p.N_q) - 1 + p.N_k - p.N_q
        loads = [("Q", h, i * t.B_r, p.N_q)]
        for j in range(last // t.B_c + 1):
            loads += [(name, h // 2, j * t.B_c, p.N_k) for name in "KV"]
        for tid in range(t.threads):
            for n, (name, head, row_0, N) in enumerate(loads):
                for e in range(tid, 16 * p.d, t.threads):
                    if row_0 + e // p.d < N:
                        instruction = (b, h, i, n, e // t.threads)
                        touch(name, instruction, tid, b, head, row_0 + e // p.d, e % p.d)
            ty, tx = divmod(tid, t.n_c)
            for r in range(t.R_r):
                row = i * t.B_r + ty + r * t.n_r
                if row < p.N_q:
                    for c in range(2):  # d = 9 over 8 lanes: 2 neighbours each
                        if 2 * tx + c < p.d:
                            touch("O", (b, h, i, r, c), tid, b, h, row, 2 * tx + c)
                    if tx == 0:
                        touch("L", (b, h, i, r), tid, b, h, row, 0)

    for row in io_model.predict(p):
        mine = [sectors for key, sectors in touched.items() if key[0] == row.array]
        walked = sum(map(len, mine)), len(mine), sum(len(set(sectors)) for sectors in mine)
        assert (row.elements, row.requests, row.sectors) == walked, row.array


# --- at the size of a figure ------------------------------------------------------------------


@pytest.mark.parametrize("method", [*PORTABLE, *METHODS_BACKWARD])
@pytest.mark.parametrize(
    "mask",
    [
        masking.none(),
        masking.causal(),
        masking.causal_skip(),
        masking.window(4096, 0),
        masking.prefix_lm(1000) & masking.window(-1, 5),
    ],
    ids=lambda mask: mask.name,
)
def test_a_million_rows_take_no_time(method: str, mask: Mask) -> None:
    N = 2**20 - 3
    tiling = hopper_backward(128) if method.startswith("fa3_") else Tiling(64, 64, 8, 16)
    p = Problem(method, "fp16", 2, 16, 4, N, N, 128, tiling, mask)
    start = time.perf_counter()
    rows = io_model.predict(p)
    assert time.perf_counter() - start < 2
    if mask.name == "none":
        expected = sum(io_model.closed_form(p).values())
        assert io_model.total(rows, "elements") == expected > N * N


# --- the papers' formulas ---------------------------------------------------------------------


PLAIN_MASKS = (masking.none(), masking.causal(), masking.causal_skip())


@st.composite
def plain_problems(draw: Any, methods: tuple[str, ...] = PORTABLE) -> Problem:
    """Full or causal attention, dividing and ragged; the model needs no kernel, so any size."""
    pick = st.sampled_from
    tiling = draw(pick((*TILINGS, Tiling(64, 32, 8, 16))))
    size = st.integers(0, 300)
    N_q, N_k = draw(size | size.map(lambda n: n * tiling.B_r)), draw(size)
    H_k = draw(pick((1, 2)))
    mask = draw(pick(PLAIN_MASKS))
    sizes = (draw(pick((1, 3))), H_k * draw(pick((1, 4))), H_k, N_q, N_k, draw(st.integers(1, 128)))
    dtype, dlse = draw(pick(tuple(DTYPES))), draw(st.booleans())
    return Problem(draw(pick(methods)), dtype, *sizes, tiling, mask, dlse=dlse)


@st.composite
def fa3_problems(draw: Any) -> Problem:
    """The same of fa3's backward pass, which has one tiling, and rows and keys in each call."""
    pick = st.sampled_from
    H_k, mask = draw(pick((1, 2))), draw(pick(PLAIN_MASKS))
    N_q, N_k = draw(st.integers(1, 500)), draw(st.integers(1, 500))
    d = draw(pick((8, 64, 72, 128, 136, 256)))
    sizes = (draw(pick((1, 3))), H_k * draw(pick((1, 4))), H_k, N_q, N_k, d, hopper_backward(d))
    method = draw(pick(("fa3_backward", "fa3_backward_deterministic")))
    return Problem(method, draw(pick(("fp16", "bf16"))), *sizes, mask, dlse=draw(st.booleans()))


@forall(200, plain_problems())
def test_closed_forms_are_predicted(problem: Problem) -> None:
    assert_closed_form(problem)


@forall(300, plain_problems(PORTABLE_BACKWARD) | fa3_problems())
def test_closed_forms_of_gradients_are_predicted(problem: Problem) -> None:
    assert_closed_form(problem)


def assert_closed_form(problem: Problem) -> None:
    rows = io_model.predict(problem)
    moved = {
        f"{r.array} {r.op}": io_model.total(rows, "elements", array=r.array, op=r.op) for r in rows
    }
    assert moved == {name: n for name, n in io_model.closed_form(problem).items() if n}


@forall(100, plain_problems())
def test_nothing_moves_less_than_the_compulsory_bytes(problem: Problem) -> None:
    rows = io_model.predict(problem)
    least = io_model.compulsory(problem)
    seen = "QKV" if problem.mask.name == "none" and problem.N_q and problem.N_k else ""
    for name in (*seen, "O", "L"):
        assert io_model.total(rows, array=name) >= least[name]
    if problem.method == "fa2":
        assert io_model.total(rows, op="store") == least["O"] + least["L"]


@forall(150, plain_problems(PORTABLE_BACKWARD) | fa3_problems())
def test_gradients_move_no_less_than_the_compulsory_bytes(problem: Problem) -> None:
    rows = io_model.predict(problem)
    least = io_model.compulsory(problem)
    assert ("dL" in least) == problem.dlse
    seen = problem.mask.name == "none" and problem.N_q and problem.N_k
    for name in least if seen else ("dK", "dV"):
        assert io_model.total(rows, array=name) >= least[name]


def test_what_the_backward_pass_moves() -> None:
    """Elements over N d at N = 16384, d = 64, tiles of 64 x 64, as worked out from Algorithm 2."""
    N, d, t = 16384, 64, Tiling(64, 64, 8, 16)
    p = Problem("fa2_backward", "fp32", 1, 1, 1, N, N, d, t)
    moved = io_model.closed_form(p)
    streamed = N * (N // 64)
    assert moved["dQ atomic"] == streamed * d
    # K, V, dK, dV; dO and O for D; dQ cleared; D; Q, dO, dQ, L and D streamed past the key tiles
    assert sum(moved.values()) == 7 * N * d + N + (3 * d + 2) * streamed
    deterministic = io_model.closed_form(replace(p, method="fa2_backward_deterministic"))
    assert "dQ atomic" not in deterministic
    assert sum(deterministic.values()) == 9 * N * d + 3 * N + (2 * d + 2 + 2 * d) * streamed


@pytest.mark.parametrize("method", METHODS_BACKWARD)
def test_dram_is_a_model_of_the_forward_pass(method: str) -> None:
    with pytest.raises(ValueError, match=f"method: got '{method}'"):
        io_model.dram(Case(method).problem(), {"fa2": 132})


def test_the_textbook_numbers() -> None:
    """Elements over N d at N = 16384, d = 64, as worked out by hand from the formulas."""
    N, d, t = 16384, 64, Tiling(64, 64, 8, 16)
    p = Problem("fa2", "fp32", 1, 1, 1, N, N, d, t)
    assert sum(io_model.closed_form(p).values()) == 2 * N * d * (N // 64) + 2 * N * d + N
    causal = replace(p, mask=masking.causal())
    visits = 256 * 257 // 2
    assert sum(io_model.closed_form(causal).values()) == 2 * 64 * d * visits + 2 * N * d + N
    half = replace(p, dtype="fp16")
    assert io_model.total(io_model.predict(half)) == 2 * (2 * N * d * 256 + 2 * N * d) + 4 * N


def test_a_closed_form_for_other_masks_is_refused() -> None:
    with pytest.raises(ValueError, match="window"):
        io_model.closed_form(Case(mask="window").problem())


def test_theorem_2_and_the_bounds() -> None:
    N, d = 4096, 64
    for M in (d, d * d, 2**17, N * d):  # powers of two: lower_bound is exact
        orders = io_model.theorem_2(N, d, M)
        assert orders["standard"] == N * d + N * N
        assert orders["fa1"] * M == N * N * d * d
        assert orders["fa1"] >= io_model.lower_bound(N, d, M)
        assert (orders["fa1"] == io_model.lower_bound(N, d, M)) == (M >= d * d)
    assert io_model.theta("fa2", N, d, N * d) == N * d  # the whole input on chip: read once
    for M in (d - 1, N * d + 1):
        with pytest.raises(ValueError, match="M: got"):
            io_model.theta("fa2", N, d, M)
    with pytest.raises(ValueError, match="method: got 'fa4'"):
        io_model.theta("fa4", N, d, d)
    assert io_model.theta("fa3", N, d, d * d) == io_model.theta("fa2", N, d, d * d)


def test_fa1_follows_the_theorem() -> None:
    """With tiles of the papers' rule, loads and stores over N^2 d^2 / M tend to a constant."""
    N, d = 2**14, 64
    ratios = []
    for M in (2**14, 2**15, 2**16):
        t = Tiling(64, M // (4 * d), 8, 8)
        p = Problem("fa1", "fp32", 1, 1, 1, N, N, d, t)
        moved = io_model.total(io_model.predict(p), "elements")
        ratios.append(float(moved / io_model.theta("fa1", N, d, M)))
    # N^2 (3 d + 4) / B_c with B_c = M / 4 d: 12 + 16 / d, and the terms in N d
    assert ratios == pytest.approx([12 + 16 / d] * 3, rel=0.03)
