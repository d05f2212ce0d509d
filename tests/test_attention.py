"""Output and LSE against the reference, and the counts against the model, for every method.

The methods are read from `PORTABLE`: a kernel is tested the day it is listed.
"""

import importlib.util

import numpy as np
import pytest
from hypothesis import example
from strategies import DTYPES, Backend, Case, Kernel, bits, cases, forall

from fa2_numba import api, reference, traffic
from fa2_numba.tiling import Tiling

WORKED = reference.WORKED_EXAMPLE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", api.PORTABLE)
# strided inputs: the simulator refused them, and wrote read-only ones back
@example(Case(Kernel(q="heads inside", k="gaps", v="one head for all"), H_k=2))
# N_k a multiple of 4, B_c not: `standard` loaded 4 of the 5 columns of a tile of P
@example(Case(Kernel(tiling=Tiling(6, 5, 3, 1)), N_k=12))
# and with B_c = 1 it divided by zero
@example(Case(Kernel(tiling=Tiling(1, 1, 1, 1)), N_q=2, N_k=4))
# an empty `out` has strides of 0 in NumPy, and was refused for them
@example(Case(B=2, N_q=0))
@forall(16, cases())
def test_equals_the_reference_and_the_model(
    backend: Backend, method: str, dtype: str, case: Case
) -> None:
    host, (q, k, v) = case.arrays(dtype), backend.operands(case, dtype)
    options = {"method": method, **case.options(dtype, backend.to_device)}

    out = backend.place(np.full_like(host[0], np.nan), case.kernel.out)[1]
    same, lse = api.attention(q, k, v, return_lse=True, out=out, **options)
    assert same is out
    got = backend.to_host(out), backend.to_host(lse)
    reference.assert_attention(*got, *host, name=method, **case.reference_options(dtype))

    out = backend.place(np.full_like(host[0], np.nan), case.kernel.out)[1]
    measured = api.measure(q, k, v, out=out, **options)
    assert bits(backend.to_host(measured.out), backend.to_host(measured.lse)) == bits(*got)
    assert all((r.source, r.level, r.cycles) == ("counted", "issued", None) for r in measured.rows)
    if importlib.util.find_spec("fa2_numba.io_model"):
        from fa2_numba import io_model

        assert traffic.differences(measured.rows, io_model.predict(measured.problem)) == []


@pytest.mark.parametrize("method", api.PORTABLE)
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_the_leading_axes(backend: Backend, method: str, ndim: int) -> None:
    host = Case(B=2, H_k=2, N_q=5, N_k=7).arrays("fp32")
    host = [x[(0,) * (4 - ndim)] for x in host]
    out, lse = backend.attention(method, *host, causal=True)
    assert out.shape == host[0].shape and lse.shape == host[0].shape[:-1]
    reference.assert_attention(out, lse, *host, name=method, causal=True)


@pytest.mark.parametrize("method", api.PORTABLE)
def test_the_worked_example(backend: Backend, method: str) -> None:
    """Six tokens in tiles of 2 x 2: agrees with the untiled float64 result to its last bits."""
    q, k, v = WORKED["q"], WORKED["k"], WORKED["v"]
    out, lse = backend.attention(method, q, k, v, scale=1.0, tiling=Tiling(2, 2, 2, 2))
    expected, expected_lse = reference.attention_reference(q, k, v, scale=1.0)
    assert abs(out - expected).max() <= 2 * np.spacing(abs(expected).max())
    assert abs(lse - expected_lse).max() <= 2 * np.spacing(abs(expected_lse).max())
    np.testing.assert_allclose(out[:2], [[3.177, 0.270], [1.190, 1.763]], atol=5e-4)


@pytest.mark.parametrize("method", api.PORTABLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_tiling_and_the_largest_head(backend: Backend, method: str, dtype: str) -> None:
    case = Case(Kernel(d=256, tiling=None), N_q=2, N_k=3)
    out, lse = backend.run(method, dtype, case)
    reference.assert_attention(out, lse, *case.arrays(dtype), name=method)


def test_auto_is_fa2_in_fp32(backend: Backend) -> None:
    case = Case()
    auto, named = (backend.run(method, "fp32", case) for method in ("auto", "fa2"))
    assert bits(*auto) == bits(*named)
