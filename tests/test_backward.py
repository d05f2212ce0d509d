"""Gradients against the reference, counts against the model, and relations between backward runs.

The methods are read from `PORTABLE_BACKWARD`: a kernel is tested the day it is listed. out and lse
are those of the reference, rounded, so that a fault of the forward pass does not show here.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st
from strategies import (
    DTYPES,
    LAYOUTS,
    SMALL_TILINGS,
    Backend,
    Case,
    Kernel,
    backward_method,
    bits,
    cases,
    forall,
)

from fa2_numba import backward, io_model, launch, masking, reference, simulator, traffic
from fa2_numba.problem import Problem
from fa2_numba.tiling import Tiling

METHODS = tuple(backward.PORTABLE_BACKWARD)
every_method = pytest.mark.parametrize("method", METHODS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
# dout's layout, and if there is a dlse. On a GPU another kind of either is another compilation.
UPSTREAM = (
    st.tuples(st.sampled_from(tuple(LAYOUTS)), st.booleans())
    if simulator.ACTIVE
    else st.sampled_from((("heads inside", True), ("gaps", False)))
)
TILING = SMALL_TILINGS[1] if simulator.ACTIVE else Tiling(16, 16, 4, 8)


def plain(*masks: tuple[str, ...]) -> Any:
    """Kernels with one of these masks."""
    d = st.sampled_from((3, 8) if simulator.ACTIVE else (48,))
    mask = st.sampled_from(masks or ((),))
    return st.builds(Kernel, d=d, tiling=st.just(TILING), mask=mask)


def repeatable(method: str) -> bool:
    """Whether two runs give the same bits: atomic adds come in one order under the simulator."""
    return simulator.ACTIVE or method != "fa2_backward"


def host_arrays(case: Case, dtype: str, **problem: Any) -> list[np.ndarray]:
    """dout, q, k, v, out, lse."""
    q, k, v = case.arrays(dtype)
    out, lse = reference.attention_same_precision(q, k, v, **problem)
    return [case.upstream(dtype)[0], q, k, v, out, lse]


# ---- values and counts ------------------------------------------------------------------------


@every_dtype
@every_method
# N_q = 0: dk and dv are written all the same; no query heads for two key heads
@example(Case(B=2, N_q=0), ("contiguous", True))
@example(Case(H_k=2, group=0), ("contiguous", False))
@example(Case(N_k=0), ("contiguous", True))
# three threads share five keys: the sixth is the next tile's
@example(Case(Kernel(tiling=Tiling(6, 5, 3, 1)), N_k=12), ("contiguous", False))
@forall(8, cases(), UPSTREAM)
def test_equals_the_reference_and_the_model(
    backend: Backend, method: str, dtype: str, case: Case, upstream: tuple[str, bool]
) -> None:
    layout, with_dlse = upstream
    problem = case.reference_options(dtype)
    dout, dlse = case.upstream(dtype, with_dlse)
    if layout == "one head for all":
        dout = np.ascontiguousarray(np.broadcast_to(dout[:, :1], dout.shape))
    if layout == "one row for all":
        dout = np.ascontiguousarray(np.broadcast_to(dout[:, :, :1], dout.shape))
    host = [dout, *host_arrays(case, dtype, **problem)[1:]]
    _, q, k, v, out, lse = host
    arrays = [backend.place(dout, layout)[1], *backend.operands(case, dtype)]
    arrays += [backend.place(out, case.kernel.out)[1], backend.to_device(lse)]
    options = case.options(dtype, backend.to_device) | backward_method(method)
    if dlse is not None:
        options["dlse"] = backend.to_device(dlse)

    got = tuple(map(backend.to_host, backward.attention_backward(*arrays, **options)))
    assert [x.shape for x in got] == [q.shape, k.shape, v.shape]
    reference.assert_attention_backward(got, *host, dlse=dlse, name=method, **problem)

    measured = backward.measure_backward(*arrays, **options)
    counted = [backend.to_host(x) for x in (measured.dq, measured.dk, measured.dv)]
    first = 0 if repeatable(method) else 1
    assert bits(*counted[first:]) == bits(*got[first:])
    assert all((r.source, r.level, r.cycles) == ("counted", "issued", None) for r in measured.rows)
    predicted = io_model.predict(measured.problem)
    assert traffic.differences(measured.rows, predicted) == []
    assert method == "fa2_backward" or "atomic" not in {r.op for r in predicted}


@every_method
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_the_leading_axes(backend: Backend, method: str, ndim: int) -> None:
    host = host_arrays(Case(B=2, H_k=2, N_q=5, N_k=7), "fp32", causal=True)
    host = [x[(0,) * (4 - ndim)] for x in host]
    got = backend.backward(method, *host, causal=True)
    assert [x.shape for x in got] == [x.shape for x in host[1:4]]
    reference.assert_attention_backward(got, *host, name=method, causal=True)


@every_dtype
@every_method
def test_the_default_tiling_and_the_largest_head(backend: Backend, method: str, dtype: str) -> None:
    host = host_arrays(Case(Kernel(d=256, tiling=None), N_q=2, N_k=3), dtype)
    got = backend.backward(method, *host)
    reference.assert_attention_backward(got, *host, name=method)


@every_dtype
@every_method
def test_after_the_forward_pass(backend: Backend, method: str, dtype: str) -> None:
    """With out and LSE of a kernel, and the gradient of the LSE."""
    case = Case(Kernel(d=8), H_k=2, group=2, N_q=9, N_k=13)
    q, k, v = case.arrays(dtype)
    dout, dlse = case.upstream(dtype)
    options: dict[str, Any] = {"causal": True, "softcap": 3.0}
    out, lse = backend.attention(method.split("_")[0], q, k, v, **options)
    host = [dout, q, k, v, out, lse]
    got = backend.backward(method, *host, dlse=dlse, **options)
    reference.assert_attention_backward(got, *host, name=method, dlse=dlse, **options)


def test_auto_is_a_method(backend: Backend) -> None:
    host = host_arrays(Case(), "fp32")
    auto = [backend.to_host(x) for x in backward.attention_backward(*map(backend.to_device, host))]
    for x, y in zip(auto, backend.backward("fa2_backward", *host), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


# ---- relations --------------------------------------------------------------------------------


@every_dtype
@every_method
@forall(1, cases(plain(("causal",), ("boolean",)), empty=False))
def test_a_loss_of_the_lse_alone(backend: Backend, method: str, dtype: str, case: Case) -> None:
    # flash-attention#889
    problem = case.reference_options(dtype)
    host = host_arrays(case, dtype, **problem)
    host[0] = np.zeros_like(host[0])
    dlse = case.upstream(dtype)[1]
    options = case.options(dtype, backend.to_device)
    got = backend.backward(method, *host, dlse=dlse, **options)
    reference.assert_attention_backward(got, *host, dlse=dlse, name=method, **problem)
    assert not got[2].any()


@every_method
@forall(2, cases(plain((), ("window",), ("boolean",)), empty=False))
def test_rows_of_dS_sum_to_dlse(backend: Backend, method: str, case: Case) -> None:
    """Where all keys are alike, dQ_i is scale times a key times the sum of row i of dS."""
    case = replace(case, scale=0.5)
    q, k, v = case.arrays("fp64")
    k = np.ones_like(k)
    problem = case.reference_options("fp64")
    out, lse = reference.attention_same_precision(q, k, v, **problem)
    dout, dlse = case.upstream("fp64")
    assert dlse is not None
    options = case.options("fp64", backend.to_device)
    seen = np.isfinite(lse)
    for given in (None, dlse):
        dq, *_ = backend.backward(method, dout, q, k, v, out, lse, dlse=given, **options)
        sums = np.zeros_like(lse) if given is None else np.where(seen, given, 0)
        # d + 2 N_k roundings of terms no larger than |dO| |v| d, and L's rounding in each P
        most = abs(dout).max() * abs(v).max() * case.kernel.d * (2 + abs(lse[seen]).max(initial=0))
        atol = (case.kernel.d + 2 * case.N_k + 8) * np.finfo(np.float64).eps * most
        np.testing.assert_allclose(dq, 0.5 * sums[..., None] + 0 * dq, rtol=1e-12, atol=atol)


@every_dtype
@every_method
def test_one_key(backend: Backend, method: str, dtype: str) -> None:
    # flash-attention#334: a softmax over one key is 1, whatever the score
    host = host_arrays(Case(Kernel(d=16), N_q=5, N_k=1, spread=3.0), dtype)
    dq, dk, _ = got = backend.backward(method, *host)
    reference.assert_attention_backward(got, *host, name=method)
    dout, q, k, v, *_ = (abs(x.astype(np.float64)).max() for x in host)
    eps = np.finfo(np.float64 if dtype == "fp64" else np.float32).eps
    narrow = np.finfo(np.float16).eps if dtype == "fp16" else 2**-8 if dtype == "bf16" else 0
    dS = (32 * eps + narrow) * dout * v * 16  # rounding of dO V, D and out
    assert abs(dq.astype(np.float64)).max() <= dS * k
    assert abs(dk.astype(np.float64)).max() <= dS * q * 5


@every_dtype
@every_method
@forall(1, cases(plain(("boolean",), ("causal",)), empty=False))
def test_batched_equals_looped(backend: Backend, method: str, dtype: str, case: Case) -> None:
    case = replace(case, B=2, group=2, H_k=2)
    problem = case.reference_options(dtype)
    host = host_arrays(case, dtype, **problem)
    options = case.options(dtype, backend.to_device)
    whole = backend.backward(method, *host, **options)
    mask = case.dense_mask()
    for b, h_k in np.ndindex(case.B, case.H_k):
        heads = slice(2 * h_k, 2 * h_k + 2)
        one = [x[b, slice(h_k, h_k + 1) if n in (2, 3) else heads] for n, x in enumerate(host)]
        here = dict(options)
        if "mask" in options and mask is not None:
            full = np.broadcast_to(mask, (case.B, case.H, case.N_q, case.N_k))
            here["mask"] = backend.to_device(np.ascontiguousarray(full[b, heads]))
        dq, dk, dv = backend.backward(method, *one, **here)
        if repeatable(method):
            assert bits(dq) == bits(whole[0][b, heads])
        assert bits(dk, dv) == bits(whole[1][b, h_k : h_k + 1], whole[2][b, h_k : h_k + 1])


@every_method
@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (9, 3), (12, 1)])
def test_gqa_is_the_sum_over_repeated_heads(
    backend: Backend, method: str, heads: tuple[int, int]
) -> None:
    # native-sparse-attention-triton#27: heads divided by the wrong count
    H, H_k = heads
    case = Case(Kernel(d=4, tiling=TILING), H_k=H_k, group=H // H_k, N_q=3, N_k=5)
    dout, q, k, v, out, lse = host = host_arrays(case, "fp64")
    grouped = backend.backward(method, *host, tiling=TILING)
    k, v = (x.repeat(H // H_k, axis=1) for x in (k, v))
    dq, dk, dv = backend.backward(method, dout, q, k, v, out, lse, tiling=TILING)
    by_group = (1, H_k, H // H_k, 5, 4)
    for x, y in zip(
        grouped, (dq, dk.reshape(by_group).sum(2), dv.reshape(by_group).sum(2)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


@every_dtype
@every_method
@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_what_nobody_sees_may_hold_anything(
    backend: Backend, method: str, dtype: str, fill: float
) -> None:
    """Padding of keys and of rows, in memory and behind a mask: the same gradients, and zeros."""
    case = Case(Kernel(d=5), H_k=2, group=2, N_q=6, N_k=11)
    host = host_arrays(case, dtype)
    trimmed = backend.backward(method, *host, tiling=TILING)
    padded = []
    for n, x in enumerate(host):
        axis, more = 2, (4 if n in (2, 3) else 3)
        shape = (*x.shape[:axis], more, *x.shape[axis + 1 :])
        end = np.full(shape, fill, x.dtype)
        if n == 4:
            end[...] = 0  # out of a row without keys
        if n == 5:
            end[...] = -np.inf
        padded.append(np.concatenate([x, end], axis))
    mask = np.zeros((9, 15), bool)
    mask[:6, :11] = True
    got = backend.backward(method, *padded, mask=backend.to_device(mask), tiling=TILING)
    inside = got[0][:, :, :6], got[1][:, :, :11], got[2][:, :, :11]
    reference.assert_attention_backward(inside, *host, name=method)
    for name, x, y in zip(("dq", "dk", "dv"), inside, trimmed, strict=True):
        if name != "dq" or repeatable(method):
            np.testing.assert_array_equal(x, y)
    assert not any(x[:, :, n:].any() for x, n in zip(got, (6, 11, 11), strict=True))


@every_method
@pytest.mark.parametrize("where", ["q", "dout", "k", "v"])
def test_nan_reaches_whom_the_formula_takes_it_to(
    backend: Backend, method: str, where: str
) -> None:
    """Under a causal mask: NaN in row 2 or key 2, in a tile that is partly masked."""
    host = host_arrays(Case(Kernel(d=5), N_q=8, N_k=8), "fp32", causal=True)
    clean = backend.backward(method, *host, causal=True, tiling=TILING)
    place = {"dout": 0, "q": 1, "k": 2, "v": 3}[where]
    host[place][0, 0, 2, 2] = np.nan
    options: dict[str, Any] = {"causal": True}
    host[4:] = reference.attention_same_precision(*host[1:4], **options)
    got = backend.backward(method, *host, tiling=TILING, **options)
    exact = reference.attention_backward(*host[:4], **options)
    for name, x, y, before in zip(("dq", "dk", "dv"), got, exact, clean, strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y), err_msg=name)
        untouched = ~np.isnan(y).any(axis=-1)
        if where in ("q", "dout") and name == "dq":
            np.testing.assert_allclose(x[untouched], before[untouched], rtol=1e-5, atol=1e-6)
    assert any(np.isnan(x).any() for x in got)


@every_method
def test_a_row_whose_lse_is_minus_infinity_counts_for_nothing(
    backend: Backend, method: str
) -> None:
    """Whatever the mask says: here it has none, and row 2 would see all keys."""
    host = host_arrays(Case(Kernel(d=5), N_q=6, N_k=8), "fp32")
    host[5][0, 0, 2] = -np.inf
    dq, dk, dv = backend.backward(method, *host, tiling=TILING)
    assert not dq[0, 0, 2].any()
    others = [x[:, :, [0, 1, 3, 4, 5]] if n not in (2, 3) else x for n, x in enumerate(host)]
    expected = reference.attention_backward(*others[:4])
    np.testing.assert_allclose(dq[:, :, [0, 1, 3, 4, 5]], expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dk, expected[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dv, expected[2], rtol=1e-4, atol=1e-5)


@every_dtype
@every_method
@forall(3, st.integers(0, 2**32 - 1), st.sampled_from((1.0, 1.5, 3.0)))
def test_heavy_tails(backend: Backend, method: str, dtype: str, seed: int, tail: float) -> None:
    """Student's t: scores of thousands, where P is 0 or 1 and L has lost its last digits."""
    rng = np.random.default_rng(seed)
    d, options = (8 if simulator.ACTIVE else 48), {"causal": True}
    dout, q, k, v = (
        np.clip(rng.standard_t(tail, (2, n, d)), -1e3, 1e3).astype(DTYPES[dtype])
        for n in (9, 9, 13, 13)
    )
    out, lse = reference.attention_same_precision(q, k, v, causal=True)
    host = [dout, q, k, v, out, lse]
    got = backend.backward(method, *host, tiling=TILING, **options)
    with np.errstate(over="ignore"):
        reference.assert_attention_backward(got, *host, name=method, causal=True)


@every_dtype
@every_method
@forall(2, cases(empty=False))
def test_the_order_of_threads(backend: Backend, method: str, dtype: str, case: Case) -> None:
    """A missing barrier shows: between barriers the last thread runs first."""
    if backend.name == "gpu":
        pytest.skip("a GPU's order is its own; there, repeated runs are compared")
    host = host_arrays(case, dtype, **case.reference_options(dtype))
    options = case.options(dtype, backend.to_device) | backward_method(method)
    runs = []
    for order in ("forward", "reversed"):
        with simulator.thread_order(order):
            runs.append(backward.measure_backward(*host, **options))
    assert bits(runs[0].dq, runs[0].dk, runs[0].dv) == bits(runs[1].dq, runs[1].dk, runs[1].dv)
    assert runs[0].rows == runs[1].rows


@every_method
@forall(1, cases(plain(("causal",)), empty=False))
def test_repeated_runs_agree_bitwise(backend: Backend, method: str, case: Case) -> None:
    # flash-attention#414, #2244: dk and dv always, dq where nothing is added atomically
    case = replace(case, B=2, group=2)
    options = case.options("fp32", backend.to_device)
    host = host_arrays(case, "fp32", **case.reference_options("fp32"))
    first = backend.backward(method, *host, **options)
    for _ in range(1 if simulator.ACTIVE else 50):
        again = backend.backward(method, *host, **options)
        skip = 0 if repeatable(method) else 1
        assert bits(*again[skip:]) == bits(*first[skip:])


@every_method
@forall(1, cases(plain(("causal",), ("window",)), empty=False))
def test_any_tiling_gives_the_same(backend: Backend, method: str, case: Case) -> None:
    tilings = SMALL_TILINGS if simulator.ACTIVE else (None, TILING, Tiling(32, 32, 8, 16))
    problem = case.reference_options("fp32")
    host = host_arrays(case, "fp32", **problem)
    for tiling in tilings:
        options = case.with_kernel(tiling=tiling).options("fp32", backend.to_device)
        got = backend.backward(method, *host, **options)
        reference.assert_attention_backward(got, *host, name=f"{method}, {tiling}", **problem)


# ---- score changes ----------------------------------------------------------------------------


def capped(args: Any, i: Any, j: Any, s: Any) -> Any:
    """softcap, written as an own change."""
    return args[0] * math.tanh(s / args[0])


def capped_derivative(args: Any, i: Any, j: Any, s: Any) -> Any:
    """Its derivative."""
    t = math.tanh(s / args[0])
    return 1 - t * t


@every_method
def test_an_own_change_with_its_derivative(backend: Backend, method: str) -> None:
    # flash-attention#2466: the factor 1 - tanh^2
    case = Case(Kernel(d=4, score=("softcap", "alibi")), N_q=5, N_k=9, spread=2.0)
    problem = case.reference_options("fp64")
    host = host_arrays(case, "fp64", **problem)
    slopes = backend.to_device(case.slopes("fp64"))
    built_in = backend.backward(method, *host, softcap=3.0, alibi_slopes=slopes)
    reference.assert_attention_backward(built_in, *host, name=method, **problem)
    del problem["alibi_slopes"]
    host = host_arrays(case, "fp64", **problem)
    own = masking.score(capped, 3.0, derivative=capped_derivative)
    got = backend.backward(method, *host, score=own)
    reference.assert_attention_backward(got, *host, name=method, **problem)


# ---- predicting -------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("with_dlse", [False, True])
def test_predicting_from_a_shape(backend: Backend, method: str, with_dlse: bool) -> None:
    case = Case(Kernel(d=8), B=2, H_k=2, group=2, N_q=9, N_k=13)
    host = host_arrays(case, "bf16", causal=True)
    dlse = case.upstream("bf16", with_dlse)[1]
    arrays = [backend.to_device(x) for x in host]
    options: dict[str, Any] = {"causal": True, "tiling": TILING} | backward_method(method)
    on_device = None if dlse is None else backend.to_device(dlse)
    measured = backward.measure_backward(*arrays, dlse=on_device, **options)
    from_arrays = backward.predict_backward(*arrays, dlse=on_device, **options)
    from_shape = backward.predict_backward(
        shape=host[1].shape, heads_kv=2, n_k=13, dtype="bf16", dlse=with_dlse, **options
    )
    assert traffic.differences(measured.rows, from_arrays) == []
    assert from_arrays == from_shape


@every_method
def test_shared_memory_is_counted(backend: Backend, method: str) -> None:
    host = host_arrays(Case(Kernel(d=8), N_q=9, N_k=13), "fp32")
    arrays = [backend.to_device(x) for x in host]
    run = backward.measure_backward(*arrays, on_chip=True, tiling=TILING, **backward_method(method))
    tiles = {(r.tile, r.op) for r in run.on_chip}
    assert {(tile, op) for tile in ("dO_i", "dS_ij") for op in ("load", "store")} <= tiles
    assert "L_i, D_i" in {r.tile for r in run.on_chip} or method == "fa1_backward"


@every_method
def test_every_phase_is_timed(backend: Backend, method: str) -> None:
    """The kernels with a clock: each phase of each has taken time, and the gradients are right."""
    if backend.name == "gpu":
        pytest.skip("the launcher alone, on NumPy arrays")
    case = Case(Kernel(d=4), B=2, H_k=2, group=2, N_q=9, N_k=17)
    dout, q, k, v, out, lse = host_arrays(case, "fp32", causal=True)
    sizes = (case.B, case.H, case.H_k, case.N_q, case.N_k, case.kernel.d)
    problem = Problem(method, "fp32", *sizes, TILING, masking.causal())
    arrays = {"dO": dout, "Q": q, "K": k, "V": v, "O": out, "L": lse}
    arrays |= {f"d{name}": np.full_like(arrays[name], np.nan) for name in "QKV"}
    operands = launch.Operands(
        problem, arrays, lambda s, t: (np.full(s, np.nan, t), None), 0, 0.5, False, timed=True
    )
    backward.launch(problem, operands)
    timelines = operands.timelines()
    assert len(timelines) == {"standard": 3, "fa2_backward_deterministic": 2}.get(
        method if method.endswith("_deterministic") else method.split("_")[0], 1
    )
    for timeline in timelines:
        assert (timeline.cycles.sum(axis=(0, 1)) > 0).all(), timeline.kernel
    reference.assert_attention_backward(
        (arrays["dQ"], arrays["dK"], arrays["dV"]), dout, q, k, v, out, lse,
        name=method, causal=True, scale=0.5,
    )  # fmt: skip


# ---- bad input --------------------------------------------------------------------------------

ROWS, KEYS, HEADS, D = 5, 7, 4, 8


def good() -> dict[str, Any]:
    """A call that is accepted."""
    return {
        "dout": np.ones((2, HEADS, ROWS, D), np.float32),
        "q": np.ones((2, HEADS, ROWS, D), np.float32),
        "k": np.ones((2, 2, KEYS, D), np.float32),
        "v": np.ones((2, 2, KEYS, D), np.float32),
        "out": np.ones((2, HEADS, ROWS, D), np.float32),
        "lse": np.ones((2, HEADS, ROWS), np.float32),
    }


def undifferentiable() -> masking.Score:
    return masking.score(capped, 3.0)


BAD: list[tuple[dict[str, Any], type, tuple[str, ...]]] = [
    ({"dout": np.ones((2, HEADS, ROWS, D + 1), np.float32)}, ValueError, ("dout", "9", "8")),
    ({"dout": np.ones((HEADS, ROWS, D), np.float32)}, ValueError, ("dout", "(4, 5, 8)")),
    ({"dout": np.ones((2, HEADS, ROWS, D), np.float16)}, TypeError, ("dout", "fp16", "fp32")),
    ({"dout": 3}, TypeError, ("dout", "int")),
    ({"out": np.ones((2, HEADS, KEYS, D), np.float32)}, ValueError, ("out", "(2, 4, 7, 8)")),
    ({"out": np.ones((2, HEADS, ROWS, D), np.float64)}, TypeError, ("out", "fp64", "fp32")),
    ({"lse": np.ones((2, HEADS, ROWS, 1), np.float32)}, ValueError, ("lse", "(2, 4, 5)")),
    ({"lse": np.ones((2, HEADS, ROWS), np.float64)}, TypeError, ("lse", "fp64", "fp32")),
    ({"lse": None}, TypeError, ("lse", "NoneType")),
    ({"dlse": np.ones((2, 2, ROWS), np.float32)}, ValueError, ("dlse", "(2, 2, 5)")),
    ({"dlse": np.ones((2, HEADS, ROWS), np.float16)}, TypeError, ("dlse", "fp16", "fp32")),
    ({"k": np.ones((2, 2, KEYS, D), np.float16)}, TypeError, ("k", "fp16", "fp32")),
    ({"v": np.ones((2, 2, KEYS + 1, D), np.float32)}, ValueError, ("v", "8", "7")),
    ({"q": np.ones((2, 3, ROWS, D), np.float32)}, ValueError, ("k", "2 heads", "3")),
    ({"method": "fa3"}, ValueError, ("method", "fa3", "auto, standard, fa1, fa2")),
    ({"method": "fa2_backward"}, ValueError, ("method", "fa2_backward", "standard, fa1, fa2")),
    ({"deterministic": 1}, TypeError, ("deterministic", "1", "True, False")),
    ({"score": undifferentiable()}, ValueError, ("score", "capped", "derivative")),
    ({"score": undifferentiable(), "softcap": 2.0}, ValueError, ("score", "derivative")),
    ({"score": capped}, TypeError, ("score", "masking.Score")),
    ({"softcap": -1.0}, ValueError, ("softcap", "-1.0", "positive")),
    ({"causal": "yes"}, ValueError, ("causal", "yes")),
    ({"window": 3}, TypeError, ("window", "3")),
    ({"mask": np.ones((ROWS, KEYS))}, TypeError, ("mask", "float64", "bool")),
    ({"scale": math.nan}, ValueError, ("scale", "nan")),
    ({"tiling": (16, 16)}, TypeError, ("tiling", "tuple")),
]


@pytest.mark.parametrize("function", [backward.attention_backward, backward.measure_backward])
@pytest.mark.parametrize(("wrong", "error", "said"), BAD)
def test_bad_arguments(
    function: Any,
    wrong: dict[str, Any],
    error: type,
    said: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not simulator.ACTIVE:
        pytest.skip("NumPy arrays are arguments of the simulator")

    def launched(*args: Any) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(launch, "launch", launched)
    with pytest.raises(AssertionError, match="a kernel was launched"):
        function(**good())
    with pytest.raises(error) as caught:
        function(**good() | wrong)
    assert caught.type is error
    for part in said:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({}, ValueError, ("predict_backward", "shape")),
        ({"shape": (5, 8), "q": np.ones((5, 8), np.float32)}, ValueError, ("shape",)),
        ({"shape": (5, 8), "dlse": np.ones(5)}, TypeError, ("dlse", "ndarray", "bool")),
        ({"shape": (5, 8), "deterministic": "no"}, TypeError, ("deterministic", "no")),
        ({"shape": (5, 8), "dtype": "fp8"}, ValueError, ("dtype", "fp8")),
        (good() | {"n_k": 4}, ValueError, ("n_k", "shape")),
    ],
)
def test_bad_predictions(arguments: dict[str, Any], error: type, said: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        backward.predict_backward(**arguments)
    for part in said:
        assert part in str(caught.value)


def test_every_head_dimension_has_a_tiling() -> None:
    """Also where shared memory is small; there the last resort lies partly in local memory."""
    from fa2_numba.tiling import DTYPE_BYTES, MAX_HEAD_DIM, choose

    for limit in (232_448, 166_912, 101_376, 65_536):
        for method in METHODS:
            for dtype in DTYPE_BYTES:
                for d in range(1, MAX_HEAD_DIM + 1):
                    tiling = choose(d, dtype, method, limit)
                    assert tiling.shared_bytes(d, dtype, method) <= limit
                    roomy = dtype != "fp64" or limit > 150_000
                    assert tiling.fits(d, dtype, method, limit) or not roomy, (limit, dtype, d)
