"""Relations between runs: what changes when the problem changes in a known way.

Where two runs do the same arithmetic they agree bit for bit. Where they sum in another order,
both must be within the reference's tolerance of one truth.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from strategies import (
    DTYPES,
    SMALL_TILINGS,
    Backend,
    Case,
    Kernel,
    bits,
    cases,
    forall,
)

from fa2_numba import api, masking, reference, simulator
from fa2_numba.tiling import Tiling

every_method = pytest.mark.parametrize("method", api.PORTABLE)

# On a GPU each kernel costs seconds to compile, so the relations between sizes share two kernels.
TILING = SMALL_TILINGS[1] if simulator.ACTIVE else Tiling(16, 16, 4, 8)


def plain(*masks: tuple[str, ...], scores: tuple[tuple[str, ...], ...] = ((),)) -> Any:
    """Kernels of two head dimensions with one of these masks and scores."""
    return st.builds(
        Kernel,
        d=st.sampled_from((3, 8) if simulator.ACTIVE else (48,)),
        tiling=st.just(TILING),
        mask=st.sampled_from(masks or ((),)),
        score=st.sampled_from(scores),
    )


def assert_same(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> None:
    assert bits(*a) == bits(*b)


# ---- the order of keys ------------------------------------------------------------------------


@every_method
@forall(5, cases(plain((), ("boolean",), scores=((), ("softcap",))), empty=False))
def test_permuting_keys(backend: Backend, method: str, case: Case) -> None:
    host = q, k, v = case.arrays("fp32")
    order = case.rng("order").permutation(case.N_k)
    options = case.options("fp32", backend.to_device)
    if (mask := case.dense_mask()) is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:3], case.N_k))
        options["mask"] = backend.to_device(np.ascontiguousarray(mask[..., order]))
    out, lse = backend.attention(method, q, k[:, :, order], v[:, :, order], **options)
    reference.assert_attention(out, lse, *host, name=method, **case.reference_options("fp32"))


@every_method
@forall(5, cases(plain((), ("boolean",)), empty=False), st.floats(0, 1))
def test_splitting_keys_and_merging_by_lse(
    backend: Backend, method: str, case: Case, where: float
) -> None:
    # fp32 and fp64 alone: in fp16 and bf16 the parts are rounded before they are merged
    dtype = ("fp32", "fp64")[case.seed % 2]
    host = q, k, v = case.arrays(dtype)
    mask, scale = case.dense_mask(), case.scale
    cut = round(where * case.N_k)  # 0 and N_k: one part has no key
    parts, inner = [], np.array(reference.rounding_error(*host, mask=mask, scale=scale))
    for keys in (slice(cut), slice(cut, None)):
        piece: dict[str, Any] = {"scale": scale}
        if mask is not None:
            mask_k = np.broadcast_to(mask, (*mask.shape[:3], case.N_k))
            piece["mask"] = np.ascontiguousarray(mask_k[..., keys])
        inner += reference.rounding_error(q, k[:, :, keys], v[:, :, keys], **piece)
        if mask is not None:
            piece["mask"] = backend.to_device(piece["mask"])
        parts += backend.attention(
            method, q, k[:, :, keys], v[:, :, keys], tiling=case.kernel.tiling, **piece
        )
    merged = [x.astype(DTYPES[dtype]) for x in reference.merge(*parts)]
    expected = reference.attention_reference(*host, mask=mask, scale=scale)
    same = reference.attention_same_precision(*host, mask=mask, scale=scale)
    for n, name in enumerate(("out", "lse")):
        reference.assert_close_to_reference(
            merged[n], expected[n], same[n], name=name, inner=inner[n]
        )


@every_method
@forall(3, cases(plain(("causal",), ("window",), ("boolean",)), empty=False))
def test_any_tiling_gives_the_same(backend: Backend, method: str, case: Case) -> None:
    tilings = SMALL_TILINGS if simulator.ACTIVE else (None, TILING, Tiling(32, 32, 8, 16))
    for tiling in tilings:
        case = case.with_kernel(tiling=tiling)
        out, lse = backend.run(method, "fp32", case)
        reference.assert_attention(
            out, lse, *case.arrays("fp32"), name=f"{method}, {tiling}",
            **case.reference_options("fp32"),
        )  # fmt: skip


# ---- one mask, said in several ways -----------------------------------------------------------


def causal_forms(case: Case) -> dict[str, dict[str, Any]]:
    """The causal mask in every way that the arguments allow."""
    dense = reference.causal_mask(case.N_q, case.N_k)
    one_document = masking.documents(np.zeros(case.N_k, np.int64))
    return {
        "True": {"causal": True},
        "bound": {"causal": "bound"},
        "skip": {"causal": "skip"},
        "window": {"window": (-1, 0)},
        "longer window": {"window": (case.N_q + case.N_k, 0)},
        "prefix of nothing": {"mask": masking.prefix_lm(0)},
        "boolean": {"mask": dense},
        "twice": {"causal": True, "window": (-1, 0)},
        "with one document": {"causal": "skip", "mask": one_document},
        "own": {"mask": masking.custom(lambda args, b, h, i, j: j <= i, name="own")},
    }


@every_method
@forall(3, cases(plain(("causal",)), empty=False))
def test_causal_in_every_form(backend: Backend, method: str, case: Case) -> None:
    host, tiling = case.arrays("fp32"), case.kernel.tiling
    results = {}
    for form, options in causal_forms(case).items():
        if isinstance(options.get("mask"), np.ndarray):
            options["mask"] = backend.to_device(options["mask"])
        results[form] = backend.attention(method, *host, tiling=tiling, scale=case.scale, **options)
        reference.assert_attention(
            *results[form], *host, name=f"{method}, {form}", causal=True, scale=case.scale
        )
    if simulator.ACTIVE:  # a GPU compiler may fuse each form's multiply-adds in its own way
        first, *others = results.values()
        for other in others:
            assert_same(first, other)


@every_method
@forall(3, cases(plain(), empty=False))
def test_what_hides_nothing_changes_nothing(backend: Backend, method: str, case: Case) -> None:
    # flash-attention#1133: a window longer than the keys took another path, and other bits
    host, N = case.arrays("fp32"), case.N_q + case.N_k
    common = {"tiling": case.kernel.tiling, "scale": case.scale}
    forms: tuple[dict[str, Any], ...] = (
        {},
        {"window": (-1, -1)},
        {"window": (N, N)},
        {"mask": masking.prefix_lm(case.N_k)},
        {"mask": backend.to_device(np.ones((1, 1, 1, 1), bool))},
        {"mask": backend.to_device(np.ones((case.N_q, case.N_k), bool))},
    )
    results = [backend.attention(method, *host, **common, **form) for form in forms]
    for form, result in zip(forms, results, strict=True):
        reference.assert_attention(*result, *host, name=f"{method} {form}", scale=case.scale)
        if simulator.ACTIVE:
            assert_same(results[0], result)


# ---- values -----------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
@forall(2, cases(plain(("causal",)), empty=False), st.sampled_from((-200, 200, 24)))
def test_a_constant_on_all_scores_moves_only_the_lse(
    backend: Backend, method: str, dtype: str, case: Case, shift: int
) -> None:
    # A feature more: q gets the constant, k a one, v a zero; scale 1/2 keeps all of it exact.
    q, k, v = (np.pad(x, [(0, 0)] * 3 + [(0, 1)]) for x in case.arrays(dtype))
    q[..., -1], k[..., -1] = 2 * shift, 1
    scale = 0.5 / math.sqrt(case.kernel.d)
    out, lse = backend.attention(
        method, q, k, v, causal=True, scale=scale, tiling=case.kernel.tiling
    )
    assert not out[..., -1].any()
    problem: dict[str, Any] = {"causal": True, "scale": scale}
    inner = reference.rounding_error(q, k, v, **problem)  # the scores are larger now
    same = reference.attention_same_precision(q, k, v, **problem)
    expected, expected_lse = reference.attention_reference(
        q[..., :-1], k[..., :-1], v[..., :-1], **problem
    )
    reference.assert_close_to_reference(
        out[..., :-1], expected, same[0][..., :-1], name="out", inner=inner[0]
    )
    moved = expected_lse + scale * 2 * shift
    reference.assert_close_to_reference(lse, moved, same[1], name="lse", inner=inner[1])


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
@forall(2, cases(plain(("window",)), empty=False))
def test_out_scales_with_v(backend: Backend, method: str, dtype: str, case: Case) -> None:
    q, k, v = case.arrays(dtype)
    options = case.options(dtype, backend.to_device)
    # Away from fp16's subnormals, where twice a rounded value is not the rounded double.
    v = v + v.dtype.type(1) * 64
    out, lse = backend.attention(method, q, k, v, **options)
    twice, same_lse = backend.attention(method, q, k, v * v.dtype.type(2), **options)
    assert_same((out * out.dtype.type(2), lse), (twice, same_lse))


@every_method
@forall(4, cases(plain(("boolean",), ("documents",)), empty=False))
def test_probabilities_sum_to_one(backend: Backend, method: str, case: Case) -> None:
    q, k, v = case.arrays("fp64")
    out, lse = backend.attention(
        method, q, k, np.ones_like(v), **case.options("fp64", backend.to_device)
    )
    seen = np.isfinite(lse)
    # N_k additions of P in O and in l, each off by at most eps / 2 of a sum that is at most 1
    np.testing.assert_allclose(out[seen], 1, atol=case.N_k * np.finfo(np.float64).eps, rtol=0)
    assert not out[~seen].any()
    assert (lse[~seen] == -np.inf).all()


# ---- batches and heads ------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
@forall(1, cases(plain(("boolean",), ("causal",), scores=(("alibi",),)), empty=False))
def test_batched_equals_looped(backend: Backend, method: str, dtype: str, case: Case) -> None:
    case = replace(case, B=2, group=2, H_k=2)
    q, k, v = case.arrays(dtype)
    mask = case.dense_mask()
    out, lse = backend.run(method, dtype, case)
    slopes = np.broadcast_to(case.slopes(dtype), (case.B, case.H))
    for b, h in np.ndindex(case.B, case.H):
        one: dict[str, Any] = {"alibi_slopes": backend.to_device(slopes[b, h : h + 1].copy())}
        if case.kernel.mask == ("causal",):
            one["causal"] = True
        elif mask is not None:
            each = np.broadcast_to(mask, (case.B, case.H, case.N_q, case.N_k))
            one["mask"] = backend.to_device(each[b, h].copy())
        one |= {"tiling": case.kernel.tiling, "scale": case.scale}
        single = backend.attention(method, q[b, h], k[b, h // 2], v[b, h // 2], **one)
        assert_same(single, (out[b, h], lse[b, h]))


@every_method
@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (9, 3), (12, 1)])
def test_gqa_equals_repeated_heads(backend: Backend, method: str, heads: tuple[int, int]) -> None:
    # native-sparse-attention-triton#27: heads divided by the wrong count
    H, H_k = heads
    case = Case(Kernel(d=4, tiling=TILING), H_k=H_k, group=H // H_k, N_q=3, N_k=5)
    q, k, v = case.arrays("fp32")
    grouped = backend.attention(method, q, k, v, tiling=TILING)
    repeated = backend.attention(
        method, q, k.repeat(H // H_k, axis=1), v.repeat(H // H_k, axis=1), tiling=TILING
    )
    assert_same(grouped, repeated)


@every_method
@forall(3, cases(plain(("causal",)), empty=False))
def test_batches_do_not_see_each_other(backend: Backend, method: str, case: Case) -> None:
    case = replace(case, B=2)
    q, k, v = case.arrays("fp32")
    options = case.options("fp32", backend.to_device)
    before = backend.attention(method, q, k, v, **options)
    for x in (q, k, v):
        x[1] = np.nan
    after = backend.attention(method, q, k, v, **options)
    assert_same((before[0][0], before[1][0]), (after[0][0], after[1][0]))
    visible = np.isfinite(before[1][1])
    assert np.isnan(after[0][1][visible]).all()


# ---- threads ----------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@forall(4, cases(empty=False))
def test_the_order_of_threads(backend: Backend, method: str, dtype: str, case: Case) -> None:
    """A missing barrier shows: between barriers the last thread runs first."""
    if backend.name == "gpu":
        pytest.skip("a GPU's order is its own; there, repeated runs are compared")
    q, k, v = backend.operands(case, dtype)
    runs = []
    for order in ("forward", "reversed"):
        with simulator.thread_order(order):
            run = api.measure(q, k, v, method=method, **case.options(dtype, backend.to_device))
        runs.append(run)
    assert_same((runs[0].out, runs[0].lse), (runs[1].out, runs[1].lse))
    assert runs[0].rows == runs[1].rows
