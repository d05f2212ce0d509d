"""Public bug reports about attention kernels, restated as small cases; each id names its report.

The lists below say what is covered here (the backward pass in test_bug_cases_backward.py; sizes
beyond 2**31 and torch's arrays in test_gpu.py; its compiler in test_torch_adapter.py), and what
waits for features that this package does not have yet. A test's id starts with the report that it
restates; the half-line of history beside it is in our words. Sizes are scaled down to the
simulator's with tiles that keep the proportions.
"""

import math
from typing import Any

import numpy as np
import pytest
from strategies import SMALL_TILINGS, Backend, Case, Kernel, bits

from fa2_numba import api, masking, reference, simulator
from fa2_numba.tiling import Tiling

FORWARD = """
pytorch#103749 pytorch#163997 pytorch#109517 pytorch#110213 pytorch#127055 pytorch#112577
pytorch#139462 xformers#1025 xformers#684 xformers#719 SageAttention#98 flash-attention#282
flash-attention#1133 flash-attention#1417 flash-attention#1569 flash-attention#2199
flash-attention#2470 flash-attention#2503 flashinfer#1533 flashinfer#4051 flashinfer#4485
cudnn-frontend#740 cudnn-frontend#943 cudnn-frontend#1072 flashinfer#941 triton#621
native-sparse-attention-triton#27 Megatron-LM#53
""".split()
BACKWARD = """
pytorch#136232 cudnn-frontend#160 flash-attention#334 flash-attention#443 flash-attention#1052
flash-attention#test:bwd_transpose flash-attention#414 flash-attention#2244 flash-attention#359
flash-attention#746 flash-attention#2466 flash-attention#889
""".split()
ON_A_GPU = """
flash-attention#54 flash-attention#767 flash-attention#1054 flash-attention#1311
flash-attention#1500 flash-attention#1977 flash-attention#2214 flash-attention#2481
flash-attention#2611 pytorch#190857 flashattention2-custom-mask#2
""".split()
TORCH = "ComfyUI#15044 flash-attention#2013".split()
WAITING = {
    "varlen": "flash-attention#1537 flash-attention#1155 flash-attention#1713 "
    "flash-attention#1773 flash-attention#2333 flash-attention#876 pytorch#187899",
    "KV cache": "flash-attention#772 flash-attention#2709 flash-attention#1402 torchtitan#3235 "
    "flashinfer#349",
    "dropout, probabilities": "flash-attention#1251 flash-attention#2088 flash-attention#902",
    "sinks": "flash-attention#1973",
    "packed positions": "transformers#39814",
}

ONE_WARP = SMALL_TILINGS[0]  # 4 rows, 8 keys
SMALLER = SMALL_TILINGS[1]  # 4 rows, 4 keys
every_method = pytest.mark.parametrize("method", api.PORTABLE)


def report(name: str) -> Any:
    """Marks a test with the report that it restates; the id becomes part of the test's."""
    assert name in FORWARD + BACKWARD + ON_A_GPU + TORCH, name
    return pytest.mark.parametrize("_report", [name])


def test_each_report_is_listed_once() -> None:
    waiting = [name for names in WAITING.values() for name in names.split()]
    every = FORWARD + BACKWARD + ON_A_GPU + TORCH + waiting
    assert len(every) == len(set(every)) == 70


def values(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) + 0.3).astype(dtype)


def check(
    backend: Backend, method: str, host: list[np.ndarray], **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Run and compare with the reference; arrays among the options go to the device."""
    names = ("causal", "window", "mask", "softcap", "alibi_slopes", "scale")
    problem = {n: v for n, v in options.items() if n in names}
    problem["causal"] = bool(problem.get("causal", False))
    device = {
        n: backend.to_device(v) if isinstance(v, np.ndarray) else v for n, v in options.items()
    }
    out, lse = backend.attention(method, *host, **device)
    reference.assert_attention(out, lse, *host, name=method, **problem)
    return out, lse


# ---- rows that see nothing --------------------------------------------------------------------


@report("pytorch#103749")
@every_method
def test_a_padding_query(backend: Backend, method: str, _report: str) -> None:
    """One row of the mask all False: the whole output became NaN."""
    q, k, v = values(2, 6, 8), values(2, 10, 8, seed=1), values(2, 10, 8, seed=2)
    mask = np.ones((6, 10), bool)
    mask[5] = False
    out, lse = check(backend, method, [q, k, v], mask=mask, tiling=ONE_WARP)
    assert not out[:, 5].any() and (lse[:, 5] == -np.inf).all()
    five, lse_five = backend.attention(method, q[:, :5], k, v, tiling=ONE_WARP)
    np.testing.assert_array_equal(out[:, :5], five)
    np.testing.assert_array_equal(lse[:, :5], lse_five)


@report("pytorch#163997")
@every_method
def test_masked_rows_do_not_depend_on_the_batch(
    backend: Backend, method: str, _report: str
) -> None:
    """NaN for one batch row, 0 for two."""
    q, k, v = values(2, 2, 5, 4), values(2, 2, 9, 4, seed=1), values(2, 2, 9, 4, seed=2)
    mask = np.random.default_rng(0).random((2, 1, 5, 9)) < 0.5
    mask[:, :, 1::2] = False
    both = check(backend, method, [q, k, v], mask=mask, tiling=ONE_WARP)
    for b in range(2):
        here = slice(b, b + 1)
        one = check(backend, method, [q[here], k[here], v[here]], mask=mask[here], tiling=ONE_WARP)
        assert bits(*one) == bits(*(x[here] for x in both))


@report("flashinfer#1533")
@every_method
@pytest.mark.parametrize("fill", [np.nan, 1e4])
def test_masked_rows_are_written(backend: Backend, method: str, fill: float, _report: str) -> None:
    """Rows without a key were skipped and kept what the buffer held."""
    q, k, v = values(2, 9, 4), values(2, 4, 4, seed=1), values(2, 4, 4, seed=2)
    out = backend.to_device(np.full_like(q, fill))
    after, lse = backend.attention(method, q, k, v, causal=True, out=out, tiling=ONE_WARP)
    reference.assert_attention(after, lse, q, k, v, name=method, causal=True)
    assert not after[:, :5].any()


@report("flash-attention#2470")
@every_method
@pytest.mark.parametrize("N_q", [1, 4, 9])
@pytest.mark.parametrize("causal", [False, True, "skip"])
def test_no_keys(backend: Backend, method: str, N_q: int, causal: bool | str, _report: str) -> None:
    """A device fault, or the host divided by zero."""
    host = [values(2, 2, N_q, 4), values(2, 2, 0, 4), values(2, 2, 0, 4)]
    out, lse = check(backend, method, host, causal=causal)
    assert out.shape == (2, 2, N_q, 4) and not out.any()
    assert (lse == -np.inf).all()


@report("cudnn-frontend#943")
@every_method
def test_one_sequence_of_the_batch_has_no_keys(backend: Backend, method: str, _report: str) -> None:
    """NaN rows for a sequence of length 0 among others; here by its mask."""
    host = [values(3, 2, 5, 4), values(3, 2, 6, 4, seed=1), values(3, 2, 6, 4, seed=2)]
    lengths = np.array([6, 0, 3])
    mask = (np.arange(6) < lengths[:, None])[:, None, None]
    out, lse = check(backend, method, host, mask=mask, tiling=ONE_WARP)
    assert not out[1].any() and (lse[1] == -np.inf).all()


@report("flash-attention#2503")
@every_method
@pytest.mark.parametrize(("B", "N_q"), [(2, 0), (0, 5), (0, 0)])
def test_no_queries(backend: Backend, method: str, B: int, N_q: int, _report: str) -> None:
    """The split heuristic divided by zero."""
    host = [values(B, 3, N_q, 4), values(B, 3, 40, 4), values(B, 3, 40, 4)]
    out, lse = check(backend, method, host, causal=True)
    assert out.shape == (B, 3, N_q, 4) and lse.shape == (B, 3, N_q)


@pytest.mark.parametrize("shape", [(0, 4, 3, 8), (2, 0, 3, 8)])
@every_method
def test_no_heads_or_batches_with_every_kind_of_mask(
    backend: Backend, method: str, shape: tuple[int, ...]
) -> None:
    B, H, N, _ = shape
    host = [values(*shape) for _ in range(3)]
    for options in (
        {"mask": np.ones((B, 1, N, N), bool)},
        {"mask": masking.documents(np.zeros((B, N), int))},
        {"alibi_slopes": np.ones((B, H), np.float32)},
    ):
        options = {
            n: backend.to_device(v) if isinstance(v, np.ndarray) else v for n, v in options.items()
        }
        out, lse = backend.attention(method, *host, **options)
        assert out.shape == shape and lse.shape == shape[:3]


# ---- large numbers ----------------------------------------------------------------------------


def bias(args: Any, i: Any, j: Any, s: Any) -> Any:
    """s plus a table of (N_q, N_k) biases; args are the table and N_k - N_q."""
    return s + args[0][i - args[1], j]


def with_bias(table: np.ndarray) -> masking.Score:
    n_q, n_k = table.shape
    return masking.score(bias, masking.Table("bias", table), n_k - n_q)


LOWEST = np.finfo(np.float32).min


@report("pytorch#109517")
@every_method
def test_a_bias_of_the_lowest_float(backend: Backend, method: str, _report: str) -> None:
    """Not -inf but finfo.min, on some keys and on whole rows: NaN. Here by a score change."""
    host = [values(21, 4), values(21, 4, seed=1), values(21, 4, seed=2)]

    def lowest(args: Any, i: Any, j: Any, s: Any) -> Any:
        return s + (LOWEST if j < 6 or i % 5 == 0 else 0)

    out, lse = backend.attention(method, *host, score=masking.score(lowest), tiling=SMALLER)
    i, j = np.indices((21, 21))
    table = np.where((j < 6) | (i % 5 == 0), LOWEST, 0).astype(np.float64)
    # The score vanishes beside finfo.min in float32, and in float64 to the last digit that a
    # float32 output shows: such a row is the mean of V.
    expected, _ = reference.attention_reference(*host, bias=table, dtype=np.float32)
    same, _ = reference.attention_same_precision(*host, bias=table)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    inner = reference.rounding_error(*host)[0]
    reference.assert_close_to_reference(
        out, expected.astype(np.float64), same, name=method, inner=inner
    )
    np.testing.assert_allclose(out[::5], host[2].mean(axis=0)[None].repeat(5, 0), atol=2e-6)


@report("pytorch#110213")
@every_method
def test_a_small_bias_beside_the_lowest(backend: Backend, method: str, _report: str) -> None:
    """3 x 3, row 0 at finfo.min and the others at 1: NaN on the GPU alone."""
    host = [values(3, 4), values(3, 4, seed=1), values(3, 4, seed=2)]

    def change(args: Any, i: Any, j: Any, s: Any) -> Any:
        return s + (LOWEST if i == 0 else np.float32(1))

    out, lse = backend.attention(method, *host, score=masking.score(change), tiling=ONE_WARP)
    np.testing.assert_allclose(out[0], host[2].mean(axis=0), atol=1e-6)
    expected, expected_lse = reference.attention_reference(*host)
    np.testing.assert_allclose(out[1:], expected[1:], atol=1e-6)
    np.testing.assert_allclose(lse[1:], expected_lse[1:] + 1, atol=1e-6)


@report("xformers#684")
@every_method
@pytest.mark.parametrize(("n_q", "n_k"), [(4, 8), (5, 11), (9, 7), (1, 1)])
def test_a_table_of_biases_with_ragged_lengths(
    backend: Backend, method: str, n_q: int, n_k: int, _report: str
) -> None:
    """N_k = 43 was rejected or NaN. A table as an own score change: no entry outside is read."""
    host = [values(2, n_q, 4), values(2, n_k, 4, seed=1), values(2, n_k, 4, seed=2)]
    table = values(n_q, n_k, seed=3)
    out, lse = backend.attention(method, *host, score=with_bias(table), tiling=ONE_WARP)
    reference.assert_attention(out, lse, *host, name=method, bias=table.astype(np.float64))


@report("cudnn-frontend#1072")
@every_method
@pytest.mark.parametrize("shift", [-128, 128])
def test_one_query_with_a_very_negative_lse(
    backend: Backend, method: str, shift: int, _report: str
) -> None:
    """LSE about -122 and one query in a tile of 64 (in the backward; the forward keeps it)."""
    q, k, v = values(1, 12), values(24, 12, seed=1), values(24, 12, seed=2)
    q[0, -1], k[:, -1] = shift * math.sqrt(12), 1
    _, lse = check(backend, method, [q, k, v], tiling=ONE_WARP)
    assert abs(lse[0] - shift) < 10


@report("pytorch#127055")
@every_method
def test_a_band_far_from_the_first_tiles(backend: Backend, method: str, _report: str) -> None:
    """The running maximum stays -inf for many tiles: late rows were NaN."""
    ones = np.ones((40, 4), np.float32)
    dense = reference.window_mask(40, 40, 4, 0)
    for options in ({"mask": dense}, {"window": (4, 0)}):
        out, lse = check(backend, method, [ones] * 3, **options, tiling=SMALLER)
        np.testing.assert_allclose(out, 1, rtol=1e-6)
        np.testing.assert_allclose(lse, 2 + np.log(np.minimum(np.arange(40) + 1, 5)), rtol=1e-6)
    # by the general loop, in which no tile is skipped for sure
    own = masking.custom(lambda args, b, h, i, j: (j <= i) & (j >= i - 4), name="band")
    out, _ = backend.attention(method, ones, ones, ones, mask=own, tiling=SMALLER)
    np.testing.assert_allclose(out, 1, rtol=1e-6)


@report("xformers#719")
@pytest.mark.parametrize("N", [32767, 32768, 32769, 33728])
def test_more_keys_than_an_int16_counts(backend: Backend, N: int, _report: str) -> None:
    """NaN beyond 32768 keys. The last tile alone is visible, so that the simulator can."""
    q, k, v = values(1, 4), values(N, 4, seed=1), values(N, 4, seed=2)
    check(backend, "fa2", [q, k, v], window=(5, 0), tiling=SMALLER)


# ---- positions --------------------------------------------------------------------------------


@report("flash-attention#282")
@every_method
@pytest.mark.parametrize("causal", [True, "skip"])
@pytest.mark.parametrize(("n_q", "n_k"), [(2, 5), (5, 2), (1, 9), (3, 3)])
def test_causal_is_bottom_right_aligned(
    backend: Backend, method: str, causal: bool | str, n_q: int, n_k: int, _report: str
) -> None:
    """Two queries, five keys: top-left, wrong for decoding."""
    host = [values(n_q, 4), values(n_k, 4, seed=1), values(n_k, 4, seed=2)]
    check(backend, method, host, causal=causal, tiling=ONE_WARP)


@report("flash-attention#2199")
@every_method
@pytest.mark.parametrize("n_k", [1, 7, 8, 16])
def test_a_window_with_more_queries_than_keys(
    backend: Backend, method: str, n_k: int, _report: str
) -> None:
    """129 queries, window (32, 64): rows without a key surprised; they are 0."""
    host = [values(17, 4), values(n_k, 4, seed=1), values(n_k, 4, seed=2)]
    _, lse = check(backend, method, host, window=(4, 8), tiling=ONE_WARP)
    i = np.arange(17) + n_k - 17
    assert ((lse == -np.inf) == (i + 8 < 0)).all()


@report("flash-attention#1133")
@every_method
def test_a_window_longer_than_the_keys(backend: Backend, method: str, _report: str) -> None:
    """It took the causal path, and bits differed."""
    host = [values(9, 4), values(14, 4, seed=1), values(14, 4, seed=2)]
    causal = check(backend, method, host, causal=True, tiling=ONE_WARP)
    full = check(backend, method, host, tiling=ONE_WARP)
    long = check(backend, method, host, window=(19, 0), tiling=ONE_WARP)
    wide = check(backend, method, host, window=(14, 14), tiling=ONE_WARP)
    if simulator.ACTIVE:
        assert bits(*causal) == bits(*long)
        assert bits(*full) == bits(*wide)


@report("flash-attention#1569")
@every_method
def test_prefill_equals_token_by_token(backend: Backend, method: str, _report: str) -> None:
    """Differences between prefill and decoding: here one query at a time, the keys so far."""
    q, k, v = values(2, 10, 4), values(2, 10, 4, seed=1), values(2, 10, 4, seed=2)
    out, lse = check(backend, method, [q, k, v], causal=True, tiling=ONE_WARP)
    for t in range(10):
        keys = slice(t + 1)
        step = check(
            backend, method, [q[:, t : t + 1], k[:, keys], v[:, keys]], causal=True, tiling=ONE_WARP
        )
        if simulator.ACTIVE:
            assert bits(*step) == bits(out[:, t : t + 1], lse[:, t : t + 1])


# ---- sizes that are no multiple ---------------------------------------------------------------


@report("SageAttention#98")
@every_method
@pytest.mark.parametrize("tiling", [Tiling(16, 16, 4, 8), Tiling(8, 32, 4, 8)], ids=str)
def test_fewer_keys_than_a_tile(
    backend: Backend, method: str, tiling: Tiling, _report: str
) -> None:
    """Reads beyond the sequence: NaN for N below the tile. The bytes after K and V are NaN."""
    for N in (1, 2, 12, 15, 16, 17):
        case = Case(Kernel(d=4, tiling=tiling, k="gaps", v="gaps"), H_k=2, N_q=N, N_k=N, seed=N)
        out, lse = backend.run(method, "fp16", case)
        reference.assert_attention(out, lse, *case.arrays("fp16"), name=f"{method}, N={N}")


@report("triton#621")
@every_method
@pytest.mark.parametrize("d", [16, 24, 40, 65, 96, 128, 192, 256])
def test_every_column_counts(backend: Backend, method: str, d: int, _report: str) -> None:
    """With d = 128 only the first 64 columns were used."""
    q, k, v = values(2, d), values(3, d, seed=1), values(3, d, seed=2)
    out, lse = check(backend, method, [q, k, v], tiling=SMALLER)
    for column in {d // 2, d - 1}:
        changed = q.copy()
        changed[:, column] += 8
        assert not np.allclose(backend.attention(method, changed, k, v, tiling=SMALLER)[1], lse)
        changed = v.copy()
        changed[:, column] += 8
        moved = backend.attention(method, q, k, changed, tiling=SMALLER)[0] - out
        np.testing.assert_allclose(moved[:, column], 8, rtol=1e-5)
        assert not np.delete(moved, column, axis=1).any()


@report("native-sparse-attention-triton#27")
@every_method
@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (9, 3), (12, 1)])
def test_heads_share_their_keys(
    backend: Backend, method: str, heads: tuple[int, int], _report: str
) -> None:
    """Heads divided by the wrong count."""
    H, H_k = heads
    host = [values(1, H, 3, 4), values(1, H_k, 5, 4, seed=1), values(1, H_k, 5, 4, seed=2)]
    check(backend, method, host, causal=True, tiling=ONE_WARP)


# ---- bytes and strides ------------------------------------------------------------------------


@report("pytorch#112577")
@every_method
@pytest.mark.parametrize("axes", ["bhnd", "bnhd", "hbnd", "nbhd", "hnbd", "nhbd", "bhdn", "dnhb"])
def test_every_order_of_axes(backend: Backend, method: str, axes: str, _report: str) -> None:
    """Transposed views gave garbage. (Slices, offsets and expanded views: all properties.)"""
    host = [values(2, 3, n, 4, seed=n) for n in (5, 7)]
    host = [host[0], host[1], host[1] * 2]
    order = tuple("bhnd".index(a) for a in axes)
    views = [
        backend.to_device(np.ascontiguousarray(x.transpose(order))).transpose(
            tuple(np.argsort(order))
        )
        for x in host
    ]
    out, lse = backend.attention(method, *views, causal=True, tiling=ONE_WARP)
    reference.assert_attention(out, lse, *host, name=method, causal=True)
    assert bits(out, lse) == bits(*backend.attention(method, *host, causal=True, tiling=ONE_WARP))


@report("cudnn-frontend#740")
@every_method
def test_nan_in_an_allocated_tail(backend: Backend, method: str, _report: str) -> None:
    """Buffers longer than their contents: 0 * NaN of the tail; and the tail of out is not ours."""
    host = [values(9, 4, seed=n) for n in range(3)]
    buffers = [np.full((16, 4), np.nan, np.float32) for _ in range(4)]
    for buffer, x in zip(buffers, host, strict=False):
        buffer[:9] = x
    on_device = [backend.to_device(b) for b in buffers]
    q, k, v, out = (b[:9] for b in on_device)
    after, lse = backend.attention(method, q, k, v, out=out, tiling=ONE_WARP)
    reference.assert_attention(after, lse, *host, name=method)
    assert np.isnan(backend.to_host(on_device[3])[9:]).all()


@report("flashinfer#941")
@every_method
def test_nan_in_unused_slots(backend: Backend, method: str, _report: str) -> None:
    """13 keys in pages of 4 (here: a mask over 16 slots): NaN of the unused slots leaked."""
    q, k, v = values(2, 3, 4), values(2, 16, 4, seed=1), values(2, 16, 4, seed=2)
    expected = reference.attention_reference(q, k[:, :13], v[:, :13])
    k[:, 13:], v[:, 13:] = np.nan, np.nan
    mask = np.arange(16) < 13
    out, lse = check(backend, method, [q, k, v], mask=mask[None, :], tiling=ONE_WARP)
    np.testing.assert_allclose(out, expected[0], atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)


# flash-attention#1417 (bits depend on the length of the buffer behind a slice) and xformers#1025
# (a workspace read before it is written) are tests of test_hygiene.py; pytorch#139462 (a mask for
# another number of keys) and Megatron-LM#53 (an argument silently ignored) of test_validation.py.


# ---- the LSE ----------------------------------------------------------------------------------


@report("flashinfer#4485")
@every_method
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "fp16", "bf16"])
def test_the_lse_is_natural(backend: Backend, method: str, dtype: str, _report: str) -> None:
    """Base 2 or e by backend. Scores of 0 over n keys: log n, whatever the layout or dtype."""
    case = Case(Kernel(), N_q=2, N_k=7)
    q, k, v = case.arrays(dtype)
    for layout in ("contiguous", "heads inside"):
        q_0 = backend.place(np.zeros_like(q), layout)[1]
        _, lse = backend.attention(method, q_0, k, v, tiling=ONE_WARP)
        np.testing.assert_allclose(lse, math.log(7), rtol=1e-6)


@report("flashinfer#4051")
@every_method
def test_merging_empty_results(backend: Backend, method: str, _report: str) -> None:
    """(0, -inf) with (0, -inf) gave NaN; it is the identity of merging."""
    q, k, v = values(2, 3, 4), values(2, 5, 4, seed=1), values(2, 5, 4, seed=2)
    nothing = backend.attention(method, q, k[:, :0], v[:, :0])
    some = backend.attention(method, q, k, v)
    empty = reference.merge(*nothing, *nothing)
    assert not empty[0].any() and (empty[1] == -np.inf).all()
    for merged in (reference.merge(*some, *nothing), reference.merge(*nothing, *some)):
        np.testing.assert_array_equal(merged[0], some[0])
        np.testing.assert_array_equal(merged[1], some[1])
