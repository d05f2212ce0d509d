"""Masks and score changes as functions, against the reference's boolean arrays by brute force.

The kernels compile these functions and the model calls them; here they are plain Python.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from fa2_numba import masking, reference
from fa2_numba.masking import EMPTY, FULL, PARTIAL
from fa2_numba.tiling import ceil_div

SIZES = list(itertools.product((1, 2, 3, 4, 5, 7, 9), repeat=2))
TILES = ((4, 4), (3, 5), (1, 1), (8, 2), (16, 16))
IDS = np.array([0, 0, 0, 1, 1, 4, 4, 4, 5])


def plain(function: Any) -> Any:
    return function


def documents(n_q: int, n_k: int) -> tuple[Any, np.ndarray]:
    ids = IDS[:n_k]
    return masking.documents(ids), reference.document_mask(ids, n_q, n_k)[0, 0]


def boolean(n_q: int, n_k: int) -> tuple[Any, np.ndarray]:
    """In blocks, so that tiles of each kind occur."""
    rng = np.random.default_rng(n_q * 16 + n_k)
    coarse = rng.integers(0, 3, (ceil_div(n_q, 4), ceil_div(n_k, 4)))
    coarse = coarse.repeat(4, 0).repeat(4, 1)[:n_q, :n_k]
    dense = (coarse == 2) | ((coarse == 1) & (rng.random((n_q, n_k)) < 0.5))
    return masking.boolean(dense[None, None]), dense


def every_second(args: Any, b: Any, h: Any, i: Any, j: Any) -> bool:
    return (i - j) % args[0] == 0


def custom(n_q: int, n_k: int) -> tuple[Any, np.ndarray]:
    i, j = np.arange(n_q)[:, None] + n_k - n_q, np.arange(n_k)
    return masking.custom(every_second, 2), (i - j) % 2 == 0


def windows(left: int, right: int) -> Any:
    return lambda q, k: (masking.window(left, right), reference.window_mask(q, k, left, right))


def prefixes(prefix: int) -> Any:
    return lambda q, k: (masking.prefix_lm(prefix), reference.prefix_lm_mask(q, k, prefix))


def causal(n_q: int, n_k: int) -> tuple[Any, np.ndarray]:
    return masking.causal(), reference.causal_mask(n_q, n_k)


def skip(n_q: int, n_k: int) -> tuple[Any, np.ndarray]:
    return masking.causal_skip(), reference.causal_mask(n_q, n_k)


def joined(a: Any, b: Any) -> Any:
    def make(n_q: int, n_k: int) -> tuple[Any, np.ndarray]:
        (mask_a, dense_a), (mask_b, dense_b) = a(n_q, n_k), b(n_q, n_k)
        return mask_a & mask_b, dense_a & dense_b

    return make


# Masks of which the loop visits no tile in vain.
EXACT = {
    "none": lambda q, k: (masking.none(), np.ones((q, k), bool)),
    "causal": causal,
    "causal-skip": skip,
    "window(-1,-1)": windows(-1, -1),
    "window(2,0)": windows(2, 0),
    "window(0,3)": windows(0, 3),
    "window(-1,1)": windows(-1, 1),
    "window(1,-1)": windows(1, -1),
    "window(20,20)": windows(20, 20),
    "prefix(0)": prefixes(0),
    "prefix(3)": prefixes(3),
    "prefix(99)": prefixes(99),
    "documents": documents,
    "boolean": boolean,
}
OTHERS = {
    "custom": custom,
    "causal&window": joined(causal, windows(3, -1)),
    "causal&documents": joined(causal, documents),
    "skip&boolean": joined(skip, boolean),
    "window&custom": joined(windows(2, 2), custom),
    "prefix&documents": joined(prefixes(2), documents),
    "nothing": joined(windows(0, 0), prefixes(0)),
    "all three": joined(joined(causal, boolean), documents),
}


def arguments(args: tuple[Any, ...], n_q: int, n_k: int, B_r: int, B_c: int) -> tuple[Any, ...]:
    """What a launch makes of a mask's arguments."""
    out: list[Any] = []
    for arg in args:
        if isinstance(arg, tuple):
            out.append(arguments(arg, n_q, n_k, B_r, B_c))
        elif isinstance(arg, masking.Table):
            out.append(arg.values)
        elif isinstance(arg, masking.BooleanArray):
            kinds = np.empty((1, 1, ceil_div(n_q, B_r), ceil_div(n_k, B_c)), np.uint8)
            for t, j in np.ndindex(*kinds.shape[2:]):
                tile = arg.values[0, 0, t * B_r : (t + 1) * B_r, j * B_c : (j + 1) * B_c]
                kinds[0, 0, t, j] = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
            out += [arg.values, kinds, B_r, B_c, n_k - n_q]
        else:
            out.append(arg)
    return tuple(out)


@pytest.mark.parametrize("make", (EXACT | OTHERS).values(), ids=EXACT | OTHERS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_and_rows_by_brute_force(make: Any, tile: tuple[int, int]) -> None:
    B_r, B_c = tile
    for n_q, n_k in SIZES:
        mask, dense = make(n_q, n_k)
        args = arguments(mask.args, n_q, n_k, B_r, B_c)
        tile_range, tile_kind, (row_bounds, visible) = masking.tile_functions(
            mask.rule, B_r, B_c, plain
        )
        at = f"{n_q} x {n_k}, tiles {B_r} x {B_c}"

        # each row, those that only fill the last tile included
        for row in range(ceil_div(n_q, B_r) * B_r):
            i, lo, hi = row_bounds(args, 0, 0, row, n_q, n_k)
            assert i == row + n_k - n_q
            assert lo >= hi or 0 <= lo < hi <= n_k, at
            got = [lo <= j < hi and bool(visible(args, 0, 0, i, j)) for j in range(n_k)]
            assert got == (list(dense[row]) if row < n_q else [False] * n_k), f"{at}, row {row}"

        for t in range(ceil_div(n_q, B_r)):
            j_begin, j_end, lo_last, hi_first = tile_range(args, 0, 0, t, n_q, n_k)
            assert 0 <= j_begin <= j_end <= ceil_div(n_k, B_c), at
            for j in range(ceil_div(n_k, B_c)):
                seen = dense[t * B_r : (t + 1) * B_r, j * B_c : (j + 1) * B_c]
                kind = EMPTY
                if j_begin <= j < j_end:
                    kind = tile_kind(args, 0, 0, t, j, lo_last, hi_first, n_q, n_k)
                if kind == EMPTY:
                    assert not seen.any(), f"{at}: tile {t}, {j} is left out"
                elif make in EXACT.values():
                    assert seen.any(), f"{at}: tile {t}, {j} is visited in vain"
                if kind == FULL:
                    assert seen.all(), f"{at}: tile {t}, {j} is not masked"
                    assert (j + 1) * B_c <= n_k, f"{at}: tile {t}, {j} has keys beyond N_k"


@pytest.mark.parametrize("make", (EXACT | OTHERS).values(), ids=EXACT | OTHERS)
def test_bounds_never_decrease(make: Any) -> None:
    for n_q, n_k in SIZES:
        mask, _ = make(n_q, n_k)
        args = arguments(mask.args, n_q, n_k, 4, 4)
        bounds, _, _ = mask.rule.functions(plain)
        ends = [bounds(args, 0, 0, row + n_k - n_q, n_k) for row in range(n_q)]
        for side in zip(*ends, strict=True):
            assert list(side) == sorted(side)


@pytest.mark.parametrize("make", [causal, windows(2, 0), prefixes(2)])
def test_full_tiles_are_found(make: Any) -> None:
    """Not only correct but used: most tiles of a long causal problem need no mask."""
    n, B = 64, 8
    mask, dense = make(n, n)
    tile_range, tile_kind, _ = masking.tile_functions(mask.rule, B, B, plain)
    for t in range(n // B):
        j_begin, j_end, lo_last, hi_first = tile_range(mask.args, 0, 0, t, n, n)
        for j in range(j_begin, j_end):
            kind = tile_kind(mask.args, 0, 0, t, j, lo_last, hi_first, n, n)
            assert (kind == FULL) == dense[t * B : (t + 1) * B, j * B : (j + 1) * B].all()


def test_documents_by_batch() -> None:
    ids = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
    args = tuple(table.values for table in masking.documents(ids).args)
    bounds, _, _ = masking.documents(ids).rule.functions(plain)
    assert bounds(args, 0, 0, 2, 4) == (2, 4)
    assert bounds(args, 1, 0, 2, 4) == (1, 4)
    assert bounds(args, 1, 0, -1, 4) == (0, 0)


# ---- combining and naming ---------------------------------------------------------------------


def test_none_is_the_identity_and_names_are_joined() -> None:
    a, b = masking.causal(), masking.window(3, 0)
    assert (masking.none() & a) is a
    assert (a & masking.none()) is a
    assert (a & b).name == "causal&window(3,0)"
    assert not (a & b).rule.elementwise
    assert (a & masking.causal_skip()).rule.elementwise


def test_what_varies_between_calls_compiles_nothing_new() -> None:
    """Window, prefix, table and array are arguments; only a new function is a new kernel."""
    ids = np.zeros(4, int)
    for a, b in (
        (masking.window(1, 0), masking.window(-1, 7)),
        (masking.prefix_lm(1), masking.prefix_lm(2)),
        (masking.documents(ids), masking.documents(ids + 1)),
        (masking.boolean(ids == 0), masking.boolean(ids == 1)),
        (masking.custom(every_second, 2), masking.custom(every_second, 3)),
        (masking.causal() & masking.window(1, 1), masking.causal() & masking.window(2, 2)),
    ):
        assert a.rule == b.rule and hash(a.rule) == hash(b.rule)
    assert masking.softcap(1.0).change == masking.softcap(2.0).change
    slopes = np.ones(2, np.float32)
    assert masking.alibi(slopes).change == masking.alibi(2 * slopes).change


@pytest.mark.parametrize(
    ("ids", "error", "said"),
    [
        (np.array([0.0, 1.0]), TypeError, "ids: got dtype float64, accepted: integers"),
        (np.zeros((1, 2, 3), int), ValueError, r"ids: got shape \(1, 2, 3\), accepted"),
        (np.array([0, 1, 0]), ValueError, "ids: .* must not decrease"),
        (np.array([[0, 1], [1, 0]]), ValueError, "ids: .* must not decrease"),
    ],
)
def test_documents_are_checked(ids: np.ndarray, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        masking.documents(ids)


def test_a_negative_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix: got -1, accepted: 0 or more"):
        masking.prefix_lm(-1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: masking.window(-2, 0),
        lambda: masking.window(1.5, 0),
        lambda: masking.prefix_lm(1.5),
    ],
)
def test_numbers_of_masks_are_checked(make: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="got"):
        make()


@pytest.mark.parametrize("end", [2**63 - 1, 2**63, 2**70])
def test_a_huge_window_is_unbounded_in_64_bits(end: int) -> None:
    mask = masking.window(end, end)
    bounds, _, _ = mask.rule.functions(plain)
    for i in (-5, 0, 7):
        lo, hi = bounds(tuple(np.int64(a) for a in mask.args), 0, 0, np.int64(i), np.int64(8))
        assert lo <= 0 and hi >= 8


# ---- score changes ----------------------------------------------------------------------------


def applied(score: masking.Score, acc: Any, i: int, j: int, s: float, h: int = 0) -> Any:
    def host(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            host(a) if isinstance(a, tuple) else a.values if isinstance(a, masking.Table) else a
            for a in args
        )

    prepare, change = score.change.functions(plain, acc)
    return change(prepare(host(score.args), 0, h), i, j, acc(s))


@pytest.mark.parametrize("acc", [np.float32, np.float64])
def test_score_changes_by_formula(acc: Any) -> None:
    slopes = np.array([0.5, 0.25], acc)
    cap, alibi = masking.softcap(3.0), masking.alibi(slopes)
    close = {"rel": 4 * float(np.finfo(acc).eps)}
    assert applied(masking.unchanged(), acc, 1, 2, 7.0) == 7
    assert applied(cap, acc, 1, 2, 7.0) == pytest.approx(3 * math.tanh(7 / 3), **close)
    assert applied(alibi, acc, 2, 5, 7.0, h=1) == 7 - 0.25 * 3
    assert applied(alibi, acc, 5, 2, 7.0, h=0) == 7 - 0.5 * 3
    both = cap.then(alibi)  # the cap first
    assert applied(both, acc, 2, 5, 7.0) == pytest.approx(3 * math.tanh(7 / 3) - 1.5, **close)
    own = masking.score(lambda args, i, j, s: s + args[0] * (i - j), 2.0, name="own")
    assert applied(both.then(own), acc, 2, 5, 7.0) == pytest.approx(
        3 * math.tanh(7 / 3) - 1.5 - 6, **close
    )
    for score in (cap, alibi, both, both.then(own)):
        assert applied(score, acc, 2, 5, 7.0).dtype == acc
    assert both.then(own).name == "softcap(3)+alibi+own"


def test_unchanged_is_the_identity() -> None:
    cap = masking.softcap(3.0)
    assert masking.unchanged().then(cap) is cap
    assert cap.then(masking.unchanged()) is cap


@pytest.mark.parametrize(("lo", "hi"), [(2**40, 2**62), (-(2**62), 2**62), (2**62, -(2**62))])
def test_bounds_of_a_row_are_those_of_keys_that_exist(lo: int, hi: int) -> None:
    """Kernels number keys with 32 bits: fa3 once saw every key where `lo` was 2**40."""
    rule = masking.Rule(lambda args, b, h, i, N_k: (lo, hi))
    _, _, (row_bounds, _) = masking.tile_functions(rule, 8, 8, lambda f: f)
    i, first, end = row_bounds((), 0, 0, 3, 10, 20)
    assert i == 13
    assert 0 <= first <= 20 and 0 <= end <= 20
    assert set(range(first, end)) == {j for j in range(20) if lo <= j < hi}
