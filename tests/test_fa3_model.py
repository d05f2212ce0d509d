"""What fa3 moves and where it puts things, in integers: no GPU is asked.

`walked` counts what the docstrings of `kernels/fa3.py`, `hbm.box_loader`, `hbm.box_storer` and
`warpgroup` say, one box and one lane after the other, and knows nothing of the model.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st
from strategies import DTYPES as ELEMENTS
from strategies import Backend, forall

from fa2_numba import api, backward, io_model, masking, reference, tensor_map
from fa2_numba.problem import Layout, Problem
from fa2_numba.tiling import HOPPER_INFO, HOPPER_SHARED_BYTES, MAX_HEAD_DIM, Tiling, choose_hopper

SMALL, TALL = Tiling(128, 64, 64, 4), Tiling(192, 48, 96, 4)
WIDE = Tiling(128, 128, 64, 4)
MASKS = {
    "none": masking.none(),
    "causal": masking.causal(),
    "skip": masking.causal_skip(),
    "window": masking.window(70, 10),
    "left window": masking.window(33, 0),
    "right window": masking.window(-1, 5),
}


# ---- counts -----------------------------------------------------------------------------------


def visible(p: Problem) -> np.ndarray:
    """Which keys each row sees, by the reference's own definition."""
    if p.mask.name == "none" or not p.mask.name:
        return np.ones((p.N_q, p.N_k), bool)
    if "causal" in p.mask.name:
        return reference.causal_mask(p.N_q, p.N_k)
    return reference.window_mask(p.N_q, p.N_k, *(int(x) for x in p.mask.args))


def key_tiles(p: Problem, seen: np.ndarray, i: int) -> range:
    """Key tiles that row tile i copies: from the first that a row sees to the last."""
    T_c = p.tiling.T_c(p.N_k)
    if p.mask.rule is masking.causal_skip().rule:
        return range(T_c)
    keys = np.flatnonzero(seen[i * p.tiling.B_r : (i + 1) * p.tiling.B_r].any(axis=0))
    return range(keys[0] // p.tiling.B_c, keys[-1] // p.tiling.B_c + 1) if len(keys) else range(1)


def walked(p: Problem) -> dict[str, tuple[int, int, int]]:
    """Array to elements, requests and sectors."""
    counts = {name: [0, 0, 0] for name in "QKVOL"}
    seen, t, group = visible(p), p.tiling, p.H // p.H_k
    width = p.fa3_store_width

    def box(name: str, b: int, h: int, row: int, rows: int, column: int) -> None:
        """Of each row what there is, in sectors, and the rest, in pieces of 32 bytes."""
        counts[name][1] += 1
        for n in range(row, row + rows):
            columns = range(column, min(column + 64, p.d)) if n < p.layout(name).shape[2] else ()
            counts[name][0] += len(columns)
            counts[name][2] += len({address(name, (b, h, n, c)) // 32 for c in columns})
            counts[name][2] += -(-(64 - len(columns)) * 2 // 32)

    def address(name: str, place: tuple[int, ...]) -> int:
        A = p.layout(name)
        return sum(x * s for x, s in zip(place, A.strides, strict=True)) + A.address

    def store_box(b: int, h: int, row: int) -> None:
        """Of 16 rows of O those that there are, each with the sectors that it lies in."""
        counts["O"][1] += 1
        for n in range(row, min(row + 16, p.N_q)):
            counts["O"][0] += p.d
            counts["O"][2] += len({address("O", (b, h, n, c)) // 32 for c in range(p.d)})

    def store(name: str, places: list[tuple[int, ...]], elements: int) -> None:
        """What the active lanes of a warp store at once."""
        at = [address(name, place) for place in places]
        counts[name][0] += elements * len(at)
        counts[name][1] += bool(at)
        counts[name][2] += len({x // 32 for x in at})

    for b, h, i in np.ndindex(p.B, p.H, t.T_r(p.N_q)):
        for first, column in itertools.product(range(0, t.B_r, 64), range(0, p.d, 64)):
            box("Q", b, h, i * t.B_r + first, 64, column)
        for j, name, column in itertools.product(key_tiles(p, seen, i), "KV", range(0, p.d, 64)):
            box(name, b, h // group, j * t.B_c, t.B_c, column)
        for warp in range(i * t.B_r, (i + 1) * t.B_r, 16):
            store("L", [(b, h, n) for n in range(warp, min(warp + 16, p.N_q))], 1)
            if p.fa3_stores_boxes:
                store_box(b, h, warp)
        for warp, r in itertools.product(range(0, t.B_r, 16), range(2)):
            if p.fa3_stores_boxes:
                break
            rows = [i * t.B_r + warp + 8 * r + lane // 4 for lane in range(32)]
            for chunk, at in itertools.product(range(0, -(-p.d // 16) * 2, 4), range(0, 8, width)):
                columns = [8 * (chunk + lane % 4) + at for lane in range(32)]
                lanes = [
                    (b, h, n, c)
                    for n, c in zip(rows, columns, strict=True)
                    if n < p.N_q and c < p.d
                ]
                store("O", lanes, width)
    return {name: (n[0], n[1], n[2]) for name, n in counts.items() if any(n)}


LAYOUTS = {
    "contiguous": lambda s: Layout.contiguous(s, 2),
    # (B, N, H, d)
    "heads inside": lambda s: Layout(
        s, tuple(2 * n for n in (s[2] * s[1] * s[3], s[3], s[1] * s[3], 1)), 2
    ),
    # rows of 16 bytes more, which begin in the middle of a sector
    "wide rows": lambda s: Layout(
        s, tuple(2 * n for n in (s[1] * s[2] * (s[3] + 8), s[2] * (s[3] + 8), s[3] + 8, 1)), 2, 16
    ),
    "one head for all": lambda s: Layout(s, (2 * s[2] * s[3], 0, 2 * s[3], 2), 2, 48),
}  # fmt: skip
OF_O = {  # those that the copy unit cannot store
    "shifted": lambda s: Layout.contiguous(s, 2, 2),
    "upwards": lambda s: Layout(
        s, (2 * s[1] * s[2] * s[3], 2 * s[2] * s[3], -2 * s[3], 2), 2, 2 * s[2] * s[3]
    ),
}


@st.composite
def problems(draw: Any) -> Problem:
    """Ragged, grouped, strided, masked; up to 4 row tiles and 7 key tiles."""
    t = draw(st.sampled_from((SMALL, TALL, WIDE)))
    d = draw(st.sampled_from((8, 24, 40, 64, 72, 128, 136)))
    B, H_k, group = (draw(st.integers(1, 2)) for _ in range(3))
    N_q, N_k = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    H, mask = H_k * group, MASKS[draw(st.sampled_from(sorted(MASKS)))]
    p = Problem("fa3", "bf16", B, H, H_k, N_q, N_k, d, t, mask)
    for name in "QKVO":
        of_O = ["contiguous", "heads inside", "wide rows", "shifted", "upwards"]
        kinds = sorted(LAYOUTS) if name != "O" else of_O
        p.layouts[name] = (LAYOUTS | OF_O)[draw(st.sampled_from(kinds))](p.layout(name).shape)
    return p


def one(N_q: int, N_k: int, mask: str, d: int = 64, H: int = 1, H_k: int = 1) -> Problem:
    return Problem("fa3", "fp16", 1, H, H_k, N_q, N_k, d, SMALL, MASKS[mask])


# rows without keys: the first row tile has one key tile all the same
@example(one(300, 40, "causal"))
@example(one(300, 40, "left window"))
@example(one(257, 1, "window", d=72, H=4, H_k=2))
@example(one(203, 60, "none", d=24))  # boxes of O that end among their rows, and empty ones
@forall(40, problems())
def test_walking_the_boxes_gives_the_prediction(problem: Problem) -> None:
    predicted = {
        row.array: (row.elements, row.requests, row.sectors) for row in io_model.predict(problem)
    }
    assert predicted == walked(problem)


def test_an_output_that_is_not_aligned_is_stored_one_by_one() -> None:
    p = one(70, 70, "none", d=72)
    odd = replace(p, layouts={"O": Layout.contiguous((1, 1, 70, 72), 2, 2)})
    assert (p.fa3_store_width, odd.fa3_store_width) == (8, 1)
    (row,) = (r for r in io_model.predict(odd) if r.array == "O")
    assert (row.elements, row.requests, row.sectors) == walked(odd)["O"]
    assert row.requests == 8 * walked(p)["O"][1]


@pytest.mark.parametrize(
    ("d", "layout", "boxes"),
    [(64, "contiguous", True), (8, "heads inside", True), (56, "wide rows", True),
     (72, "contiguous", False), (64, "shifted", False), (64, "upwards", False),
     (60, "contiguous", False)],
)  # fmt: skip
def test_which_outputs_are_stored_in_boxes(d: int, layout: str, boxes: bool) -> None:
    p = one(100, 70, "none", d=d)
    p.layouts["O"] = (LAYOUTS | OF_O)[layout](p.layout("O").shape)
    assert p.fa3_stores_boxes == boxes
    if boxes:
        tensor_map.check("out", p.layouts["O"], (1, 1, 16, 64), "bf16")
    far = replace(p.layouts["O"], strides=(2**40, *p.layouts["O"].strides[1:]))
    assert replace(p, layouts={"O": far}).fa3_stores_boxes == boxes  # of one batch
    two = replace(far, shape=(2, *far.shape[1:]))
    assert not replace(p, B=2, layouts={"O": two}).fa3_stores_boxes


def test_stored_boxes_by_hand() -> None:
    """40 rows of 32, in three of the eight boxes of a row tile: a row is 64 bytes, 2 sectors.

    Of every second one that starts in the middle of a sector, 3.
    """
    p = one(40, 70, "none", d=32)
    (row,) = (r for r in io_model.predict(p) if r.array == "O")
    assert (row.elements, row.requests, row.sectors) == (40 * 32, 8, 40 * 2)
    p.layouts["O"] = Layout(p.layout("O").shape, (3200, 3200, 80, 2), 2)
    (row,) = (r for r in io_model.predict(p) if r.array == "O")
    assert (row.elements, row.requests, row.sectors) == (40 * 32, 8, 20 * 2 + 20 * 3)


def test_rows_name_the_phases() -> None:
    rows = io_model.predict(one(300, 300, "causal"))
    assert [(r.array, r.phase, r.op) for r in rows] == [
        ("Q", "load Q_i", "load"), ("K", "load K_j, V_j", "load"), ("V", "load K_j, V_j", "load"),
        ("O", "epilogue", "store"), ("L", "epilogue", "store"),
    ]  # fmt: skip
    assert all(r.method == "fa3" and r.bytes == r.elements * (4 if r.array == "L" else 2)
               for r in rows)  # fmt: skip


@forall(100, problems())
def test_closed_forms_are_predicted(problem: Problem) -> None:
    if problem.mask.rule not in (MASKS[name].rule for name in ("none", "causal", "skip")):
        with pytest.raises(ValueError, match="mask: got window"):
            io_model.closed_form(problem)
        return
    rows = io_model.predict(problem)
    moved = {f"{row.array} {row.op}": row.elements for row in rows}
    assert moved == io_model.closed_form(problem)


def test_the_closed_form_by_hand() -> None:
    """N = 1024, 8 row tiles of 128, key tiles of 128: causal row tile i reads i + 1 of them."""
    p = Problem("fa3", "bf16", 2, 6, 2, 1024, 1024, 128, WIDE, masking.causal())
    keys = 128 * 128 * sum(range(1, 9))
    assert io_model.closed_form(p) == {
        "Q load": 12 * 1024 * 128, "K load": 12 * keys, "V load": 12 * keys,
        "O store": 12 * 1024 * 128, "L store": 12 * 1024,
    }  # fmt: skip
    skip = replace(p, mask=masking.causal_skip())
    assert io_model.closed_form(skip)["K load"] == 12 * 8 * 1024 * 128


@pytest.mark.parametrize("empty", ["B", "H", "N_q"])
def test_nothing_moves_without_rows(empty: str) -> None:
    sizes = {"B": 1, "H": 2, "H_k": 1, "N_q": 9, "N_k": 9} | {empty: 0}
    p = Problem("fa3", "bf16", *sizes.values(), 64, SMALL, masking.causal())
    assert io_model.predict(p) == []


# ---- shared memory ----------------------------------------------------------------------------

# What a caller may give: every B_c, both B_r.
TILINGS = [Tiling(B_r, B_c, B_r // 2, 4) for B_r in (128, 192) for B_c in range(16, 257, 16)]


@pytest.mark.parametrize("d", [1, 8, 64, 65, 72, 96, 128, 160, 192, 256])
def test_places_do_not_overlap(d: int) -> None:
    accepted = 0
    for t in TILINGS:
        rings, end = t.hopper_layout(d)
        consumers, row = t.B_r // 64, -(-d // 64) * 128
        places = sorted(
            (ring.start + n * ring.size, ring.start + (n + 1) * ring.size)
            for ring in rings.values()
            for n in range(ring.places)
        )
        assert places[0][0] == 0 and places[-1][1] == end
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
        for name, rows in (("Q", 64), ("K", t.B_c), ("V", t.B_c)):
            assert rings[name].size == rows * row
            for barriers in (rings[f"{name} full"], rings[f"{name} empty"]):
                assert barriers[1:] == (8, rings[name].places) and barriers.start % 8 == 0
            # the swizzle's pattern repeats every 1024 bytes
            assert rings[name].start % 1024 == rings[name].size % 1024 == 0
        assert rings["Q"].places in (consumers, 2 * consumers)
        assert ("O" in rings) == (d <= 64)
        if d <= 64:  # for each warp, 16 rows of 128 bytes
            assert rings["O"][1:] == (16 * row, 4 * consumers) and rings["O"].start % 1024 == 0
        assert rings["K"].places == rings["V"].places == 2
        assert rings["info"][1:] == (HOPPER_INFO, 1)
        try:
            t.check(d, "bf16", "fa3", HOPPER_SHARED_BYTES)
        except ValueError:
            continue
        accepted += 1
        assert end <= HOPPER_SHARED_BYTES
    assert accepted


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("N_q", [1, 2048, 2049, 100_000])
def test_every_head_dimension_has_a_tiling(N_q: int, bounded: bool, plain: bool) -> None:
    for d in range(1, MAX_HEAD_DIM + 1):
        t = choose_hopper(d, N_q, bounded, plain)
        for dtype in ("fp16", "bf16"):
            t.check(d, dtype, "fa3", HOPPER_SHARED_BYTES)
        assert t.shared_bytes(d, "bf16", "fa3") == t.hopper_layout(d)[1] <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize(
    ("tiling", "d", "said"),
    [
        (Tiling(64, 64, 32, 4), 64, "accepted: B_r 128 or 192, B_c a multiple of 16 up to 256"),
        (Tiling(128, 72, 64, 4), 64, "accepted: B_r 128 or 192, B_c a multiple of 16 up to 256"),
        (Tiling(128, 272, 64, 4), 64, "accepted: B_r 128 or 192, B_c a multiple of 16 up to 256"),
        (Tiling(128, 128, 32, 8), 64, "accepted: n_r=64, n_c=4"),
        (Tiling(192, 128, 64, 4), 64, "accepted: n_r=96, n_c=4"),
        (Tiling(192, 128, 96, 4), 128, "needs about 188 registers .* a thread may have 160"),
        (Tiling(128, 128, 64, 4), 256, "needs about 252 registers .* a thread may have 232"),
        (Tiling(128, 144, 64, 4), 160, "needs 270,?[0-9]+ bytes of shared memory"),
    ],
)
def test_tilings_that_fa3_refuses(tiling: Tiling, d: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"^tiling: .*{said}"):
        tiling.check(d, "bf16", "fa3", HOPPER_SHARED_BYTES)


def test_one_byte_less_is_refused() -> None:
    need = WIDE.shared_bytes(128, "bf16", "fa3")
    WIDE.check(128, "bf16", "fa3", need)
    with pytest.raises(ValueError, match=f"needs {need} bytes .* method=fa3, d=128, dtype=bf16"):
        WIDE.check(128, "bf16", "fa3", need - 1)


# ---- the simulator ----------------------------------------------------------------------------


@pytest.mark.parametrize("function", [api.attention, api.measure, api.predict])
def test_the_simulator_has_no_fa3(backend: Backend, function: Any) -> None:
    if backend.name != "simulator":
        pytest.skip("about the simulator")
    x = np.ones((4, 8, 64), ELEMENTS["bf16"])
    with pytest.raises(ValueError, match=r"method: got fa3, accepted .*: auto, standard"):
        function(x, x, x, method="fa3")


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_simulator_has_no_gradients_of_fa3(backend: Backend, deterministic: bool) -> None:
    if backend.name != "simulator":
        pytest.skip("about the simulator")
    x, lse = np.ones((4, 8, 64), ELEMENTS["bf16"]), np.ones((4, 8), np.float32)
    six = (x, x, x, x, x, lse)
    for function in (
        backward.attention_backward, backward.measure_backward, backward.predict_backward
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"method: got fa3, accepted .*: auto, standard"):
            function(*six, method="fa3", deterministic=deterministic)
    rows = backward.predict_backward(*six, deterministic=deterministic)
    assert {row.method for row in rows} == {
        "fa2_backward_deterministic" if deterministic else "fa2_backward"
    }
