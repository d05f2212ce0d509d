"""Tile sizes, thread grids and shared memory: the numbers that kernels, model and tests read."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fa2_numba import problem, tiling
from fa2_numba.tiling import (
    BACKWARD_TILES,
    BANK_BYTES,
    CANDIDATES,
    CANDIDATES_BACKWARD,
    DTYPE_BYTES,
    MAX_HEAD_DIM,
    REGISTERS_PER_SM,
    REGISTERS_PER_THREAD,
    Tiling,
    acc_bytes,
    choose,
)

LIMITS = {"H200": 232_448, "A100": 166_912, "RTX 4090": 101_376, "T4": 65_536}
METHODS = problem.PORTABLE
HEAD_DIMS = (1, 2, 3, 4, 8, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 255, 256)


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    """Any legal tiling of at most 64 rows or columns a thread grid's step."""
    n_c = draw(st.sampled_from((1, 2, 4, 8, 16, 32)))
    n_r = draw(st.integers(1, 1024 // n_c).filter(lambda n: n * n_c <= 32 or n * n_c % 32 == 0))
    return Tiling(n_r * draw(st.integers(1, 8)), n_c * draw(st.integers(1, 8)), n_r, n_c)


any_tiling = given(tilings(), st.integers(1, MAX_HEAD_DIM), st.sampled_from(tuple(DTYPE_BYTES)))
many = settings(max_examples=200)


# ---- what a tiling may be ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "error", "said"),
    [
        ((0, 8, 1, 8), ValueError, "B_r must be at least 1, got 0"),
        ((8, 8, -1, 8), ValueError, "n_r must be at least 1, got -1"),
        ((8.0, 8, 4, 8), TypeError, "B_r must be an int, got 8.0"),
        ((True, 8, 1, 8), TypeError, "B_r must be an int, got True"),
        ((8, "8", 4, 8), TypeError, "B_c must be an int, got '8'"),
        ((10, 8, 4, 8), ValueError, "n_r must divide B_r, got n_r=4, B_r=10"),
        ((8, 10, 4, 8), ValueError, "n_c must divide B_c, got n_c=8, B_c=10"),
        ((8, 6, 8, 6), ValueError, "n_c must be a power of two up to 32 .*, got 6"),
        ((8, 64, 8, 64), ValueError, "n_c must be a power of two up to 32 .*, got 64"),
        ((12, 4, 12, 4), ValueError, "multiple of 32 up to 1024, or below 32; got 48"),
        ((64, 32, 64, 32), ValueError, "multiple of 32 up to 1024, or below 32; got 2048"),
    ],
)
def test_illegal_tilings(sizes: tuple[int, int, int, int], error: type, said: str) -> None:
    with pytest.raises(error, match=f"^tiling: .*{said}"):
        Tiling(*sizes)


def test_a_tiling_is_frozen_and_hashable() -> None:
    t = Tiling(8, 8, 4, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.B_r = 4  # type: ignore[misc]
    assert len({t, Tiling(8, 8, 4, 8)}) == 1


@pytest.mark.parametrize("N", [0, 1, 7, 8, 9, 16, 17])
def test_numbers_of_tiles(N: int) -> None:
    t = Tiling(8, 4, 8, 4)
    assert (t.T_r(N), t.T_c(N)) == (math.ceil(N / 8), math.ceil(N / 4))


# ---- who computes what ------------------------------------------------------------------------


@many
@any_tiling
def test_threads_share_tiles_without_gap_or_overlap(t: Tiling, d: int, dtype: str) -> None:
    n_r, n_c, C_G = t.n_r, t.n_c, t.columns_of_O(d, dtype)
    C, G = C_G
    rows = [ty + r * n_r for ty in range(n_r) for r in range(t.R_r)]
    columns = [tx + c * n_c for tx in range(n_c) for c in range(t.R_c)]
    columns_of_O = [C * (tx + g * n_c) + c for tx in range(n_c) for g in range(G) for c in range(C)]
    assert sorted(rows) == list(range(t.B_r))
    assert sorted(columns) == list(range(t.B_c))
    assert sorted(columns_of_O) == list(range(C * G * n_c))
    assert len(columns_of_O) >= d
    assert C * acc_bytes(dtype) <= 16
    C_k, G_k = t.keys_of_dK(dtype)
    keys = [C_k * (ty + g * n_r) + c for ty in range(n_r) for g in range(G_k) for c in range(C_k)]
    assert sorted(keys) == list(range(C_k * G_k * n_r))
    assert len(keys) >= t.B_c and C_k * acc_bytes(dtype) <= 16
    # no narrower O tile covers d
    assert len(columns_of_O) == min(
        c * n_c * math.ceil(d / (c * n_c)) for c in (1, 2, 4)[:C] + (C,)
    )


# ---- shared memory ----------------------------------------------------------------------------


@many
@any_tiling
def test_shared_layout(t: Tiling, d: int, dtype: str) -> None:
    e = acc_bytes(dtype)
    for names, replaces in (("QKVP", False), ("QKVP", True), ("QK", False), ("VP", False)):
        tiles, total = t.shared_layout(d, dtype, names, replaces)
        assert set(tiles) == set(names)
        spans = {}
        for name, (rows, columns, offset) in tiles.items():
            assert offset % BANK_BYTES == 0
            assert columns * e % 16 == 0 or name == "V"
            spans[name] = (offset, offset + rows * columns * e)
        assert total == max(-(-end // BANK_BYTES) * BANK_BYTES for _, end in spans.values())
        for (a, (a0, a1)), (b, (b0, b1)) in itertools.combinations(spans.items(), 2):
            if replaces and {a, b} == {"K", "P"}:
                assert a0 == b0
            else:
                assert a1 <= b0 or b1 <= a0
        needed = {"Q": (t.B_r, d), "K": (t.B_c, d), "V": (t.B_c, d), "P": (t.B_r, t.B_c)}
        for name, (rows, columns, _) in tiles.items():
            assert rows == needed[name][0]
            assert columns >= needed[name][1]


@many
@any_tiling
def test_backward_layout(t: Tiling, d: int, dtype: str) -> None:
    e = acc_bytes(dtype)
    C, G = t.columns_of_O(d, dtype)
    C_k, G_k = t.keys_of_dK(dtype)
    rows, keys, scores = (t.B_r, C * G * t.n_c), (t.B_c, C * G * t.n_c), (t.B_r, C_k * G_k * t.n_r)
    needed = {"Q": rows, "dO": rows, "K": keys, "V": keys, "P": scores, "dS": scores}
    needed["L"] = (2, t.B_r)
    for method, kernels in BACKWARD_TILES.items():
        totals = []
        for names in kernels:
            tiles, total = t.backward_layout(d, dtype, names)
            assert tuple(tiles) == names
            end = 0
            for name, (n_rows, columns, offset) in tiles.items():
                assert offset % BANK_BYTES == 0 and offset >= end
                assert columns * e % 16 == 0 or name == "L"
                assert n_rows == needed[name][0] and columns >= needed[name][1]
                assert name in ("P", "dS", "L") or columns >= -(-d // 4) * 4
                end = offset + n_rows * columns * e
            assert end <= total < end + BANK_BYTES
            totals.append(total)
        assert t.shared_bytes(d, dtype, method) == max(totals)


@pytest.mark.parametrize("d", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("t", [t for t in CANDIDATES_BACKWARD if t.threads >= 32], ids=str)
def test_no_bank_conflicts_backward(t: Tiling, d: int) -> None:
    """fp32: reads across rows (Q, dO, K, V), reads along them (all), writes of P and dS."""
    tiles, _ = t.backward_layout(d, "fp32", ("Q", "K", "dS"))
    C, _ = t.columns_of_O(d, "fp32")
    C_k, _ = t.keys_of_dK("fp32")
    warp = [(tid // t.n_c, tid % t.n_c) for tid in range(32)]

    def address(name: str, row: int, column: int) -> int:
        _, columns, offset = tiles[name]
        return offset + 4 * (row * columns + column)

    for quarter in (warp[n : n + 8] for n in range(0, 32, 8)):
        for starts, width in (
            ([address("Q", ty, 0) for ty, _ in quarter], 4),
            ([address("K", tx, 0) for _, tx in quarter], 4),
            ([address("K", 1, C * tx) for _, tx in quarter], C),
            ([address("dS", 1, C_k * ty) for ty, _ in quarter], C_k),
        ):
            assert conflicts([a + 4 * c for a in starts for c in range(width)]) == 1
    assert conflicts([address("dS", ty, tx) for ty, tx in warp]) == 1


def conflicts(addresses: list[int]) -> int:
    """Most distinct 4-byte words that one bank serves in one 128-byte phase of a warp access."""
    words = {a // 4 for a in addresses}
    banks = [w % 32 for w in words]
    return max(banks.count(b) for b in set(banks))


@pytest.mark.parametrize("d", [32, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("t", CANDIDATES, ids=str)
def test_no_bank_conflicts(t: Tiling, d: int) -> None:
    """fp32: 16-byte reads are served a quarter warp at a time, 4-byte writes a warp at once."""
    tiles, _ = t.shared_layout(d, "fp32")
    warp = [(tid // t.n_c, tid % t.n_c) for tid in range(32)]

    def address(name: str, row: int, column: int) -> int:
        _, columns, offset = tiles[name]
        return offset + 4 * (row * columns + column)

    for quarter in (warp[n : n + 8] for n in range(0, 32, 8)):
        reads = {
            "Q": [address("Q", ty, 0) for ty, _ in quarter],
            "K": [address("K", tx, 0) for _, tx in quarter],
        }
        for name, starts in reads.items():
            assert conflicts([a + 4 * c for a in starts for c in range(4)]) == 1, name
    assert conflicts([address("P", ty, tx) for ty, tx in warp]) == 1


@many
@any_tiling
def test_what_a_method_needs_is_what_its_kernels_place(t: Tiling, d: int, dtype: str) -> None:
    need = {m: t.shared_bytes(d, dtype, m) for m in METHODS}
    assert need["fa1"] == t.shared_layout(d, dtype)[1]
    assert need["fa2"] == t.shared_layout(d, dtype, P_replaces_K=True)[1]
    assert need["fa2"] <= need["fa1"]
    for method, bytes_ in need.items():
        t.check(d, dtype, method, bytes_)
        with pytest.raises(ValueError) as error:
            t.check(d, dtype, method, bytes_ - 1)
        for part in ("tiling", str(t), str(bytes_), str(bytes_ - 1), f"d={d}", dtype, method):
            assert part in str(error.value)


# ---- choosing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "method", "dtype"), list(itertools.product(LIMITS, METHODS, DTYPE_BYTES))
)
def test_every_head_dimension_has_a_tiling(gpu: str, method: str, dtype: str) -> None:
    for d in range(1, MAX_HEAD_DIM + 1):
        t = choose(d, dtype, method, LIMITS[gpu])
        assert t.shared_bytes(d, dtype, method) <= LIMITS[gpu]
        assert t.registers(d, dtype) <= REGISTERS_PER_THREAD
        assert t.registers(d, dtype) * t.threads <= REGISTERS_PER_SM


def test_the_first_that_fits_is_chosen() -> None:
    for d, (name, limit) in itertools.product(HEAD_DIMS, LIMITS.items()):
        chosen = choose(d, "fp32", "fa2", limit)
        fitting = [t for t in CANDIDATES if t.fits(d, "fp32", "fa2", limit)]
        assert chosen == fitting[0], (d, name)


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match=r"tiling: none fits 100 bytes .* d=64"):
        choose(64, "fp32", "fa2", 100)


@many
@given(st.integers(1, 2**20), st.integers(1, 256))
@example(1000, 1)
def test_the_papers_rule(M: int, d: int) -> None:
    """Line 1 of Algorithm 1 (2022): the four tiles fill M but for the rounding up."""
    B_r, B_c = tiling.papers_rule(M, d)
    assert B_c == math.ceil(M / (4 * d))
    assert B_r == min(B_c, d)
    assert 4 * d * (B_c - 1) < M <= 4 * d * B_c
