"""Public bug reports about backward passes, restated as small cases (see test_bug_cases.py)."""

from typing import Any

import numpy as np
import pytest
from strategies import SMALL_TILINGS, Backend, backward_method, bits
from test_bug_cases import report, values

from fa2_numba import backward, reference, simulator
from fa2_numba.tiling import Tiling

ONE_WARP = SMALL_TILINGS[0]  # 4 rows, 8 keys
METHODS = tuple(backward.PORTABLE_BACKWARD)
every_method = pytest.mark.parametrize("method", METHODS)


def check(
    backend: Backend, method: str, host: list[np.ndarray], dlse: Any = None, **options: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run dout, q, k, v with the reference's out and lse, and compare with the reference."""
    problem = {n: x for n, x in options.items() if n != "tiling"}
    forward = reference.attention_same_precision(*host[1:], **problem)
    device = {
        n: backend.to_device(x) if isinstance(x, np.ndarray) else x for n, x in options.items()
    }
    got = backend.backward(method, *host, *forward, dlse=dlse, **device)
    reference.assert_attention_backward(got, *host, *forward, dlse=dlse, name=method, **problem)
    assert all(np.isfinite(x.astype(np.float64)).all() for x in got)
    return got


def arrays(
    N_q: int, N_k: int, d: int = 8, H: int = 2, dtype: Any = np.float32, spread: float = 1
) -> list[np.ndarray]:
    """dout, q, k, v."""
    dout = values(H, N_q, d, seed=3, dtype=dtype)
    q, k, v = (values(H, n, d, seed=s) * spread for s, n in enumerate((N_q, N_k, N_k)))
    return [dout, *(x.astype(dtype) for x in (q, k, v))]


# ---- the LSE ----------------------------------------------------------------------------------


@report("pytorch#136232")
@every_method
def test_lse_gradient_with_ragged_keys(backend: Backend, method: str, _report: str) -> None:
    """NaN in the backward where the mask was built for a longer sequence and LSE was used."""
    dout, q, k, v = host = arrays(30, 30)
    mask = (np.arange(32)[:, None] >= np.arange(32))[:30, :30]  # of a mask for 32
    out, lse = reference.attention_reference(q, k, v, mask=mask)
    dout[...] = np.exp(lse)[..., None]  # loss = sum(out exp(lse))
    dlse = (out.sum(-1) * np.exp(lse)).astype(np.float32)
    check(backend, method, host, dlse=dlse, mask=mask, tiling=ONE_WARP)


@report("flash-attention#889")
@every_method
def test_the_lse_is_differentiable(backend: Backend, method: str, _report: str) -> None:
    """loss = mean(lse^2): no gradient came back; dv is exactly 0."""
    _, q, k, v = arrays(6, 9)
    _, lse = reference.attention_reference(q, k, v)
    dlse = (2 * lse / lse.size).astype(np.float32)
    dq, dk, dv = check(backend, method, [np.zeros_like(q), q, k, v], dlse=dlse, tiling=ONE_WARP)
    assert dq.any() and dk.any() and not dv.any()


@report("cudnn-frontend#1072")
@every_method
@pytest.mark.parametrize("shift", [-128.0, -1e4])
def test_a_very_negative_lse(backend: Backend, method: str, shift: float, _report: str) -> None:
    """exp(0 - LSE) of padded rows and columns overflowed: NaN in dk and dv for one query."""
    dout, q, k, v = arrays(1, 11, d=4)
    q, k = (np.pad(x, [(0, 0), (0, 0), (0, 1)]) for x in (q, k))
    q[..., -1], k[..., -1] = 2 * shift, 1
    v, dout = (np.pad(x, [(0, 0), (0, 0), (0, 1)]) for x in (v, dout))
    _, lse = reference.attention_reference(q, k, v, scale=0.5)
    assert (lse < shift + 20).all()
    for N_q in (1, 5):  # 1 row of a tile of 4, and 1 row of the second
        rows = [x.repeat(N_q, axis=1) for x in (dout, q)]
        check(backend, method, [*rows, k, v], scale=0.5, tiling=ONE_WARP)


# ---- lengths ----------------------------------------------------------------------------------


@report("cudnn-frontend#160")
@every_method
@pytest.mark.parametrize("N", [1, 3, 7, 9, 15, 17, 25])
def test_lengths_that_are_no_multiple_of_a_tile(
    backend: Backend, method: str, N: int, _report: str
) -> None:
    """NaN in the backward without a padding mask."""
    check(backend, method, arrays(N, N, d=4), tiling=ONE_WARP)


@report("flash-attention#334")
@every_method
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_one_token(backend: Backend, method: str, dtype: Any, _report: str) -> None:
    """NaN in dq for N = 1; the softmax over one key has no gradient, and dv is dout."""
    host = arrays(1, 1, d=16, H=1, dtype=dtype, spread=3)
    host[0][...] = 1
    dq, dk, dv = check(backend, method, host)
    most = 16 * 32 * np.finfo(np.float32).eps * max(abs(x.astype(np.float64)).max() for x in host)
    for x in (dq, dk):
        assert abs(x.astype(np.float64)).max() <= most * 16
    np.testing.assert_allclose(dv.astype(np.float64), 1, rtol=1e-3)


@report("flash-attention#443")
@every_method
@pytest.mark.parametrize(("N_q", "N_k"), [(19, 1), (9, 1), (30, 1), (9, 2)])
def test_very_short_keys(backend: Backend, method: str, N_q: int, N_k: int, _report: str) -> None:
    """NaN in dq: values beyond the last key were not masked in the backward."""
    host = arrays(N_q, N_k, d=8, H=1, dtype=np.float16, spread=3)
    dq, *_ = check(backend, method, host, causal=True, tiling=ONE_WARP)
    assert not dq[:, : N_q - N_k].any()  # rows before the keys


@report("flash-attention#1052")
@every_method
def test_large_logits(backend: Backend, method: str, _report: str) -> None:
    """NaN in the gradients for inputs of standard deviation 3."""
    host = arrays(33, 33, d=32, H=1, dtype=np.float16, spread=3)
    check(backend, method, host, causal=True, tiling=Tiling(8, 16, 4, 8))


@report("flash-attention#2466")
@every_method
def test_softcap(backend: Backend, method: str, _report: str) -> None:
    """The backward hung with softcap; its factor is 1 - tanh^2."""
    host = arrays(17, 17, spread=3)
    check(backend, method, host, causal=True, softcap=10.0, tiling=ONE_WARP)
    check(backend, method, host, softcap=0.5, tiling=ONE_WARP)


# ---- memory -----------------------------------------------------------------------------------


@report("flash-attention#test:bwd_transpose")
@every_method
def test_dout_of_any_strides(backend: Backend, method: str, _report: str) -> None:
    """Wrong strides where dout was every second batch of a transposed array, or out.sum()'s."""
    q, k, v = (values(2, 2, n, 4, seed=s) for s, n in enumerate((5, 9, 9)))
    wide = values(5, 4, 2, 4, seed=3)  # (N, 2 B, H, d)
    out, lse = reference.attention_same_precision(q, k, v)
    views = {
        "transposed": lambda x: x[:, ::2].transpose(1, 2, 0, 3),
        "one number": lambda x: np.broadcast_to(x[:1, :1, :1, :1], (2, 2, 5, 4)),
    }
    for name, view in views.items():
        strided = view(backend.to_device(wide))
        dense = np.ascontiguousarray(view(wide))
        got = backend.backward(method, strided, q, k, v, out, lse, tiling=ONE_WARP)
        again = backend.backward(method, dense, q, k, v, out, lse, tiling=ONE_WARP)
        reference.assert_attention_backward(got, dense, q, k, v, out, lse, name=name)
        skip = 0 if simulator.ACTIVE or method != "fa2_backward" else 1
        assert bits(*got[skip:]) == bits(*again[skip:])


# ---- again, and again -------------------------------------------------------------------------


@report("flash-attention#414")
def test_atomic_adds_are_close(backend: Backend, _report: str) -> None:
    """dq differs between runs: documented, and within rounding; dk and dv do not differ."""
    host = arrays(40, 40, spread=2)
    first, second = (check(backend, "fa2_backward", host, tiling=ONE_WARP) for _ in range(2))
    assert bits(*first[1:]) == bits(*second[1:])


@report("flash-attention#2244")
@pytest.mark.parametrize("group", [1, 4])
def test_deterministic_means_it(backend: Backend, group: int, _report: str) -> None:
    """deterministic=True gave other bits under load, and with grouped heads."""
    n, d, runs = (9, 4, 2) if simulator.ACTIVE else (1024, 64, 200)
    dtype = np.float16
    q, dout = (values(2, 4, n, d, seed=s, dtype=dtype) for s in (0, 3))
    k, v = (values(2, 4 // group, n, d, seed=s, dtype=dtype) for s in (1, 2))
    out, lse = reference.attention_same_precision(q, k, v)
    device = [backend.to_device(x) for x in (dout, q, k, v, out, lse)]
    seen = set()
    for _ in range(runs):
        got = backward.attention_backward(*device, deterministic=True)
        seen.add(bits(*(backend.to_host(x) for x in got)))
    assert len(seen) == 1


@report("flash-attention#359")
@every_method
def test_no_race(backend: Backend, method: str, _report: str) -> None:
    """Sometimes wrong gradients, by compiler flag. Another order of threads, the same bits."""
    B, n, m, d, runs = (2, 9, 17, 4, 2) if simulator.ACTIVE else (300, 512, 128, 128, 20)
    q, dout = (values(B, 1, n, d, seed=s, dtype=np.float16) * 3 for s in (0, 3))
    k, v = (values(B, 1, m, d, seed=s, dtype=np.float16) * 3 for s in (1, 2))
    out, lse = reference.attention_same_precision(q, k, v)
    device = [backend.to_device(x) for x in (dout, q, k, v, out, lse)]
    seen = set()
    for n in range(runs):
        with simulator.thread_order("reversed" if n % 2 else "forward"):
            got = backward.attention_backward(*device, **backward_method(method))
        skip = 0 if simulator.ACTIVE or method != "fa2_backward" else 1
        seen.add(bits(*(backend.to_host(x) for x in got[skip:])))
    assert len(seen) == 1


@report("flash-attention#746")
def test_deterministic_reaches_the_kernels(backend: Backend, _report: str) -> None:
    """The flag was accepted and not passed down. With it, nothing is added atomically."""
    host = arrays(5, 9)
    forward = reference.attention_same_precision(*host[1:])
    device = [backend.to_device(x) for x in (*host, *forward)]
    for deterministic in (False, True):
        options: dict[str, Any] = {"deterministic": deterministic, "tiling": ONE_WARP}
        run = backward.measure_backward(*device, **options)
        from_shape = backward.predict_backward(shape=(2, 5, 8), n_k=9, **options)
        for rows in (run.rows, backward.predict_backward(*device, **options), from_shape):
            assert ("atomic" in {row.op for row in rows}) != deterministic
        assert run.problem.method.endswith("_deterministic") == deterministic
