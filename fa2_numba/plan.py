"""Plans: calls as they were launched, launched again at other addresses.

The first call of a configuration, of `attention` or `attention_backward`, is checked, prepared and
launched by `api` or `backward`, in about a millisecond of host time. All that it decides follows
from its key. So a later call with an equal key repeats the launches: `replay` allocates, writes the
new addresses into the recorded parameters and calls the driver.

A call that has no key, or meets anything out of the ordinary, is left to the checked way, which has
the messages.
"""

import contextlib
import functools
import operator
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fa2_numba import tensor_map
from fa2_numba.arrays import span
from fa2_numba.launch import Launched, Operands, on_device
from fa2_numba.problem import ALLOCATION_ALIGNMENT
from fa2_numba.tiling import Tiling

KEPT = 512  # plans, some KB each
WORD = 8  # bytes of a parameter, or more than it needs
ADDRESS = 4  # of an array's parameters: two zeros, elements, bytes of one, address, shape, strides

_enabled = True


def replay(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...] | None]:
    """Do a call by its plan.

    Parameters
    ----------
    arrays : tuple of array
        All that are given: q, k, v and perhaps out; or dout, q, k, v, out, lse and perhaps dlse.
        So their number tells which function is called.
    options : tuple
        causal, window, softcap, scale, method, tiling; then, of a backward call, deterministic.

    Returns
    -------
    key : object
        For `record`; None where the call can have no plan.
    results : tuple of array, or None
        (out, lse) or (dq, dk, dv). None: the call was not done.
    """
    kind: Any = type(arrays[0])
    library = _library(kind)
    if library is None or not _enabled or not _plain(*options):
        return None, None
    seen = library.see(arrays)
    if seen is None:
        return None, None
    signature, addresses = seen
    key = library, options, signature
    plan = _plans.get(key)
    return key, None if plan is None else plan(arrays, addresses)


def record(key: Any, given: Sequence[str], results: Mapping[str, Any], operands: Operands) -> None:
    """Keep the plan of a call that `replay` did not do, where there can be one.

    Parameters
    ----------
    key : object
        From `replay`, not None.
    given : sequence of str
        Names of the arrays that `replay` had, as kernels know them.
    results : mapping
        Name to array, in the order in which `replay` returns them. One may be given: the first
        result and the last array.
    operands : Operands
        What the call launched.
    """
    plan = _planned(key[0], given, results, operands)
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


def _plain(
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    method: Any,
    tiling: Any,
    deterministic: Any = False,
) -> bool:
    """Whether options mean the same wherever they are equal.

    True == 1 == 1.0, so only some types do; and 0.0 == -0.0, so a scale of 0 does not.
    """
    return (
        type(causal) in (bool, str)
        and (window is None or (type(window) is tuple and [*map(type, window)] == [int, int]))
        and (softcap is None or type(softcap) in (float, int))
        and (scale is None or (type(scale) in (float, int) and scale != 0))
        and type(method) is str
        and (tiling is None or type(tiling) is Tiling)
        and (deterministic is False or deterministic is True)
    )


# ---- plans --------------------------------------------------------------------------------------


class Plan:
    """The launches of one configuration on one device.

    Its addresses are, in this order, those of the arrays given, of what is allocated, and of tensor
    maps. A place is an index among them.

    Parameters
    ----------
    method : str
        What errors call it.
    library : Torch or CuPy
        Of the arrays.
    device : int
        Their GPU.
    fresh : sequence of callable ``() -> array``
        What each call allocates: the results, but one that is given, then the workspaces.
    results : int
        How many of these are results.
    spans : sequence of (int, int)
        Where a result is given, which is the last array then: first byte of each array, and the one
        behind its last, from its address. Else empty.
    maps : sequence of (place, Boxes)
        Tensor maps: the place of their array, and what they say of it.
    launches : sequence of (tuple, int)
        Arguments of cuLaunchKernel up to the stream; its first word.
    words : sequence of int
        The parameters of all launches, 64 bits each.
    slots : sequence of (word, place)
        Which words are addresses.
    """

    def __init__(
        self,
        method: str,
        library: Any,
        device: int,
        fresh: Sequence[Callable[[], Any]],
        results: int,
        spans: Sequence[tuple[int, int]],
        maps: Sequence[tuple[int, tensor_map.Boxes]],
        launches: Sequence[tuple[tuple[Any, ...], int]],
        words: Sequence[int],
        slots: Sequence[tuple[int, int]],
    ):
        from cuda.bindings import driver

        self.method, self.device = method, device
        self.fresh, self.spans, self.slots = fresh, spans, slots
        self._results = slice(results)
        self._mapped = [place for place, _ in maps]
        self._maps = tensor_map.Group([boxes for _, boxes in maps])
        self._heads, self._words = launches, words
        self._allocate, self._address = library.allocate, library.address
        self._stream = library.stream
        self._current, self._launch = driver.cuCtxGetCurrent, driver.cuLaunchKernel
        with on_device(device):
            self._context = self._current()[1]
        self._idle = [Parameters(self._launch, launches, words)]

    def __call__(self, arrays: tuple[Any, ...], addresses: list[int]) -> tuple[Any, ...] | None:
        """Launch for these arrays: the results, or None where the recorded launches do not fit."""
        if self.spans and self._overlap(addresses):
            return None
        device = self.device
        fresh = self._allocate(self.fresh, device)
        for address in map(self._address, fresh):
            if address % ALLOCATION_ALIGNMENT:
                return None
            addresses.append(address)
        stream = self._stream(device)
        if self._current()[1] == self._context:
            self._enqueue(addresses, stream)
        else:
            with on_device(device):
                self._enqueue(addresses, stream)
        results = tuple(fresh[self._results])
        return (arrays[-1], *results) if self.spans else results

    def _enqueue(self, addresses: list[int], stream: int) -> None:
        if self._mapped:
            # Held until all is enqueued: their memory is not written anew before.
            maps = self._maps.find(tuple([addresses[place] for place in self._mapped]), stream)
            addresses += maps.addresses
        try:
            parameters = self._idle.pop()
        except IndexError:  # other threads have them
            parameters = Parameters(self._launch, self._heads, self._words)
        words = parameters.words
        for word, place in self.slots:
            words[word] = addresses[place]
        for launch, start in parameters.launches:
            (status,) = launch(stream, start, 0)
            if status:
                raise RuntimeError(f"{self.method}: a launch failed: {status.name}")
        self._idle.append(parameters)

    def _overlap(self, addresses: list[int]) -> bool:
        """Whether the memory range of the result given has a byte in common with an input's."""
        *inputs, (first, end) = [
            (address + low, address + high)
            for address, (low, high) in zip(addresses, self.spans, strict=True)
        ]
        return any([first < high and low < end for low, high in inputs])


class Parameters:
    """The words of a plan in memory, for one call at a time: the driver reads them unlocked.

    Parameters
    ----------
    launch : callable
        cuLaunchKernel.
    heads, words : sequence
        `launches` and `words` of `Plan`.

    Attributes
    ----------
    words : array of uint64
    launches : list of (callable ``(stream, parameters, 0)``, address of its parameters)
    """

    def __init__(
        self, launch: Any, heads: Sequence[tuple[tuple[Any, ...], int]], words: Sequence[int]
    ):
        self.words = array("Q", words)
        start, count = self.words.buffer_info()
        self._pointers = array("Q", range(start, start + WORD * count, WORD))  # the driver's way
        start, _ = self._pointers.buffer_info()
        self.launches = [
            (functools.partial(launch, *head), start + WORD * first) for head, first in heads
        ]


def _planned(
    library: Any, given: Sequence[str], results: Mapping[str, Any], operands: Operands
) -> Plan | None:
    """The plan of a call that ran as `record` says; None if it did what a plan cannot repeat."""
    new = {name: x for name, x in results.items() if name not in given}
    fresh = {**new, **operands.workspaces}
    if any(library.address(x) % ALLOCATION_ALIGNMENT for x in fresh.values()):
        return None
    names = [*given, *fresh]
    # By identity: q and k may be the same tensor, so addresses do not tell.
    known = [operands.arrays[name] for name in names] + [argument for argument, *_ in operands.maps]
    places = {id(value): place for place, value in enumerate(known)}
    launches: list[tuple[tuple[Any, ...], int]] = []
    words: list[int] = []
    slots: list[tuple[int, int]] = []
    with on_device(operands.device):
        makers = [library.maker(tuple(x.shape), x.dtype, operands.device) for x in fresh.values()]
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
    one_given = len(new) < len(results)
    layouts = [operands.problem.layouts[name] for name in given] if one_given else []
    return Plan(
        operands.problem.method,
        library,
        operands.device,  # type: ignore[arg-type]
        makers,
        len(new),
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


class Kept:
    """A plan, and whether it was used."""

    __slots__ = ("plan", "used")

    def __init__(self, plan: Plan):
        self.plan, self.used = plan, False


class Plans:
    """The plans in use by their keys, for any number of threads.

    A second chance for each: of those not used since they were last considered, the oldest goes.
    So a use costs no lock and moves nothing.
    """

    def __init__(self, most: int):
        self._most = most
        self._plans: OrderedDict[Any, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> Plan | None:
        """The plan of a key, which counts as used."""
        kept = self._plans.get(key)
        if kept is None:
            return None
        kept.used = True
        return kept.plan

    def keep(self, key: Any, plan: Plan) -> None:
        """Keep a plan, in place of an old one where there are too many."""
        with self._lock:
            while len(self._plans) >= self._most and key not in self._plans:
                oldest, kept = next(iter(self._plans.items()))
                if kept.used:
                    kept.used = False
                    self._plans.move_to_end(oldest)
                else:
                    del self._plans[oldest]
            self._plans[key] = Kept(plan)


_plans = Plans(KEPT)


# ---- array libraries ----------------------------------------------------------------------------


class Torch:
    """torch's tensors, seen at little cost."""

    def __init__(self) -> None:
        import torch

        self.kind = torch.Tensor
        self.address = torch.Tensor.data_ptr
        self._torch, self._grad = torch, torch.is_grad_enabled
        handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream = handle or (lambda device: torch.cuda.current_stream(device).cuda_stream)

    def see(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]] | None:
        """What decides a call, and the addresses; None where the checked way might refuse one."""
        kind = self.kind
        addresses: list[int] = []
        seen: list[Any] = []
        for x in arrays:
            if type(x) is not kind or (x.requires_grad and self._grad()):
                return None
            address = x.data_ptr()
            addresses.append(address)
            remainder = address % ALLOCATION_ALIGNMENT
            seen.append((x.shape, x.stride(), x.dtype, x.device, remainder))
        return tuple(seen), addresses

    def maker(self, shape: tuple[int, ...], dtype: Any, device: int) -> Callable[[], Any]:
        """What makes tensors on the device, which is current."""
        torch = self._torch
        if torch.cuda.is_current_stream_capturing():  # a graph's memory is not for plans to hold
            return functools.partial(torch.empty, shape, dtype=dtype, device=device)
        # One element, seen as many: torch reads a tensor faster than a shape, dtype and device.
        like = torch.empty((1,), dtype=dtype, device=device).expand(shape)
        return functools.partial(torch.empty_like, like, memory_format=torch.contiguous_format)

    def allocate(self, makers: Sequence[Callable[[], Any]], device: int) -> list[Any]:
        """New tensors."""
        return [make() for make in makers]


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
        """What decides a call, and the addresses; None where the checked way might refuse one."""
        kind = self.kind
        addresses: list[int] = []
        seen: list[Any] = []
        for x in arrays:
            if type(x) is not kind:
                return None
            data = x.data
            address = data.ptr
            addresses.append(address)
            remainder = address % ALLOCATION_ALIGNMENT
            seen.append((x.shape, x.strides, x.dtype, data.device_id, remainder))
        return tuple(seen), addresses

    def stream(self, device: int) -> int:
        """The handle of the current stream."""
        return int(self._stream(device).ptr)

    def maker(self, shape: tuple[int, ...], dtype: Any, device: int) -> Callable[[], Any]:
        """What makes arrays on the device that is then current."""
        return functools.partial(self._empty, shape, dtype)

    def allocate(self, makers: Sequence[Callable[[], Any]], device: int) -> list[Any]:
        """New arrays."""
        if self._current() == device:
            return [make() for make in makers]
        with self._device(device):
            return [make() for make in makers]


@functools.lru_cache(maxsize=64)
def _library(kind: Any) -> Any:
    """How to see arrays of a class; None for those that have no plans."""
    libraries: dict[str, Any] = {"torch": Torch, "cupy": CuPy}
    make = libraries.get(kind.__module__.partition(".")[0])
    library = make() if make else None
    return library if library and library.kind is kind else None
