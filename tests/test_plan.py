"""Plans and the store of tensor maps, without a GPU.

The array libraries, the driver and Numba's launch are stand-ins that write down what they are
asked for. So what a plan hands to the driver can be compared, word by word, with what the checked
way would have launched for the same arrays.
"""

import contextlib
import ctypes
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from strategies import backward_method, forall

from fa2_numba import (
    api,
    arrays,
    backward,
    hbm,
    launch,
    masking,
    plan,
    simulator,
    tensor_map,
)
from fa2_numba.accounting.launches import watched
from fa2_numba.problem import Layout, Problem
from fa2_numba.tiling import Tiling, hopper_backward

CONTEXT = 77  # the handle of the device's context
ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4}

# ---- stand-ins ----------------------------------------------------------------------------------


class Device(NamedTuple):
    """A ``torch.device``."""

    type: str
    index: int


class Tensor:
    """What is asked of a ``torch.Tensor``."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str = "float32",
        address: int = 0,
        strides: tuple[int, ...] | None = None,
        device: int = 0,
        requires_grad: bool = False,
    ):
        self.shape, self.dtype, self.requires_grad = tuple(shape), dtype, requires_grad
        self._strides = strides or Layout.contiguous(self.shape, 1).strides
        self._address = address
        self.device = Device("cuda", device)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return ITEMSIZE[self.dtype]

    def expand(self, shape: tuple[int, ...]) -> "Tensor":
        return Tensor(shape, self.dtype, self._address, (0,) * len(shape), self.device.index)


class ndarray:
    """What is asked of a ``cupy.ndarray``."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str = "float32",
        address: int = 0,
        strides: tuple[int, ...] | None = None,
        device: int = 0,
    ):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        steps = strides or Layout.contiguous(self.shape, 1).strides
        self.strides = tuple(step * self.itemsize for step in steps)
        self.data = SimpleNamespace(ptr=address, device_id=device)
        self.device = SimpleNamespace(id=device)


Tensor.__module__, ndarray.__module__ = "torch", "cupy"


class View:
    """A device array as kernels take it."""

    def __init__(self, pointer: int, shape: tuple, strides: tuple, dtype: Any):
        self.pointer, self.shape, self.strides = pointer, shape, strides
        self.dtype = np.dtype(dtype)

    @property
    def words(self) -> list[int]:
        return [
            0,
            0,
            math.prod(self.shape),
            self.dtype.itemsize,
            self.pointer,
            *self.shape,
            *self.strides,
        ]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.pointer, False)}

    __array_interface__ = __cuda_array_interface__


@dataclass
class Machine:
    """The stand-ins together."""

    kinds: dict[str, Any]
    heap: int = 1 << 40
    allocated: list[Any] = field(default_factory=list)
    checked: list[tuple[Any, ...]] = field(default_factory=list)  # launched by Numba
    replayed: list[tuple[Any, ...]] = field(default_factory=list)  # launched by plans
    current: int = CONTEXT
    entered: list[int] = field(default_factory=list)
    stream: int = 0
    capturing: bool = False
    grad: bool = True
    status: int = 0
    counts: dict[int, int] = field(default_factory=dict)  # function to parameters
    compiled: dict[Any, int] = field(default_factory=dict)  # kernel and so many, to function

    def take(self, size: int) -> int:
        """The address of new memory."""
        address = self.heap
        self.heap += -(-size // 256) * 256
        return address

    def empty(self, family: str, shape: Any, dtype: Any) -> Any:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        address = self.take(math.prod(shape) * ITEMSIZE.get(name, 2))
        self.allocated.append(new := self.kinds[family](shape, name, address))
        return new

    def launch(
        self, kernel: Any, blocks: int, threads: int, stream: Any, shared: int, *args: Any
    ) -> Any:
        """In place of `launch.launch`."""

        def flat(values: Any) -> Iterator[int]:
            for value in values:
                if isinstance(value, tuple):
                    yield from flat(value)
                else:
                    made: list[Any] = []
                    prepare(None, value, 0, [], made)
                    yield from map(plan._word, made)

        words = list(flat(args))
        function = self.compiled.setdefault((kernel, len(words)), len(self.compiled) + 1)
        self.counts[function] = len(words)
        self.checked.append((function, blocks, threads, shared, words))
        return SimpleNamespace(
            debug=False,
            cooperative=False,
            argument_types=args,
            _prepare_args=prepare,
            _codelibrary=SimpleNamespace(get_cufunc=lambda: SimpleNamespace(handle=function)),
        )

    def cuLaunchKernel(self, function: Any, *rest: Any) -> tuple[Any]:
        blocks, _, _, threads, _, _, shared, stream, parameters, extra = rest
        count = self.counts[int(function)]
        if threading.active_count() > 1:
            time.sleep(1e-4)  # other threads run while the driver reads
        places = (ctypes.c_uint64 * count).from_address(parameters)
        words = [ctypes.c_uint64.from_address(place).value for place in places]
        self.replayed.append((int(function), blocks, threads, shared, words))
        assert (stream, extra) == (self.stream, 0) and self.current == CONTEXT
        return (SimpleNamespace(name="CUDA_ERROR_OUT_OF_PAPER") if self.status else 0,)

    @contextlib.contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        before, self.current = self.current, CONTEXT
        self.entered.append(device)
        yield
        self.current = before


def prepare(kind: Any, value: Any, stream: Any, retr: Any, made: list[Any]) -> None:
    """Numba's `_prepare_args`, of what these kernels take."""
    if isinstance(value, View):
        made += value.words
    elif value is None:
        made.append(0)
    elif isinstance(value, np.floating):
        made.append({4: ctypes.c_float, 8: ctypes.c_double}[value.itemsize](value))
    else:
        made.append(ctypes.c_int64(int(value)))


FAMILIES = ("torch", "cupy")
KINDS: dict[str, Any] = {"torch": Tensor, "cupy": ndarray}


@contextlib.contextmanager
def stand_ins() -> Iterator[Machine]:
    """Inside the block: two array libraries, one GPU, no plans yet."""
    from cuda.bindings import driver

    m = Machine(KINDS)
    names = {name: name for name in ("float32", "float64", "float16", "bfloat16")}
    torch = SimpleNamespace(
        Tensor=Tensor,
        **names,
        bool="bool",
        empty=lambda shape, dtype, device: m.empty("torch", shape, dtype),
        is_grad_enabled=lambda: m.grad,
        empty_like=lambda like, memory_format: m.empty("torch", like.shape, like.dtype),
        contiguous_format="contiguous",
        cuda=SimpleNamespace(
            current_stream=lambda _: SimpleNamespace(cuda_stream=m.stream),
            is_current_stream_capturing=lambda: m.capturing,
        ),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda _: m.stream),
    )
    cupy = SimpleNamespace(
        ndarray=ndarray,
        empty=lambda shape, dtype: m.empty("cupy", shape, dtype),
        cuda=SimpleNamespace(
            Device=m.on_device,
            runtime=SimpleNamespace(getDevice=lambda: 0),
            get_current_stream=lambda _: SimpleNamespace(ptr=m.stream),
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setattr(arrays, "simulator", SimpleNamespace(ACTIVE=False))
        patch.setattr(arrays, "device_view", View)
        patch.setattr(arrays, "numba_stream", lambda handle: handle)
        patch.setattr(launch, "launch", m.launch)
        for module in (api, backward, launch, plan):
            patch.setattr(module, "on_device", m.on_device)
        patch.setattr(driver, "cuCtxGetCurrent", lambda: (0, m.current))
        patch.setattr(driver, "cuLaunchKernel", m.cuLaunchKernel)
        patch.setattr(plan, "_plans", plan.Plans(plan.KEPT))
        plan._library.cache_clear()
        yield m
        plan._library.cache_clear()


@pytest.fixture
def machine() -> Iterator[Machine]:
    if not simulator.ACTIVE:
        pytest.skip("kernels are built for the simulator: NUMBA_ENABLE_CUDASIM=1")
    with stand_ins() as m:
        yield m


every_family = pytest.mark.parametrize("family", FAMILIES)
every_method = pytest.mark.parametrize("method", api.PORTABLE)
every_gradient = pytest.mark.parametrize("method", backward.PORTABLE_BACKWARD)


class Function(NamedTuple):
    """A function with plans."""

    call: Callable[..., Any]
    names: tuple[str, ...]  # of the arrays that it needs
    launches: int  # of a call with the default options, in float32

    def arrays(
        self, m: Machine, family: str, dtype: str = "float32", n: int = 9, d: int = 16
    ) -> list[Any]:
        """Its arrays, at new addresses."""
        acc = "float64" if dtype == "float64" else "float32"
        rows, keys = (2, n, d), (1, n + 4, d)
        shapes = {"k": keys, "v": keys, "lse": rows[:-1], "dlse": rows[:-1]}
        return [
            m.empty(family, shapes.get(name, rows), acc if "lse" in name else dtype)
            for name in self.names
        ]


ATTENTION = Function(api.attention, ("q", "k", "v"), 1)
GRADIENTS = Function(backward.attention_backward, ("dout", "q", "k", "v", "out", "lse"), 3)
WITH_DLSE = GRADIENTS._replace(names=(*GRADIENTS.names, "dlse"))
every_function = pytest.mark.parametrize("f", [ATTENTION, GRADIENTS], ids=["forward", "backward"])
qkv = ATTENTION.arrays


# ---- what is launched ---------------------------------------------------------------------------


def as_checked(
    m: Machine, heap: int, *args: Any, f: Function = ATTENTION, **options: Any
) -> list[tuple[Any, ...]]:
    """What the checked way launches, where allocations begin at `heap`."""
    m.heap = heap
    m.checked.clear()
    with plan.unused():
        f.call(*args, **options)
    return list(m.checked)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": "skip", "window": (3, -1)},
    {"softcap": 2.5, "scale": 0.3, "return_lse": True},
    {"tiling": Tiling(16, 16, 4, 8)},
]


@every_family
@every_method
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("own_out", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_plan_launches_what_the_checked_way_would(
    machine: Machine, family: str, method: str, dtype: str, own_out: bool, options: dict[str, Any]
) -> None:
    m = machine
    options = {**options, "method": method}

    def call() -> tuple[list[Any], dict[str, Any]]:
        three = qkv(m, family, dtype)
        return three, {"out": m.empty(family, three[0].shape, dtype)} if own_out else {}

    first, out = call()
    api.attention(*first, **out, **options)
    assert m.checked and not m.replayed

    for one_for_both in (False, True):
        again, out = call()
        if one_for_both:
            again[2] = again[1]
        heap = m.heap
        m.allocated.clear()
        m.replayed.clear()
        result = api.attention(*again, **out, **options)
        assert m.replayed == as_checked(m, heap, *again, **out, **options)
        got, lse = result if options.get("return_lse") else (result, None)
        assert got is out.get("out", got)
        assert type(got) is KINDS[family] and got.shape == again[0].shape
        assert lse is None or lse.shape == again[0].shape[:-1]


@every_family
@every_gradient
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_plan_launches_what_the_checked_way_would_for_gradients(
    machine: Machine,
    family: str,
    method: str,
    dtype: str,
    with_dlse: bool,
    options: dict[str, Any],
) -> None:
    m = machine
    options = {name: x for name, x in options.items() if name != "return_lse"}
    options |= backward_method(method)
    f = WITH_DLSE if with_dlse else GRADIENTS

    def given() -> dict[str, Any]:
        return dict(zip(f.names, f.arrays(m, family, dtype), strict=True))

    f.call(**given(), **options)
    assert m.checked and not m.replayed

    for one_for_two in (False, True):
        again = given()
        if one_for_two:
            again |= {"dout": again["q"], "v": again["k"]}
        heap = m.heap
        m.replayed.clear()
        results = f.call(**again, **options)
        assert m.replayed == as_checked(m, heap, f=f, **again, **options)
        for got, name in zip(results, "qkv", strict=True):
            like = again[name]
            assert type(got) is KINDS[family] and (got.shape, got.dtype) == (like.shape, like.dtype)
        assert not {id(x) for x in results} & {id(x) for x in again.values()}


@every_family
def test_the_functions_do_not_share_plans(machine: Machine, family: str) -> None:
    """Whatever is called between, each call has the launches of its own."""
    calls: list[tuple[Function, dict[str, Any]]] = [
        (ATTENTION, {}),
        (GRADIENTS, {}),
        (WITH_DLSE, {}),
        (GRADIENTS, {"deterministic": True}),
        (GRADIENTS, {"scale": 0.5}),
    ]
    for turn in range(3):
        for f, options in calls:
            given = dict(zip(f.names, f.arrays(machine, family), strict=True))
            heap = machine.heap
            machine.replayed.clear()
            f.call(**given, **options)
            if turn:
                assert machine.replayed == as_checked(machine, heap, f=f, **given, **options)
            else:
                assert not machine.replayed


@every_family
def test_one_array_may_be_all_three(machine: Machine, family: str) -> None:
    x, y = (machine.empty(family, (9, 16), "float32") for _ in range(2))
    api.attention(x, x, x)
    heap = machine.heap
    api.attention(x, y, x)
    assert machine.replayed == as_checked(machine, heap, x, y, x)


@every_family
@every_function
def test_streams_are_those_of_the_call(machine: Machine, family: str, f: Function) -> None:
    given = f.arrays(machine, family)
    for machine.stream in (0, 5, 9):  # the stand-in for the driver compares
        f.call(*given)
    assert len(machine.replayed) == 2 * f.launches


@every_family
def test_nothing_to_launch(machine: Machine, family: str) -> None:
    q, k, v = (machine.empty(family, shape, "float32") for shape in ((0, 16), (5, 16), (5, 16)))
    for _ in range(2):
        out, lse = api.attention(q, k, v, return_lse=True)
        assert (out.shape, lse.shape) == ((0, 16), (0,))
    assert machine.checked == machine.replayed == []


@every_family
@every_function
def test_another_context_is_left_as_it_was(machine: Machine, family: str, f: Function) -> None:
    given = f.arrays(machine, family)
    f.call(*given)
    machine.entered.clear()
    machine.current = 1
    f.call(*given)
    assert len(machine.replayed) == f.launches
    assert (machine.entered, machine.current) == ([0], 1)


@pytest.mark.parametrize(
    ("f", "name"), [(ATTENTION, "fa2"), (GRADIENTS, "fa2_backward")], ids=["forward", "backward"]
)
def test_a_failed_launch_says_so(machine: Machine, f: Function, name: str) -> None:
    given = f.arrays(machine, "torch")
    f.call(*given)
    machine.status = 1
    with pytest.raises(RuntimeError, match=f"^{name}: a launch failed: CUDA_ERROR_OUT_OF_PAPER"):
        f.call(*given)


@every_function
def test_plans_hold_no_memory_of_a_graph(machine: Machine, f: Function) -> None:
    """Recorded in a capture, a plan asks torch for each tensor by its shape."""
    shapes: list[Any] = []
    empty = sys.modules["torch"].empty
    sys.modules["torch"].empty = lambda shape, **how: shapes.append(shape) or empty(shape, **how)  # type: ignore[attr-defined]
    machine.capturing = True
    given = f.arrays(machine, "torch")
    f.call(*given)
    assert (1,) not in shapes
    heap = machine.heap
    f.call(*given)
    assert machine.replayed == as_checked(machine, heap, *given, f=f)
    machine.capturing = False
    f.call(*f.arrays(machine, "torch", n=10))
    assert (1,) in shapes


# ---- what has no plan ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_gradient_is_refused_on_a_replay(machine: Machine, name: str) -> None:
    arguments = dict(zip("qkv", qkv(machine, "torch"), strict=True))
    arguments["out"] = machine.empty("torch", (2, 9, 16), "float32")
    api.attention(**arguments)
    arguments[name].requires_grad = True
    with pytest.raises(TypeError, match=f"^{name}: requires grad"):
        api.attention(**arguments)
    machine.grad = False
    api.attention(**arguments)
    assert len(machine.replayed) == 1


@pytest.mark.parametrize("name", WITH_DLSE.names)
def test_a_gradient_is_refused_on_a_replay_of_gradients(machine: Machine, name: str) -> None:
    """Where autograd is on; with it off, and detached, a tensor is as any other."""
    f = WITH_DLSE
    arguments = dict(zip(f.names, f.arrays(machine, "torch"), strict=True))
    f.call(**arguments)
    arguments[name].requires_grad = True
    with pytest.raises(TypeError, match=f"^{name}: requires grad"):
        f.call(**arguments)
    machine.grad = False
    f.call(**arguments)
    machine.grad, arguments[name].requires_grad = True, False
    f.call(**arguments)
    assert len(machine.replayed) == 2 * f.launches


@every_family
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_overlap_is_refused_on_a_replay(machine: Machine, family: str, name: str) -> None:
    three = qkv(machine, family)
    out = machine.empty(family, three[0].shape, "float32")
    api.attention(*three, out=out)
    shared = dict(zip("qkv", three, strict=True))[name]
    address = shared.data_ptr() if family == "torch" else shared.data.ptr
    for shift in (-256, 0, 256):  # of 9 * 16 * 4 bytes at least
        bad = KINDS[family](three[0].shape, "float32", address + shift)
        with pytest.raises(ValueError, match="its memory range overlaps"):
            api.attention(*three, out=bad)
    api.attention(*three, out=out)
    assert len(machine.replayed) == 1


def test_out_beside_an_input_is_taken(machine: Machine) -> None:
    """The first byte behind q, whatever the strides: no overlap."""
    q, k, v = (machine.empty("torch", (8, 16), "float32") for _ in range(3))
    reach = 8 * 16 * 4
    for base in (1 << 41, 1 << 42):
        q = Tensor((8, 16), address=base + 7 * 64, strides=(-16, 1))
        api.attention(q, k, v, out=Tensor((8, 16), address=base + reach))
    assert len(machine.replayed) == 1


@every_family
@every_function
def test_masks_and_scores_take_the_checked_way(machine: Machine, family: str, f: Function) -> None:
    given = f.arrays(machine, family)
    for _ in range(2):
        f.call(*given, mask=masking.causal())
        f.call(*given, score=masking.unchanged())
    assert len(machine.checked) == 4 * f.launches and not machine.replayed


@every_family
@every_function
def test_memory_that_is_less_aligned_takes_the_checked_way(
    machine: Machine, family: str, f: Function
) -> None:
    """Then stores are narrower: another kernel."""
    given = f.arrays(machine, family)
    machine.heap += 8
    f.call(*given)
    machine.heap -= 8
    f.call(*given)
    assert len(machine.checked) == 2 * f.launches and not machine.replayed
    machine.heap += 8
    f.call(*given)
    assert len(machine.checked) == 3 * f.launches and not machine.replayed
    machine.heap -= 8
    f.call(*given)
    assert len(machine.checked) == 3 * f.launches and len(machine.replayed) == f.launches


@every_function
@pytest.mark.parametrize("name", ["debug", "cooperative"])
def test_a_kernel_that_needs_more_than_a_launch_has_no_plan(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, f: Function, name: str
) -> None:
    def special(*args: Any) -> Any:
        compiled = machine.launch(*args)
        setattr(compiled, name, True)
        return compiled

    monkeypatch.setattr(launch, "launch", special)
    given = f.arrays(machine, "torch")
    for _ in range(2):
        f.call(*given)
    assert len(machine.checked) == 2 * f.launches and not machine.replayed


ADDING = ["backward_rowsum", "backward_clear", "fa2_backward_columns"]


@every_function
def test_watched_launches_are_those_of_operands(machine: Machine, f: Function) -> None:
    given = f.arrays(machine, "torch")
    seen: list[str] = []
    for _ in range(2):
        f.call(*given)
    with watched(lambda operands, name: seen.append(name)):
        f.call(*given, method="fa2")
    f.call(*given)
    assert seen == (["fa2"] if f is ATTENTION else ADDING)
    assert len(machine.replayed) == 2 * f.launches


def test_other_arrays_have_no_plan(machine: Machine) -> None:
    class Parameter(Tensor):
        pass

    three = qkv(machine, "torch")
    mixed = three[0], *qkv(machine, "cupy")[1:]
    own = Parameter(three[0].shape, address=three[0].data_ptr()), *three[1:]
    for arguments in (mixed, own, ([1], [2], [3]), (None, None, None)):
        assert plan.replay(arguments, (False, None, None, None, "auto", None)) == (None, None)


# ---- keys ---------------------------------------------------------------------------------------

NUMBERS = (1, 1.0, True, np.float32(1), np.int64(1), 2.5, -1.0, 0.0, -0.0, 0, math.nan)


def mostly(good: tuple[Any, ...], bad: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """A value that a call takes, or in one of ten draws one of the others."""
    few = st.sampled_from(bad)
    return st.integers(0, 9).flatmap(lambda n: few if n == 9 else st.sampled_from(good))


GIVEN = {
    "forward": ("q", "k", "v", "out"),
    "backward": ("dout", "q", "k", "v", "out", "lse", "dlse"),
}  # the last may be absent
every_direction = pytest.mark.parametrize("direction", GIVEN)
PLACES = [f"{name}_{what}" for name in GIVEN["backward"] for what in ("gap", "offset")]

# All of a call that may differ.
CALLS = st.fixed_dictionaries(
    {
        "shape": st.sampled_from(((4, 16), (2, 4, 16), (1, 2, 4, 16), (4, 8))),
        "keys": st.sampled_from((4, 4, 5)),
        "dtype": mostly(("float32", "float16", "float64"), ("int32",)),
        "v_dtype": mostly((None,), ("float16",)),
        "device": st.sampled_from((0, 1)),
        "v_device": mostly((None,), (1,)),
        "last": st.booleans(),
        **{name: mostly((0,), (8,)) for name in PLACES},  # elements, between rows; bytes
        "causal": mostly((False, True, "bound", "skip"), (0, 1, 1.0, "x", np.bool_(True))),
        "window": mostly(
            (None, (1, 1), (1, 2)), ((1.0, 1), (True, 1), [1, 1], (np.int64(1), 1), (1,), (1, -2))
        ),
        "softcap": mostly((None, 1, 1.0), NUMBERS),
        "scale": mostly((None, 1, 1.0), NUMBERS),
        "method": mostly(("auto", "fa2", "fa1", "standard"), ("none",)),
        "tiling": mostly((None, Tiling(16, 16, 4, 8), Tiling(16, 8, 4, 8)), (16,)),
        "deterministic": mostly((False, True), (0, 1, np.bool_(True))),
    }
)

NAMES = (
    *("shape", "keys", "dtype", "v_dtype", "device", "v_device", "last", *PLACES),
    *("causal", "window", "softcap", "scale", "method", "tiling", "deterministic"),
)


def made(
    call: dict[str, Any], family: str, direction: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arrays and options of a call."""
    names = GIVEN[direction] if call["last"] else GIVEN[direction][:-1]
    shape, keys = call["shape"], (*call["shape"][:-2], call["keys"], call["shape"][-1])
    shapes = {"k": keys, "v": keys, "lse": shape[:-1], "dlse": shape[:-1]}
    out = []
    for n, name in enumerate(names):
        own, of_rows = shapes.get(name, shape), "lse" in name
        row = len(own) - (1 if of_rows else 2)
        steps = list(Layout.contiguous(own, 1).strides)
        steps[row] += call[f"{name}_gap"]
        steps[:row] = [9 * step for step in steps[:row]]  # room for the gaps
        dtype, device = call["dtype"], call["device"]
        if of_rows:
            dtype = "float64" if dtype == "float64" else "float32"
        if name == "v":
            dtype = call["v_dtype"] or dtype
            device = device if call["v_device"] is None else call["v_device"]
        address = (n + 1 << 20) + call[f"{name}_offset"]
        out.append(KINDS[family](own, dtype, address, tuple(steps), device))
    options = ["causal", "window", "softcap", "scale", "method", "tiling"]
    options += ["deterministic"] if direction == "backward" else []
    return tuple(out), {name: call[name] for name in options}


def meaning(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """All that a call launches, but addresses; None if it is refused."""
    own = {key: options[key] for key in ("method", "tiling", "scale")}
    call: Any
    try:
        if "deterministic" in options:
            dlse = given[6] if len(given) > 6 else None
            own["deterministic"] = options["deterministic"]
            call = backward._Backward(*given[:6], dlse, **own)
        else:
            call = api._Call(*given[:3], out=given[3] if len(given) > 3 else None, **own)
        call.change(options["causal"], options["window"], None, options["softcap"], None, None)
    except (TypeError, ValueError):
        return None
    p = call.problem()
    places = {
        name: (x.shape, x.strides, x.itemsize, x.address % 256) for name, x in p.layouts.items()
    }
    return repr(
        (p.method, p.dtype, p.B, p.H, p.H_k, p.N_q, p.N_k, p.d, p.tiling, call.scale, places)
        + (call.like.device, p.mask.name, p.mask.rule, p.mask.args, p.score.name, p.score.change)
        + (p.score.args, p.load_width, p.store_width, p.o_acc_width, p.o_row_width, p.p_width)
        + (p.dlse, p.d_width, p.gradient_width, p.dq_row_width, p.fa3_gradient_width)
    )


@every_family
@every_direction
def test_calls_of_one_key_mean_the_same(family: str, direction: str) -> None:
    """Equal keys, equal problems; a call that is refused has no key of one that is not."""
    if not simulator.ACTIVE:
        pytest.skip("the tiling of the simulator")
    good = 0

    # Two calls that differ in little: drawn apart, their keys would hardly ever be equal.
    @forall(1000, CALLS, CALLS, st.sets(st.sampled_from(NAMES), max_size=2))
    def compare(one: dict[str, Any], other: dict[str, Any], changed: set[str]) -> None:
        nonlocal good
        two = one | {name: other[name] for name in changed}
        with stand_ins():
            calls = [made(call, family, direction) for call in (one, two)]
            keys = [plan.replay(given, tuple(options.values()))[0] for given, options in calls]
            if keys[0] is not None and keys[0] == keys[1]:
                meanings = [meaning(*call) for call in calls]
                assert meanings[0] == meanings[1]
                good += meanings[0] is not None

    compare()
    assert good > 100


def base() -> dict[str, Any]:
    """A good call."""
    defaults = dict.fromkeys(NAMES, 0) | {"shape": (2, 4, 16), "keys": 4, "dtype": "float32"}
    defaults |= dict.fromkeys(("v_dtype", "v_device", "window", "softcap", "scale", "tiling"))
    return defaults | {
        "last": True,
        "causal": False,
        "method": "auto",
        "deterministic": False,
    }


@every_family
@every_direction
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shape", (1, 8, 16)),
        ("keys", 5),
        ("dtype", "float16"),
        ("v_dtype", "float16"),
        ("device", 1),
        ("v_device", 1),
        ("last", False),
        *((place, 8) for place in PLACES),
        ("causal", True),
        ("causal", "skip"),
        ("window", (1, 1)),
        ("softcap", 2.0),
        ("scale", 0.5),
        ("method", "fa1"),
        ("tiling", Tiling(16, 16, 4, 8)),
        ("deterministic", True),
    ],
)
def test_what_decides_a_call_is_in_its_key(
    machine: Machine, family: str, direction: str, name: str, value: Any
) -> None:
    def key(call: dict[str, Any]) -> Any:
        given, options = made(call, family, direction)
        return plan.replay(given, tuple(options.values()))[0]

    foreign = direction == "forward" and name.startswith(("dout", "lse", "dlse", "deterministic"))
    assert key(base()) == key(base()) is not None
    assert (key(base() | {name: value}) == key(base())) == foreign
    assert key(base() | {name: value}) is not None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"scale": 1.0}, {"scale": np.float64(1)}),
        ({"scale": 0.0}, {"scale": -0.0}),
        ({"window": (1, 1)}, {"window": (True, 1)}),
        ({"window": (1, 1)}, {"window": (1.0, 1)}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({"deterministic": False}, {"deterministic": np.bool_(False)}),
    ],
    ids=str,
)
def test_equal_options_of_another_type_have_no_key(
    machine: Machine, a: dict[str, Any], b: dict[str, Any]
) -> None:
    defaults = dict.fromkeys(("causal", "window", "softcap", "scale", "method", "tiling"))
    defaults |= {"causal": False, "method": "auto"}
    three = tuple(qkv(machine, "torch"))
    key, other = (plan.replay(three, tuple({**defaults, **x}.values()))[0] for x in (a, b))
    assert other is None and (key is None) == (a.get("scale") == 0)


# ---- how many are kept --------------------------------------------------------------------------


def test_the_latest_plans_are_kept() -> None:
    plans = plan.Plans(3)
    made: list[Any] = [object() for _ in range(5)]
    for n in range(3):
        plans.keep(n, made[n])
    assert plans.get(0) is made[0]  # now the latest
    plans.keep(3, made[3])
    assert [plans.get(n) for n in range(4)] == [made[0], None, made[2], made[3]]
    plans.keep(3, made[4])
    assert plans.get(3) is made[4] and plans.get(0) is made[0]


def test_a_plan_that_was_used_has_a_second_chance() -> None:
    plans = plan.Plans(3)
    made: list[Any] = [object() for _ in range(6)]

    def keep(n: int) -> list[int]:
        plans.keep(n, made[n])
        return list(plans._plans)

    for n in range(3):
        keep(n)
    for n in (2, 1):  # the order of uses is not kept
        assert plans.get(n) is made[n]
    assert keep(3) == [1, 2, 3]
    assert keep(4) == [1, 2, 4]  # that of 1 and 2; 3 was never used
    for n in (1, 2, 4):
        plans.get(n)
    assert keep(5) == [2, 4, 5]  # all were used: the oldest, and never the new one
    assert keep(0) == [4, 5, 0]
    assert keep(0) == [4, 5, 0]  # anew: in its own place
    assert plans.get(1) is None and plans.get(0) is made[0]


def in_threads(work: Callable[[int], None], count: int = 8) -> None:
    """Run `work` in threads that take turns often; an error in one is raised here."""
    start, errors = threading.Barrier(count), []

    def run(n: int) -> None:
        start.wait()
        try:
            work(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_plans_in_many_threads() -> None:
    plans = plan.Plans(4)

    def work(n: int) -> None:
        for i in range(500):
            key = (i * (n + 1)) % 7
            plans.keep(key, key)  # type: ignore[arg-type]
            assert plans.get(key) in (key, None)

    in_threads(work)
    assert len(plans._plans) == 4


@every_function
def test_threads_do_not_mix_their_addresses(machine: Machine, f: Function) -> None:
    """One plan, many threads: each launch has the addresses of one call."""
    calls = [dict(zip(f.names, f.arrays(machine, "torch"), strict=True)) for _ in range(8)]
    f.call(**calls[0])
    function, *_, words = machine.checked[-1]  # has q, k and v
    slots = [words.index(calls[0][name].data_ptr()) for name in "qkv"]
    known = [tuple(call[name].data_ptr() for name in "qkv") for call in calls]

    def work(n: int) -> None:
        for _ in range(20):
            f.call(**calls[n])

    in_threads(work)
    launched = Counter(
        tuple(words[n] for n in slots) for one, *_, words in machine.replayed if one == function
    )
    assert launched == dict.fromkeys(known, 20)
    assert len(machine.replayed) == 8 * 20 * f.launches


# ---- tensor maps --------------------------------------------------------------------------------

BOXES = tensor_map.Boxes(0, (64, 64), (128,), (64, 64), "bf16")


@dataclass
class Memory:
    """A device for a `Store`: who reads a map sees what was last written."""

    captured: set[int] = field(default_factory=set)
    words: dict[int, Any] = field(default_factory=dict)
    slabs: list[int] = field(default_factory=list)
    waits: int = 0
    may_wait: bool = True
    during: Callable[[], None] = lambda: None

    def capturing(self, stream: int) -> bool:
        return stream in self.captured

    def allocate(self, size: int) -> int:
        self.slabs.append(size)
        return len(self.slabs) << 20

    def write(self, address: int, words: Any) -> None:
        self.words[address] = words

    def idle(self) -> bool:
        self.waits += 1
        self.during()
        return self.may_wait


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(tensor_map, "_encode", lambda address, *_: address)
    return Memory()


def test_equal_maps_are_one(memory: Memory) -> None:
    store = tensor_map.Store(memory, 4)
    first = store.find(16, BOXES, 0)
    assert memory.words == {first.address: 16} and first.address % 128 == 0
    assert store.find(16, BOXES, 0) is first
    others = [
        store.find(32, BOXES, 0),
        store.find(16, BOXES._replace(dtype="fp16"), 0),
        store.find(16, BOXES._replace(box=(32, 64)), 0),
    ]
    assert len({x.address for x in (first, *others)}) == 4
    assert memory.slabs == [4 * 128] and memory.waits == 0


def test_the_oldest_half_goes_when_the_device_is_idle(memory: Memory) -> None:
    store = tensor_map.Store(memory, 4)
    for address in range(4):
        store.find(address, BOXES, 0)
    store.find(0, BOXES, 0)  # used again: 1 and 2 are the oldest
    places = {address: store.find(address, BOXES, 0).address for address in (0, 3)}
    new = store.find(4, BOXES, 0)
    assert memory.waits == 1 and len(memory.slabs) == 1
    assert new.address not in places.values()
    assert {a: store.find(a, BOXES, 0).address for a in (0, 3)} == places
    assert memory.words[new.address] == 4
    store.find(5, BOXES, 0)
    assert memory.waits == 1  # half of the slab was free
    assert len(store._latest) == 4


def test_a_map_that_is_held_is_not_written_anew(memory: Memory) -> None:
    """Another thread may launch with it later."""
    store = tensor_map.Store(memory, 4)
    held = [store.find(address, BOXES, 0) for address in range(4)]
    for address in range(4, 40):
        store.find(address, BOXES, 0)
    assert [memory.words[x.address] for x in held] == [0, 1, 2, 3]
    assert store.slabs == 2
    places = {x.address for x in held}
    del held
    later = [store.find(address, BOXES, 0).address for address in range(100, 108)]
    assert store.slabs == 2 and places & set(later)  # and now it may be


def test_what_is_let_go_during_the_wait_is_not_free(memory: Memory) -> None:
    """Its last launch may be later than what the wait was for."""
    store = tensor_map.Store(memory, 4)
    held = [store.find(address, BOXES, 0) for address in range(2)]
    place = held[0].address
    for address in (2, 3):
        store.find(address, BOXES, 0)
    memory.during = held.clear
    seen = [store.find(address, BOXES, 0).address for address in range(4, 8)]
    assert memory.waits == 1 and place not in seen
    seen += [store.find(address, BOXES, 0).address for address in range(8, 12)]
    assert memory.waits == 2 and place in seen


def test_a_map_of_a_captured_stream_stays_for_ever(memory: Memory) -> None:
    store = tensor_map.Store(memory, 4)
    hit = store.find(0, BOXES, 7).address  # made before the capture, asked for in it
    memory.captured = {7}
    assert store.find(0, BOXES, 7).address == hit
    made = store.find(1, BOXES, 7).address
    memory.captured = set()
    for address in range(2, 200):
        store.find(address, BOXES, 0)
    assert (memory.words[hit], memory.words[made]) == (0, 1)
    assert store.find(0, BOXES, 0).address == hit and store.find(1, BOXES, 0).address == made
    assert store.slabs == 1


def test_no_wait_while_a_stream_is_captured(memory: Memory) -> None:
    store = tensor_map.Store(memory, 4)
    places = {n: store.find(n, BOXES, 0).address for n in range(4)}
    memory.captured = {7}
    store.find(4, BOXES, 7)
    assert memory.waits == 0 and store.slabs == 2
    assert {n: store.find(n, BOXES, 0).address for n in range(4)} == places


def test_where_the_device_may_not_wait_memory_grows(memory: Memory) -> None:
    """Another thread captures: what was let go is free only after a wait that succeeds."""
    store = tensor_map.Store(memory, 4)
    memory.may_wait = False
    for address in range(5):
        store.find(address, BOXES, 0)
    assert store.slabs == 2 and set(memory.words.values()) == set(range(5))
    memory.may_wait = True
    for address in range(5, 50):
        store.find(address, BOXES, 0)
    assert store.slabs == 2


def test_a_copy_that_fails_loses_no_memory(memory: Memory) -> None:
    store = tensor_map.Store(memory, 2)
    write, memory.write = memory.write, lambda *_: 1 / 0  # type: ignore[method-assign]
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            store.find(0, BOXES, 0)
    memory.write = write  # type: ignore[method-assign]
    assert {store.find(n, BOXES, 0).address for n in range(2)} == {1 << 20, (1 << 20) + 128}
    assert store.slabs == 1


def test_maps_in_many_threads(memory: Memory) -> None:
    """Whoever holds a map reads its own, whatever the others make room for."""
    store = tensor_map.Store(memory, 8)

    def work(n: int) -> None:
        for i in range(300):
            address = (i * (n + 3)) % 23
            held = store.find(address, BOXES, 0)
            for _ in range(3):
                assert memory.words[held.address] == address

    in_threads(work)
    assert store.slabs <= 3


# ---- maps that stay for ever ----


def group(
    monkeypatch: pytest.MonkeyPatch, store: tensor_map.Store, count: int = 2
) -> tensor_map.Group:
    """Of the first arrays' maps, which differ in their boxes."""
    monkeypatch.setattr(tensor_map, "_stores", {0: store})
    return tensor_map.Group([BOXES._replace(box=(n + 1, 64)) for n in range(count)])


def test_a_group_finds_the_maps_of_its_arrays(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tensor_map.Store(memory, 8)
    maps = group(monkeypatch, store)
    first = maps.find((16, 32), 0)
    assert first.addresses == tuple(one.address for one in first.maps)
    assert [memory.words[place] for place in first.addresses] == [16, 32]
    assert [one.boxes.box for one in first.maps] == [(1, 64), (2, 64)]
    assert maps.find((16, 32), 0).addresses == first.addresses
    other = maps.find((32, 16), 0)
    assert [memory.words[place] for place in other.addresses] == [32, 16]
    assert not {*first.addresses} & {*other.addresses}


def test_the_driver_is_asked_once_and_then_no_more(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Memory, "capturing", lambda _, stream: asked.append(stream))
    maps = group(monkeypatch, tensor_map.Store(memory, 8), 3)
    for stream in (5, 6, 7):
        maps.find((16, 32, 48), stream)
    assert asked == [5]


def test_maps_that_are_not_asked_about_are_never_written_anew(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph may have them: the driver was not asked whether the stream is captured."""
    store = tensor_map.Store(memory, 8, staying=4)
    maps = group(monkeypatch, store)
    found = [maps.find((n, n + 1), 0).addresses for n in (0, 10)]
    memory.captured = {7}
    assert [maps.find((n, n + 1), 7).addresses for n in (0, 10)] == found
    memory.captured = set()
    del maps
    for address in range(100, 200):
        store.find(address, BOXES, 0)
    assert [[memory.words[x] for x in places] for places in found] == [[0, 1], [10, 11]]


def test_beyond_the_maps_that_stay_a_capture_is_asked_about(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tensor_map.Store(memory, 8, staying=3)  # one group of two, and not a part of another
    maps = group(monkeypatch, store)
    maps.find((0, 1), 0)
    before = maps.find((10, 11), 0).addresses
    assert len(store._stay) == 2 and len(maps._stay) == 1
    memory.captured = {7}
    assert maps.find((10, 11), 7).addresses == before
    memory.captured = set()
    for address in range(100, 200):
        maps.find((address, address), 0)
    assert [memory.words[place] for place in before] == [10, 11]
    assert len(store._stay) == 4 and len(maps._stay) == 1 and store.slabs == 1


def test_a_map_that_stays_counts_once(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tensor_map.Store(memory, 8, staying=3)
    maps = group(monkeypatch, store)
    for pair in ((0, 1), (0, 11), (0, 12), (0, 1)):
        maps.find(pair, 0)
    assert set(maps._stay) == {(0, 1), (0, 11)} and len(store._stay) == 3


def test_the_others_have_room_beside_the_maps_that_stay(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each few of them would wait for the device."""
    store = tensor_map.Store(memory, 16, staying=15)
    maps = group(monkeypatch, store, 1)
    for address in range(15):
        maps.find((address,), 0)
    assert (store.slabs, memory.waits) == (1, 0)
    for address in range(100, 117):
        store.find(address, BOXES, 0)
    assert (store.slabs, memory.waits) == (2, 0)
    for address in range(200, 280):
        store.find(address, BOXES, 0)
    assert store.slabs == 2 and memory.waits <= 80 // 8 + 1


def test_maps_of_a_group_are_held_while_it_makes_the_others(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the second map is not the memory of the first."""
    store = tensor_map.Store(memory, 2, staying=0)
    maps = group(monkeypatch, store, 3)
    for n in range(20):
        found = maps.find((n, n + 100, n + 200), 0)
        assert [memory.words[place] for place in found.addresses] == [n, n + 100, n + 200]
    assert store.slabs <= 3


def test_a_group_keeps_so_many(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "GROUPS", 4)
    maps = group(monkeypatch, tensor_map.Store(memory, 64))
    for a in range(6):
        for b in range(6):  # 36 pairs of 12 maps
            found = maps.find((a, b), 0)
            assert [memory.words[place] for place in found.addresses] == [a, b]
            assert len(maps._stay) <= 4
    assert len(memory.words) == 12


def test_groups_in_many_threads(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few that stay and little room, each sees its own maps."""
    monkeypatch.setattr(tensor_map, "GROUPS", 3)
    store = tensor_map.Store(memory, 8, staying=6)
    maps = group(monkeypatch, store)

    def work(n: int) -> None:
        for i in range(200):
            pair = (i * (n + 3)) % 11, (i * (n + 5)) % 7
            held = maps.find(pair, 0)
            for _ in range(3):
                assert tuple(memory.words[place] for place in held.addresses) == pair

    in_threads(work)
    assert len(store._stay) <= 6 and len(maps._stay) <= 3 + 8


@dataclass
class Driver:
    """Answers of the driver, and what it was asked."""

    real: Any
    asked: list[str] = field(default_factory=list)
    mode: int = 0
    statuses: dict[str, Any] = field(default_factory=dict)
    capture: int = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self.real, name)  # an enumeration

        def call(*args: Any) -> tuple[Any, ...]:
            self.asked.append(name)
            status = self.statuses.get(name, self.real.CUresult.CUDA_SUCCESS)
            if name == "cuThreadExchangeStreamCaptureMode":
                before, self.mode = self.mode, int(args[0])
                return status, before
            if name in ("cuMemAlloc", "cuStreamCreate", "cuMemcpyHtoDAsync"):
                assert self.mode == 2  # CU_STREAM_CAPTURE_MODE_RELAXED
            if name == "cuStreamIsCapturing":
                return status, self.capture
            return (status, 4096) if name in ("cuMemAlloc", "cuStreamCreate") else (status,)

        return call


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> tuple[tensor_map.Device, Driver]:
    import cuda.bindings.driver

    asked = Driver(cuda.bindings.driver)
    monkeypatch.setattr(cuda.bindings, "driver", asked)
    return tensor_map.Device(), asked


def test_memory_is_asked_for_in_relaxed_mode(device: tuple[tensor_map.Device, Driver]) -> None:
    """And the mode is what it was afterwards, also after an error."""
    on, driver = device
    assert on.allocate(256) == 4096 and driver.mode == 0
    on.write(4096, [1] * 16)
    assert driver.asked[-4:] == [
        "cuThreadExchangeStreamCaptureMode",
        "cuMemcpyHtoDAsync",
        "cuStreamSynchronize",
        "cuThreadExchangeStreamCaptureMode",
    ]
    driver.statuses["cuMemAlloc"] = SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        on.allocate(256)
    assert driver.mode == 0


def test_capture_is_asked_of_the_stream(device: tuple[tensor_map.Device, Driver]) -> None:
    on, driver = device
    assert not on.capturing(7)
    driver.capture = 1
    assert on.capturing(7)
    driver.capture, error = 0, SimpleNamespace(name="CUDA_ERROR_STREAM_CAPTURE_IMPLICIT")
    driver.statuses["cuStreamIsCapturing"] = error
    assert on.capturing(0)  # the default stream cannot say no


def test_the_device_is_waited_for_unless_a_stream_is_captured(
    device: tuple[tensor_map.Device, Driver],
) -> None:
    on, driver = device
    assert on.idle() and driver.asked[-1] == "cuCtxSynchronize"
    error = SimpleNamespace(name="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
    driver.statuses["cuCtxSynchronize"] = error
    assert not on.idle()
    driver.statuses["cuCtxSynchronize"] = SimpleNamespace(name="CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_FAILED"):
        on.idle()
    driver.asked.clear()
    driver.statuses["cuStreamIsCapturing"] = error
    assert not on.idle() and "cuCtxSynchronize" not in driver.asked


def copies_boxes(problem: Problem, A: launch.Operands) -> None:
    """A launcher that gives its kernel tensor maps."""
    maps = [A.boxes(name, (1, 1, 8, 64), "load") for name in ("Q", "K", "K")]
    maps.append(A.boxes("O", (1, 1, 16, 64), "store"))
    assert all(type(x) is np.uint64 for x in maps)
    others = A.array("O"), A.array("L"), maps[0], A.scale, maps[2], maps[3]
    A.run(copies_boxes, 3, 32, 0, maps[1], *others)


@every_family
@pytest.mark.parametrize("own_out", [False, True])
def test_maps_are_found_for_each_call(
    machine: Machine, memory: Memory, monkeypatch: pytest.MonkeyPatch, family: str, own_out: bool
) -> None:
    from numba import cuda

    store = tensor_map.Store(memory, 64)
    monkeypatch.setattr(tensor_map, "_stores", {0: store})
    monkeypatch.setattr(tensor_map, "simulator", SimpleNamespace(ACTIVE=False))
    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(id=0), raising=False)
    monkeypatch.setitem(api.METHODS, "fa2", copies_boxes)

    def call() -> tuple[Any, ...]:
        return tuple(machine.empty(family, (2, 40, 64), "float16") for _ in range(3 + own_out))

    def attend(given: tuple[Any, ...]) -> None:
        api.attention(*given[:3], out=given[3] if own_out else None)

    attend(call())
    for _ in range(3):
        given = call()
        heap = machine.heap
        machine.replayed.clear()
        attend(given)
        again = as_checked(machine, heap, *given[:3], out=given[3] if own_out else None)
        assert machine.replayed == again
        words = again[0][-1]
        read = [memory.words[words[n]] for n in (0, -4, -2, -1)]
        addresses = [x.data_ptr() if family == "torch" else x.data.ptr for x in given]
        out = words[1 + plan.ADDRESS]  # of the array, which each call allocates or is given
        assert read == [addresses[1], addresses[0], addresses[1], out]
        assert not own_out or out == addresses[3]
    assert len(memory.words) == 3 * 4


@every_family
@pytest.mark.parametrize("with_dlse", [False, True])
def test_maps_of_gradients_are_found_for_each_call(
    machine: Machine,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    with_dlse: bool,
) -> None:
    """Of the launches of fa3, as they are on a GPU of sm_90."""
    from numba import cuda

    monkeypatch.setattr(tensor_map, "_stores", {0: tensor_map.Store(memory, 64)})
    monkeypatch.setattr(tensor_map, "simulator", SimpleNamespace(ACTIVE=False))
    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(id=0), raising=False)
    monkeypatch.setattr(backward._BackwardShape, "_fa3_error", lambda self: None)
    monkeypatch.setattr(backward._BackwardShape, "_tiling", lambda self: hopper_backward(self.d))
    f = WITH_DLSE if with_dlse else GRADIENTS

    def call() -> dict[str, Any]:
        return dict(zip(f.names, f.arrays(machine, family, "float16", 40, 64), strict=True))

    f.call(**call(), causal=True)  # "auto"
    launches = len(machine.checked)
    assert launches > 1 and not machine.replayed
    for _ in range(3):
        given = call()
        heap = machine.heap
        machine.replayed.clear()
        f.call(**given, causal=True)
        again = as_checked(machine, heap, f=f, causal=True, **given)
        assert machine.replayed == again and len(again) == launches
        words = {word for *_, words in again for word in words}
        read = {memory.words[word] for word in words if word in memory.words}
        boxed = [given[name] for name in ("q", "k", "v", "dout")]
        assert read == {x.data_ptr() if family == "torch" else x.data.ptr for x in boxed}
    assert len(memory.words) == 4 * 4


def test_boxes_of_a_counted_array(
    machine: Machine, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same map as of the plain array, and the array's tally."""
    from numba import cuda

    monkeypatch.setattr(tensor_map, "_stores", {0: tensor_map.Store(memory, 64)})
    monkeypatch.setattr(tensor_map, "simulator", SimpleNamespace(ACTIVE=False))
    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(id=0), raising=False)
    problem = Problem("fa2", "fp16", 1, 1, 1, 64, 64, 64, Tiling(16, 16, 4, 8))
    K = arrays.aligned_empty((1, 1, 64, 64), np.float16)
    plain, counted = (
        launch.Operands(problem, {"K": K}, None, 0, 1.0, counted=counted).boxes(
            "K", (1, 1, 64, 64), "load K_j, V_j"
        )
        for counted in (False, True)
    )
    assert type(plain) is np.uint64 and isinstance(counted, hbm.CountedBoxes)
    assert counted.address == plain and counted.counted.data is K
