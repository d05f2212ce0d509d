"""What warps do with scores and gradients in the backward kernels of Hopper, on the simulator.

The kernels themselves need a GPU (`test_fa3_backward_gpu.py`); these parts of them do not.
"""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

from fa2_numba import hbm, launch, masking, reference, simulator, warpgroup
from fa2_numba.formats import FORMATS

pytestmark = pytest.mark.skipif(not simulator.ACTIVE, reason="runs on the simulator")

N = 64  # columns of scores
HELD = N // 2  # registers of a thread


def place(lane: int, register: int) -> tuple[int, int]:
    """Row and column of an accumulator among the 16 rows of a warp."""
    c, r, e = register // 4, register // 2 % 2, register % 2
    return lane // 4 + 8 * r, 8 * c + 2 * (lane % 4) + e


BIT = np.arange(HELD, dtype=np.uint32).reshape(2, -1).T.ravel()  # of a score in `hidden`
ROW, COLUMN = np.array([[place(t, k) for k in range(HELD)] for t in range(32)]).transpose(2, 0, 1)


def run(kernel: Any, *args: Any) -> None:
    """One block of one warp."""
    launch.launch(hbm.jit(kernel), 1, 32, 0, 0, *args)


MASKS = {
    "none": (masking.none(), lambda N_q, N_k: np.ones((N_q, N_k), bool)),
    "causal": (masking.causal(), reference.causal_mask),
    "window": (masking.window(9, 3), lambda *n: reference.window_mask(*n, 9, 3)),
    "skip": (masking.causal_skip(), reference.causal_mask),
}
LENGTHS = [(70, 90), (90, 70), (64, 64), (1, 130), (130, 1)]


@given(tiles=st.integers(1, 9), heads=st.integers(1, 40), section=st.integers(1, 40))
def test_each_tile_of_each_head_has_a_block(tiles: int, heads: int, section: int) -> None:
    section = min(section, heads)  # as the launchers give it
    order = np.zeros((tiles * heads, 2), np.int64)

    def kernel(order):
        for block in range(cuda.threadIdx.x, tiles * heads, 32):
            found = warpgroup.tile_of_block(
                np.uint32(block), np.uint32(tiles), np.uint32(heads), np.uint32(section)
            )
            order[block, 0], order[block, 1] = found

    run(kernel, order)
    assert len({*map(tuple, order.tolist())}) == tiles * heads
    assert order.min() == 0 and order[:, 0].max() == tiles - 1 and order[:, 1].max() == heads - 1
    for first in range(0, heads, section):  # of a section, first tiles first
        here = order[first * tiles : (first + section) * tiles]
        assert np.all(np.diff(here[:, 0]) >= 0)
        assert np.all((here[:, 1] >= first) & (here[:, 1] < first + section))


@pytest.mark.parametrize(
    ("tiles", "heads", "section", "blocks"),
    [(5, 7, 3, 4), (1, 9, 9, 2), (8, 2, 1, 16), (3, 5, 2, 1)],
)
def test_blocks_take_each_tile_once(tiles: int, heads: int, section: int, blocks: int) -> None:
    """And each ends for good: behind a number that is too large there is no smaller one."""
    rounds = -(-tiles * heads // blocks) + 2
    taken = np.zeros((blocks, rounds, 3), np.int64)

    def kernel(taken):
        for block in range(cuda.threadIdx.x, blocks, 32):
            for n in range(rounds):
                found = warpgroup.nth_tile(
                    np.uint32(n), np.uint32(block), np.uint32(blocks),
                    np.uint32(tiles), np.uint32(heads), np.uint32(section),
                )  # fmt: skip
                taken[block, n, 0], taken[block, n, 1], taken[block, n, 2] = found

    run(kernel, taken)
    assert np.all(np.diff(taken[:, :, 0], axis=1) > 0)
    real = taken[taken[:, :, 0] < tiles * heads]
    assert sorted(real[:, 0]) == [*range(tiles * heads)]
    assert {(t, h) for _, t, h in real.tolist()} == {*np.ndindex(tiles, heads)}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("N_q", "N_k"), [*LENGTHS, (700, 500)])
def test_row_tiles_that_see_a_key_tile(name: str, N_q: int, N_k: int) -> None:
    """No tile with a visible pair is left out; of the bounded masks none is taken in vain."""
    B_r, B_c = 16, 32
    mask, visible = MASKS[name]
    sees = visible(N_q, N_k)
    seeing = warpgroup.row_tiles_seeing(mask.rule, B_r, B_c)
    misses = warpgroup.partial_tiles(mask.rule, B_r, B_c)
    T_r, T_c = math.ceil(N_q / B_r), math.ceil(N_k / B_c)

    def kernel(found, partial, args):
        for j in range(T_c):
            begin, end = seeing(args, 0, 0, np.int32(j), N_q, N_k)
            if cuda.threadIdx.x == 31:  # all lanes know
                found[j, 0], found[j, 1] = begin, end
            for i in range(cuda.threadIdx.x, T_r, 32):
                partial[i, j] = misses(args, 0, 0, np.int32(i), np.int32(j), N_q, N_k)

    found, partial = np.zeros((T_c, 2), np.int64), np.zeros((T_r, T_c), bool)
    run(kernel, found, partial, mask.args)
    for j, (begin, end) in enumerate(found):
        for i in range(T_r):
            tile = sees[i * B_r : (i + 1) * B_r, j * B_c : (j + 1) * B_c]
            assert partial[i, j] == ((j + 1) * B_c > N_k or not tile.all())
            if mask.rule.elementwise:  # its bounds are all keys
                assert begin <= i < end
            else:
                assert (begin <= i < end) == bool(tile.any())


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("keys_in_rows", [False, True])
@pytest.mark.parametrize(("N_q", "N_k"), LENGTHS)
def test_hidden_scores(name: str, keys_in_rows: bool, N_q: int, N_k: int) -> None:
    mask, visible = MASKS[name]
    find = warpgroup.hidden_finder(mask.rule, keys_in_rows)
    first_row, first_key = 48 if N_q > 64 else 0, 32 if N_k > 64 else 0
    hidden = np.zeros((32, 1), np.uint32)

    def kernel(hidden, args):
        lane = cuda.threadIdx.x
        down, across = lane // 4, 2 * (lane % 4)
        i, j = (across, down) if keys_in_rows else (down, across)
        hidden[lane, 0] = find(args, 0, 0, first_row + i, first_key + j, N_q, N_k)

    run(kernel, hidden, mask.args)
    seen = np.zeros((16, N), bool)
    seen[ROW, COLUMN] = hidden >> BIT & 1 == 0
    shape = (N, 16) if keys_in_rows else (16, N)
    expected = np.zeros(shape, bool)
    part = visible(N_q, N_k)[first_row:, first_key:][: shape[0], : shape[1]]
    expected[: part.shape[0], : part.shape[1]] = part
    np.testing.assert_array_equal(seen.T if keys_in_rows else seen, expected)


def test_what_is_hidden_is_zero() -> None:
    """NaN and infinity, too; the other half of the word stays."""
    _, hide = warpgroup.score_packer("bf16")
    rng = np.random.default_rng(5)
    words = rng.integers(0, 2**32, (32, HELD // 2), np.uint32)
    bits = rng.integers(0, 2**32, (32, 1), np.uint32)

    def kernel(words, bits, after):
        lane = cuda.threadIdx.x
        own = cuda.local.array(HELD // 2, np.uint32)
        for k in range(HELD // 2):
            own[k] = words[lane, k]
        hide(own, bits[lane, 0])
        for k in range(HELD // 2):
            after[lane, k] = own[k]

    after = np.zeros_like(words)
    run(kernel, words, bits, after)
    hidden = bits >> BIT & 1 == 1
    halves = words.view(np.uint16).reshape(32, HELD)  # the left of two is the lower half
    expected = np.where(hidden, np.uint16(0), halves)
    np.testing.assert_array_equal(after.view(np.uint16).reshape(32, HELD), expected)


@pytest.mark.parametrize("change", [masking.unchanged(), masking.softcap(1.5)], ids=["", "cap"])
def test_p_and_ds_of_query_rows(change: masking.Score) -> None:
    _, make_P, make_dS, make_both = warpgroup.score_gradients(N, False, change.change)
    prepare, _ = change.change.functions(hbm.device, np.float32)
    rng = np.random.default_rng(11)
    S, dP = (rng.standard_normal((16, N)).astype(np.float32) for _ in range(2))
    L, D = rng.standard_normal(16), rng.standard_normal(16)
    L[5] = np.inf  # a row that sees no key
    scale, plain = np.float32(0.4), change.change is masking.UNCHANGED
    rows = np.stack([L / math.log(2), D]).astype(np.float32)

    def kernel(S, dP, rows, args):
        lane = cuda.threadIdx.x
        own_S, own_dP = cuda.local.array(HELD, np.float32), cuda.local.array(HELD, np.float32)
        L, D = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        ahead = cuda.local.array(warpgroup.AHEAD, np.float32)  # of what is in shared memory
        for r in range(2):
            L[r], D[r] = rows[0, lane // 4 + 8 * r], rows[1, lane // 4 + 8 * r]
        for k in range(HELD):
            own_S[k], own_dP[k] = S[lane, k], dP[lane, k]
        if plain:
            make_P(own_S, L, ahead, scale * np.float32(1 / math.log(2)))
            make_dS(own_S, own_dP, D, ahead)
        else:
            make_both(own_S, own_dP, L, D, scale, prepare(args, 0, 0), 0, 0)
        for k in range(HELD):
            S[lane, k], dP[lane, k] = own_S[k], own_dP[k]

    held_S, held_dP = S[ROW, COLUMN], dP[ROW, COLUMN]
    run(kernel, held_S, held_dP, rows, tuple(np.float32(x) for x in change.args))
    s = S.astype(np.float64) * float(scale)
    slope = np.ones_like(s) if plain else 1 - np.tanh(s / 1.5) ** 2
    s = s if plain else 1.5 * np.tanh(s / 1.5)
    P = np.exp(s - L[:, None])
    np.testing.assert_allclose(held_S, P[ROW, COLUMN], rtol=1e-5)
    dS = P * (dP - D[:, None]) * slope
    np.testing.assert_allclose(held_dP, dS[ROW, COLUMN], rtol=1e-4, atol=1e-6)
    assert np.all(P[5] == 0)


@pytest.mark.parametrize("gradient", ["dQ", "dK", "dV"])
@pytest.mark.parametrize("name", ["causal", "window"])
def test_gradients_that_are_not_finite_are_computed_again(gradient: str, name: str) -> None:
    """A masked NaN or infinity reaches nobody; what is finite is left alone."""
    rng = np.random.default_rng(3)
    N_q, N_k, d, group = 14, 13, 40, 2
    shapes = ((2, N_q), (1, N_k), (1, N_k), (2, N_q))
    q, k, v, dout = (rng.standard_normal((1, h, n, d)).astype(np.float16) for h, n in shapes)
    options: dict[str, Any] = {"causal": True} if name == "causal" else {"window": (9, 3)}
    mask = MASKS[name][0]
    scale = np.float32(0.3)
    if gradient == "dQ":
        k[0, 0, 12, 3], v[0, 0, 12, 7] = np.nan, np.inf  # seen by the last row alone
    else:
        q[0, :, 2], dout[0, :, 2] = np.nan, np.inf  # sees the first two keys alone
    with np.errstate(all="ignore"):
        out, lse = reference.attention_reference(q, k, v, scale=float(scale), **options)
        out, lse = out.astype(np.float32), lse.astype(np.float32)
        D = (dout.astype(np.float32) * out).sum(-1)
        expected = reference.attention_backward(dout, q, k, v, scale=float(scale), **options)
    right = dict(zip(("dQ", "dK", "dV"), expected, strict=True))[gradient]
    given = np.full(right.shape, 5, np.float16)
    h, again = 0, [1, 2, 7, 13 if gradient == "dQ" else 12]
    given[0, h, again, 1] = np.nan
    recompute = warpgroup.gradient_recomputer(
        gradient, d, mask.rule, masking.UNCHANGED, FORMATS["fp16"]
    )

    def kernel(Q, K, V, dO, L, D, out, args):
        recompute(Q, K, V, dO, L, D, out, scale, args, (), 0, h, group, 0, N_q, N_k)

    after = given.copy()
    with np.errstate(all="ignore"):
        run(kernel, q, k, v, dout, lse, D, after, mask.args)
    for row in range(right.shape[2]):
        if row in again:
            np.testing.assert_allclose(after[0, h, row], right[0, h, row], rtol=4e-3, atol=4e-3)
        else:
            assert np.all(after[0, h, row] == 5)
    finite = np.isfinite(right[0, h]).all(axis=-1)
    assert finite[again].any() and not finite[again].all()  # both kinds are among them
