"""Bytes that must not matter, and bytes that must not change.

Everything outside the valid region is NaN or a canary: around inputs and outputs, in masked keys,
in workspaces, in `out` before the run. (All properties of the other files also place their inputs
in buffers of NaN.)
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from strategies import (
    DTYPES,
    LAYOUTS,
    OUT_LAYOUTS,
    SMALL_TILINGS,
    Backend,
    Case,
    Kernel,
    bits,
    cases,
    forall,
)

from fa2_numba import api, backward, masking, reference, simulator
from fa2_numba.launch import Operands
from fa2_numba.problem import Problem
from fa2_numba.tiling import Tiling

every_method = pytest.mark.parametrize("method", api.PORTABLE)
CANARY = 0xA5  # a byte of canaries; poison is 0xFF, which is NaN in every format
TILING = SMALL_TILINGS[1] if simulator.ACTIVE else Tiling(16, 16, 4, 8)


def kernels(masks: tuple[tuple[str, ...], ...], **layouts: Any) -> Any:
    return st.builds(
        Kernel,
        d=st.sampled_from((3, 8) if simulator.ACTIVE else (48,)),
        tiling=st.just(TILING),
        mask=st.sampled_from(masks),
        **{name: st.sampled_from(choices) for name, choices in layouts.items()},
    )


# ---- inputs -----------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
@forall(2, cases(kernels((("causal",), ("window",), ("boolean",), ("documents", "custom")))))
def test_masked_keys_may_hold_anything(
    backend: Backend, method: str, dtype: str, case: Case
) -> None:
    """Each row is what it is without the keys that it does not see.

    Rows that see such a key become NaN or inf, as in the reference. (No infinite K here: a visible
    score of -inf is an exact 0 in P, and whether 0 * V is NaN then depends on the path.)
    """
    q, k, v = case.arrays(dtype)
    rng = case.rng("poison")
    for x, poisons in ((k, (np.nan,)), (v, (np.nan, np.inf, -np.inf))):
        where = rng.random(x.shape[:3]) < 0.25
        x[where] = rng.choice(poisons, (*x.shape[:3], 1)).astype(x.dtype)[where]
    out, lse = backend.attention(method, q, k, v, **case.options(dtype, backend.to_device))
    reference.assert_attention(out, lse, q, k, v, name=method, **case.reference_options(dtype))


@every_method
@forall(4, cases(kernels((("causal",), ("boolean",), ("window", "custom"))), empty=False))
def test_keys_that_no_row_sees_change_no_bit(backend: Backend, method: str, case: Case) -> None:
    q, k, v = case.arrays("fp32")
    options = case.options("fp32", backend.to_device)
    mask = case.dense_mask()
    assert mask is not None
    seen = np.broadcast_to(mask, (case.B, case.H, case.N_q, case.N_k)).any(axis=2)
    seen = seen.reshape(case.B, case.H_k, case.group, case.N_k).any(axis=2)
    before = backend.attention(method, q, k, v, **options)
    k[~seen], v[~seen] = (np.nan, np.inf, -np.inf)[case.seed % 3], (np.inf, np.nan)[case.seed % 2]
    after = backend.attention(method, q, k, v, **options)
    assert bits(*before) == bits(*after)


@every_method
@forall(3, cases(kernels(((), ("causal",))), empty=False))
def test_a_row_of_nan_stays_alone(backend: Backend, method: str, case: Case) -> None:
    q, k, v = case.arrays("fp32")
    options = case.options("fp32", backend.to_device)
    before = backend.attention(method, q, k, v, **options)
    row = case.seed % case.N_q
    q[:, :, row] = np.nan
    after = backend.attention(method, q, k, v, **options)
    others = np.arange(case.N_q) != row
    for a, b in zip(before, after, strict=True):
        assert bits(a[:, :, others]) == bits(b[:, :, others])


@every_method
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_are_only_read(backend: Backend, method: str, layout: str) -> None:
    case = Case(Kernel(tiling=TILING, q=layout, k=layout, v=layout), B=2, H_k=2)
    placed = [backend.place(x, layout) for x in case.arrays("fp16")]
    before = [bits(backend.to_host(buffer)) for buffer, _ in placed]
    backend.attention(method, *(x for _, x in placed), tiling=TILING)
    assert [bits(backend.to_host(buffer)) for buffer, _ in placed] == before


@every_method
def test_read_only_inputs(backend: Backend, method: str) -> None:
    if backend.name == "gpu":
        pytest.skip("CuPy has no read-only arrays")
    case = Case()
    q, k, v = case.arrays("fp32")
    expected = backend.attention(method, q, k, v, causal=True)
    for x in (q, k, v):
        x.setflags(write=False)
    mask = reference.causal_mask(case.N_q, case.N_k)
    mask.setflags(write=False)
    assert bits(*backend.attention(method, q, k, v, mask=mask)) == bits(*expected)


# ---- outputs ----------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
@forall(3, cases(kernels(((), ("causal",), ("boolean",)), out=OUT_LAYOUTS)))
def test_out_is_written_wholly_and_nothing_else(
    backend: Backend, method: str, dtype: str, case: Case
) -> None:
    # flashinfer#1533: rows without keys kept what the buffer held
    host = case.arrays(dtype)
    shape, layout = host[0].shape, case.kernel.out
    buffer_shape, view = LAYOUTS[layout]
    buffer = np.full(buffer_shape(shape), CANARY, np.uint8).repeat(DTYPES[dtype].itemsize, -1)
    buffer = buffer.view(DTYPES[dtype])
    view(buffer, shape)[...] = np.nan
    on_device = backend.to_device(buffer.copy())
    out = view(on_device, shape)
    options = case.options(dtype, backend.to_device)
    _, lse = backend.attention(method, *host, out=out, **options)
    after = backend.to_host(on_device)
    reference.assert_attention(
        view(after, shape), lse, *host, name=method, **case.reference_options(dtype)
    )
    view(buffer, shape)[...] = view(after, shape)
    assert bits(after) == bits(buffer)  # equal once the output is put into the canaries


def guarded(backend: Backend, fill: np.ndarray) -> tuple[Any, Any]:
    """A kernel's array with the contents of `fill` between canaries, and what holds it all."""
    raw = np.full(fill.nbytes + 1024, CANARY, np.uint8)
    start = 512 - raw.ctypes.data % 256 if backend.name == "simulator" else 512
    raw[start : start + fill.nbytes] = np.frombuffer(fill.tobytes(), np.uint8)
    if backend.name == "simulator":
        return np.ndarray(fill.shape, fill.dtype, raw.data, start), raw
    from fa2_numba.arrays import device_view

    on_device = backend.to_device(raw)
    strides = np.empty(fill.shape, fill.dtype).strides
    return device_view(on_device.data.ptr + start, fill.shape, strides, fill.dtype), on_device


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
@forall(2, cases(kernels(((), ("causal",), ("window",)))))
def test_workspaces_are_written_before_read_and_stay_in_bounds(
    backend: Backend, method: str, dtype: str, case: Case
) -> None:
    """The launchers alone, with every workspace, O and L NaN between canaries."""
    # xformers#1025: an uninitialised workspace
    mask = {"causal": masking.causal(), "window": masking.none(), "": masking.none()}
    kind = "".join(case.kernel.mask)
    rule = masking.window(*case.mask[0][1:]) if kind == "window" else mask[kind]
    problem = Problem(
        method, dtype, case.B, case.H, case.H_k, case.N_q, case.N_k, case.kernel.d, TILING, rule
    )
    host, held = case.arrays(dtype), []
    storage = np.uint16 if dtype == "bf16" else DTYPES[dtype]
    acc = np.float64 if dtype == "fp64" else np.float32

    def allocate(shape: tuple[int, ...], element: Any) -> tuple[Any, Any]:
        size = np.dtype(element).itemsize
        poison = np.full((*shape, size), 0xFF, np.uint8).view(element).reshape(shape)
        array, holder = guarded(backend, poison)
        held.append((holder, poison.nbytes))
        return array, holder

    operands, inputs = {}, []  # a kernel's array does not keep its memory: `inputs` does
    for name, x in zip("QKV", host, strict=True):
        operands[name], holder = guarded(backend, x.view(storage))
        inputs.append(holder)
    for name, element in (("O", storage), ("L", acc)):
        operands[name] = allocate(problem.layout(name).shape, element)[0]
    scale = case.scale if case.scale is not None else case.kernel.d**-0.5
    api.PORTABLE[method](problem, Operands(problem, operands, allocate, 0, scale, counted=False))

    for holder, size in held:
        memory = backend.to_host(holder)
        assert (memory == CANARY).sum() >= memory.size - size
        outside = np.flatnonzero(memory != CANARY)
        assert outside.size == 0 or np.ptp(outside) < size
    out, lse = (
        x if backend.name == "simulator" else x.copy_to_host()
        for x in (operands["O"], operands["L"])
    )
    reference.assert_attention(
        out.view(DTYPES[dtype]), lse, *host, name=method, **case.reference_options(dtype)
    )


@pytest.mark.parametrize("method", backward.PORTABLE_BACKWARD)
@pytest.mark.parametrize("dtype", DTYPES)
@forall(2, cases(kernels(((), ("causal",))), empty=False))
def test_workspaces_of_the_backward_pass(
    backend: Backend, method: str, dtype: str, case: Case
) -> None:
    """The same for gradients: xformers#1025 was a workspace of the backward pass."""
    rule = masking.causal() if case.kernel.mask else masking.none()
    sizes = (case.B, case.H, case.H_k, case.N_q, case.N_k, case.kernel.d)
    problem = Problem(method, dtype, *sizes, TILING, rule, dlse=True)
    storage = np.uint16 if dtype == "bf16" else DTYPES[dtype]
    q, k, v = case.arrays(dtype)
    dout, dlse = case.upstream(dtype)
    assert dlse is not None
    out, lse = reference.attention_same_precision(q, k, v, **case.reference_options(dtype))
    held, operands = [], {}

    def allocate(shape: tuple[int, ...], element: Any) -> tuple[Any, Any]:
        size = np.dtype(element).itemsize
        poison = np.full((*shape, size), 0xFF, np.uint8).view(element).reshape(shape)
        array, holder = guarded(backend, poison)
        held.append((holder, poison.nbytes))
        return array, holder

    inputs = {"Q": q, "K": k, "V": v, "O": out, "dO": dout}
    for name, x in (
        {n: x.view(storage) for n, x in inputs.items()} | {"L": lse, "dL": dlse}
    ).items():
        operands[name], holder = guarded(backend, x)
        held.append((holder, x.nbytes))
    for name in ("dQ", "dK", "dV"):
        operands[name] = allocate(problem.layout(name).shape, storage)[0]
    scale = case.scale if case.scale is not None else case.kernel.d**-0.5
    backward.launch(problem, Operands(problem, operands, allocate, 0, scale, counted=False))

    for holder, size in held:
        outside = np.flatnonzero(backend.to_host(holder) != CANARY)
        assert outside.size == 0 or np.ptp(outside) < size
    got = [operands[name] for name in ("dQ", "dK", "dV")]
    got = [x if backend.name == "simulator" else x.copy_to_host() for x in got]
    reference.assert_attention_backward(
        (got[0].view(q.dtype), got[1].view(q.dtype), got[2].view(q.dtype)),
        dout, q, k, v, out, lse, dlse=dlse, name=method, **case.reference_options(dtype),
    )  # fmt: skip


# ---- again ------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
@forall(1, cases(kernels((("causal",), ("boolean",))), empty=False))
def test_repeated_runs_agree_bitwise(backend: Backend, method: str, dtype: str, case: Case) -> None:
    case = replace(case, B=2)
    q, k, v = backend.operands(case, dtype)
    options = case.options(dtype, backend.to_device)
    first = bits(*backend.attention(method, q, k, v, **options))
    for _ in range(1 if simulator.ACTIVE else 20):
        assert bits(*backend.attention(method, q, k, v, **options)) == first


@every_method
def test_physical_size_of_a_cache_does_not_matter(backend: Backend, method: str) -> None:
    # flash-attention#1417: the result changed with the length of the buffer behind a slice
    case = Case(H_k=2, N_q=2, N_k=11)
    q, k, v = case.arrays("fp32")
    results = set()
    for physical in (11, 12, 40):
        caches = []
        for x in (k, v):
            cache = np.full((1, 2, physical, x.shape[-1]), np.nan, x.dtype)
            cache[:, :, :11] = x
            caches.append(backend.to_device(cache)[:, :, :11])
        results.add(bits(*backend.attention(method, q, *caches, causal=True, tiling=TILING)))
    assert len(results) == 1
