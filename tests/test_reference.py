"""The reference against a triple loop, against its own symmetries, and the tolerance on trial."""

import math
from importlib import resources
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from fa2_numba import reference
from fa2_numba.reference import (
    WORKED_EXAMPLE,
    InnerStep,
    RowTile,
    assert_attention,
    assert_attention_backward,
    assert_close_to_reference,
    attention_backward,
    attention_backward_same_precision,
    attention_reference,
    attention_same_precision,
    causal_mask,
    flash_attention_2_trace,
    merge,
    window_mask,
)

bf16 = ml_dtypes.bfloat16
DTYPES = [np.float16, bf16, np.float32, np.float64]
few = settings(max_examples=100, deadline=None)

# Both sides are float64 with at most 6 keys, 4 columns and scores below 100: a few dozen roundings
# of 1.1e-16, some of them multiplied by the score they sit in.
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def naive(
    q: Any, k: Any, v: Any, scale: float | None = None, causal: bool = False, window: Any = None,
    mask: Any = None, softcap: float | None = None, alibi_slopes: Any = None, bias: Any = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Four-dimensional arrays; loops over rows and keys, and never touches a masked key."""
    (B, H, N_q, d), (_, H_k, N_k, _) = q.shape, k.shape
    out, lse = np.zeros((B, H, N_q, d)), np.full((B, H, N_q), -math.inf)
    scale = d**-0.5 if scale is None else scale
    for b, h, row in np.ndindex(B, H, N_q):
        kv, i, s = h * H_k // H, row + N_k - N_q, {}
        for j in range(N_k):
            if causal and j > i:
                continue
            if window is not None and window[0] != -1 and i - j > window[0]:
                continue
            if window is not None and window[1] != -1 and j - i > window[1]:
                continue
            if mask is not None and not np.broadcast_to(mask, (B, H, N_q, N_k))[b, h, row, j]:
                continue
            s[j] = scale * sum(float(q[b, h, row, c]) * float(k[b, kv, j, c]) for c in range(d))
            if softcap:
                s[j] = softcap * math.tanh(s[j] / softcap)
            if alibi_slopes is not None:
                s[j] -= np.broadcast_to(alibi_slopes, (B, H))[b, h] * abs(i - j)
            if bias is not None:
                s[j] += np.broadcast_to(bias, (B, H, N_q, N_k))[b, h, row, j]
        if s:
            top = math.nan if any(map(math.isnan, s.values())) else max(s.values())
            total = sum(math.exp(x - top) for x in s.values())
            lse[b, h, row] = top + math.log(total)
            for c in range(d):
                weighted = (math.exp(x - top) * float(v[b, kv, j, c]) for j, x in s.items())
                out[b, h, row, c] = sum(weighted) / total
    return out, lse


def assert_equal(got: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_allclose(got: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, **EXACT)


def random_qkv(
    seed: int, q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: Any = np.float64
) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in (q_shape, kv_shape, kv_shape)]


@st.composite
def problems(draw: Any, empty: bool = True) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Any q, k, v and options; small because `naive` is slow and every edge is within 6 rows."""
    low = 0 if empty else 1
    sizes, some = st.integers(low, 6), st.integers(1, 3)
    B, H_k, d, N_q, N_k = draw(some), draw(some), draw(st.integers(1, 4)), draw(sizes), draw(sizes)
    H = H_k * draw(some)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    qkv = [3 * rng.standard_normal((B, h, n, d)) for h, n in ((H, N_q), (H_k, N_k), (H_k, N_k))]
    side = st.integers(-1, 7)
    options = {
        "scale": draw(st.sampled_from([None, 1.0, 0.3])),
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.tuples(side, side)),
        "softcap": draw(st.sampled_from([None, 2.0])),
        "mask": draw(st.sampled_from([None, rng.random((B, 1, N_q, N_k)) < 0.6])),
        "alibi_slopes": draw(st.sampled_from([None, rng.random(H), rng.random((B, H))])),
        "bias": draw(st.sampled_from([None, rng.standard_normal((H, N_q, N_k))])),
    }
    return qkv, options


# The definition ----------------------------------------------------------------------------------


@few
@given(problems())
def test_equals_the_triple_loop(problem: Any) -> None:
    qkv, options = problem
    for got, expected in zip(
        attention_reference(*qkv, **options), naive(*qkv, **options), strict=True
    ):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, expected, **EXACT)


@few
@given(problems(empty=False), st.data())
def test_masked_nan_and_inf_influence_nothing_and_visible_nan_shows(
    problem: Any, data: Any
) -> None:
    # pytorch#163997, cudnn-frontend#740, flashinfer#941: 0 * NaN of a masked key or padded tail
    (q, k, v), options = problem
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    poison = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    bad = rng.random(k.shape[:3]) < 0.3
    only_v = v.copy()
    only_v[bad] = poison  # inf * p is inf, inf - inf is NaN: the loop says which
    with np.errstate(invalid="ignore"):
        expected = naive(q, k, only_v, **options)
    for got, want in zip(attention_reference(q, k, only_v, **options), expected, strict=True):
        np.testing.assert_allclose(got, want, **EXACT)
    both = k.copy()
    both[bad] = only_v[bad] = np.nan
    expected = naive(q, both, only_v, **options)
    for got, want in zip(attention_reference(q, both, only_v, **options), expected, strict=True):
        np.testing.assert_allclose(got, want, **EXACT)


def test_inf_in_a_masked_key() -> None:
    q, k, v = random_qkv(0, (4, 8), (6, 8))
    seen = np.ones(6, bool)
    seen[[1, 4]] = False
    expected = attention_reference(q, k[seen], v[seen])
    k[1], k[4], v[1], v[4] = np.inf, -np.inf, np.inf, np.nan
    for got, want in zip(attention_reference(q, k, v, mask=seen), expected, strict=True):
        np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_leading_dimensions_and_rows(ndim: int) -> None:
    q, k, v = random_qkv(1, (2, 4, 7, 3), (2, 2, 9, 3))
    options = {"causal": True, "alibi_slopes": np.array([0.5, 0.2, 0.1, 0.0])}
    if ndim < 4:
        q, k, v = q[0], k[0], v[0]
    if ndim < 3:
        q, k, v, options = q[0], k[0], v[0], {"causal": True, "alibi_slopes": [0.5]}
    out, lse = attention_reference(q, k, v, **options)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    rows = [6, 0, 3]
    some_out, some_lse = attention_reference(q, k, v, rows=rows, **options)
    np.testing.assert_allclose(some_out, out[..., rows, :], **EXACT)
    np.testing.assert_allclose(some_lse, lse[..., rows], **EXACT)


@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (9, 3), (12, 1)])
def test_gqa_equals_repeated_heads(heads: tuple[int, int]) -> None:
    # native-sparse-attention-triton#27; the lengths of flash-attention#1537
    H, H_k = heads
    q, k, v = random_qkv(2, (2, H, 5, 4), (2, H_k, 3, 4))
    repeated = (np.repeat(x, H // H_k, axis=1) for x in (k, v))
    for got, want in zip(
        attention_reference(q, k, v, causal=True),
        attention_reference(q, *repeated, causal=True),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 2, 0, 5), (2, 2, 5, 0), (0, 2, 3, 3), (2, 0, 3, 3), (1, 1, 0, 0)]
)
def test_zero_sizes(shape: tuple[int, int, int, int], causal: bool) -> None:
    # flash-attention#2470, #2503, #1155, cudnn-frontend#943: no keys means 0 and -inf
    B, H, N_q, N_k = shape
    q, k, v = random_qkv(3, (B, H, N_q, 4), (B, H, N_k, 4), np.float16)
    for attention in (attention_reference, attention_same_precision):
        out, lse = attention(q, k, v, causal=causal)
        assert out.shape == q.shape and lse.shape == (B, H, N_q)
        if N_k == 0:
            assert (out == 0).all() and (lse == -np.inf).all()
    assert_attention(out, lse, q, k, v, name="empty", causal=causal)


def test_zero_columns() -> None:
    out, lse = attention_reference(np.zeros((2, 0)), np.zeros((3, 0)), np.zeros((3, 0)))
    assert out.shape == (2, 0)
    np.testing.assert_allclose(lse, math.log(3), **EXACT)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"q": (4,)}, "q, k, v"),
        ({"v": (1, 2, 5, 4)}, "q, k, v"),
        ({"q": (1, 3, 5, 8)}, "q, k"),
        ({"q": (1, 5, 5, 8)}, "multiple of H_k"),
        ({"window": (-2, 0)}, "window"),
        ({"mask": np.ones((5, 4), bool)}, "broadcast"),  # pytorch#139462: mask of another N_k
    ],
)
def test_errors_name_the_argument(problem: dict[str, Any], message: str) -> None:
    shapes = {name: problem.pop(name, (1, 2, 5, 8)) for name in "qkv"}
    with pytest.raises(ValueError, match=message):
        attention_reference(*(np.zeros(s) for s in shapes.values()), **problem)


def test_a_float_mask_is_refused() -> None:
    x = np.zeros((3, 2))
    with pytest.raises(TypeError, match="mask: got float64"):
        attention_reference(x, x, x, mask=np.zeros((3, 3)))


# Masks -------------------------------------------------------------------------------------------


@few
@given(st.integers(0, 7), st.integers(0, 7), st.integers(-1, 8), st.integers(-1, 8))
@example(2, 5, -1, 0)  # flash-attention#282: bottom-right, not top-left
@example(6, 3, 2, 4)  # flash-attention#2199: rows that see nothing, not causal
def test_masks_by_definition(n_q: int, n_k: int, left: int, right: int) -> None:
    rng = np.random.default_rng(n_q)
    ids = np.sort(rng.integers(0, 3, (2, n_k)))
    masks = {
        "causal": causal_mask(n_q, n_k),
        "window": window_mask(n_q, n_k, left, right),
        "prefix": reference.prefix_lm_mask(n_q, n_k, 2),
        "alibi": reference.alibi_bias([[0.5], [0.25]], n_q, n_k),
        "documents": reference.document_mask(ids, n_q, n_k),
        "one": reference.document_mask(ids[0], n_q, n_k),
    }
    assert masks["documents"].shape == (2, 1, n_q, n_k) and masks["one"].shape == (1, 1, n_q, n_k)
    assert masks["alibi"].shape == (2, 1, n_q, n_k)
    for row, j in np.ndindex(n_q, n_k):
        i = row + n_k - n_q
        assert masks["causal"][row, j] == (j <= i)
        assert masks["prefix"][row, j] == (j <= i or j < 2)
        inside = (left == -1 or i - left <= j) and (right == -1 or j <= i + right)
        assert masks["window"][row, j] == inside
        for b in range(2):
            assert masks["documents"][b, 0, row, j] == (i >= 0 and ids[b, i] == ids[b, j])
            assert masks["alibi"][b, 0, row, j] == -[0.5, 0.25][b] * abs(i - j)
    np.testing.assert_array_equal(masks["one"][0], masks["documents"][0])


@few
@given(problems())
def test_causal_is_a_window_is_a_mask(problem: Any) -> None:
    # flash-attention#1133: a window wider than the keys is no window
    (q, k, v), options = problem
    for name in ("causal", "window", "mask", "bias"):
        options.pop(name)
    n_q, n_k = q.shape[2], k.shape[2]
    visible = causal_mask(n_q, n_k)
    causal = attention_reference(q, k, v, causal=True, **options)
    everything = attention_reference(q, k, v, **options)
    for expected, same in (
        (causal, {"window": (-1, 0)}),
        (causal, {"window": (n_q + n_k, 0)}),
        (causal, {"mask": visible}),
        (causal, {"bias": np.where(visible, 0, -np.inf)}),
        (everything, {"window": (n_q + n_k, n_q + n_k)}),
        (everything, {"window": (-1, -1)}),
    ):
        assert_equal(attention_reference(q, k, v, **same, **options), expected)


# Symmetries --------------------------------------------------------------------------------------


@few
@given(problems(empty=False), st.integers(0, 6), st.integers(0, 6))
@example((random_qkv(0, (1, 1, 2, 2), (1, 1, 3, 2)), {}), 0, 3)
def test_permuting_and_splitting_keys(problem: Any, first: int, second: int) -> None:
    (q, k, v), options = problem
    # a window or ALiBi counts places: as a mask and a bias they move with their keys
    B, H, n_q, _ = q.shape
    n_k = k.shape[2]
    mask, bias = np.ones((B, H, n_q, n_k), bool), np.zeros((B, H, n_q, n_k))
    mask &= True if options.get("mask") is None else options["mask"]
    bias += 0 if options.get("bias") is None else options["bias"]
    if options.pop("causal", False):
        mask &= causal_mask(n_q, n_k)
    if (window := options.pop("window", None)) is not None:
        mask &= window_mask(n_q, n_k, *window)
    if (slopes := options.pop("alibi_slopes", None)) is not None:
        bias += reference.alibi_bias(slopes, n_q, n_k)
    whole = attention_reference(*problem[0], **options | {"mask": mask, "bias": bias})

    def over(keys: Any) -> tuple[np.ndarray, np.ndarray]:
        part = options | {"mask": mask[..., keys], "bias": bias[..., keys]}
        return attention_reference(q, k[:, :, keys], v[:, :, keys], **part)

    assert_allclose(over(np.random.default_rng(first).permutation(n_k)), whole)
    a, b = sorted((first, second))  # any of the three parts may be empty
    parts = [over(slice(None, a)), over(slice(a, b)), over(slice(b, None))]
    assert_allclose(merge(*merge(*parts[0], *parts[1]), *parts[2]), whole)
    assert_allclose(merge(*parts[0], *merge(*parts[1], *parts[2])), whole)


def test_merge_identity_is_exact() -> None:
    # flashinfer#4051: merging two empty states gave NaN
    part = attention_reference(*random_qkv(4, (2, 5, 3), (2, 4, 3)))
    nothing = np.zeros((2, 5, 3)), np.full((2, 5), -np.inf)
    assert_equal(merge(*part, *nothing), part)
    assert_equal(merge(*nothing, *part), part)
    assert_equal(merge(*nothing, *nothing), nothing)


@few
@given(problems(), st.floats(-300, 300))
def test_a_constant_on_all_scores_moves_only_lse(problem: Any, shift: float) -> None:
    # cudnn-frontend#1072: scores around -128
    qkv, options = problem
    out, lse = attention_reference(*qkv, **options)
    options["bias"] = shift + (0.0 if options["bias"] is None else options["bias"])
    moved_out, moved_lse = attention_reference(*qkv, **options)
    assert_allclose((moved_out, moved_lse), (out, lse + shift))


@few
@given(problems())
def test_out_is_linear_in_v_and_probabilities_sum_to_one(problem: Any) -> None:
    (q, k, v), options = problem
    out, lse = attention_reference(q, k, v, **options)
    assert_equal(attention_reference(q, k, -4 * v, **options), (-4 * out, lse))
    ones, _ = attention_reference(q, k, np.ones_like(v), **options)
    np.testing.assert_allclose(ones, np.broadcast_to(np.isfinite(lse)[..., None], ones.shape))


def test_batches_and_every_column_count() -> None:
    # pytorch#163997: batch 1 and batch 2 differed; triton#621: columns past 64 were ignored
    q, k, v = random_qkv(5, (2, 2, 4, 80), (2, 2, 6, 80))
    mask = np.random.default_rng(5).random((2, 1, 4, 6)) < 0.5
    mask[1, :, 2] = False
    out, lse = attention_reference(q, k, v, mask=mask)
    for b in range(2):
        one = attention_reference(q[b], k[b], v[b], mask=mask[b])
        assert_equal(one, (out[b], lse[b]))
    for c in range(80):
        changed = q.copy()
        changed[..., c] = 0
        assert (attention_reference(changed, k, v, mask=mask)[1] != lse)[0].any()


# Gradients ---------------------------------------------------------------------------------------

# Gradients are sums of products of four factors below 30: a few thousand roundings of 1e-14.
NEAR = {"rtol": 1e-11, "atol": 1e-10}
# A fourth-order difference at h = 2e-4 errs by h^4 f'''''/30 and by 1e-16 f/h, here both below
# 1e-8. A term that is missing or doubled shows in the first digits.
DIFFERENCE = {"rtol": 1e-7, "atol": 1e-7}
some = settings(max_examples=40, deadline=None)


def upstream(q: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """dout and dlse."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(q.shape), rng.standard_normal(q.shape[:-1])


def loss(qkv: Any, dout: Any, dlse: Any, options: dict[str, Any]) -> float:
    """A loss whose gradients by out and lse are dout and dlse; a constant lse has no part in it."""
    out, lse = attention_reference(*qkv, **options)
    return float((dout * out).sum() + (dlse * np.where(lse == -np.inf, 0, lse)).sum())


def central_difference(f: Any, h: float = 2e-4) -> float:
    """f'(0), good to h^4."""
    return float((8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h))


def along(qkv: Any, n: int, direction: Any, *problem: Any) -> float:
    """Derivative of the loss when the n-th of q, k, v moves in a direction."""

    def f(t: float) -> float:
        return loss([x + t * direction if m == n else x for m, x in enumerate(qkv)], *problem)

    return central_difference(f)


def ragged(seed: int, *shape: int) -> np.ndarray:
    """A mask with a row that sees nothing and a key that no row sees."""
    mask = np.random.default_rng(seed).random(shape) < 0.7
    mask[..., 1, :] = mask[..., :, 2] = False
    return mask


def assert_near(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, **NEAR)


@pytest.mark.parametrize("sizes", [(3, 4), (4, 3)])
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},  # of four rows and three keys, the first row sees nothing
        {"window": (1, 0)},
        {"mask": True},
        {"mask": True, "causal": True, "window": (2, 1)},
        {"softcap": 0.8},
        {"alibi_slopes": [0.5, 0.3, 0.2, 0.1]},
        {"alibi_slopes": [[0.5, 0.3, 0.2, 0.1]], "softcap": 0.8, "causal": True, "mask": True},
        {"bias": True, "softcap": 1.5},
        {"scale": -0.4},
        {"scale": 0.0, "causal": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_gradients_are_central_differences(
    options: dict[str, Any], with_dlse: bool, sizes: tuple[int, int]
) -> None:
    # flash-attention#2466 (softcap), #889 and pytorch#136232 (the gradient of the LSE)
    n_q, n_k = sizes
    options = dict(options)
    qkv = random_qkv(20, (1, 4, n_q, 2), (1, 2, n_k, 2))
    if "mask" in options:
        options["mask"] = ragged(20, 4, n_q, n_k)
    if "bias" in options:
        options["bias"] = np.where(ragged(21, 4, n_q, n_k), upstream(np.ones(n_k), 22)[0], -np.inf)
    dout, dlse = upstream(qkv[0], 23)
    got = attention_backward(dout, *qkv, dlse=dlse if with_dlse else None, **options)
    problem = dout, dlse if with_dlse else 0, options
    for n, gradient in enumerate(got):
        assert gradient.dtype == np.float64 and gradient.shape == qkv[n].shape
        numeric = np.zeros(gradient.shape)
        for at in np.ndindex(gradient.shape):
            direction = np.zeros(gradient.shape)
            direction[at] = 1
            numeric[at] = along(qkv, n, direction, *problem)
        np.testing.assert_allclose(gradient, numeric, **DIFFERENCE)


@some
@given(problems(empty=False), st.integers(0, 2**32 - 1))
def test_gradients_in_a_random_direction(problem: Any, seed: int) -> None:
    qkv, options = problem
    dout, dlse = upstream(qkv[0], seed)
    got = attention_backward(dout, *qkv, dlse=dlse, **options)
    rng = np.random.default_rng(seed)
    for n, gradient in enumerate(got):
        direction = rng.standard_normal(gradient.shape)
        direction /= np.linalg.norm(direction)
        numeric = along(qkv, n, direction, dout, dlse, options)
        np.testing.assert_allclose((gradient * direction).sum(), numeric, **DIFFERENCE)


@some
@given(problems(), st.integers(0, 2**32 - 1))
def test_what_gradients_sum_to(problem: Any, seed: int) -> None:
    (q, k, v), options = problem
    (B, H, n_q, d), H_k = q.shape, k.shape[1]
    dout, dlse = upstream(q, seed)
    out, lse = attention_reference(q, k, v, **options)
    dq, dk, dv = attention_backward(dout, q, k, v, dlse=dlse, **options)
    group = (B, H_k, H // H_k, n_q, d)
    # out is linear in V with weights that sum to 1, or to 0 in a row without a visible key
    sees = (lse > -np.inf)[..., None]
    rows = (dout * sees).reshape(group).sum(axis=(2, 3))
    assert_near([dv.sum(axis=2)], [rows])
    assert_near([(dv * v).sum(axis=(2, 3))], [(dout * out).reshape(group).sum(axis=(2, 3, 4))])
    # Q and K meet in q . k alone: (t Q, K / t) is the same problem
    assert_near([(dq * q).reshape(group).sum(axis=(2, 3, 4))], [(dk * k).sum(axis=(2, 3))])
    # k + c adds scale q_i . c to all scores of row i: lse moves by it, out does not. So a row of dS
    # sums to its dlse, and the dK_j of a head to scale * sum_i dlse_i q_i
    if options["softcap"] is None:
        scale = d**-0.5 if options["scale"] is None else options["scale"]
        moved = (scale * dlse[..., None] * sees * q).reshape(group).sum(axis=(2, 3))
        assert_near([dk.sum(axis=2)], [moved])


def test_without_dlse_a_constant_on_all_keys_changes_nothing() -> None:
    q, k, v = random_qkv(24, (2, 5, 3), (2, 7, 3))
    dout, _ = upstream(q, 24)
    _, dk, _ = attention_backward(dout, q, k, v, causal=True)
    assert abs(dk).max() > 0.1
    np.testing.assert_allclose(dk.sum(axis=1), 0, **NEAR)
    dq, _, _ = attention_backward(dout, q, np.ones_like(k), v, causal=True)  # dS times equal rows
    np.testing.assert_allclose(dq, 0, **NEAR)


def test_a_loss_of_the_lse_alone() -> None:
    # flash-attention#889
    q, k, v = random_qkv(25, (2, 5, 3), (2, 4, 3))
    _, dlse = upstream(q, 25)
    dq, dk, dv = attention_backward(np.zeros_like(q), q, k, v, dlse=dlse, causal=True)
    assert (dv == 0).all() and abs(dk).max() > 0.1
    PK, _ = attention_reference(q, k, k, causal=True)  # the mean key is the LSE's gradient by q
    np.testing.assert_allclose(dq, 3**-0.5 * dlse[..., None] * PK, **EXACT)


def test_gradients_of_one_key() -> None:
    # flash-attention#334: NaN in dQ
    q, k, v = random_qkv(26, (3, 16), (1, 16), np.float16)
    dout, dlse = upstream(q, 26)
    dq, dk, dv = attention_backward(dout, 3 * q, 3 * k, v)
    assert_allclose((dq, dk), (0, 0))
    np.testing.assert_allclose(dv, dout.sum(axis=0, keepdims=True), **EXACT)
    dq, _, _ = attention_backward(dout, q, k, v, dlse=dlse)
    np.testing.assert_allclose(dq, dlse[:, None] * k.astype(np.float64) / 4, **EXACT)


def test_gradients_of_batches_and_heads_one_by_one() -> None:
    q, k, v = random_qkv(27, (2, 4, 5, 3), (2, 4, 6, 3))
    dout, dlse = upstream(q, 27)
    mask, slopes = ragged(27, 2, 4, 5, 6), np.random.default_rng(27).random((2, 4))
    whole = attention_backward(dout, q, k, v, dlse=dlse, mask=mask, alibi_slopes=slopes)
    for b in range(2):
        options = {"dlse": dlse[b], "mask": mask[b], "alibi_slopes": slopes[b]}
        batch = attention_backward(dout[b], q[b], k[b], v[b], **options)
        assert_equal(batch, [x[b] for x in whole])
        for h in range(4):
            options = {"dlse": dlse[b, h], "mask": mask[b, h], "alibi_slopes": slopes[b, h]}
            one = attention_backward(dout[b, h], q[b, h], k[b, h], v[b, h], **options)
            assert_equal(one, [x[b, h] for x in whole])


@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (4, 1)])
def test_grouped_gradients_are_sums_over_the_group(heads: tuple[int, int]) -> None:
    H, H_k = heads
    q, k, v = random_qkv(28, (2, H, 5, 4), (2, H_k, 6, 4))
    dout, dlse = upstream(q, 28)
    dq, dk, dv = attention_backward(dout, q, k, v, dlse=dlse, causal=True)
    k, v = (np.repeat(x, H // H_k, axis=1) for x in (k, v))
    all_dq, *all_kv = attention_backward(dout, q, k, v, dlse=dlse, causal=True)
    all_dk, all_dv = (x.reshape(2, H_k, -1, 6, 4).sum(axis=2) for x in all_kv)
    assert_near((dq, dk, dv), (all_dq, all_dk, all_dv))


def test_permuted_keys_permute_their_gradients() -> None:
    q, k, v = random_qkv(29, (2, 5, 3), (2, 7, 3))
    dout, dlse = upstream(q, 29)
    mask, to = ragged(29, 2, 5, 7), np.random.default_rng(29).permutation(7)
    dq, dk, dv = attention_backward(dout, q, k, v, dlse=dlse, mask=mask, softcap=2.0)
    assert_near(
        attention_backward(dout, q, k[:, to], v[:, to], dlse=dlse, mask=mask[..., to], softcap=2.0),
        (dq, dk[:, to], dv[:, to]),
    )


@some
@given(problems(empty=False), st.lists(st.integers(0, 5)), st.integers(0, 2**32 - 1))
def test_gradients_of_disjoint_rows_add_up(problem: Any, rows: list[int], seed: int) -> None:
    (q, k, v), options = problem
    dout, dlse = upstream(q, seed)
    dq, dk, dv = attention_backward(dout, q, k, v, dlse=dlse, **options)
    first = np.isin(np.arange(q.shape[2]), rows)
    parts = [np.flatnonzero(first), np.flatnonzero(~first)]
    of_rows = [
        attention_backward(dout[:, :, r], q, k, v, dlse=dlse[:, :, r], rows=r, **options)
        for r in parts
    ]
    for r, (some_dq, _, _) in zip(parts, of_rows, strict=True):
        np.testing.assert_allclose(some_dq, dq[:, :, r], **NEAR)
    assert_near([sum(x) for x in list(zip(*of_rows, strict=True))[1:]], (dk, dv))


@some
@given(problems(empty=False), st.sampled_from([np.nan, np.inf]), st.integers(0, 2**32 - 1))
def test_what_no_row_sees_and_what_sees_nothing_has_no_gradient(
    problem: Any, poison: float, seed: int
) -> None:
    # flash-attention#443: keys past the end, NaN in the backward
    (q, k, v), options = problem
    dout, dlse = upstream(q, seed)
    rng = np.random.default_rng(seed)
    keys, rows = rng.random(k.shape[2]) < 0.3, rng.random(q.shape[2]) < 0.3
    mask = np.ones((*q.shape[:3], k.shape[2]), bool)
    mask &= True if options["mask"] is None else options["mask"]
    options["mask"] = mask & ~keys & ~rows[:, None]
    dq, dk, dv = clean = attention_backward(dout, q, k, v, dlse=dlse, **options)
    assert all(np.isfinite(x).all() for x in clean)
    assert (dk[:, :, keys] == 0).all() and (dv[:, :, keys] == 0).all()
    _, lse = attention_reference(q, k, v, **options)
    assert (dq[lse == -np.inf] == 0).all() and (lse[:, :, rows] == -np.inf).all()
    k[:, :, keys] = v[:, :, keys] = q[:, :, rows] = poison
    dout[:, :, rows] = dlse[:, :, rows] = poison
    assert_equal(attention_backward(dout, q, k, v, dlse=dlse, **options), clean)


@pytest.mark.parametrize("poisoned", ["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_visible_nan_reaches_what_meets_it_alone(poisoned: str, softcap: float | None) -> None:
    # rows see their own key and the one before it
    arrays = dict(zip("qkv", random_qkv(30, (6, 3), (6, 3)), strict=True))
    arrays["dout"], arrays["dlse"] = upstream(arrays["q"], 30)
    clean = attention_backward(**arrays, window=(1, 0), softcap=softcap)
    arrays[poisoned][4] = np.nan
    got = attention_backward(**arrays, window=(1, 0), softcap=softcap)
    rows = [4, 5] if poisoned in "kv" else [4]
    keys = [3, 4, 5] if poisoned in "kv" else [3, 4]
    met = {0: rows, 1: keys, 2: keys}
    if poisoned in ("v", "dlse"):
        met[2] = []  # dV = P^T dO has neither
    for n, (gradient, expected) in enumerate(zip(got, clean, strict=True)):
        assert np.isnan(gradient[met[n]]).all()
        others = np.setdiff1d(np.arange(6), met[n])
        np.testing.assert_array_equal(gradient[others], expected[others])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 2, 0, 5), (2, 2, 5, 0), (0, 2, 3, 3), (2, 0, 3, 3), (1, 1, 0, 0)]
)
def test_gradients_of_zero_sizes(shape: tuple[int, int, int, int], causal: bool) -> None:
    B, H, N_q, N_k = shape
    q, k, v = random_qkv(31, (B, H, N_q, 4), (B, H, N_k, 4), np.float16)
    dout, dlse = upstream(q, 31)
    got = attention_backward(dout, q, k, v, dlse=dlse, causal=causal)
    for gradient, x in zip(got, (q, k, v), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()
    q, k, v = np.zeros((2, 0)), np.zeros((3, 0)), np.zeros((3, 0))
    assert [x.shape for x in attention_backward(q, q, k, v)] == [(2, 0), (3, 0), (3, 0)]


def test_gradients_far_from_zero_scores() -> None:
    # flash-attention#1052; cudnn-frontend#1072: the LSE around -128
    q, k, v = random_qkv(32, (4, 3), (5, 3))
    dout, dlse = upstream(q, 32)
    expected = attention_backward(dout, q, k, v, dlse=dlse)
    for shift in (-2000.0, -200.0, 200.0, 2000.0):
        assert_near(attention_backward(dout, q, k, v, dlse=dlse, bias=shift), expected)
    huge = np.full((2, 2), 1e18)  # two equal keys: half each, though log 2 is lost in the LSE
    _, _, dv = attention_backward(np.ones((2, 2)), huge, huge, v[:2, :2])
    np.testing.assert_allclose(dv, 1, **EXACT)
    # where tanh is flat, the scores have no gradient
    dq, dk, _ = attention_backward(dout, 1e4 * q, 1e4 * k, v, softcap=1.0)
    assert (dq == 0).all() and (dk == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_of_the_inputs_as_they_are(dtype: Any) -> None:
    q, k, v = random_qkv(33, (2, 5, 8), (2, 7, 8), dtype)
    dout, dlse = (x.astype(dtype) for x in upstream(q, 33))
    got = attention_backward(dout, q, k, v, dlse=dlse, causal=True, softcap=3.0)
    dout, q, k, v, dlse = (x.astype(np.float64) for x in (dout, q, k, v, dlse))
    assert_equal(got, attention_backward(dout, q, k, v, dlse=dlse, causal=True, softcap=3.0))
    assert {x.dtype for x in got} == {np.dtype(np.float64)}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"dout": np.zeros((2, 4, 8))}, ValueError, r"dout: got \(2, 4, 8\), accepted is \(2, 5"),
        ({"dout": np.zeros((2, 5, 1))}, ValueError, "dout"),
        ({"dlse": np.zeros((2, 5, 1))}, ValueError, r"dlse: .*accepted is \(2, 5\)"),
        ({"rows": [0, 1]}, ValueError, r"dout: .*accepted is \(2, 2, 8\)"),
        ({"q": np.zeros((3, 5, 8))}, ValueError, "q, k"),
        ({"v": np.zeros((2, 6, 8))}, ValueError, "q, k, v"),
        ({"window": (0, -3)}, ValueError, "window"),
        ({"dout": np.zeros((2, 5, 8), complex)}, TypeError, "dout: got complex128, accepted are"),
        ({"dlse": np.zeros((2, 5), int)}, TypeError, "dlse: got int64"),
        ({"q": np.zeros((2, 5, 8), int)}, TypeError, "q: got int64"),
        ({"k": np.zeros((2, 7, 8), bool)}, TypeError, "k: got bool"),
        ({"v": np.zeros((2, 7, 8), np.longdouble)}, TypeError, "v: got"),
        ({"mask": np.zeros((5, 7))}, TypeError, "mask: got float64"),
        ({"score": np.tanh}, TypeError, "attention_backward.*score"),
    ],
)
def test_errors_of_gradients_name_the_argument(
    wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    q, k, v = random_qkv(34, (2, 5, 8), (2, 7, 8))
    with pytest.raises(error, match=message):
        attention_backward(**{"dout": q, "q": q, "k": k, "v": v} | wrong)


# Public bug reports ------------------------------------------------------------------------------


def test_padding_row_changes_no_other_row() -> None:
    # pytorch#103749: a mask row of False turned the output into NaN
    q, k, v = random_qkv(6, (2, 6, 8), (2, 10, 8))
    mask = np.ones((6, 10), bool)
    mask[5] = False
    out, lse = attention_reference(q, k, v, mask=mask)
    assert (out[:, 5] == 0).all() and (lse[:, 5] == -np.inf).all()
    # whole problems of 5 and 6 rows may take different matrix kernels: round-off
    assert_allclose((out[:, :5], lse[:, :5]), attention_reference(q[:, :5], k, v))


def test_bias_of_lowest_float32_is_finite() -> None:
    # pytorch#110213 and #109517: such rows were NaN. The score is absorbed, the weights are equal
    lowest = float(np.finfo(np.float32).min)
    q, k, v = random_qkv(7, (3, 4), (3, 4), np.float32)
    bias = np.array([[lowest] * 3, [1.0] * 3, [1.0] * 3])
    for attention in (attention_reference, attention_same_precision):
        out, lse = attention(q, k, v, bias=bias)
        np.testing.assert_allclose(out[0], v.mean(axis=0), rtol=1e-6)
        assert np.isfinite(lse).all()
    q, k, v = random_qkv(7, (441, 64), (441, 64), np.float32)
    bias = np.zeros((441, 441))
    bias[:, :128] = bias[3:5] = lowest
    rows = [0, 3, 440]
    out, lse = attention_reference(q, k, v, bias=bias, rows=rows)
    assert_allclose((out[[0, 2]], lse[[0, 2]]), attention_reference(q[[0, 440]], k[128:], v[128:]))
    np.testing.assert_allclose(out[1], v.mean(axis=0, dtype=np.float64), **EXACT)


def test_band_of_late_keys() -> None:
    # pytorch#127055: the running maximum stays -inf for many tiles
    ones = np.ones((600, 4))
    out, lse = attention_reference(ones, ones, ones, window=(9, 0))
    np.testing.assert_allclose(out, 1, **EXACT)
    np.testing.assert_allclose(lse, 2 + np.log(np.minimum(np.arange(600) + 1, 10)), **EXACT)


def test_more_than_32768_keys() -> None:
    # xformers#719: an int16 counter; flashinfer#4485: the base is e
    zeros = np.zeros((33728, 8), np.float32)
    out, lse = attention_reference(zeros, zeros, zeros, rows=[0, 33727])
    assert (out == 0).all()
    np.testing.assert_allclose(lse, math.log(33728), **EXACT)


def test_one_key_and_huge_scores() -> None:
    # flash-attention#334 (one key), #1052 (large scores)
    q, k, v = random_qkv(8, (1, 16), (1, 16), np.float16)
    out, lse = attention_same_precision(3 * q, 3 * k, v)
    np.testing.assert_array_equal(out, v)
    huge = np.array([[1e18, -1e18], [1e18, 1e18]])
    out, lse = attention_reference(huge, huge, np.eye(2), scale=1.0)
    np.testing.assert_array_equal(out, np.eye(2))
    np.testing.assert_array_equal(lse, [2e36, 2e36])


# Rounding and the tolerance ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_precision_rounds_once(dtype: Any) -> None:
    q, k, v = random_qkv(9, (2, 5, 8), (2, 7, 8), dtype)
    out, lse = attention_same_precision(q, k, v, causal=True, softcap=3.0, alibi_slopes=[0.1, 0.2])
    acc = np.float64 if dtype == np.float64 else np.float32
    assert out.dtype == dtype and lse.dtype == acc
    wide = (x.astype(acc) for x in (q, k, v))
    out_acc, lse_acc = attention_same_precision(
        *wide, causal=True, softcap=3.0, alibi_slopes=[0.1, 0.2]
    )
    assert_equal((out, lse), (out_acc.astype(dtype), lse_acc))
    upcast = (x.astype(np.float64) for x in (q, k, v))
    assert_equal(attention_reference(q, k, v), attention_reference(*upcast))


def online(
    q: Any, k: Any, v: Any, B_c: int, scale: float, causal: bool, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """A tiled kernel at its worst: log2(e) folded into Q, dots column by column, exp2 off by 2 ulp.

    One head. The errors of exp2 are random up to 2 ulp; all else is rounded in the accumulation
    dtype, sums run from the first term to the last.
    """
    rng = np.random.default_rng(seed)
    t = np.float64 if q.dtype == np.float64 else np.float32
    Q, K, V = (x.astype(t) for x in (q, k, v))

    def exp2(x: np.ndarray) -> np.ndarray:
        ulps = 2 * float(np.finfo(t).eps) * rng.uniform(-1, 1, x.shape)
        return (np.exp2(x.astype(np.float64)) * (1 + np.where(x == 0, 0, ulps))).astype(t)

    m, l, acc = np.full(len(Q), -np.inf, t), np.zeros(len(Q), t), np.zeros(Q.shape, t)
    for first in range(0, len(K), B_c):
        S = np.zeros((len(Q), len(K[first : first + B_c])), t)
        for c in range(Q.shape[1]):
            S += (Q[:, c, None] * t(scale * math.log2(math.e))) * K[None, first : first + B_c, c]
        if causal:
            S = np.where(causal_mask(len(Q), len(K))[:, first : first + B_c], S, -np.inf)
        old, m = m, np.maximum(m, S.max(axis=1))
        shift = np.where(m == -np.inf, 0, m).astype(t)
        P, alpha = exp2(S - shift[:, None]), exp2(old - shift)
        l, acc = l * alpha, acc * alpha[:, None]
        for j in range(P.shape[1]):
            l, acc = l + P[:, j], acc + P[:, j, None] * V[first + j]
    with np.errstate(divide="ignore"):
        lse = m * t(math.log(2)) + np.log(l)
    return (acc / np.where(l == 0, 1, l).astype(t)[:, None]).astype(q.dtype), lse


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.tuples(*[st.integers(1, 20)] * 3),
    st.integers(1, 20),
    st.sampled_from([1e-3, 1.0, 8.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_tolerance_accepts_a_sloppy_kernel(
    dtype: Any, shape: Any, B_c: int, size: float, whole: bool, causal: bool, seed: int
) -> None:
    n_q, n_k, d = shape
    q, k, v = (size * x for x in random_qkv(seed, (n_q, d), (n_k, d)))
    if whole:  # small integers: the NumPy run is exact by luck
        q, k, v = (np.rint(x) for x in (q, k, v))
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    scale = d**-0.5
    out, lse = online(q, k, v, B_c, scale, causal, seed)
    assert_attention(out, lse, q, k, v, name="sloppy", scale=scale, causal=causal)


def rejected(out: Any, lse: Any, *qkv: Any, **options: Any) -> bool:
    try:
        assert_attention(out, lse, *qkv, name="wrong", **options)
    except AssertionError:
        return True
    return False


# A change of 1 % in the scale moves out by less than bfloat16 can show: there the lse must tell.
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(16, 48), d=st.sampled_from([8, 32, 64]))
def test_tolerance_rejects(dtype: Any, seed: int, n: int, d: int) -> None:
    qkv = random_qkv(seed, (2, n, d), (2, n, d), dtype)
    run = attention_same_precision
    out, lse = run(*qkv)
    assert not rejected(out, lse, *qkv)
    wrong_out, wrong_lse = run(*qkv, scale=1.01 * d**-0.5)
    assert rejected(out, wrong_lse, *qkv)
    assert rejected(wrong_out, None, *qkv) or dtype == bf16
    for key in range(0, n, 5):
        wrong_out, wrong_lse = run(*qkv, mask=np.arange(n) != key)
        assert rejected(out, wrong_lse, *qkv)
        assert rejected(wrong_out, None, *qkv)
    for off in (-1, 1):
        wrong_out, wrong_lse = run(*qkv, mask=np.tri(n, n, off, dtype=bool))
        assert rejected(wrong_out, None, *qkv, causal=True)
        assert rejected(out, wrong_lse, *qkv, causal=True)


# --- how far gradients may be off -----------------------------------------------------------------


def one_by_one(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """A B, the terms added from the first to the last in their own dtype."""
    total = np.zeros((A.shape[0], B.shape[1]), A.dtype)
    for n in range(A.shape[1]):
        total += A[:, n, None] * B[n]
    return total


def sloppy_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, causal: bool, seed: int
) -> tuple[np.ndarray, ...]:
    """A backward kernel at its worst: sums term by term, log2(e) by hand, exp2 off by 2 ulp."""
    rng = np.random.default_rng(seed)
    t = np.float64 if q.dtype == np.float64 else np.float32
    dO, Q, K, V, O = (x.astype(t) for x in (dout, q, k, v, out))
    scale = t(q.shape[1] ** -0.5)
    S = one_by_one(Q * scale, np.ascontiguousarray(K.T))
    x = ((S - lse[:, None]) * t(math.log2(math.e))).astype(np.float64)
    ulps = 2 * float(np.finfo(t).eps) * rng.uniform(-1, 1, x.shape)
    visible = causal_mask(len(Q), len(K)) if causal else np.ones(S.shape, bool)
    with np.errstate(all="ignore"):
        P = np.where(visible, np.exp2(x) * (1 + ulps), 0).astype(t)
    D = np.zeros(len(Q), t)
    for c in range(Q.shape[1]):
        D += dO[:, c] * O[:, c]
    dS = P * (one_by_one(dO, np.ascontiguousarray(V.T)) - (D - dlse)[:, None])
    dQ = scale * one_by_one(dS, K)
    dK = one_by_one(np.ascontiguousarray(dS.T), Q * scale)
    dV = one_by_one(np.ascontiguousarray(P.T), dO)
    return tuple(x.astype(q.dtype) for x in (dQ, dK, dV))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.tuples(*[st.integers(1, 20)] * 3),
    st.sampled_from([1e-3, 1.0, 4.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_tolerance_accepts_a_sloppy_backward_kernel(
    dtype: Any, shape: Any, size: float, whole: bool, causal: bool, seed: int
) -> None:
    n_q, n_k, d = shape
    q, k, v = (size * x for x in random_qkv(seed, (n_q, d), (n_k, d)))
    dout, dlse = upstream(q, seed)
    if whole:  # small integers: the NumPy run is exact by luck
        q, k, v, dout = (np.rint(x) for x in (q, k, v, dout))
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    out, lse = attention_same_precision(q, k, v, causal=causal)
    dlse = dlse.astype(lse.dtype)
    got = sloppy_backward(dout, q, k, v, out, lse, dlse, causal, seed)
    assert_attention_backward(got, dout, q, k, v, out, lse, name="sloppy", dlse=dlse, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(16, 48), d=st.sampled_from([8, 32]))
def test_tolerance_rejects_wrong_gradients(dtype: Any, seed: int, n: int, d: int) -> None:
    q, k, v = random_qkv(seed, (2, n, d), (2, n, d), dtype)
    dout, dlse = upstream(q, seed)
    out, lse = attention_same_precision(q, k, v, causal=True)
    arrays = [dout.astype(dtype), q, k, v, out, lse]
    run = attention_backward_same_precision

    def rejected(got: Any) -> bool:
        try:
            assert_attention_backward(got, *arrays, name="wrong", dlse=dlse, causal=True)
        except AssertionError:
            return True
        return False

    right = run(*arrays, dlse=dlse, causal=True)
    assert not rejected(right)
    wrong = {
        "no dlse": run(*arrays, causal=True),
        "dlse of the other sign": run(*arrays, dlse=-dlse, causal=True),
        "no D": run(*arrays[:4], 0 * out, lse, dlse=dlse, causal=True),
        "scale": run(*arrays, dlse=dlse, causal=True, scale=1.05 * d**-0.5),
        "diagonal": run(*arrays, dlse=dlse, mask=np.tri(n, n, -1, dtype=bool)),
        "a key": run(*arrays, dlse=dlse, causal=True, mask=np.arange(n) != n // 2),
        "a row": tuple(np.where((np.arange(n) == 1)[:, None], 0, x) for x in right),
        "dq and dk": (right[1], right[0], right[2]),
    }
    for what, got in wrong.items():
        assert rejected(got), what


def test_the_same_precision_of_float64_is_the_definition() -> None:
    qkv = random_qkv(31, (2, 4, 9, 5), (2, 2, 11, 5))
    dout, dlse = upstream(qkv[0], 32)
    options: dict[str, Any] = {"causal": True, "softcap": 2.0, "alibi_slopes": [0.4, 0.3, 0.2, 0.1]}
    forward = attention_reference(*qkv, **options)
    same = attention_backward_same_precision(dout, *qkv, *forward, dlse=dlse, **options)
    for x, y in zip(same, attention_backward(dout, *qkv, dlse=dlse, **options), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)
    for dtype in DTYPES:
        assert run_dtypes(dtype) == {np.dtype(dtype)}


def run_dtypes(dtype: Any) -> set[np.dtype]:
    """Dtypes of the gradients of problems in `dtype`."""
    qkv = random_qkv(33, (3, 4), (5, 4), dtype)
    out, lse = attention_same_precision(*qkv)
    return {x.dtype for x in attention_backward_same_precision(out, *qkv, out, lse)}


def test_assert_close_says_what_differs() -> None:
    q, k, v = random_qkv(10, (3, 4), (5, 4), np.float32)
    mask = np.ones((3, 5), bool)
    mask[1] = False
    v[4, 0] = np.nan
    mask[2, 4] = False
    ref, lse_ref = attention_reference(q, k, v, mask=mask)
    same, lse = attention_same_precision(q, k, v, mask=mask)
    assert np.isnan(ref).sum() == 1 and np.isneginf(lse_ref).sum() == 1
    error, allowed = assert_close_to_reference(same, ref, same, name="out")
    assert 0 < 2 * error < allowed < 1e-5
    assert_close_to_reference(lse, lse_ref, lse, name="lse")
    with pytest.raises(AssertionError, match=r"out: got float64 .*is float32"):
        assert_close_to_reference(ref, ref, same, name="out")
    with pytest.raises(AssertionError, match=r"out: got float32 \(2, 4\)"):
        assert_close_to_reference(same[:2], ref, same, name="out")
    for wrong in (np.nan, np.inf, -np.inf, 0.0):
        for at in ((0, 0), (2, 1)):
            out = same.copy()
            out[at] = wrong
            if np.isfinite(wrong) and np.isfinite(ref[at]):
                message = r"max\|out - ref64\| = .*e-.* > .*e-.* allowed, at \(2, 1\)"
            elif np.isnan(wrong) and np.isnan(ref[at]):
                continue
            else:
                message = r"1 of 12 entries are NaN or inf"
            with pytest.raises(AssertionError, match=message):
                assert_close_to_reference(out, ref, same, name="out")
    lse[1] = np.inf  # the other projects' sign of a fully masked row
    with pytest.raises(AssertionError, match=r"first at \(1,\): got inf, the reference is -inf"):
        assert_close_to_reference(lse, lse_ref, lse, name="lse")


# Real activations --------------------------------------------------------------------------------


# Largest difference to the stored output over all rows and over rows of real tokens: see
# fa2_numba/data/minilm_qkv.md. It is the float16 rounding of the stored q, k, v.
@pytest.mark.parametrize(
    ("layer", "everywhere", "real"), [(0, 5.39e-3, 2.90e-3), (5, 1.16e-3, 1.16e-3)]
)
def test_minilm(layer: int, everywhere: float, real: float) -> None:
    with (resources.files("fa2_numba") / "data" / "minilm_qkv.npz").open("rb") as file:
        data = np.load(file)
        q, k, v, out = (data[f"layer{layer}_{name}"] for name in ("q", "k", "v", "out"))
        mask = data["mask"]
    got, lse = attention_reference(q, k, v, mask=mask[:, None, None, :])
    error = abs(got - out).max(axis=(1, 3))
    assert error.max() == pytest.approx(everywhere, abs=5e-6)
    assert error[mask].max() == pytest.approx(real, abs=5e-6)
    poisoned = [np.where(mask[:, None, :, None], x, np.nan).astype(x.dtype) for x in (k, v)]
    assert_allclose(
        attention_reference(q, *poisoned, mask=mask[:, None, None, :], rows=[0, 200]),
        (got[:, :, [0, 200]], lse[:, :, [0, 200]]),
    )
    unmasked, _ = attention_reference(q[1], k[1], v[1])
    assert abs(unmasked - out[1]).max() > 1


# FlashAttention-2, step by step ------------------------------------------------------------------


def test_worked_example() -> None:
    steps = list(flash_attention_2_trace(**WORKED_EXAMPLE))
    assert [(s.i, s.j) for s in steps if isinstance(s, InnerStep)] == [
        (i, j) for i in (1, 2, 3) for j in (1, 2, 3)
    ]
    first = [s for s in steps[:3] if isinstance(s, InnerStep)]
    S_11, S_12, S_13 = (s.S_ij.tolist() for s in first)
    assert S_11 == [[4, -3], [-12, 15]]
    assert S_12 == [[7, -4], [-3, 12]]
    assert S_13 == [[10, 8], [-10, -24]]
    assert [s.m_i.tolist() for s in first] == [[4, 15], [7, 15], [10, 15]]
    np.testing.assert_allclose(first[-1].l_i, [1.1876, 1.0498], atol=5e-5)
    tiles = [s for s in steps if isinstance(s, RowTile)]
    np.testing.assert_allclose(tiles[0].O_i, [[3.177, 0.270], [1.190, 1.763]], atol=5e-4)
    q, k, v = (WORKED_EXAMPLE[name] for name in "qkv")
    out, lse = attention_reference(q, k, v, scale=1.0)
    assert abs(np.concatenate([t.O_i for t in tiles]) - out).max() <= 2 * np.finfo(np.float64).eps
    np.testing.assert_array_max_ulp(np.concatenate([t.L_i for t in tiles]), lse, maxulp=1)


@few
@given(problems(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_trace_equals_the_formula(problem: Any, B_r: int, B_c: int, causal: bool) -> None:
    (q, k, v), _ = problem
    assume(q.shape[2])
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    steps = list(flash_attention_2_trace(q, k, v, B_r, B_c, 0.5, causal))
    tiles = [s for s in steps if isinstance(s, RowTile)]
    got = np.concatenate([t.O_i for t in tiles]), np.concatenate([t.L_i for t in tiles])
    assert_allclose(got, attention_reference(q, k, v, scale=0.5, causal=causal))
    for s in steps:
        if causal and isinstance(s, InnerStep):  # no tile is visited in vain
            assert np.isfinite(s.S_ij).any()
