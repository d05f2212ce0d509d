"""What only a GPU can show: array libraries, streams, devices, sizes beyond 2**31, real inputs.

The properties of the other files run here as well, marked ``gpu`` through `backend`. Seconds go
into compiling, so each test says how many kernels it needs by what it is parametrised over.
"""

import functools
import importlib.resources
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numba import cuda
from strategies import DTYPES, Backend, Case, Kernel, backward_method, bits, forall

from fa2_numba import api, arrays, backward, hbm, io_model, launch, masking, reference, traffic
from fa2_numba.tiling import Tiling

pytestmark = pytest.mark.gpu

every_method = pytest.mark.parametrize("method", api.PORTABLE)
one_worker = pytest.mark.xdist_group("memory")  # tests of many GB one after the other


@pytest.fixture
def cp() -> Iterator[Any]:
    """CuPy; its cached memory is given back, for other workers on this GPU."""
    import cupy

    yield cupy
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def torch() -> Iterator[Any]:
    """torch, where it is installed with CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    yield torch
    torch.cuda.empty_cache()


def need(cp: Any, gigabytes: float) -> None:
    """Skip where the GPU has less free memory."""
    free, _ = cp.cuda.runtime.memGetInfo()
    if free < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory")


def values(*shape: int, dtype: str = "fp32", seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return (rng.standard_normal(shape, np.float32) + np.float32(0.3)).astype(DTYPES[dtype])


def qkv(
    n_q: int, n_k: int, d: int, H: int = 4, H_k: int = 2, B: int = 1, dtype: str = "fp32"
) -> list[np.ndarray]:
    shapes = ((B, H, n_q, d), (B, H_k, n_k, d), (B, H_k, n_k, d))
    return [values(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


def to_torch(torch: Any, x: np.ndarray) -> Any:
    if x.dtype == DTYPES["bf16"]:
        return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(x).cuda()


# ---- array libraries --------------------------------------------------------------------------


class ByInterface:
    """An array of which only ``__cuda_array_interface__`` is known."""

    def __init__(self, array: Any):
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.array.__cuda_array_interface__


class ByDLPack:
    """An array of which only DLPack is known."""

    def __init__(self, array: Any):
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_library_gives_the_same(cp: Any, torch: Any, method: str, dtype: str) -> None:
    """Same bits, and out and LSE come back as the caller's own kind of array."""
    host = qkv(70, 90, 40, dtype=dtype)
    makers = {"cupy": cp.asarray, "torch": lambda x: to_torch(torch, x)}
    if dtype != "bf16":  # Numba has no bfloat16 arrays, and neither has the interface
        makers["numba"] = cuda.to_device
        makers["interface"] = lambda x: ByInterface(cp.asarray(x))
        makers["dlpack"] = lambda x: ByDLPack(cp.asarray(x))
    seen = set()
    for name, make in makers.items():
        device = [make(x) for x in host]
        out, lse = api.attention(*device, causal=True, method=method, return_lse=True)
        if name in ("cupy", "torch", "numba"):
            assert type(out) is type(device[0]) and type(lse) is type(device[0])
            assert out.dtype == device[0].dtype
        got = arrays.to_host(out), arrays.to_host(lse)
        reference.assert_attention(*got, *host, name=f"{method}, {name}", causal=True)
        seen.add(bits(*got))
    assert len(seen) == 1


def test_libraries_may_be_mixed(cp: Any, torch: Any) -> None:
    q, k, v = host = qkv(33, 65, 32)
    out, lse = api.attention(
        to_torch(torch, q), cp.asarray(k), cuda.to_device(v), mask=np.ones((33, 65), bool),
        return_lse=True,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    reference.assert_attention(out.cpu().numpy(), lse.cpu().numpy(), *host, name="mixed")


@every_method
def test_out_of_each_library(cp: Any, torch: Any, method: str) -> None:
    host = qkv(33, 33, 32, H_k=4)
    for make in (cp.asarray, lambda x: to_torch(torch, x), cuda.to_device):
        q, k, v, out = (make(x) for x in (*host, np.full_like(host[0], np.nan)))
        assert api.attention(q, k, v, out=out, method=method) is out
        reference.assert_attention(arrays.to_host(out), None, *host, name=method)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_views(torch: Any, dtype: str) -> None:
    """Transposed, sliced, expanded, one element off: equal to contiguous copies, bit for bit."""
    q, k, v = (to_torch(torch, x) for x in qkv(50, 60, 32, B=2, dtype=dtype))
    expected = api.attention(q, k, v, causal=True, method="fa2")

    def heads_inside(x: Any) -> Any:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def every_second(x: Any) -> Any:
        return x.repeat_interleave(2, dim=2)[:, :, ::2]

    def offset(x: Any) -> Any:
        return torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape)

    for view in (heads_inside, every_second, offset):
        assert torch.equal(
            api.attention(*map(view, (q, k, v)), causal=True, method="fa2"), expected
        )
    one = k[:, :1].expand(-1, 2, -1, -1)
    assert one.stride(1) == 0
    assert torch.equal(
        api.attention(q, one, v, method="fa2"), api.attention(q, one.contiguous(), v, method="fa2")
    )


def test_numba_views() -> None:
    q, k, v = host = qkv(50, 60, 32, H_k=4)
    device = [cuda.to_device(np.pad(x, ((0, 0), (0, 0), (2, 3), (1, 0)))) for x in host]
    out, lse = api.attention(*(x[:, :, 2:-3, 1:] for x in device), return_lse=True)
    reference.assert_attention(out.copy_to_host(), lse.copy_to_host(), q, k, v, name="numba")


# ---- torch without autograd -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("function", [api.attention, api.measure, api.predict])
def test_a_tensor_that_wants_a_gradient_is_refused(torch: Any, name: str, function: Any) -> None:
    arguments = dict(zip("qkv", (to_torch(torch, x) for x in qkv(9, 9, 16)), strict=True))
    arguments[name].requires_grad_()
    with pytest.raises(TypeError, match=f"^{name}: requires grad"):
        function(**arguments)
    with torch.no_grad():
        function(**arguments)


def test_slopes_that_want_a_gradient_are_refused(torch: Any) -> None:
    # flash-attention#1977: slopes accepted, their gradient silently dropped
    q, k, v = (to_torch(torch, x) for x in qkv(9, 9, 16))
    slopes = torch.ones(4, device="cuda", requires_grad=True)
    with pytest.raises(TypeError, match="alibi_slopes: requires grad"):
        api.attention(q, k, v, alibi_slopes=slopes)
    api.attention(q, k, v, alibi_slopes=slopes.detach())


def test_arrays_that_are_not_on_a_gpu(cp: Any, torch: Any) -> None:
    host = qkv(9, 9, 16)
    q, k, v = (cp.asarray(x) for x in host)
    with pytest.raises(TypeError, match="k: got a NumPy array, accepted: CuPy, torch or Numba"):
        api.attention(q, host[1], v)
    with pytest.raises(TypeError, match="v: got a tensor on cpu, accepted: a CUDA device"):
        api.attention(q, k, torch.from_numpy(host[2]))
    with pytest.raises(ValueError, match="out: accepted: the same kind of array as q"):
        api.attention(q, k, v, out=to_torch(torch, host[0]))


# ---- streams ----------------------------------------------------------------------------------


def spin(x, n):
    """Keeps one thread of a GPU busy: 4 cycles a turn."""
    y = x[0]
    for _ in range(n):
        y = y * np.float32(0.999) + np.float32(1)
    x[0] = y


@functools.cache
def spinner() -> tuple[Any, Any]:
    """The kernel and its argument."""
    return hbm.jit(spin), cuda.device_array(1, np.float32)


def delay(stream: Any) -> None:
    """About 0.1 s on a stream."""
    kernel, x = spinner()
    launch.launch(kernel, 1, 1, stream, 0, x, 50_000_000)


@every_method
@pytest.mark.parametrize("counted", [False, True])
def test_cupy_stream(cp: Any, method: str, counted: bool) -> None:
    # flash-attention#2481: a kernel read before the producer on the same stream had finished
    host = qkv(70, 70, 32, H_k=4)
    good = [cp.asarray(x) for x in host]
    function = api.measure if counted else api.attention
    function(*good, mask=cp.ones((70, 70), bool), method=method)  # compiled
    q, k, v = (cp.full_like(x, cp.nan) for x in good)
    mask = cp.zeros((70, 70), bool)
    cp.cuda.Device().synchronize()
    delay(0)
    cp.cuda.Device().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        delay(cuda.external_stream(stream.ptr))
        for late, x in zip((q, k, v), good, strict=True):
            late[...] = x
        mask[...] = True
        result = function(q, k, v, mask=mask, method=method)
        out = result.out if counted else result
        consumed = out + 0  # on the same stream, without a word of ours between
    stream.synchronize()
    reference.assert_attention(cp.asnumpy(consumed), None, *host, name=method)


def test_torch_stream(torch: Any) -> None:
    host = qkv(70, 70, 32, H_k=4)
    good = [to_torch(torch, x) for x in host]
    api.attention(*good, causal=True)  # compiled
    delay(0)
    late = [torch.full_like(x, math.nan) for x in good]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        delay(cuda.external_stream(stream.cuda_stream))
        for x, y in zip(late, good, strict=True):
            x.copy_(y)
        consumed = api.attention(*late, causal=True) + 0
    stream.synchronize()
    reference.assert_attention(consumed.cpu().numpy(), None, *host, name="torch", causal=True)


# ---- devices ----------------------------------------------------------------------------------


def two_gpus() -> None:
    if len(cuda.gpus) < 2:
        pytest.skip("needs two GPUs")


@every_method
def test_arrays_on_a_device_that_is_not_current(cp: Any, method: str) -> None:
    # flash-attention#54, flashinfer#349: zeros, or an illegal access, on cuda:1
    two_gpus()
    host = qkv(70, 70, 32)
    with cp.cuda.Device(1):
        device = [cp.asarray(x) for x in host]
        on_1 = cp.ones((70, 70), bool)
    assert cp.cuda.runtime.getDevice() == 0
    for mask in (None, np.ones((70, 70), bool), on_1):
        out, lse = api.attention(*device, mask=mask, method=method, return_lse=True)
        assert out.device.id == lse.device.id == 1
        assert cp.cuda.runtime.getDevice() == 0
        reference.assert_attention(arrays.to_host(out), arrays.to_host(lse), *host, name=method)
    measured = api.measure(*device, method=method)
    assert traffic.differences(measured.rows, io_model.predict(measured.problem)) == []


def test_torch_on_a_device_that_is_not_current(torch: Any) -> None:
    two_gpus()
    host = qkv(70, 70, 32)
    device = [to_torch(torch, x).to("cuda:1") for x in host]
    out = api.attention(*device, causal=True)
    assert out.device == device[0].device
    assert torch.cuda.current_device() == 0
    reference.assert_attention(out.cpu().numpy(), None, *host, name="torch", causal=True)


def test_arrays_on_two_devices_are_refused(cp: Any) -> None:
    two_gpus()
    q, k, v = (cp.asarray(x) for x in qkv(9, 9, 16))
    with cp.cuda.Device(1):
        k_1, mask = cp.asarray(cp.asnumpy(k)), cp.ones((9, 9), bool)
        out = cp.empty_like(cp.asarray(cp.asnumpy(q)))
    with pytest.raises(ValueError, match="k: on GPU 1, accepted: q's, 0"):
        api.attention(q, k_1, v)
    with pytest.raises(ValueError, match="mask: on GPU 1, accepted: q's, 0"):
        api.attention(q, k, v, mask=mask)
    with pytest.raises(ValueError, match=r"out: .* on the same device"):
        api.attention(q, k, v, out=out)


# ---- sizes ------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize(
    ("B", "H", "n_q", "n_k"), [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (0, 0, 0, 0)]
)
def test_empty(cp: Any, torch: Any, method: str, B: int, H: int, n_q: int, n_k: int) -> None:
    # flash-attention#2470, #2503
    host = qkv(n_q, n_k, 32, H=H, H_k=H, B=B)
    for make in (cp.asarray, lambda x: to_torch(torch, x), cuda.to_device):
        for options in ({"causal": True}, {"mask": np.ones((B, 1, n_q, n_k), bool)}):
            out, lse = api.attention(
                *(make(x) for x in host), method=method, return_lse=True, **options
            )
            assert tuple(out.shape) == (B, H, n_q, 32)
            assert tuple(lse.shape) == (B, H, n_q)
            if n_k == 0 and math.prod(out.shape):
                assert not arrays.to_host(out).any()
                assert (arrays.to_host(lse) == -np.inf).all()


@every_method
@pytest.mark.parametrize(("B", "H"), [(70_000, 1), (3, 30_000), (1, 65_536)])
def test_more_blocks_than_65535(cp: Any, method: str, B: int, H: int) -> None:
    # flash-attention#1311: B = 70000 is more than grid.y or grid.z can have
    host = qkv(2, 3, 16, H=H, H_k=1, B=B, dtype="fp16")
    out, lse = api.attention(
        *(cp.asarray(x) for x in host), causal=True, method=method, return_lse=True
    )
    q, k, v = host
    for b, h in ((0, 0), (B - 1, H - 1), (B // 2, H // 3)):
        reference.assert_attention(
            cp.asnumpy(out[b, h]), cp.asnumpy(lse[b, h]), q[b, h], k[b, 0], v[b, 0],
            name=f"{method}, head {b}, {h}", causal=True,
        )  # fmt: skip


def check_heads(
    cp: Any,
    out: Any,
    lse: Any,
    q: Any,
    k: Any,
    v: Any,
    heads: list[tuple[int, int]],
    **problem: Any,
) -> None:
    """Some heads of a large problem, on device arrays; `rows` of the problem samples rows."""
    group = q.shape[1] // k.shape[1]
    rows = problem.get("rows")
    mask = problem.pop("mask", None)
    for b, h in heads:
        one = dict(problem)
        if mask is not None:
            one["mask"] = cp.asnumpy(mask[b, h])
        got = out[b, h], lse[b, h]
        if rows is not None:
            got = got[0][cp.asarray(rows)], got[1][cp.asarray(rows)]
        inputs = (q[b, h], k[b, h // group], v[b, h // group])
        reference.assert_attention(
            *map(cp.asnumpy, got), *map(cp.asnumpy, inputs), name=f"head {b}, {h}", **one
        )


@one_worker
@every_method
def test_batch_stride_beyond_32_bits(cp: Any, method: str) -> None:
    # flash-attention#2611, #772: i * stride wraps on a view of a big buffer
    need(cp, 10)
    B, H, n, d, stride = 2, 2, 70, 32, 2**31
    size = H * n * d
    inputs, outputs = (cp.zeros(stride + 4 * size, cp.float16) for _ in range(2))

    def view(memory: Any) -> Any:
        strides = tuple(2 * s for s in (stride, n * d, d, 1))
        return cp.lib.stride_tricks.as_strided(memory, (B, H, n, d), strides)

    q, k, v = (view(inputs[place * size :]) for place in range(3))
    out = view(outputs)  # apart from the inputs, whose span covers all of their buffer
    for x, host in zip((q, k, v), qkv(n, n, d, H=H, H_k=H, B=B, dtype="fp16"), strict=True):
        x[...] = cp.asarray(host)
    _, lse = api.attention(q, k, v, out=out, causal=True, method=method, return_lse=True)
    check_heads(cp, out, lse, q, k, v, [(0, 0), (1, 1)], causal=True)


@one_worker
@every_method
def test_row_stride_beyond_32_bits(cp: Any, method: str) -> None:
    # flash-attention#2611: rows of a wide concatenation
    need(cp, 6)
    n, d = 66, 32
    step = 2**31 // (n - 2) // 8 * 8
    memory = cp.zeros((n, step), cp.float16)
    q, k, v = (memory[None, None, :, place * d : (place + 1) * d] for place in range(3))
    assert (n - 1) * q.strides[2] // 2 > 2**31
    for x, host in zip((q, k, v), qkv(n, n, d, H=1, H_k=1, dtype="fp16"), strict=True):
        x[...] = cp.asarray(host)
    out, lse = api.attention(q, k, v, causal=True, method=method, return_lse=True)
    check_heads(cp, out, lse, q, k, v, [(0, 0)], causal=True)


@one_worker
def test_gradients_beyond_2_to_the_31_elements(cp: Any) -> None:
    # flash-attention#1500, #1311: row offsets of the dq accumulator wrap
    need(cp, 60)
    B, H, n, d = 17_000, 16, 128, 64
    q, k, v, dout, out = (cp.zeros((B, H, n, d), cp.float16) for _ in range(5))
    assert q.size > 2**31
    heads = [(0, 0), (B // 2, 3), (B - 1, H - 1)]
    for n_head, (b, h) in enumerate(heads):
        for x, seed in ((q, 0), (k, 1), (v, 2), (dout, 3)):
            x[b, h] = cp.asarray(values(n, d, dtype="fp16", seed=10 * n_head + seed))
    _, lse = api.attention(q, k, v, causal=True, return_lse=True, out=out)
    gradients = backward.attention_backward(dout, q, k, v, out, lse, causal=True)
    for place in heads:
        host = [cp.asnumpy(x[place]) for x in (dout, q, k, v, out, lse)]
        got = tuple(cp.asnumpy(x[place]) for x in gradients)
        reference.assert_attention_backward(got, *host, name=str(place), causal=True)
    assert not any(x[B // 3, 0].any() for x in gradients)


@pytest.mark.parametrize("method", backward.PORTABLE_BACKWARD)
def test_gradients_on_a_torch_stream(torch: Any, method: str) -> None:
    # flash-attention#2481: the preprocessing kernel read dout before its producer had finished
    host = qkv(70, 70, 32, H_k=4)
    forward = reference.attention_same_precision(*host, causal=True)
    dout = values(*host[0].shape, seed=7)
    good = [to_torch(torch, x) for x in (dout, *host, *forward)]
    options = {"causal": True, **backward_method(method)}
    backward.attention_backward(*good, **options)  # compiled
    delay(0)
    late = [torch.full_like(x, math.nan) for x in good]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        delay(cuda.external_stream(stream.cuda_stream))
        for x, y in zip(late, good, strict=True):
            x.copy_(y)
        got = backward.attention_backward(*late, **options)
    stream.synchronize()
    reference.assert_attention_backward(
        tuple(x.cpu().numpy() for x in got), dout, *host, *forward, name=method, causal=True
    )


@one_worker
def test_more_than_2_to_the_31_elements(cp: Any) -> None:
    # flash-attention#2214: a big batch that is fine when small
    need(cp, 20)
    B, H, n, d = 2600, 16, 729, 72
    q, k, v = (cp.zeros((B, n, H, d), cp.float16).transpose(0, 2, 1, 3) for _ in range(3))
    assert q.size > 2**31
    heads = [(0, 0), (B // 2, 3), (B - 1, H - 1)]
    for n_head, (b, h) in enumerate(heads):
        for x, seed in ((q, 0), (k, 1), (v, 2)):
            x[b, h] = cp.asarray(values(n, d, dtype="fp16", seed=10 * n_head + seed))
    out, lse = api.attention(q, k, v, method="fa2", return_lse=True)
    check_heads(cp, out, lse, q, k, v, heads)
    other = out[B // 3, 0], lse[B // 3, 0]  # zeros: the mean of zeros, and log n
    assert not other[0].any() and abs(other[1] - math.log(n)).max() < 1e-5


@one_worker
def test_long_rows_and_many_of_them(cp: Any) -> None:
    # flash-attention#767: N = 262144 and H d = 6144. A window, since N^2 d would take a minute.
    need(cp, 16)
    n, H, d = 262_144, 48, 128
    q, k, v = (cp.zeros((1, n, H, d), cp.float16).transpose(0, 2, 1, 3) for _ in range(3))
    for h in (0, H - 1):
        for x, seed in ((q, 0), (k, 1), (v, 2)):
            x[0, h] = cp.asarray(values(n, d, dtype="fp16", seed=h + seed))
    out, lse = api.attention(q, k, v, window=(100, 0), method="fa2", return_lse=True)
    rows = np.array([0, 1, 127, 128, n // 2, n - 1])
    check_heads(cp, out, lse, q, k, v, [(0, 0), (0, H - 1)], window=(100, 0), rows=rows)


@one_worker
def test_probabilities_of_50000_keys(cp: Any) -> None:
    # flash-attention#1054: N^2 = 2.5e9 probabilities; here S and P of the standard method
    need(cp, 26)
    n, d = 50_000, 64
    host = qkv(n, n, d, H=1, H_k=1)
    device = [cp.asarray(x) for x in host]
    out, lse = api.attention(*device, method="standard", return_lse=True)
    check_heads(cp, out, lse, *device, [(0, 0)], rows=np.array([0, 7, n // 2, n - 1]))


@one_worker
def test_keys_outside_batches(cp: Any) -> None:
    # pytorch#190857: K and V viewed from (24000, B, 128)
    need(cp, 16)
    n, B, d = 24_000, 720, 128
    k, v = (cp.zeros((n, B, d), cp.float16).transpose(1, 0, 2)[:, None] for _ in range(2))
    assert k.size > 2**31
    q = cp.asarray(values(B, 1, 5, d, dtype="fp16"))
    for x, seed in ((k, 1), (v, 2)):
        x[-1, 0] = cp.asarray(values(n, d, dtype="fp16", seed=seed))
    out, lse = api.attention(q, k, v, method="fa2", return_lse=True)
    check_heads(cp, out, lse, q, k, v, [(B - 1, 0), (0, 0)])


@one_worker
def test_a_mask_of_more_than_2_to_the_31_bytes(cp: Any) -> None:
    # flashattention2-custom-mask#2: the offset B * H * N * N of the mask overflowed
    need(cp, 12)
    B, H, n, d = 8, 28, 4096, 32
    host = qkv(n, n, d, H=H, H_k=H, B=B, dtype="fp16")
    q, k, v = (cp.asarray(x) for x in host)
    mask = cp.zeros((B, H, n, n), bool)
    assert mask.size > 2**31
    heads = [(0, 0), (B - 1, H - 1)]
    for b, h in heads:
        mask[b, h] = cp.asarray(np.random.default_rng(b).random((n, n), np.float32) < 0.3)
    out, lse = api.attention(q, k, v, mask=mask, return_lse=True)
    check_heads(cp, out, lse, q, k, v, heads, mask=mask, rows=np.arange(0, n, 37))
    assert not out[1, 1].any() and bool((lse[1, 1] == -np.inf).all())


@one_worker
@pytest.mark.parametrize("N", [32_767, 32_768, 32_769, 33_728])
def test_zeros_over_more_keys_than_an_int16_counts(cp: Any, N: int) -> None:
    # xformers#719: NaN for more than 32768 keys
    x = cp.zeros((1, N, 64), cp.float32)
    out, lse = api.attention(x, x, x, return_lse=True)
    assert not out.any()
    assert float(abs(lse - math.log(N)).max()) < 1e-5


@one_worker
@every_method
def test_a_large_tiling(cp: Any, method: str) -> None:
    """More than 48 KB of shared memory, up to 1024 threads: it runs, or it says why not."""
    host = qkv(300, 300, 128)
    device = [cp.asarray(x) for x in host]
    for tiling in (Tiling(128, 64, 16, 16), Tiling(64, 64, 32, 16), Tiling(64, 64, 32, 32)):
        try:
            out = api.attention(*device, method=method, tiling=tiling)
        except ValueError as error:
            assert "tiling" in str(error)
        else:
            reference.assert_attention(cp.asnumpy(out), None, *host, name=f"{method} {tiling}")


# ---- the grids of other projects' tests -------------------------------------------------------
# Lengths and head dimensions that flash-attention's own tests use; fp32 and small heads added.

OUTPUT = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024),
    (1023, 1024), (1024, 1023), (1, 239), (3, 799), (127, 512), (127, 513), (799, 3), (1, 1),
    (64, 128), (239, 1), (640, 128),
)  # fmt: skip
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
HEADS = ((6, 6), (6, 2), (6, 1))  # MHA, GQA, MQA


@pytest.mark.parametrize(
    ("d", "dtype"),
    [(d, ("fp16", "bf16", "fp32")[n % 3]) for n, d in enumerate(HEAD_DIMS)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_output_grid(cp: Any, d: int, dtype: str, causal: bool) -> None:
    for n, (n_q, n_k) in enumerate(OUTPUT):
        H, H_k = HEADS[n % 3]
        host = qkv(n_q, n_k, d, H=H, H_k=H_k, dtype=dtype)
        out, lse = api.attention(
            *map(cp.asarray, host), causal=causal, method="fa2", return_lse=True
        )
        some = slice(0, None, H // min(H_k, 2))  # one query head of up to two groups
        q, k, v = host
        reference.assert_attention(
            cp.asnumpy(out)[0, some], cp.asnumpy(lse)[0, some], q[0, some], *(
                x[0, :: max(H_k // 2, 1)] for x in (k, v)
            ),
            name=f"{n_q} x {n_k}, heads {H}/{H_k}", causal=causal,
        )  # fmt: skip


@pytest.mark.parametrize("method", ["standard", "fa1"])
@pytest.mark.parametrize(("d", "dtype"), [(59, "fp32"), (128, "bf16"), (256, "fp16")])
def test_output_grid_of_the_others(cp: Any, method: str, d: int, dtype: str) -> None:
    for n_q, n_k in OUTPUT[:6] + OUTPUT[9:]:
        host = qkv(n_q, n_k, d, H=2, H_k=1, dtype=dtype)
        out, lse = api.attention(
            *map(cp.asarray, host), causal=True, method=method, return_lse=True
        )
        reference.assert_attention(
            cp.asnumpy(out), cp.asnumpy(lse), *host, name=f"{method}, {n_q} x {n_k}", causal=True
        )


@pytest.mark.parametrize("softcap", [1.0, 50.0])
@pytest.mark.parametrize("alibi", [False, True])
def test_score_grid(cp: Any, softcap: float, alibi: bool) -> None:
    for n_q, n_k in ((113, 203), (256, 512), (1023, 1024), (17, 987)):
        host = qkv(n_q, n_k, 64, dtype="bf16")
        options: dict[str, Any] = {"softcap": softcap, "causal": True}
        slopes = values(1, 4)[:] ** 2 * np.float32(0.3)
        device = options | ({"alibi_slopes": cp.asarray(slopes)} if alibi else {})
        out, lse = api.attention(*map(cp.asarray, host), method="fa2", return_lse=True, **device)
        reference.assert_attention(
            cp.asnumpy(out), cp.asnumpy(lse), *host, name=f"{n_q} x {n_k}",
            **options, **({"alibi_slopes": slopes} if alibi else {}),
        )  # fmt: skip


def test_window_grid(cp: Any) -> None:
    for left in (3, 13, 23, 37, 43, 33, 111, 233, 533):
        for right in (0, left // 2, -1):
            host = qkv(577, 1024, 64, H=2, dtype="fp16")
            out, lse = api.attention(
                *map(cp.asarray, host), window=(left, right), method="fa2", return_lse=True
            )
            reference.assert_attention(
                cp.asnumpy(out), cp.asnumpy(lse), *host, name=f"window {left}, {right}",
                window=(left, right),
            )  # fmt: skip


def test_a_huge_window_is_no_window(cp: Any) -> None:
    device = [cp.asarray(x) for x in qkv(70, 90, 32)]
    expected = cp.asnumpy(api.attention(*device, window=(1000, 1000)))
    for end in (2**31, 2**40, 2**63 - 1, 2**70):
        got = cp.asnumpy(api.attention(*device, window=(end, end)))
        np.testing.assert_array_equal(got, expected)


# ---- real inputs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm() -> dict[str, np.ndarray]:
    """Activations of a trained encoder over two passages, one of them padded."""
    path = importlib.resources.files("fa2_numba") / "data" / "minilm_qkv.npz"
    with path.open("rb") as file, np.load(file) as arrays_:
        return dict(arrays_)


@every_method
@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_real_activations(
    cp: Any, minilm: dict[str, np.ndarray], method: str, layer: int, dtype: str
) -> None:
    host = [minilm[f"layer{layer}_{n}"].astype(DTYPES[dtype]) for n in "qkv"]
    mask = minilm["mask"][:, None, None, :]
    out, lse = api.attention(
        *map(cp.asarray, host), mask=cp.asarray(mask), method=method, return_lse=True
    )
    out, lse = cp.asnumpy(out), cp.asnumpy(lse)
    reference.assert_attention(out, lse, *host, name=f"{method}, layer {layer}", mask=mask)
    # The model's own output, from unrounded inputs: they were rounded to fp16, which moves the
    # float64 result by up to 5.4e-3 (layer 0); the output's own rounding adds 3.22 * 2**-11.
    saved = minilm[f"layer{layer}_out"].astype(np.float32)
    assert abs(out.astype(np.float32) - saved).max() < 5.4e-3 + 1.6e-3


# ---- again and again --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "n_q", "n_k", "runs"),
    [
        ("fa2", 239, 1, 250),
        ("fa2", 3, 799, 250),
        ("fa2", 1024, 128, 250),
        ("fa2", 257, 257, 250),
        ("fa1", 257, 257, 50),
        ("standard", 257, 257, 50),
    ],
)
def test_250_runs_agree_bitwise(cp: Any, method: str, n_q: int, n_k: int, runs: int) -> None:
    """A race would show; the shapes are those of flash-attention's race test."""
    q, k, v = (cp.asarray(x) for x in qkv(n_q, n_k, 64, H=4, H_k=4, B=60, dtype="fp16"))
    out, lse = api.attention(q, k, v, causal=True, method=method, return_lse=True)
    differing = cp.zeros((), cp.int64)
    for _ in range(runs):
        again, lse_again = api.attention(q, k, v, causal=True, method=method, return_lse=True)
        differing += (again.view(cp.uint16) != out.view(cp.uint16)).sum()
        differing += (lse_again.view(cp.uint32) != lse.view(cp.uint32)).sum()
    assert int(differing) == 0


# ---- counts -----------------------------------------------------------------------------------

COUNTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp32", {}),
    ("fp32", {"causal": True}),
    ("fp16", {"causal": "skip"}),
    ("bf16", {"window": (100, 20)}),
    ("fp64", {"causal": True, "mask": "documents"}),
    ("fp32", {"mask": "boolean", "alibi_slopes": True}),
)


@every_method
@pytest.mark.parametrize(("dtype", "given"), COUNTED, ids=str)
def test_counted_equals_predicted(cp: Any, method: str, dtype: str, given: dict[str, Any]) -> None:
    B = 2
    for n_q, n_k in ((1000, 1000), (257, 770)):
        options = dict(given)
        if options.get("mask") == "documents":
            ids = np.sort(np.random.default_rng(0).integers(0, 5, n_k))
            options["mask"] = masking.documents(ids)
        if options.get("mask") == "boolean":
            coarse = np.random.default_rng(0).random((B, 1, 1 + n_q // 50, 1 + n_k // 50)) < 0.5
            mask = coarse.repeat(50, 2).repeat(50, 3)[:, :, :n_q, :n_k]
            options["mask"] = cp.asarray(np.ascontiguousarray(mask))
        if options.get("alibi_slopes"):
            options["alibi_slopes"] = np.full(4, 0.1, np.float32)
        host = qkv(n_q, n_k, 64, B=B, dtype=dtype)
        device = [cp.asarray(x) for x in host]
        measured = api.measure(*device, method=method, **options)
        assert traffic.differences(measured.rows, io_model.predict(measured.problem)) == []
        predicted = api.predict(*device, method=method, **options)
        assert traffic.differences(measured.rows, predicted) == []
        out, lse = api.attention(*device, method=method, return_lse=True, **options)
        assert bits(cp.asnumpy(out), cp.asnumpy(lse)) == bits(
            cp.asnumpy(measured.out), cp.asnumpy(measured.lse)
        )


@every_method
def test_counted_equals_predicted_in_another_layout(cp: Any, method: str) -> None:
    """Heads inside, an odd length, a head dimension whose rows start in the middle of a sector."""
    host = qkv(1023, 513, 36, H=6, H_k=3, B=2)
    device = [cp.asarray(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in host]
    measured = api.measure(*(x.transpose(0, 2, 1, 3) for x in device), causal=True, method=method)
    assert traffic.differences(measured.rows, io_model.predict(measured.problem)) == []
    reference.assert_attention(
        cp.asnumpy(measured.out), cp.asnumpy(measured.lse), *host, name=method, causal=True
    )


# ---- sizes at random --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gpu"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@forall(
    10,
    st.builds(
        Case,
        kernel=st.just(Kernel(64, None, ("causal",))),
        B=st.integers(1, 3),
        H_k=st.integers(1, 3),
        group=st.integers(1, 4),
        N_q=st.integers(0, 1500),
        N_k=st.integers(0, 1500),
        mask=st.just((("causal",),)),
        seed=st.integers(0, 2**32 - 1),
        spread=st.sampled_from((0.3, 1.0, 3.0)),
    ),
)
def test_any_size(backend: Backend, dtype: str, case: Case) -> None:
    """Many sizes for one kernel, which is compiled once."""
    out, lse = backend.run("fa2", dtype, case)
    reference.assert_attention(
        out, lse, *case.arrays(dtype), name="fa2", **case.reference_options(dtype)
    )
