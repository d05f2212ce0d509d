"""Plans on a GPU: the same bits, whatever the addresses, streams, threads, devices and graphs."""

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_gpu import cp as cp
from test_gpu import delay, two_gpus
from test_gpu import torch as torch

from fa2_numba import api, arrays, launch, plan, tensor_map
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
    return "float16" if method == "fa3" else "float32"


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
        import ml_dtypes

        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        with self.module.cuda.Device(device):
            return self.module.asarray(host.astype(kind))

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
    if method == "fa3" and launch.compute_capability(None) != (9, 0):
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
    """Of out and LSE."""
    return tuple(arrays.to_host(x).tobytes() for x in result)


def checked(*args: Any, **options: Any) -> tuple[bytes, ...]:
    """The bits of the checked way."""
    with plan.unused():
        return bits(api.attention(*args, return_lse=True, **options))


# ---- the same bits ------------------------------------------------------------------------------


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

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
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
