"""attention for torch: values, gradients, tracing, and torch's own signature.

On the simulator with CPU tensors, and marked ``gpu`` with CUDA tensors. In float64 the other side
is torch's own arithmetic; in fewer bits it is `api`, whose bits the adapter has to return.
"""

import math
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_bug_cases import report

from fa2_numba import api, backward, flash_attn, simulator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch says of other packages while it is imported
    torch = pytest.importorskip("torch", reason="needs torch: pip install -e .[torch]")

from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.checkpoint import checkpoint

from fa2_numba.adapters import torch as adapter

# What torch's compiler and triton say of themselves; warnings of this package are still errors.
compiling = pytest.mark.filterwarnings("ignore:::torch", "ignore:::triton")
# float64 on both sides; sums of at most 30 terms of order 1, so errors of some 10 eps = 2e-15.
EXACT = {"rtol": 0, "atol": 1e-13}
B, H, H_k, d = 2, 4, 2, 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU on the simulator, or a GPU."""
    if request.param == "cpu" and not simulator.ACTIVE:
        pytest.skip("CPU tensors run on the simulator: NUMBA_ENABLE_CUDASIM=1")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    return request.param


def tensors(
    device: str,
    N_q: int,
    N_k: int,
    heads: tuple[int, int] = (H, H_k),
    dtype: Any = None,
    batch: int = 1,
) -> list[Any]:
    """q, k and v that require grad; float64 unless another dtype is given."""
    torch.manual_seed(N_q * 100 + N_k)
    shapes = [(batch, heads[0], N_q, d), *[(batch, heads[1], N_k, d)] * 2]
    dtype = dtype or torch.float64
    return [
        torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def formula(
    q: Any, k: Any, v: Any, visible: Any, scale: float, softcap: Any, slopes: Any
) -> tuple[Any, Any]:
    """Out and LSE by torch's arithmetic; 0 and -inf in a row without a visible key."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    S = scale * q @ k.mT
    if softcap is not None:
        S = softcap * torch.tanh(S / softcap)
    N_q, N_k = S.shape[-2:]
    i = torch.arange(N_q, device=q.device)[:, None] + N_k - N_q
    j = torch.arange(N_k, device=q.device)
    if slopes is not None:
        S = S - slopes[:, None, None] * (i - j).abs()
    some = visible.any(-1)
    finite = S.masked_fill(~visible & some[:, None], -math.inf)
    out = torch.where(some[:, None], finite.softmax(-1) @ v, 0)
    return out, torch.where(some, finite.logsumexp(-1), -math.inf)


def band(N_q: int, N_k: int, left: int, right: int, device: str) -> Any:
    """What a window shows; -1 is unbounded."""
    i = torch.arange(N_q, device=device)[:, None] + N_k - N_q
    j = torch.arange(N_k, device=device)
    return ((j >= i - left) | (left == -1)) & ((j <= i + right) | (right == -1))


def gradients(out: Any, lse: Any, inputs: list[Any], weights: list[Any]) -> tuple[Any, ...]:
    """By q, k and v, of a sum of out and LSE with weights; rows without a key have none by LSE."""
    loss = (out * weights[0]).sum()
    if lse is not None:
        loss = loss + (torch.where(lse.isfinite(), lse, 0) * weights[1]).sum()
    return torch.autograd.grad(loss, inputs)


def equal_bits(a: Any, b: Any) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# --- values and gradients --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "band_ends", "N_q", "N_k"),
    [
        ({}, (-1, -1), 5, 18),
        ({"causal": True}, (-1, 0), 5, 7),
        ({"causal": True}, (-1, 0), 7, 5),  # two rows see nothing
        ({"window": (2, 1)}, (2, 1), 6, 8),
        ({"softcap": 1.5, "causal": True}, (-1, 0), 6, 6),
        ({"scale": 0.3, "window": (3, -1)}, (3, -1), 4, 9),
        ({"method": "fa1"}, (-1, -1), 5, 6),
        ({"deterministic": True}, (-1, -1), 5, 6),
        ({"alibi": True, "causal": True}, (-1, 0), 5, 6),
    ],
)
def test_values_and_gradients(device, options, band_ends, N_q, N_k):
    q, k, v = inputs = tensors(device, N_q, N_k)
    slopes = None
    if options.pop("alibi", False):
        options["alibi_slopes"] = slopes = torch.linspace(0.1, 0.8, H, device=device).double()
    visible = band(N_q, N_k, *band_ends, device)
    scale = options.get("scale", d**-0.5)
    want = formula(q, k, v, visible, scale, options.get("softcap"), slopes)
    got = adapter.attention(q, k, v, **options, return_lse=True)
    weights = [torch.randn_like(x) for x in got]
    torch.testing.assert_close(got, want, **EXACT)
    torch.testing.assert_close(
        gradients(*got, inputs, weights), gradients(*want, inputs, weights), **EXACT
    )


def test_a_boolean_mask(device):
    q, k, v = inputs = tensors(device, 5, 6)
    mask = torch.rand(5, 6, device=device) < 0.6
    mask[2] = False
    want = formula(q, k, v, mask, d**-0.5, None, None)
    got = adapter.attention(q, k, v, mask=mask, return_lse=True)
    weights = [torch.randn_like(x) for x in got]
    torch.testing.assert_close(got, want, **EXACT)
    torch.testing.assert_close(
        gradients(*got, inputs, weights), gradients(*want, inputs, weights), **EXACT
    )


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2)])
def test_differences_of_the_function(device, shape):
    torch.manual_seed(0)
    inputs = [
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3)
    ]

    def call(q, k, v):
        return adapter.attention(
            q, k, v, causal=True, softcap=2.0, deterministic=True, return_lse=True
        )

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_bits_are_those_of_api(device, dtype):
    q, k, v = inputs = tensors(device, 5, 18, dtype=dtype)
    out, lse = adapter.attention(q, k, v, causal=True, deterministic=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad([out, lse], inputs, [dout, dlse])

    def plain(x):
        x = x.detach()
        if device == "cuda":
            return x
        if dtype == torch.bfloat16 and x.dtype == dtype:
            return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()

    arrays = [plain(x) for x in (q, k, v)]
    results = api.attention(*arrays, causal=True, return_lse=True)
    expected = backward.attention_backward(
        plain(dout), *arrays, *results, dlse=plain(dlse), causal=True, deterministic=True
    )
    for got, want in zip((out, lse, *found), (*results, *expected), strict=True):
        if device == "cuda":
            assert equal_bits(got, want)
        else:
            assert np.array_equal(plain(got), want)


@pytest.mark.parametrize("reduce", ["sum", "transposed", "slice"])
def test_any_strides_of_the_gradient(device, reduce):
    q, k, v = inputs = tensors(device, 5, 6)
    visible = torch.ones(5, 6, dtype=torch.bool, device=device)

    def loss(out):
        if reduce == "sum":  # dout has stride 0 everywhere
            return out.sum()
        if reduce == "transposed":
            return (out.mT * torch.arange(5.0, device=device).double()).sum()
        return out[..., ::2].square().sum()

    got = torch.autograd.grad(loss(adapter.attention(q, k, v)), inputs)
    want = torch.autograd.grad(loss(formula(q, k, v, visible, d**-0.5, None, None)[0]), inputs)
    torch.testing.assert_close(got, want, **EXACT)


def test_strides_of_inputs_and_output(device):
    x = torch.randn(B, 5, 3, H, d, dtype=torch.float64, device=device, requires_grad=True)
    q, k, v = (y.transpose(1, 2) for y in x.unbind(2))
    out = adapter.attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()  # in memory as q's axes
    visible = torch.ones(5, 5, dtype=torch.bool, device=device)
    want, _ = formula(q, k, v, visible, d**-0.5, None, None)
    torch.testing.assert_close(out, want, **EXACT)
    (got,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(want.square().sum(), x)[0], **EXACT)
    wide = torch.randn(1, 1, 5, d, dtype=torch.float64, device=device).expand(B, H, 5, d)
    torch.testing.assert_close(
        adapter.attention(wide, wide, wide),
        formula(wide, wide, wide, visible, d**-0.5, None, None)[0],
        **EXACT,
    )


def test_a_loss_of_the_lse_alone(device):
    q, k, v = tensors(device, 4, 6)
    visible = torch.ones(4, 6, dtype=torch.bool, device=device)
    _, lse = adapter.attention(q, k, v, return_lse=True)
    _, want = formula(q, k, v, visible, d**-0.5, None, None)
    got = torch.autograd.grad(lse.square().sum(), (q, k, v))
    expected = torch.autograd.grad(want.square().sum(), (q, k))
    torch.testing.assert_close(got[:2], expected, **EXACT)
    assert not got[2].any()


def test_only_some_inputs_require_grad(device):
    q, k, v = tensors(device, 4, 6)
    want = torch.autograd.grad(adapter.attention(q, k, v, deterministic=True).sum(), v)
    q, k = q.detach(), k.detach()
    out = adapter.attention(q, k, v, deterministic=True)
    assert equal_bits(torch.autograd.grad(out.sum(), v)[0], want[0])
    assert not adapter.attention(q, k, v.detach()).requires_grad
    with torch.no_grad():
        assert not adapter.attention(q, k, v).requires_grad


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_empty(device, sizes):
    q, k, v = inputs = tensors(device, *sizes)
    out, lse = adapter.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and not out.any() and lse.shape == q.shape[:-1]
    found = torch.autograd.grad(out.sum(), inputs)
    assert all(g.shape == x.shape and not g.any() for g, x in zip(found, inputs, strict=True))


def test_double_backward_is_refused(device):
    q, k, v = tensors(device, 3, 3)
    dq, _, _ = torch.autograd.grad(adapter.attention(q, k, v).sum(), (q, k, v), create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch.func.jvp
def test_forward_mode_is_refused(device):
    """A custom operator has no rule for it: torch would say that the derivative is 0."""
    q, k, v = (x.detach() for x in tensors(device, 3, 3))
    with pytest.raises(NotImplementedError, match="k: got a tensor with a tangent"):
        torch.func.jvp(lambda k: adapter.attention(q, k, v), (k,), (k,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, v)
        with pytest.raises(NotImplementedError, match="v: got a tensor with a tangent"):
            adapter.attention(q, k, dual)


# --- torch's machinery -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": [2, 0], "softcap": 2.0, "scale": 0.4, "deterministic": True},
        {"mask": True, "causal": True},
    ],
)
def test_the_operators_keep_torchs_rules(device, options):
    q, k, v = (x.detach().requires_grad_() for x in tensors(device, 2, 3, heads=(2, 1)))
    names = ("mask", "alibi_slopes", "causal", "window", "softcap", "scale", "method")
    plain = (None, None, False, None, None, None, "auto")
    chosen = dict(zip(names, plain, strict=True)) | {"deterministic": True} | options
    if chosen["mask"]:
        chosen["mask"] = torch.ones(2, 3, dtype=torch.bool, device=device).tril(1)
    options = tuple(chosen.values())
    torch.library.opcheck(adapter.attention_forward, (q, k, v, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = adapter.attention_forward(q, k, v, *options)
    for dlse in (None, torch.randn_like(lse)):
        arrays = (torch.randn_like(out), dlse, q, k, v, out, lse)
        torch.library.opcheck(adapter.attention_backward, (*arrays, *options))


@report("ComfyUI#15044")
def test_strides_are_said_as_they_are(device, _report):
    """What tracing was told of the output's strides differed from what a transposed q gave."""
    x = torch.randn(1, 3, 3, 2, d, dtype=torch.float64, device=device)
    options = (None, None, True, None, None, None, "auto", True)
    packed = [y.transpose(1, 2) for y in x.unbind(2)]
    copies = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in packed]
    for arrays in (packed, copies):
        q, k, v = (y.detach().requires_grad_() for y in arrays)
        torch.library.opcheck(adapter.attention_forward, (q, k, v, *options))


@compiling
@report("flash-attention#2013")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["attention", "scaled_dot_product_attention"])
def test_compiled_in_one_graph(device, compiler, name, _report):
    """No graph came of it: the call could not be traced."""
    torch.compiler.reset()
    options: dict[str, Any] = (
        {"causal": True, "return_lse": True, "deterministic": True}
        if name == "attention"
        else {"is_causal": True, "enable_gqa": True}
    )

    def call(q, k, v):
        found = getattr(adapter, name)(q * 2, k, v, **options)
        return [2 * x for x in (found if isinstance(found, tuple) else (found,))]

    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    for N_q, N_k in ((4, 6), (5, 7)):  # the second with sizes that torch keeps as symbols
        inputs = tensors(device, N_q, N_k)
        got, want = compiled(*inputs), call(*inputs)
        weights = [torch.randn_like(x) for x in want]
        torch.testing.assert_close(got, want, **EXACT)
        torch.testing.assert_close(
            torch.autograd.grad(got, inputs, weights),
            torch.autograd.grad(want, inputs, weights),
            **EXACT,
        )


@compiling
@pytest.mark.gpu
def test_compiled_by_inductor():
    torch.compiler.reset()
    inputs = tensors("cuda", 33, 65, dtype=torch.bfloat16)

    def call(q, k, v):
        return adapter.attention(q, k, v, causal=True, deterministic=True)

    got, want = torch.compile(call, fullgraph=True)(*inputs), call(*inputs)
    dout = torch.randn_like(want)
    assert equal_bits(got, want)
    for g, w in zip(
        torch.autograd.grad(got, inputs, dout),
        torch.autograd.grad(want, inputs, dout),
        strict=True,
    ):
        assert equal_bits(g, w)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(device, reentrant):
    inputs = tensors(device, 5, 6)

    def call(q, k, v):
        return adapter.attention(q.sin(), k, v, causal=True, deterministic=True)

    out = checkpoint(call, *inputs, use_reentrant=reentrant)
    want = call(*inputs)
    assert equal_bits(out, want)
    for x in inputs:
        x.grad = None
    out.square().sum().backward()
    found = [x.grad for x in inputs]
    for got, expected in zip(found, torch.autograd.grad(want.square().sum(), inputs), strict=True):
        assert equal_bits(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    q, k, v = inputs = tensors(device, 5, 6, dtype=torch.float32)
    with torch.autocast(device, dtype):
        out = adapter.attention(q, k, v, deterministic=True)
        twice = adapter.attention(q.double(), k.double(), v.double())
    want = adapter.attention(*(x.to(dtype) for x in inputs), deterministic=True)
    assert equal_bits(out, want)
    assert twice.dtype == torch.float64  # as torch's own attention leaves it
    found, expected = (torch.autograd.grad(x.float().sum(), inputs) for x in (out, want))
    assert all(g.dtype == torch.float32 for g in found)
    assert all(equal_bits(g, w) for g, w in zip(found, expected, strict=True))


def test_torchs_switch_makes_gradients_repeatable(device, monkeypatch):
    seen = []
    real = backward.attention_backward
    monkeypatch.setattr(
        backward,
        "attention_backward",
        lambda *a, **k: seen.append(k["deterministic"]) or real(*a, **k),
    )
    q, k, v = tensors(device, 3, 3)
    adapter.attention(q, k, v).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        adapter.attention(q, k, v).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensor_cores_forward_and_gradients(dtype):
    """Where "auto" is fa3: no farther from float64 than twice torch's own attention."""
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, 4, n, 64, device="cuda").to(dtype).requires_grad_() for n in (200, 333, 333)
    ]
    dout = torch.randn(2, 4, 200, 64, device="cuda").to(dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    visible = band(200, 333, -1, 0, "cuda")
    want, _ = formula(*wide, visible, 0.125, None, None)
    ours = adapter.attention(*inputs, causal=True)
    theirs = torch_sdpa(*inputs, attn_mask=visible)
    expected = (want, *torch.autograd.grad(want, wide, dout.double()))
    eps = torch.finfo(dtype).eps
    for got, same, ref in zip(
        (ours, *torch.autograd.grad(ours, inputs, dout)),
        (theirs, *torch.autograd.grad(theirs, inputs, dout)),
        expected,
        strict=True,
    ):
        most = 2 * (same.double() - ref).abs().max() + eps * ref.abs().max()
        assert (got.double() - ref).abs().max() <= most


@pytest.mark.gpu
def test_the_current_stream_is_used():
    q, k, v = inputs = tensors("cuda", 300, 300, dtype=torch.float32)
    want = adapter.attention(q, k, v, deterministic=True)
    expected = torch.autograd.grad(want.sum(), inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Leaves of this stream: those of the first graph, which is still there, belong to another.
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = adapter.attention(*(x * 1 for x in leaves), deterministic=True)
        found = torch.autograd.grad(out.sum(), leaves)
    torch.cuda.current_stream().wait_stream(stream)
    assert equal_bits(out, want)
    assert all(equal_bits(g, w) for g, w in zip(found, expected, strict=True))


# --- torch's signature -----------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 4), (3, 6), (6, 3), (20, 4), (4, 20), (3, 0), (0, 3)])
@pytest.mark.parametrize("grouped", [False, True])
def test_sdpa_causal(device, sizes, grouped):
    q, k, v = inputs = tensors(device, *sizes, heads=(H, H_k if grouped else H))
    options = {"is_causal": True, "enable_gqa": grouped}
    got = adapter.scaled_dot_product_attention(q, k, v, **options)
    visible = torch.ones(sizes, dtype=torch.bool, device=device).tril()
    if 0 not in sizes:
        torch.testing.assert_close(got, torch_sdpa(q, k, v, **options), **EXACT)
    want, _ = formula(q, k, v, visible, d**-0.5, None, None) if sizes[1] else (q * 0, None)
    torch.testing.assert_close(got, want, **EXACT)
    weights = [torch.randn_like(got)]
    found = gradients(got, None, inputs, weights)
    expected = torch.autograd.grad(want, inputs, weights, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("shape", [(5, 6), (1, 6), (H, 1, 6), (B, 1, 5, 6)])
def test_sdpa_boolean_masks(device, shape):
    q, k, v = inputs = tensors(device, 5, 6, heads=(H, H), batch=B)
    mask = torch.rand(shape, device=device) < 0.6
    mask[..., 0] = True  # torch's gradients are nan in a row without a key in some versions
    got = adapter.scaled_dot_product_attention(q, k, v, mask, scale=0.7)
    want = torch_sdpa(q, k, v, mask, scale=0.7)
    weights = [torch.randn_like(got)]
    torch.testing.assert_close(got, want, **EXACT)
    torch.testing.assert_close(
        gradients(got, None, inputs, weights), gradients(want, None, inputs, weights), **EXACT
    )


@pytest.mark.parametrize("axes", [2, 3])
def test_sdpa_with_fewer_axes(device, axes):
    one = (0,) * (4 - axes)
    q, k, v = (x[one] for x in tensors(device, 4, 5, heads=(H, H)))
    torch.testing.assert_close(
        adapter.scaled_dot_product_attention(q, k, v, is_causal=True),
        torch_sdpa(q, k, v, is_causal=True),
        **EXACT,
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: got 0.1"),
        ({"attn_mask": torch.zeros(3, 3)}, NotImplementedError, "attn_mask: got dtype"),
        (
            {"attn_mask": torch.ones(3, 3, dtype=torch.bool), "is_causal": True},
            ValueError,
            "is_causal: got True beside attn_mask",
        ),
        ({}, ValueError, "key: got shape .* enable_gqa=True"),
    ],
)
def test_sdpa_refuses(options, error, message):
    q, k, v = tensors("cpu", 3, 3)
    with pytest.raises(error, match=message):
        adapter.scaled_dot_product_attention(q, k, v, **options)


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": np.zeros((3, 4))}, TypeError, "q: got ndarray, accepted: torch.Tensor"),
        ({"mask": np.ones((3, 3), bool)}, TypeError, "mask: got ndarray"),
        ({"mask": torch.zeros(3, 3)}, TypeError, "mask: got dtype"),
        ({"causal": "skip"}, TypeError, "causal: got 'skip', accepted: True, False"),
        ({"method": "fa9"}, ValueError, "method: got 'fa9'"),
        ({"window": (1, 2, 3)}, TypeError, "window: got"),
        ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
        ({"k": torch.zeros(3, 5, dtype=torch.float64)}, ValueError, "k: got head dimension 5"),
        (
            {"alibi_slopes": torch.ones(1, requires_grad=True)},
            NotImplementedError,
            "alibi_slopes: requires grad",
        ),
    ],
)
def test_what_is_refused_is_named(change, error, message):
    if not simulator.ACTIVE:
        pytest.skip("CPU tensors run on the simulator: NUMBA_ENABLE_CUDASIM=1")
    x = torch.zeros(3, 4, dtype=torch.float64)
    with pytest.raises(error, match=message):
        adapter.attention(**({"q": x, "k": x, "v": x} | change))


@pytest.mark.gpu
def test_cpu_tensors_are_refused_beside_a_gpu():
    x = torch.zeros(3, 4)
    with pytest.raises(TypeError, match="q: got a tensor on cpu, accepted: a CUDA device"):
        adapter.attention(x, x, x)


# --- flash-attn's functions, on tensors ------------------------------------------------------


def test_flash_attn_func(device):
    q, k, v = inputs = [
        x.detach().transpose(1, 2).contiguous() for x in tensors(device, 5, 6, batch=B)
    ]
    for x in inputs:
        x.requires_grad_()
    options = {"causal": True, "softcap": 1.5, "window_size": (3, 0)}
    out, lse, none = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    want, want_lse = formula(
        *(x.transpose(1, 2) for x in inputs), band(5, 6, 3, 0, device), d**-0.5, 1.5, None
    )
    assert out.is_contiguous() and none is None
    weights = [torch.randn_like(out), torch.randn_like(lse)]
    torch.testing.assert_close((out, lse), (want.transpose(1, 2), want_lse), **EXACT)
    torch.testing.assert_close(
        gradients(out, lse, inputs, weights),
        gradients(want.transpose(1, 2), want_lse, inputs, weights),
        **EXACT,
    )


def test_flash_attn_packed(device):
    torch.manual_seed(0)
    qkv = torch.randn(B, 5, 3, H, d, dtype=torch.float64, device=device, requires_grad=True)
    q, kv = qkv[:, :, 0], qkv[:, :, 1:]
    outs = [
        flash_attn.flash_attn_func(*qkv.unbind(2), deterministic=True),
        flash_attn.flash_attn_qkvpacked_func(qkv, deterministic=True),
        flash_attn.flash_attn_kvpacked_func(q, kv, deterministic=True),
    ]
    found = [torch.autograd.grad(out.square().sum(), qkv, retain_graph=True)[0] for out in outs]
    for out, gradient in zip(outs, found, strict=True):
        assert equal_bits(out, outs[0]) and equal_bits(gradient, found[0])


@compiling
def test_flash_attn_compiled(device):
    torch.compiler.reset()
    qkv = torch.randn(B, 5, 3, H, d, dtype=torch.float64, device=device, requires_grad=True)
    call = flash_attn.flash_attn_qkvpacked_func
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(qkv, causal=True)
    want = call(qkv, causal=True)
    torch.testing.assert_close(got, want, **EXACT)
    found, expected = (torch.autograd.grad(x.square().sum(), qkv) for x in (got, want))
    torch.testing.assert_close(found, expected, **EXACT)


def test_flash_attn_slopes_have_no_gradient(device):
    x = torch.zeros(1, 2, H, d, dtype=torch.float64, device=device)
    slopes = torch.ones(H, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="alibi_slopes: requires grad"):
        flash_attn.flash_attn_func(x, x, x, alibi_slopes=slopes)
