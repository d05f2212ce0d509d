"""Plans on a GPU: the same bits, whatever the addresses, streams, threads, devices and graphs."""

import contextlib
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from strategies import backward_method
from test_gpu import cp as cp
from test_gpu import delay, two_gpus
from test_gpu import torch as torch

from fa2_numba import api, arrays, backward, launch, plan, tensor_map
from fa2_numba.problem import Layout

pytestmark = pytest.mark.gpu

every_method = pytest.mark.parametrize("method", api.METHODS)
SHAPES = [  # B, H, H_k, N_q, N_k, d
    (2, 4, 4, 128, 64, 64),
    (1, 8, 1, 33, 257, 64),
    (1, 2, 2, 0, 5, 64),
    (1, 2, 2, 5, 0, 64),
    (1, 1, 1, 1, 1, 40),
    (1, 4, 2, 70, 90, 40),
    (2, 2, 2, 65, 65, 128),
]
CASES = [(shape, "float32") for shape in SHAPES] + [
    (shape, dtype) for dtype in ("float64", "float16", "bfloat16") for shape in SHAPES[:2]
]
REPLAYED = [(method, *case) for method in api.PORTABLE for case in CASES] + [
    ("fa3", shape, dtype)
    for dtype in ("float16", "bfloat16")
    for shape in SHAPES
    if shape[4]  # fa3 takes no call without keys
]


def dtype_for(method: str) -> str:
    """What a method takes: fa3 has no float32."""
    return "float16" if method.startswith("fa3") else "float32"


@pytest.fixture(params=["cupy", "torch"])
def library(request: pytest.FixtureRequest) -> "Library":
    """Both libraries, one after the other."""
    name = "cp" if request.param == "cupy" else "torch"
    return Library(request.param, request.getfixturevalue(name))


class Library:
    """What these tests need of CuPy or torch."""

    def __init__(self, name: str, module: Any):
        self.name, self.module = name, module

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int, device: int = 0) -> Any:
        """A new array of normal values."""
        host = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        if self.name == "torch":
            tensor = self.module.from_numpy(host).to(f"cuda:{device}")
            return tensor.to(getattr(self.module, dtype))
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        with self.module.cuda.Device(device):
            return self.module.asarray(host.astype(kind))

    def broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        """A view with stride 0 along the axes that are new or were 1."""
        if self.name == "torch":
            return x.expand(shape)
        return self.module.broadcast_to(x, shape)

    def moved(self, x: Any, elements: int) -> Any:
        """The same values, so many elements behind the beginning of other memory."""
        join = self.module.concatenate if self.name == "cupy" else self.module.cat
        flat = x.reshape(-1)
        return join([flat[:elements], flat])[elements:].reshape(x.shape)

    def stream(self) -> Any:
        """A new stream, as a context manager."""
        if self.name == "torch":
            return self.module.cuda.stream(self.module.cuda.Stream())
        return self.module.cuda.Stream(non_blocking=True)

    def synchronize(self) -> None:
        """Wait for the current device."""
        if self.name == "torch":
            self.module.cuda.synchronize()
        else:
            self.module.cuda.Device().synchronize()

    def copy(self, into: Any, values: Any) -> None:
        """On the current stream."""
        if self.name == "torch":
            into.copy_(values)
        else:
            into[...] = values

    def qkv(self, shape: tuple[int, ...], dtype: str, seed: int, device: int = 0) -> list[Any]:
        """q, k and v for (B, H, H_k, N_q, N_k, d)."""
        B, H, H_k, N_q, N_k, d = shape
        sizes = ((B, H, N_q, d), (B, H_k, N_k, d), (B, H_k, N_k, d))
        return [self.normal(s, dtype, 3 * seed + n, device) for n, s in enumerate(sizes)]


@pytest.fixture(autouse=True)
def replayed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Any]]:
    """No plans at first; in it, the plan of each call that was done by one."""
    callspec = getattr(request.node, "callspec", None)
    method = callspec.params.get("method") if callspec else None
    if str(method).startswith("fa3") and launch.compute_capability(None) != (9, 0):
        pytest.skip("fa3 needs compute capability 9.0")
    done: list[Any] = []
    call = plan.Plan.__call__

    def spy(self: plan.Plan, *args: Any) -> Any:
        result = call(self, *args)
        if result is not None:
            done.append(self)
        return result

    monkeypatch.setattr(plan.Plan, "__call__", spy)
    monkeypatch.setattr(plan, "_plans", plan.Plans(plan.KEPT))
    yield done


def bits(result: Any) -> tuple[bytes, ...]:
    """Of each array."""
    return tuple(arrays.to_host(x).tobytes() for x in result)


def checked(*args: Any, **options: Any) -> tuple[bytes, ...]:
    """The bits of the checked way."""
    with plan.unused():
        return bits(api.attention(*args, return_lse=True, **options))


# ---- the same bits ------------------------------------------------------------------------------


def in_threads(work: Any, count: int) -> None:
    """``work(n)`` for each n, all at once, each interrupted as often as can be."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize(("method", "shape", "dtype"), REPLAYED, ids=str)
def test_a_replay_gives_the_bits_of_the_checked_way(
    library: Library, replayed: list[Any], method: str, shape: tuple[int, ...], dtype: str
) -> None:
    """Of other data at other addresses, with the first call's arrays alive beside them."""
    options = {"method": method, "causal": True}
    calls = [library.qkv(shape, dtype, seed) for seed in range(3)]
    want = [checked(*three, **options) for three in calls]
    results = [api.attention(*three, return_lse=True, **options) for three in calls]
    assert len(replayed) == 2
    assert [bits(result) for result in results] == want
    assert len(set(want)) == (3 if shape[3] and shape[4] else 1)
    for again, first in zip(results[-1], results[0], strict=True):
        assert (type(again), again.dtype, again.shape) == (type(first), first.dtype, first.shape)


@every_method
def test_options_do_not_share_plans(library: Library, replayed: list[Any], method: str) -> None:
    three = library.qkv((1, 4, 2, 70, 90, 64), dtype_for(method), 0)
    options: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"causal": "skip"},
        {"window": (9, 9)},
        {"window": (9, 8)},
        {"softcap": 2.0},
        {"softcap": 2.5},
        {"scale": 0.5},
        {"scale": -0.5},
    ]
    want = [checked(*three, method=method, **o) for o in options]
    for turn in range(2):
        got = [bits(api.attention(*three, method=method, return_lse=True, **o)) for o in options]
        assert got == want and len(replayed) == turn * len(options)


@every_method
def test_one_tensor_as_q_k_and_v(library: Library, replayed: list[Any], method: str) -> None:
    x, y, z = (library.normal((2, 2, 65, 64), dtype_for(method), n) for n in range(3))
    for three in ((x, x, x), (x, y, x), (x, x, y), (z, z, z), (x, y, z)):
        got = bits(api.attention(*three, method=method, return_lse=True))
        assert got == checked(*three, method=method)
    assert len(replayed) == 4


@every_method
def test_out_is_written_on_a_replay(library: Library, replayed: list[Any], method: str) -> None:
    for seed in range(3):
        q, k, v = library.qkv((1, 2, 2, 65, 70, 64), dtype_for(method), seed)
        out = library.normal(q.shape, dtype_for(method), 99)
        want = checked(q, k, v, method=method)
        result = api.attention(q, k, v, method=method, out=out, return_lse=True)
        assert result[0] is out and bits(result) == want
    assert len(replayed) == 2


def test_views(library: Library, replayed: list[Any]) -> None:
    """Strides are part of the key; a view one element off loads narrower."""
    wide = [library.normal((2, 4, 70, 65), "float32", n) for n in range(3)]
    for left in (0, 1):
        views = [x[..., left : 64 + left] for x in wide]
        inside = [x[:, ::2] for x in views]
        for three in (views, inside):
            want = checked(*three, causal=True)
            for _ in range(2):
                assert bits(api.attention(*three, causal=True, return_lse=True)) == want
    assert len(replayed) >= 4


# ---- refused on a replay ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_gradient_is_refused_on_a_replay(torch: Any, replayed: list[Any], name: str) -> None:
    arguments = {n: torch.randn(1, 2, 33, 64, device="cuda") for n in "qkv"}
    api.attention(**arguments)
    arguments[name].requires_grad_()
    with pytest.raises(TypeError, match=f"^{name}: requires grad"):
        api.attention(**arguments)
    assert not replayed
    with torch.no_grad():
        api.attention(**arguments)
    with torch.inference_mode():
        api.attention(**arguments)
    assert len(replayed) == 2


def test_new_tensors_of_a_replay_are_as_of_the_first_call(torch: Any, replayed: list[Any]) -> None:
    """Whatever the strides of q: they are not handed on."""
    wide = torch.randn(2, 33, 4, 64, device="cuda")
    three = [wide.transpose(1, 2)] * 3
    for context in (contextlib.nullcontext, torch.inference_mode, torch.no_grad):
        with context():
            first, again = (api.attention(*three, return_lse=True) for _ in range(2))
            for a, b in zip(first, again, strict=True):
                assert (a.shape, a.stride(), a.dtype, a.device) == (
                    b.shape,
                    b.stride(),
                    b.dtype,
                    b.device,
                )
                assert b.is_contiguous() and not b.requires_grad
                assert a.is_inference() == b.is_inference() == torch.is_inference_mode_enabled()
                assert a.data_ptr() != b.data_ptr() and b.storage_offset() == 0
    assert len(replayed) == 5


def test_an_overlap_is_refused_on_a_replay(library: Library, replayed: list[Any]) -> None:
    buffer = library.normal((5, 1, 2, 64, 64), "float32", 0)
    q, k, v, out = buffer[0], buffer[1], buffer[2], buffer[3]
    for _ in range(2):
        api.attention(q, k, v, out=out)
    rows = buffer.reshape(5 * 2 * 64, 64)
    for bad in (q, k, v, rows[64 : 64 + 128].reshape(1, 2, 64, 64)):
        with pytest.raises(ValueError, match="out: its memory range overlaps"):
            api.attention(q, k, v, out=bad)
    assert len(replayed) == 1


def test_tensors_on_the_host_are_refused_on_a_replay(torch: Any) -> None:
    three = [torch.randn(1, 2, 33, 64, device="cuda") for _ in range(3)]
    api.attention(*three)
    with pytest.raises(TypeError, match="k: got a tensor on cpu"):
        api.attention(three[0], three[1].cpu(), three[2])


# ---- streams and threads ------------------------------------------------------------------------


@every_method
def test_streams(library: Library, replayed: list[Any], method: str) -> None:
    """A replay waits for what its stream computes, and is waited for by what follows there."""
    shape = (1, 4, 4, 70, 70, 64)
    good = library.qkv(shape, dtype_for(method), 1)
    want = checked(*good, method=method)[0]
    late = [library.qkv(shape, dtype_for(method), seed) for seed in (2, 3)]
    api.attention(*good, method=method)
    delay(0)  # compiled
    library.synchronize()
    consumed = []
    streams = [library.stream() for _ in late]
    for three, stream in zip(late, streams, strict=True):
        with stream:
            handle = _handle(library, stream)
            delay(arrays.numba_stream(handle))
            for into, values in zip(three, good, strict=True):
                library.copy(into, values)
            consumed.append(api.attention(*three, method=method) + 0)
    library.synchronize()
    assert len(replayed) == 2
    assert [arrays.to_host(x).tobytes() for x in consumed] == [want, want]


def _handle(library: Library, stream: Any) -> int:
    """Of the current stream."""
    if library.name == "torch":
        return int(library.module.cuda.current_stream().cuda_stream)
    return int(stream.ptr)


@every_method
def test_threads(library: Library, replayed: list[Any], method: str) -> None:
    """Four threads, one plan, data and stream of each its own."""
    calls = [library.qkv((1, 2, 2, 65, 65, 64), dtype_for(method), seed) for seed in range(4)]
    want = [checked(*three, method=method) for three in calls]
    api.attention(*calls[0], method=method)
    library.synchronize()
    results: list[list[Any]] = [[] for _ in calls]
    start = threading.Barrier(len(calls))

    def work(n: int) -> None:
        start.wait()
        with library.stream():
            for _ in range(100):
                results[n].append(api.attention(*calls[n], method=method, return_lse=True))
            library.synchronize()

    in_threads(work, len(calls))
    assert len(replayed) == 4 * 100
    for n, mine in enumerate(results):
        assert len(mine) == 100 and {bits(result) for result in mine} == {want[n]}


# ---- devices ------------------------------------------------------------------------------------


@every_method
def test_a_device_that_is_not_current(library: Library, replayed: list[Any], method: str) -> None:
    two_gpus()
    module = library.module
    three = library.qkv((1, 2, 2, 65, 65, 64), dtype_for(method), 0, device=1)
    want = checked(*three, method=method)
    for _ in range(3):
        result = api.attention(*three, method=method, return_lse=True)
        current = (
            module.cuda.current_device()
            if library.name == "torch"
            else module.cuda.runtime.getDevice()
        )
        assert current == 0 and bits(result) == want
    assert len(replayed) == 2
    zero = library.qkv((1, 2, 2, 65, 65, 64), dtype_for(method), 0, device=0)
    assert bits(api.attention(*zero, method=method, return_lse=True)) == want
    assert len(replayed) == 2  # a plan is one device's


def test_a_thread_without_a_context(library: Library, replayed: list[Any]) -> None:
    three = library.qkv((1, 2, 2, 65, 65, 64), "float32", 0)
    want = checked(*three)
    api.attention(*three)
    got = []
    thread = threading.Thread(
        target=lambda: got.append(bits(api.attention(*three, return_lse=True)))
    )
    thread.start()
    thread.join()
    assert got == [want] and len(replayed) == 1


# ---- graphs -------------------------------------------------------------------------------------


@every_method
def test_a_graph_of_cupy(cp: Any, replayed: list[Any], method: str) -> None:
    """Captured once, launched with new data in the same memory."""
    library = Library("cupy", cp)
    shape = (1, 2, 2, 65, 70, 64)
    three = library.qkv(shape, dtype_for(method), 0)
    out = cp.empty_like(three[0])
    for _ in range(2):
        api.attention(*three, method=method, out=out)
    library.synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        api.attention(*three, method=method, out=out)  # fills the pool of this stream
        stream.synchronize()
        stream.begin_capture()
        _, lse = api.attention(*three, method=method, out=out, return_lse=True)
        graph = stream.end_capture()
    assert len(replayed) == 3
    for seed in (1, 2):
        data = library.qkv(shape, dtype_for(method), seed)
        want = checked(*data, method=method)
        library.synchronize()
        with stream:
            for into, values in zip(three, data, strict=True):
                into[...] = values
            graph.launch(stream)
        stream.synchronize()
        assert bits((out, lse)) == want


@every_method
def test_a_graph_of_torch(torch: Any, replayed: list[Any], method: str) -> None:
    library = Library("torch", torch)
    shape = (1, 2, 2, 65, 70, 64)
    three = library.qkv(shape, dtype_for(method), 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            api.attention(*three, method=method)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = api.attention(*three, method=method, return_lse=True)
    assert len(replayed) == 3
    for seed in (1, 2):
        data = library.qkv(shape, dtype_for(method), seed)
        for into, values in zip(three, data, strict=True):
            into.copy_(values)
        graph.replay()
        torch.cuda.synchronize()
        assert bits(result) == checked(*data, method=method)


# ---- gradients ----------------------------------------------------------------------------------

every_gradient = pytest.mark.parametrize("method", backward.METHODS_BACKWARD)
ATOMIC = ("fa2_backward", "fa3_backward")  # dq is a sum in the order of chance
GRADIENT_SHAPES = [
    (1, 8, 1, 33, 257, 64),
    (1, 4, 2, 70, 90, 40),
    (2, 2, 2, 65, 16, 64),  # one tile of keys: nothing is summed in the order of chance
    (1, 2, 2, 0, 5, 64),
    (1, 2, 2, 5, 0, 64),
]
GRADIENT_CASES = [
    (method, shape, "float32")
    for method in backward.METHODS_BACKWARD
    for shape in GRADIENT_SHAPES
    if not method.startswith("fa3")
] + [
    (method, shape, dtype)
    for method in backward.METHODS_BACKWARD
    for dtype in ("float16", "bfloat16")
    for shape in GRADIENT_SHAPES[:3]
]


def dgiven(
    library: Library,
    shape: tuple[int, ...],
    dtype: str,
    seed: int,
    device: int = 0,
    dlse: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The arrays of a backward call; out and lse are of the checked way."""
    q, k, v = library.qkv(shape, dtype, seed, device)
    with plan.unused():
        out, lse = api.attention(q, k, v, method="fa2", return_lse=True, **options)
    acc = "float64" if dtype == "float64" else "float32"
    given = {"dout": library.normal(q.shape, dtype, 100 + seed, device)}
    given |= {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    return given | ({"dlse": library.normal(q.shape[:-1], acc, 200 + seed, device)} if dlse else {})


def dchecked(given: dict[str, Any], **options: Any) -> tuple[np.ndarray, ...]:
    """dq, dk and dv of the checked way."""
    with plan.unused():
        return on_host(backward.attention_backward(**given, **options))


def on_host(result: Any) -> tuple[np.ndarray, ...]:
    """Copies of arrays."""
    return tuple(np.array(arrays.to_host(x)) for x in result)


def assert_same(got: Any, want: tuple[np.ndarray, ...], method: str, N_k: int) -> None:
    """The same bits; but dq that is summed in the order of chance within its roundings."""
    got = on_host(got)
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    by_chance = method in ATOMIC and N_k > 16
    for a, b in list(zip(got, want, strict=True))[by_chance:]:
        assert a.tobytes() == b.tobytes()
    if by_chance:
        eps = float(ml_dtypes.finfo(got[0].dtype).eps)
        wide = got[0].dtype.itemsize > 2
        a, b = (x.astype(np.float64) for x in (got[0], want[0]))
        assert np.abs(a - b).max(initial=0) <= (64 if wide else 1) * eps * np.abs(b).max(initial=0)


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize(("method", "shape", "dtype"), GRADIENT_CASES, ids=str)
def test_a_replay_gives_the_gradients_of_the_checked_way(
    library: Library,
    replayed: list[Any],
    method: str,
    shape: tuple[int, ...],
    dtype: str,
    dlse: bool,
) -> None:
    """Of other data at other addresses, with the first call's arrays alive beside them."""
    options = {"causal": True, **backward_method(method)}
    calls = [dgiven(library, shape, dtype, seed, dlse=dlse, causal=True) for seed in range(3)]
    want = [dchecked(given, **options) for given in calls]
    results = [backward.attention_backward(**given, **options) for given in calls]
    assert len(replayed) == 2
    for got, expected in zip(results, want, strict=True):
        assert_same(got, expected, method, shape[4])
    for again, first, name in zip(results[-1], results[0], "qkv", strict=True):
        assert (type(again), again.dtype, again.shape) == (type(first), first.dtype, first.shape)
        assert (again.dtype, again.shape) == (calls[-1][name].dtype, calls[-1][name].shape)
    if shape[3] and shape[4]:
        assert len({x[1].tobytes() for x in want}) == 3


@every_gradient
def test_options_of_gradients_do_not_share_plans(
    library: Library, replayed: list[Any], method: str
) -> None:
    """Nor do the two functions, nor calls with and without a gradient by the LSE."""
    given = dgiven(library, (1, 4, 2, 70, 90, 64), dtype_for(method), 0, dlse=True)
    without = {name: x for name, x in given.items() if name != "dlse"}
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (given, {}),
        (without, {}),
        (given, {"causal": True}),
        (given, {"window": (9, 9)}),
        (given, {"window": (9, 8)}),
        (given, {"softcap": 2.0}),
        (given, {"scale": 0.1}),
    ]
    how = backward_method(method)
    want = [dchecked(arguments, **how, **o) for arguments, o in calls]
    assert len({x[1].tobytes() for x in want}) == len(calls)
    for turn in range(3):
        for (arguments, options), expected in zip(calls, want, strict=True):
            got = backward.attention_backward(**arguments, **how, **options)
            assert_same(got, expected, method, 90)
            api.attention(*(given[name] for name in "qkv"), method=how["method"], **options)
        # Two of the calls are one of the forward's, which that has done once before.
        assert len(replayed) == turn * 2 * len(calls) + 1


@every_gradient
def test_gradients_at_other_addresses(library: Library, replayed: list[Any], method: str) -> None:
    """One element behind, loads are narrower: a key and kernels of its own. fa3 refuses, always."""
    given = dgiven(library, (1, 4, 2, 70, 90, 64), dtype_for(method), 0, dlse=True, causal=True)
    options = {"causal": True, **backward_method(method)}
    want = dchecked(given, **options)
    backward.attention_backward(**given, **options)
    for name in given:
        moved = given | {name: library.moved(given[name], 1)}
        replayed.clear()
        if method.startswith("fa3") and name in ("q", "k", "v", "dout"):
            for _ in range(2):
                with pytest.raises(ValueError, match=f"^{name}: got address"):
                    backward.attention_backward(**moved, **options)
            moved = given | {name: library.moved(given[name], 8)}  # 16 bytes
        expected = dchecked(moved, **options)
        for _ in range(2):
            assert_same(backward.attention_backward(**moved, **options), expected, method, 90)
        assert len(replayed) == 1
        assert_same(backward.attention_backward(**given, **options), want, method, 90)
        assert len(replayed) == 2


@every_gradient
def test_gradients_of_views(library: Library, replayed: list[Any], method: str) -> None:
    """dout as a sum's gradient, with stride 0; and arrays whose heads and rows are exchanged."""
    shape = 1, 4, 2, 70, 90, 64
    for seed in range(3):
        given = dgiven(library, shape, dtype_for(method), seed, causal=True)
        row = library.normal((64,), dtype_for(method), 9 + seed)
        broadcast = [library.broadcast(row, (1, 4, 70, 64))]
        if not method.startswith("fa3"):  # which needs elements one behind the other
            broadcast.append(library.broadcast(row[:1], (1, 4, 70, 64)))
        swapped = {
            name: _contiguous(library, x.swapaxes(1, 2)).swapaxes(1, 2)
            for name, x in given.items()
            if name != "lse"
        }
        for arguments in (*(given | {"dout": x} for x in broadcast), given | swapped):
            options = {"causal": True, **backward_method(method)}
            want = dchecked(arguments, **options)
            replayed.clear()
            got = backward.attention_backward(**arguments, **options)
            assert_same(got, want, method, 90)
            assert len(replayed) == bool(seed)


def _contiguous(library: Library, x: Any) -> Any:
    return x.contiguous() if library.name == "torch" else library.module.ascontiguousarray(x)


@pytest.mark.parametrize("name", ["dout", "q", "lse"])
def test_a_gradient_is_refused_on_a_replay_of_gradients(
    torch: Any, replayed: list[Any], name: str
) -> None:
    """And taken under no_grad, where the results want none."""
    library = Library("torch", torch)
    given = dgiven(library, (1, 2, 2, 65, 16, 64), "float32", 0)
    want = dchecked(given, deterministic=True)
    backward.attention_backward(**given, deterministic=True)
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(TypeError, match=f"^{name}: requires grad"):
        backward.attention_backward(**given, deterministic=True)
    assert not replayed
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            got = backward.attention_backward(**given, deterministic=True)
        assert_same(got, want, "fa2_backward_deterministic", 16)
        assert not any(x.requires_grad for x in got)
    assert len(replayed) == 2


@every_gradient
def test_gradients_on_streams(library: Library, replayed: list[Any], method: str) -> None:
    """A replay waits for what its stream computes, and is waited for by what follows there."""
    shape, options = (1, 4, 4, 70, 70, 64), backward_method(method)
    good = dgiven(library, shape, dtype_for(method), 1, dlse=True)
    want = dchecked(good, **options)
    late = [dgiven(library, shape, dtype_for(method), seed, dlse=True) for seed in (2, 3)]
    backward.attention_backward(**good, **options)
    delay(0)  # compiled
    library.synchronize()
    consumed = []
    streams = [library.stream() for _ in late]
    for given, stream in zip(late, streams, strict=True):
        with stream:
            delay(arrays.numba_stream(_handle(library, stream)))
            for name, values in good.items():
                library.copy(given[name], values)
            results = backward.attention_backward(**given, **options)
            consumed.append([x + 0 for x in results])
    library.synchronize()
    assert len(replayed) == 2
    for got in consumed:
        assert_same(got, want, method, 70)


@every_gradient
def test_gradients_in_threads(library: Library, replayed: list[Any], method: str) -> None:
    """Four threads, one plan; data, stream and workspaces of each its own."""
    shape, options = (1, 2, 2, 65, 65, 64), backward_method(method)
    calls = [dgiven(library, shape, dtype_for(method), seed) for seed in range(4)]
    want = [dchecked(given, **options) for given in calls]
    backward.attention_backward(**calls[0], **options)
    library.synchronize()
    results: list[list[Any]] = [[] for _ in calls]
    start = threading.Barrier(len(calls))

    def work(n: int) -> None:
        start.wait()
        with library.stream():
            for _ in range(50):
                results[n].append(backward.attention_backward(**calls[n], **options))
            library.synchronize()

    in_threads(work, len(calls))
    assert len(replayed) == 4 * 50
    for n, mine in enumerate(results):
        assert len(mine) == 50
        for got in mine:
            assert_same(got, want[n], method, 65)


@every_gradient
def test_gradients_on_a_device_that_is_not_current(
    library: Library, replayed: list[Any], method: str
) -> None:
    two_gpus()
    cuda, shape, options = library.module.cuda, (1, 2, 2, 65, 65, 64), backward_method(method)
    given = dgiven(library, shape, dtype_for(method), 0, device=1)
    want = dchecked(given, **options)
    for _ in range(3):
        results = backward.attention_backward(**given, **options)
        current = cuda.current_device() if library.name == "torch" else cuda.runtime.getDevice()
        assert current == 0
        assert_same(results, want, method, 65)
    assert len(replayed) == 2
    zero = dgiven(library, shape, dtype_for(method), 0, device=0)
    assert_same(backward.attention_backward(**zero, **options), want, method, 65)
    assert len(replayed) == 2  # a plan is one device's


@every_gradient
def test_a_graph_of_cupy_with_gradients(cp: Any, replayed: list[Any], method: str) -> None:
    """Captured once, launched with new data in the same memory."""
    library = Library("cupy", cp)
    shape, options = (1, 2, 2, 65, 70, 64), backward_method(method)
    given = dgiven(library, shape, dtype_for(method), 0, dlse=True)
    for _ in range(2):
        backward.attention_backward(**given, **options)
    library.synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        backward.attention_backward(**given, **options)  # fills the pool of this stream
        stream.synchronize()
        stream.begin_capture()
        results = backward.attention_backward(**given, **options)
        graph = stream.end_capture()
    assert len(replayed) == 3
    for seed in (1, 2):
        data = dgiven(library, shape, dtype_for(method), seed, dlse=True)
        want = dchecked(data, **options)
        library.synchronize()
        with stream:
            for name, values in data.items():
                given[name][...] = values
            for x in results:
                x[...] = math.nan
            graph.launch(stream)
        stream.synchronize()
        assert_same(results, want, method, 70)


@every_gradient
def test_a_graph_of_torch_with_gradients(torch: Any, replayed: list[Any], method: str) -> None:
    library = Library("torch", torch)
    shape, options = (1, 2, 2, 65, 70, 64), backward_method(method)
    given = dgiven(library, shape, dtype_for(method), 0, dlse=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            backward.attention_backward(**given, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = backward.attention_backward(**given, **options)
    assert len(replayed) == 3
    for seed in (1, 2):
        data = dgiven(library, shape, dtype_for(method), seed, dlse=True)
        for name, values in data.items():
            given[name].copy_(values)
        for x in results:
            x.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(results, dchecked(data, **options), method, 70)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_autograd_replays(torch: Any, replayed: list[Any], dtype: str, create_graph: bool) -> None:
    """Both directions, from autograd's threads, with gradients recorded or not; by parameters."""
    from fa2_numba.adapters import torch as adapter

    library = Library("torch", torch)
    seen = []
    for _ in range(3):
        q, k, v = (torch.nn.Parameter(x) for x in library.qkv((1, 2, 2, 65, 70, 64), dtype, 0))
        out, lse = adapter.attention(q, k, v, causal=True, return_lse=True, deterministic=True)
        loss = out.sum() + lse.sum()
        seen.append(bits(torch.autograd.grad(loss, (q, k, v), create_graph=create_graph)))
    assert len(replayed) == 2 * 2
    assert seen[0] == seen[1] == seen[2]


# ---- tensor maps --------------------------------------------------------------------------------


def _read(address: int) -> bytes:
    """What is at an address of the current device."""
    from numba import cuda

    whole = arrays.device_view(address, (tensor_map.MAP_BYTES,), (1,), np.dtype(np.uint8))
    cuda.synchronize()
    return bytes(whole.copy_to_host())


def _encoded(address: int) -> bytes:
    return np.array(tensor_map._encode(address, *BOXES[1:]), np.uint64).tobytes()


BOXES = tensor_map.Boxes(0, (64, 64), (128,), (64, 64), "bf16")


@pytest.fixture
def store(cp: Any) -> tensor_map.Store:
    """An empty one of the current device, with a slab of 4 maps."""
    from numba import cuda

    if cuda.get_current_device().compute_capability[0] < 9:
        pytest.skip("the driver encodes tensor maps for sm_90 and later")
    cp.zeros(1)  # the context is current
    return tensor_map.Store(tensor_map.Device(), 4)


def test_maps_are_in_memory_when_they_are_handed_out(cp: Any, store: tensor_map.Store) -> None:
    memory = cp.zeros(1 << 16, cp.uint8)
    start = memory.data.ptr
    for n in range(20):
        made = store.find(start + 256 * n, BOXES, 0)
        assert _read(made.address) == _encoded(start + 256 * n)
    assert store.slabs == 1


@pytest.mark.parametrize("mode", ["global", "thread-local", "relaxed"])
@pytest.mark.parametrize("blocking", [False, True])
def test_maps_are_made_while_a_stream_is_captured(
    cp: Any, store: tensor_map.Store, mode: str, blocking: bool
) -> None:
    """The capture goes on, and the maps stay, whatever comes later."""
    runtime = cp.cuda.runtime
    modes = {
        "global": runtime.streamCaptureModeGlobal,
        "thread-local": runtime.streamCaptureModeThreadLocal,
        "relaxed": runtime.streamCaptureModeRelaxed,
    }
    memory = cp.zeros(1 << 16, cp.uint8)
    memory += 1  # compiled
    start = memory.data.ptr
    before = store.find(start, BOXES, 0)
    stream = cp.cuda.Stream(non_blocking=not blocking)
    with stream:
        stream.begin_capture(modes[mode])
        found = [store.find(start + 256 * n, BOXES, stream.ptr) for n in range(6)]
        memory += 1
        graph = stream.end_capture()
    cp.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert int(memory[0]) == 2  # the capture was not invalidated
    assert found[0] is before and store.slabs == 2
    places = [made.address for made in found]
    del found, before
    for n in range(6, 60):
        store.find(start + 256 * n, BOXES, 0)
    assert [_read(place) for place in places] == [_encoded(start + 256 * n) for n in range(6)]


def test_maps_of_a_group_stay(
    cp: Any, store: tensor_map.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a group found may be captured without being asked about, and is not written anew."""
    monkeypatch.setattr(tensor_map, "_stores", {BOXES.device: store})
    memory = cp.zeros(1 << 16, cp.uint8)
    start = memory.data.ptr
    maps = tensor_map.Group([BOXES, BOXES])
    pair = start, start + 256
    found = maps.find(pair, 0).addresses
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        assert maps.find(pair, stream.ptr).addresses == found
        stream.end_capture()
    for n in range(2, 60):
        store.find(start + 256 * n, BOXES, 0)
    assert [_read(place) for place in found] == [_encoded(place) for place in pair]


def test_a_hit_costs_about_a_microsecond(cp: Any, store: tensor_map.Store) -> None:
    memory = cp.zeros(1 << 12, cp.uint8)
    store.find(memory.data.ptr, BOXES, 0)
    begin = time.perf_counter()
    for _ in range(10_000):
        store.find(memory.data.ptr, BOXES, 0)
    cost = (time.perf_counter() - begin) / 10_000 * 1e6
    print(f"a tensor map that is there: {cost:.2f} us")
    assert cost < 10


def test_boxes_of_operands(cp: Any, store: tensor_map.Store) -> None:
    """What a launcher gets, and that it types as uint64."""
    from fa2_numba.problem import Problem
    from fa2_numba.tiling import Tiling

    q = cp.zeros((1, 2, 64, 64), cp.uint16)
    layout = Layout(q.shape, q.strides, 2, q.data.ptr)
    problem = Problem("fa2", "bf16", 1, 2, 2, 64, 64, 64, Tiling(16, 16, 4, 8))
    view = arrays.device_view(q.data.ptr, q.shape, q.strides, q.dtype)
    A = launch.Operands(problem, {"Q": view}, None, 0, 1.0, counted=False)
    address = A.boxes("Q", (1, 1, 64, 64), "load Q_i")
    assert type(address) is np.uint64
    assert int(address) == tensor_map.tensor_map("Q", layout, (1, 1, 64, 64), "bf16").address


# ---- what it costs ------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("method", api.PORTABLE)
def test_host_cost(library: Library, replayed: list[Any], method: str) -> None:
    """Time to enqueue a tiny problem; the limit leaves room for slow processors."""
    three = library.qkv((1, 1, 1, 16, 16, 64), "float32", 0)
    for _ in range(10):
        api.attention(*three, method=method)
    library.synchronize()
    times = []
    for n in range(2000):
        begin = time.perf_counter_ns()
        api.attention(*three, method=method)
        times.append(time.perf_counter_ns() - begin)
        if n % 100 == 99:
            library.synchronize()  # so that the queue is never full
    microseconds = statistics.median(times) / 1e3
    print(f"{library.name}, {method}: {microseconds:.1f} us a call")
    assert len(replayed) == 2009
    if method == "fa2":
        assert microseconds < 40


@pytest.mark.alone
def test_host_cost_with_tensor_maps(library: Library, replayed: list[Any]) -> None:
    """As `test_host_cost`, of fa3: its maps were found by the first replay."""
    from fa2_numba.launch import compute_capability

    if compute_capability(0) != (9, 0):
        pytest.skip("fa3 needs compute capability 9.0")
    three = library.qkv((1, 8, 8, 128, 128, 128), "float16", 0)
    for _ in range(10):
        api.attention(*three, causal=True, method="fa3")
    library.synchronize()
    times = []
    for n in range(2000):
        begin = time.perf_counter_ns()
        api.attention(*three, causal=True, method="fa3")
        times.append(time.perf_counter_ns() - begin)
        if n % 100 == 99:
            library.synchronize()
    microseconds = statistics.median(times) / 1e3
    print(f"{library.name}, fa3: {microseconds:.1f} us a call")
    assert len(replayed) == 2009 and microseconds < 40


@pytest.mark.alone
@every_gradient
def test_host_cost_of_gradients(library: Library, replayed: list[Any], method: str) -> None:
    """As `test_host_cost`: 2 to 4 launches; the limit leaves room for slow processors."""
    options = backward_method(method)
    given = dgiven(library, (1, 1, 1, 16, 16, 64), dtype_for(method), 0)
    for _ in range(10):
        backward.attention_backward(**given, **options)
    library.synchronize()
    times = []
    for n in range(2000):
        begin = time.perf_counter_ns()
        backward.attention_backward(**given, **options)
        times.append(time.perf_counter_ns() - begin)
        if n % 100 == 99:
            library.synchronize()
    microseconds = statistics.median(times) / 1e3
    print(f"{library.name}, {method}: {microseconds:.1f} us a call")
    assert len(replayed) == 2009 and microseconds < 100
