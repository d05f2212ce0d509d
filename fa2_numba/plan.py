"""Plans: calls of `attention` as they were launched, launched again at other addresses.

The first call of a configuration is checked, prepared and launched by `api`, in about a
millisecond of host time. All that it decides follows from its key. So a later call with an equal
key repeats the launches: `replay` allocates, writes the new addresses into the recorded parameters
and calls the driver.

A call that has no key, or meets anything out of the ordinary, is left to `api`, which has the
checks and their messages.
"""

import contextlib
import functools
import operator
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from fa2_numba import tensor_map
from fa2_numba.arrays import span
from fa2_numba.launch import Launched, Operands, on_device
from fa2_numba.problem import ALLOCATION_ALIGNMENT
from fa2_numba.tiling import Tiling

KEPT = 512  # plans, some KB each
ARRAYS = "QKVOL"  # the first of a plan's addresses; those of workspaces and tensor maps follow
WORD = 8  # bytes of a parameter, or more than it needs
ADDRESS = 4  # of an array's parameters: two zeros, elements, bytes of one, address, shape, strides

_enabled = True


def replay(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, tuple[Any, Any] | None]:
    """Do a call by its plan.

    Parameters
    ----------
    arrays : tuple of array
        q, k, v and, where it is given, out.
    options : tuple
        causal, window, softcap, scale, method, tiling.

    Returns
    -------
    key : object
        For `record`; None where the call can have no plan.
    result : (out, lse) or None
        None: the call was not done.
    """
    kind: Any = type(arrays[0])
    library = _library(kind)
    if library is None or not _enabled or not _plain(*options):
        return None, None
    seen = library.see(arrays)
    if seen is None:
        return None, None
    signatures, addresses = seen
    remainders = tuple([address % ALLOCATION_ALIGNMENT for address in addresses])
    key = library, options, remainders, signatures
    plan = _plans.get(key)
    return key, None if plan is None else plan(arrays, addresses)


def record(key: Any, arrays: tuple[Any, ...], out: Any, lse: Any, operands: Operands) -> None:
    """Keep the plan of a call that `replay` did not do, where there can be one.

    Parameters
    ----------
    key : object
        From `replay`, not None.
    arrays : tuple of array
        As for `replay`.
    out, lse : array
        The results.
    operands : Operands
        What the call launched.
    """
    plan = _planned(key[0], len(arrays), out, lse, operands)
    if plan is not None:
        _plans.keep(key, plan)


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Inside the block no call is done by a plan."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def _plain(causal: Any, window: Any, softcap: Any, scale: Any, method: Any, tiling: Any) -> bool:
    """Whether options mean the same wherever they are equal.

    True == 1 == 1.0, so only some types do; and 0.0 == -0.0, so a scale of 0 does not.
    """
    return (
        type(causal) in (bool, str)
        and (window is None or (type(window) is tuple and set(map(type, window)) == {int}))
        and (softcap is None or type(softcap) in (float, int))
        and (scale is None or (type(scale) in (float, int) and scale != 0))
        and type(method) is str
        and (tiling is None or type(tiling) is Tiling)
    )


# ---- plans --------------------------------------------------------------------------------------


class Plan:
    """The launches of one configuration on one device.

    Parameters
    ----------
    library : Torch or CuPy
        Of the arrays.
    device : int
        Their GPU.
    fresh : sequence of (shape, dtype)
        What each call allocates: O, unless it is the caller's, L, the workspaces.
    spans : sequence of (int, int)
        Where O is the caller's: first byte of Q, K, V and O, and the one behind their last, from
        their addresses. Else empty.
    maps : sequence of (place, Boxes)
        Tensor maps: the place of their array among the addresses, and what they say of it.
    launches : sequence of (tuple, int)
        Arguments of cuLaunchKernel up to the stream; its first word.
    words : sequence of int
        The parameters of all launches, 64 bits each.
    slots : sequence of (word, place)
        Which words are addresses.
    """

    def __init__(
        self,
        library: Any,
        device: int,
        fresh: Sequence[tuple[tuple[int, ...], Any]],
        spans: Sequence[tuple[int, int]],
        maps: Sequence[tuple[int, tensor_map.Boxes]],
        launches: Sequence[tuple[tuple[Any, ...], int]],
        words: Sequence[int],
        slots: Sequence[tuple[int, int]],
    ):
        from cuda.bindings import driver

        self.library, self.device = library, device
        self.fresh, self.spans, self.maps, self.slots = fresh, spans, maps, slots
        self.words = array("Q", words)
        start, count = self.words.buffer_info()
        self._pointers = array("Q", range(start, start + WORD * count, WORD))  # the driver's way
        start, _ = self._pointers.buffer_info()
        self.launches = [(head, start + WORD * first) for head, first in launches]
        self._current, self._launch = driver.cuCtxGetCurrent, driver.cuLaunchKernel
        with on_device(device):
            self._context = int(self._current()[1])
        self._lock = threading.Lock()

    def __call__(self, arrays: tuple[Any, ...], addresses: list[int]) -> tuple[Any, Any] | None:
        """Launch for these arrays: O and L, or None where the recorded launches do not fit."""
        if self.spans and self._overlap(addresses):
            return None
        library, device = self.library, self.device
        fresh = [library.empty(shape, dtype, device) for shape, dtype in self.fresh]
        more = [library.address(x) for x in fresh]
        if any([address % ALLOCATION_ALIGNMENT for address in more]):
            return None
        stream = library.stream(device)
        if int(self._current()[1]) == self._context:
            self._enqueue(addresses + more, stream)
        else:
            with on_device(device):
                self._enqueue(addresses + more, stream)
        _, _, _, out, lse = (*arrays, *fresh)[: len(ARRAYS)]
        return out, lse

    def _enqueue(self, addresses: list[int], stream: int) -> None:
        # Held until all is enqueued: their memory is not written anew before.
        maps = [tensor_map.find(addresses[place], boxes, stream) for place, boxes in self.maps]
        addresses += [found.address for found in maps]
        with self._lock:  # the driver reads the words without Python's own lock
            for word, place in self.slots:
                self.words[word] = addresses[place]
            for head, parameters in self.launches:
                (status,) = self._launch(*head, stream, parameters, 0)
                if status:
                    raise RuntimeError(f"attention: a launch failed: {status.name}")

    def _overlap(self, addresses: list[int]) -> bool:
        """Whether O's memory range has a byte in common with Q's, K's or V's."""
        *inputs, (O_low, O_high) = [
            (address + low, address + high)
            for address, (low, high) in zip(addresses, self.spans, strict=True)
        ]
        return any([O_low < high and low < O_high for low, high in inputs])


def _planned(library: Any, given: int, out: Any, lse: Any, operands: Operands) -> Plan | None:
    """The plan of a call that ran with so many arrays; None if it did what a plan cannot repeat."""
    names = [*ARRAYS, *operands.workspaces]
    own = [out, lse] if given == len("QKV") else [lse]
    fresh = [*own, *operands.workspaces.values()]
    if any(library.address(x) % ALLOCATION_ALIGNMENT for x in fresh):
        return None
    # By identity: q and k may be the same tensor, so addresses do not tell.
    known = [operands.arrays[name] for name in names] + [argument for argument, *_ in operands.maps]
    places = {id(value): place for place, value in enumerate(known)}
    launches: list[tuple[tuple[Any, ...], int]] = []
    words: list[int] = []
    slots: list[tuple[int, int]] = []
    with on_device(operands.device):
        for ran in operands.launched:
            if ran.compiled.debug or ran.compiled.cooperative:
                return None
            launches.append((_head(ran), len(words)))
            for parameters, value in parameters_of(ran):
                is_array = len(parameters) > 1
                if id(value) in places:
                    slots.append((len(words) + ADDRESS * is_array, places[id(value)]))
                elif is_array:
                    return None
                words += parameters
    layouts = [operands.problem.layouts[name] for name in "QKVO"] if given == len("QKVO") else []
    return Plan(
        library,
        operands.device,  # type: ignore[arg-type]
        [(tuple(x.shape), x.dtype) for x in fresh],
        [(span(x)[0] - x.address, span(x)[1] - x.address) for x in layouts],
        [(names.index(name), made.boxes) for _, name, made in operands.maps],
        launches,
        words,
        slots,
    )


def _head(ran: Launched) -> tuple[Any, ...]:
    """The arguments of cuLaunchKernel up to the stream."""
    from cuda.bindings import driver

    function = driver.CUfunction(int(ran.compiled._codelibrary.get_cufunc().handle))
    return function, ran.blocks, 1, 1, ran.threads, 1, 1, ran.shared_bytes


def parameters_of(ran: Launched) -> Iterator[tuple[list[int], Any]]:
    """The parameters of a launch as Numba lays them out: the words of each array or number."""

    def flat(kinds: Any, values: Any) -> Iterator[tuple[list[int], Any]]:
        for kind, value in zip(kinds, values, strict=True):
            if isinstance(value, tuple):
                yield from flat(kind, value)
            else:
                made: list[Any] = []
                ran.compiled._prepare_args(kind, value, 0, [], made)
                yield [_word(x) for x in made], value

    yield from flat(ran.compiled.argument_types, ran.args)


def _word(parameter: Any) -> int:
    """A kernel parameter of up to 8 bytes as the low bytes of a word."""
    is_int = isinstance(parameter, int)  # else it is of ctypes
    raw = parameter.to_bytes(8, "little", signed=True) if is_int else bytes(parameter)
    return int.from_bytes(raw, "little")


class Plans:
    """The latest plans by their keys, for any number of threads."""

    def __init__(self, most: int):
        self._most = most
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> Plan | None:
        """The plan of a key, which becomes the latest."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
        return plan

    def keep(self, key: Any, plan: Plan) -> None:
        """Keep a plan, and of all the latest."""
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > self._most:
                self._plans.popitem(last=False)


_plans = Plans(KEPT)


# ---- array libraries ----------------------------------------------------------------------------


class Torch:
    """torch's tensors, seen at little cost."""

    def __init__(self) -> None:
        import torch

        self.kind = torch.Tensor
        self.address = torch.Tensor.data_ptr
        self._empty, self._grad = torch.empty, torch.is_grad_enabled
        handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream = handle or (lambda device: torch.cuda.current_stream(device).cuda_stream)

    def see(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]] | None:
        """What decides a call, and the addresses; None where `attention` might refuse one."""
        for x in arrays:
            if type(x) is not self.kind or not x.is_cuda or (x.requires_grad and self._grad()):
                return None
        return (
            tuple([(x.shape, x.stride(), x.dtype, x.get_device()) for x in arrays]),
            [x.data_ptr() for x in arrays],
        )

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> Any:
        """A new tensor."""
        return self._empty(shape, dtype=dtype, device=device)


class CuPy:
    """CuPy's arrays, seen at little cost."""

    address = operator.attrgetter("data.ptr")

    def __init__(self) -> None:
        import cupy

        self.kind = cupy.ndarray
        self._empty, self._device = cupy.empty, cupy.cuda.Device
        self._current = cupy.cuda.runtime.getDevice
        self._stream = cupy.cuda.get_current_stream

    def see(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]] | None:
        """What decides a call, and the addresses; None where `attention` might refuse one."""
        for x in arrays:
            if type(x) is not self.kind:
                return None
        return (
            tuple([(x.shape, x.strides, x.dtype, x.data.device_id) for x in arrays]),
            [x.data.ptr for x in arrays],
        )

    def stream(self, device: int) -> int:
        """The handle of the current stream."""
        return int(self._stream(device).ptr)

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int) -> Any:
        """A new array."""
        if self._current() == device:
            return self._empty(shape, dtype)
        with self._device(device):
            return self._empty(shape, dtype)


@functools.lru_cache(maxsize=64)
def _library(kind: Any) -> Any:
    """How to see arrays of a class; None for those that have no plans."""
    libraries: dict[str, Any] = {"torch": Torch, "cupy": CuPy}
    make = libraries.get(kind.__module__.partition(".")[0])
    library = make() if make else None
    return library if library and library.kind is kind else None
