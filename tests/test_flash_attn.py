"""flash-attn's functions: the layout, the names of arguments, and what is refused."""

from typing import Any

import numpy as np
import pytest
from strategies import Backend

from fa2_numba import api, flash_attn, simulator

B, N_q, N_k, H, H_k, D = 2, 5, 7, 4, 2, 8


def arrays(backend: Backend, *shapes: tuple[int, ...]) -> list[Any]:
    """Arrays of these shapes, float32."""
    rng = np.random.default_rng(0)
    return [backend.to_device(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]


def qkv(backend: Backend) -> list[Any]:
    """q, k and v in flash-attn's layout."""
    return arrays(backend, (B, N_q, H, D), (B, N_k, H_k, D), (B, N_k, H_k, D))


def by_api(backend: Backend, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """What `attention` gives for copies with heads before rows, on the host."""
    copies = [x.swapaxes(1, 2).copy() for x in (q, k, v)]
    out, lse = api.attention(*copies, **options, return_lse=True)
    return backend.to_host(out).swapaxes(1, 2), backend.to_host(lse)


SLOPES = np.linspace(0.1, 0.8, H, dtype=np.float32)


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({}, {}),
        ({"causal": True}, {"causal": True}),
        ({"softmax_scale": 0.3, "softcap": 1.5}, {"scale": 0.3, "softcap": 1.5}),
        ({"window_size": (2, 1)}, {"window": (2, 1)}),
        ({"window_size": (-1, -1), "softcap": 0.0}, {}),
        ({"window_size": [3, -1], "causal": True}, {"window": (3, 0)}),
        ({"alibi_slopes": SLOPES, "deterministic": True}, {"alibi_slopes": SLOPES}),
    ],
)
def test_names_and_layout(backend, options, meant):
    q, k, v = qkv(backend)
    want, lse = by_api(backend, q, k, v, **meant)
    out, softmax_lse, probabilities = flash_attn.flash_attn_func(
        q, k, v, **options, return_attn_probs=True
    )
    assert type(out) is type(q) and out.flags.c_contiguous
    assert np.array_equal(backend.to_host(out), want)
    assert softmax_lse.shape == (B, H, N_q) and np.array_equal(backend.to_host(softmax_lse), lse)
    assert probabilities is None
    alone = flash_attn.flash_attn_func(q, k, v, **options)
    assert np.array_equal(backend.to_host(alone), want)


def test_packed(backend):
    packed, q, kv = arrays(backend, (B, N_k, 3, H, D), (B, N_q, H, D), (B, N_k, 2, H_k, D))
    out = flash_attn.flash_attn_qkvpacked_func(packed, causal=True)
    want, _ = by_api(backend, *(packed[:, :, i] for i in range(3)), causal=True)
    assert out.flags.c_contiguous and np.array_equal(backend.to_host(out), want)
    out, lse, _ = flash_attn.flash_attn_kvpacked_func(q, kv, return_attn_probs=True)
    want, lse_want = by_api(backend, q, kv[:, :, 0], kv[:, :, 1])
    assert np.array_equal(backend.to_host(out), want)
    assert np.array_equal(backend.to_host(lse), lse_want)


def test_nothing_is_copied(backend, monkeypatch):
    seen = []
    real = api.attention
    monkeypatch.setattr(api, "attention", lambda *a, **k: seen.append(a) or real(*a, **k))
    packed, *three = arrays(backend, (B, N_k, 3, H, D), *[(B, N_k, H, D)] * 3)
    flash_attn.flash_attn_qkvpacked_func(packed)
    flash_attn.flash_attn_func(*three)
    for given, owners in zip(seen, ([packed] * 3, three), strict=True):
        assert all(view.base is owner for view, owner in zip(given, owners, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: got 0.1, accepted: 0"),
        ({"q": np.zeros((N_q, H, D), np.float32)}, ValueError, r"q: got shape \(5, 4, 8\)"),
        ({"v": [[1.0]]}, TypeError, "v: got list, accepted: a torch tensor or a CuPy array"),
        ({"window_size": (-2, 0)}, ValueError, "window: "),
        ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
        ({"block_table": None}, TypeError, "block_table"),
    ],
)
def test_what_is_refused_is_named(change, error, message):
    if not simulator.ACTIVE:
        pytest.skip("NumPy arrays run on the simulator: NUMBA_ENABLE_CUDASIM=1")
    x = np.zeros((B, N_q, H, D), np.float32)
    with pytest.raises(error, match=message):
        flash_attn.flash_attn_func(**({"q": x, "k": x, "v": x} | change))


@pytest.mark.parametrize("shape", [(B, N_q, 2, H, D), (B, N_q, H, D)])
def test_packed_shapes_are_checked(shape):
    with pytest.raises(ValueError, match=r"qkv: got shape .* accepted: \(B, N, 3, H, D\)"):
        flash_attn.flash_attn_qkvpacked_func(np.zeros(shape))


def test_options_are_keyword_only():
    x = np.zeros((B, N_q, H, D), np.float32)
    with pytest.raises(TypeError, match="positional"):
        flash_attn.flash_attn_func(x, x, x, 0.0)
