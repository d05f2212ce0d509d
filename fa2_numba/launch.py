"""Launch kernels, and keep the operands of one attention call.

A kernel file's ``launch(problem, A)`` asks `A` for its operands by name (``A.array("Q", "load
Q_i")``) and says what to run (``A.run(kernel, blocks, threads, shared_bytes, ...)``). Whether the
operands are plain or counted is decided here, so no launcher knows.
"""

import contextlib
import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fa2_numba import cache, hbm, simulator, smem
from fa2_numba.clock import PhaseClock, Timeline
from fa2_numba.masking import BooleanArray, Table
from fa2_numba.problem import Layout, Problem, acc_type
from fa2_numba.tensor_map import TensorMap, tensor_map
from fa2_numba.traffic import SharedTraffic, Traffic

MAX_BLOCKS = 2**31 - 1  # of one launch, in x
STATIC_SHARED_LIMIT = 48 * 1024  # above this a kernel must ask for its shared memory
OPS = ("load", "store", "atomic")
TILE_NAMES = {"Q": "Q_i", "K": "K_j", "V": "V_j", "P": "P_ij", "M": "M", "R": "R"}
TILE_NAMES |= {"dO": "dO_i", "dS": "dS_ij", "L": "L_i, D_i"}


@dataclass(frozen=True)
class Launch:
    """One launch, and what the GPU gives it; under the simulator the last four are 0.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    blocks, threads : int
        Blocks of the grid, threads of a block.
    shared_bytes : int
        Dynamic shared memory of a block.
    registers, local_bytes : int
        Of one thread. Local memory holds what registers cannot.
    blocks_per_sm : int
        Blocks that fit on an SM at once.
    code_bytes : int
        Machine code, which the SMs fetch through L2 like data.
    """

    kernel: str
    blocks: int
    threads: int
    shared_bytes: int
    registers: int
    local_bytes: int
    blocks_per_sm: int
    code_bytes: int


class Launched(NamedTuple):
    """A launch as it was made: `compiled` is Numba's kernel, None under the simulator."""

    kernel: str
    compiled: Any
    blocks: int
    threads: int
    shared_bytes: int
    args: tuple[Any, ...]


class Operands:
    """The operands of one attention call, plain or counted.

    Parameters
    ----------
    problem : Problem
        The call.
    arrays : dict
        Name to device array as kernels take it: Q, K, V, O, L, and what `allocate` adds.
    allocate : callable ``(shape, dtype) -> (array, owner)``
        Makes a workspace on the call's device and stream; `owner` keeps its memory alive.
    stream : Any
        What Numba launches on.
    scale : float
        Score scale.
    counted : bool
        Whether the kernels count their accesses to global memory.
    on_chip : bool
        Whether they count their accesses to shared memory.
    timed : bool
        Whether they time their phases.
    capacity : int
        How many marks of each warp are kept for a timeline, where timed.
    device : int, optional
        The GPU of the arrays; default: the current one.

    Attributes
    ----------
    launched : list of Launched
        The launches so far, in order.
    workspaces : dict
        Name to owner of what `workspace` allocated.
    maps : list of (argument, name, TensorMap)
        What `boxes` returned, for which array.
    """

    def __init__(
        self,
        problem: Problem,
        arrays: dict[str, Any],
        allocate: Any,
        stream: Any,
        scale: float,
        counted: bool,
        on_chip: bool = False,
        timed: bool = False,
        capacity: int = 0,
        device: int | None = None,
    ):
        self.problem = problem
        self.arrays = arrays
        self.stream = stream
        self.scale = problem.number(scale)
        self.counted, self.on_chip = counted, on_chip
        self.timed, self.capacity = timed, capacity
        self.device = device
        self._allocate = allocate
        self._owners: list[Any] = []
        self._tallies: list[tuple[str, tuple[str, ...], int, hbm.Counted]] = []
        self._of_boxes: set[int] = set()  # places of those in which copies of boxes count
        self._shared: list[tuple[str, Sequence[str], smem.SharedTally]] = []
        self._clocks: list[PhaseClock] = []
        self.launched: list[Launched] = []
        self.workspaces: dict[str, Any] = {}
        self.maps: list[tuple[Any, str, TensorMap]] = []

    def array(self, name: str, *phases: str) -> Any:
        """Operand `name`; its accesses belong to `phases`, by the row that `hbm.phase` names."""
        return self._operand(name, self.arrays[name], phases)

    def boxes(self, name: str, box: tuple[int, ...], *phases: str) -> Any:
        """Array `name` as the hardware copies it: its tensor map's address, or `CountedBoxes`.

        Parameters
        ----------
        name : str
            Q, K, V or O, in fp16 or bf16.
        box : tuple of int
            Elements of a box along each of the four axes.
        phases : str
            To which the copies belong.

        Raises
        ------
        ValueError
            The hardware cannot copy this array, or this box.
        NotImplementedError
            Under the simulator.
        """
        array = self.arrays[name]
        layout = Layout(
            tuple(array.shape), tuple(array.strides), array.dtype.itemsize, _pointer(array)
        )
        made = tensor_map(name, layout, box, self.problem.dtype, int(self.stream))
        argument: Any = np.uint64(made.address)
        if self.counted:
            self._of_boxes.add(len(self._tallies))
            argument = hbm.CountedBoxes(self._operand(name, array, phases), made.address)
        self.maps.append((argument, name, made))
        return argument

    def workspace(self, name: str) -> None:
        """Allocate the workspace array `name` of the problem (S, P, l, m, O_acc, D, ...)."""
        shape = self.problem.layout(name).shape
        self.arrays[name] = self.allocate(shape, acc_type(self.problem.dtype))
        self.workspaces[name] = self._owners[-1]

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A device array that lives as long as this call."""
        array, owner = self._allocate(shape, dtype)
        self._owners.append(owner)
        return array

    def mask_args(self, phase: str) -> tuple[Any, ...]:
        """The mask's arguments; reads of its arrays belong to `phase`."""
        return self._args(self.problem.mask.args, phase)

    def score_args(self, phase: str) -> tuple[Any, ...]:
        """The score change's arguments; reads of its arrays belong to `phase`."""
        return self._args(self.problem.score.args, phase)

    def _args(self, args: tuple[Any, ...], phase: str) -> tuple[Any, ...]:
        out: list[Any] = []
        for arg in args:
            if isinstance(arg, tuple):
                out.append(self._args(arg, phase))
            elif isinstance(arg, Table):
                out.append(self._operand(arg.name, self.arrays[arg.name], (phase,)))
            elif isinstance(arg, BooleanArray):
                t, p = self.problem.tiling, self.problem
                shapes = (p.N_q, p.N_k), (t.T_r(p.N_q), t.T_c(p.N_k))
                for name, shape in zip((arg.name, arg.map_name), shapes, strict=True):
                    array = _broadcast(self.arrays[name], (p.B, p.H, *shape))
                    out.append(self._operand(name, array, (phase,)))
                out += (t.B_r, t.B_c, p.N_k - p.N_q)
            else:
                out.append(self.problem.number(arg))
        return tuple(out)

    def _operand(self, name: str, array: Any, phases: tuple[str, ...]) -> Any:
        if not self.counted:
            return array
        tally = hbm.Counted(array, len(phases))
        self._tallies.append((name, phases, array.dtype.itemsize, tally))
        return tally

    def distinct_bytes(self) -> dict[str, int]:
        """Counted bytes by op, where lanes of a warp that share an element count it once.

        Copies of boxes are not among them. Rows count an element for each lane; the two differ for
        tables that lanes look up together.
        """
        sums = dict.fromkeys(OPS, 0)
        for place, (_, _, itemsize, tally) in enumerate(self._tallies):
            if place in self._of_boxes:
                continue
            for op, elements in zip(
                OPS, tally.counts()[:, :, hbm.DISTINCT].sum(axis=0), strict=True
            ):
                sums[op] += int(elements) * itemsize
        return sums

    def shared(self, kernel: str, tiles: Sequence[str]) -> Any:
        """The `shared` argument of `kernel`, whose tiles have these letters, or None."""
        if not self.on_chip:
            return None
        tally = smem.SharedTally(len(tiles))
        self._shared.append((kernel, tiles, tally))
        return tally.argument

    def clock(self, kernel: str, phases: tuple[str, ...], blocks: int, threads: int) -> Any:
        """The `clock` argument of `kernel` for this launch, or None."""
        if not self.timed:
            return None
        new = PhaseClock(kernel, phases, blocks, threads, self.capacity)
        self._clocks.append(new)
        return new.argument

    def on_chip_rows(self) -> list[SharedTraffic]:
        """The counted accesses to shared memory, one row for each (kernel, tile, op) with any."""
        rows = []
        for kernel, tiles, tally in self._shared:
            for letter, counts in zip(tiles, tally.counts(), strict=True):
                for op, (elements, requests, *others) in zip(OPS[:2], counts.tolist(), strict=True):
                    if requests:
                        name = TILE_NAMES[letter]
                        rows.append(SharedTraffic(kernel, name, op, elements, requests, *others))
        return rows

    def timelines(self) -> list[Timeline]:
        """What the clocks saw, one for each timed launch."""
        return [c.timeline() for c in self._clocks]

    def run(self, kernel: Any, blocks: int, threads: int, shared_bytes: int, *args: Any) -> None:
        """Launch `blocks` blocks of `threads` threads; no block, no launch.

        Raises
        ------
        ValueError
            More blocks than one launch can have.
        """
        if blocks == 0:
            return
        if blocks > MAX_BLOCKS:
            raise ValueError(
                f"{self.problem.method}: {blocks} blocks exceed the {MAX_BLOCKS} of one launch"
            )
        compiled = launch(kernel, blocks, threads, self.stream, shared_bytes, *args)
        self.launched.append(
            Launched(kernel.__name__, compiled, blocks, threads, shared_bytes, args)
        )

    @property
    def launches(self) -> list[Launch]:
        """The launches so far, in order. The driver is asked now: a launch costs no host time."""
        with on_device(self.device):
            return [
                Launch(name, blocks, threads, size, *_resources(compiled, threads, size))
                for name, compiled, blocks, threads, size, _ in self.launched
            ]

    def rows(self, boxes: bool | None = None) -> list[Traffic]:
        """The counted traffic so far, one row for each (array, phase, op) that moved anything.

        Of copies of boxes alone with `boxes`, of all else if it is False.
        """
        sums: dict[tuple[str, str, str], list[int]] = {}
        for place, (name, phases, itemsize, tally) in enumerate(self._tallies):
            if boxes is not None and boxes != (place in self._of_boxes):
                continue
            counts = tally.counts()
            for row, phase in enumerate(phases):
                for op, op_name in enumerate(OPS):
                    elements, _, requests, sectors = (int(n) for n in counts[row, op])
                    if requests:
                        entry = sums.setdefault((name, phase, op_name), [0, 0, 0, 0])
                        numbers = (elements, elements * itemsize, requests, sectors)
                        entry[:] = [a + b for a, b in zip(entry, numbers, strict=True)]
        columns = self.problem.columns()
        return [
            Traffic(
                **columns,
                array=array,
                phase=phase,
                op=op,
                elements=n[0],
                bytes=n[1],
                requests=n[2],
                sectors=n[3],
                cycles=None,
                source="counted",
            )
            for (array, phase, op), n in sums.items()
        ]


def launch(
    kernel: Any, blocks: int, threads: int, stream: Any, shared_bytes: int, *args: Any
) -> Any:
    """Launch a kernel, allowing it the shared memory it needs.

    Above 48 KB the driver wants to be asked for each compiled kernel; Numba does not ask.

    Returns
    -------
    Any
        The compiled kernel; None under the simulator.
    """
    if simulator.ACTIVE:
        kernel[blocks, threads, stream, shared_bytes](*(simulator.argument(a) for a in args))
        return None
    from numba.cuda.cudadrv.driver import _to_core_stream, binding, driver

    types = tuple(kernel.typeof_pyval(arg) for arg in args)
    compiled = kernel.overloads.get(types) or cache.compiled(kernel, types)
    function = compiled._codelibrary.get_cufunc()
    if shared_bytes > STATIC_SHARED_LIMIT:
        driver.cuKernelSetAttribute(
            binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            shared_bytes,
            function.handle,
            function.device.id,
        )
    compiled.launch(args, (blocks, 1, 1), (threads, 1, 1), _to_core_stream(stream), shared_bytes)
    return compiled


def _resources(compiled: Any, threads: int, shared_bytes: int) -> tuple[int, int, int, int]:
    """Registers and local bytes of a thread, blocks on an SM, bytes of code; 0 if simulated."""
    if compiled is None:
        return 0, 0, 0, 0
    function = compiled._codelibrary.get_cufunc()
    code = machine_code_bytes(bytes(compiled._codelibrary.get_cubin().code))
    context = function.module.context
    blocks = context.get_active_blocks_per_multiprocessor(function, threads, shared_bytes)
    return function.attrs.regs, function.attrs.local, int(blocks), code


def machine_code_bytes(cubin: bytes) -> int:
    """Bytes of the executable sections of a cubin, which is a 64-bit ELF file."""
    EXECUTABLE = 0x4  # SHF_EXECINSTR
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    sections = (struct.unpack_from("<8xQ8x8xQ", cubin, table + n * size) for n in range(count))
    return sum(length for flags, length in sections if flags & EXECUTABLE)


def _broadcast(array: Any, shape: tuple[int, ...]) -> Any:
    """A view of a device array with stride 0 along the axes that broadcast."""
    if tuple(array.shape) == shape:
        return array
    strides = tuple(
        0 if have == 1 and want != 1 else step
        for have, want, step in zip(array.shape, shape, array.strides, strict=True)
    )
    if simulator.ACTIVE:
        return np.lib.stride_tricks.as_strided(array, shape, strides)
    from fa2_numba.arrays import device_view

    return device_view(_pointer(array), shape, strides, array.dtype)


def _pointer(array: Any) -> int:
    if simulator.ACTIVE:
        return int(array.__array_interface__["data"][0])
    return int(array.__cuda_array_interface__["data"][0])


@contextlib.contextmanager
def on_device(device: int | None) -> Iterator[None]:
    """Make GPU `device` current; None leaves things as they are."""
    if device is None:
        yield
        return
    from numba import cuda

    with cuda.gpus[device]:
        yield


def gpu_available() -> bool:
    """Whether this process can use a GPU."""
    if simulator.ACTIVE:
        return False
    from numba import cuda

    return bool(cuda.is_available())


@functools.cache
def processors(device: int | None) -> int:
    """SMs of this device."""
    from numba import cuda

    with on_device(device):
        return int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


@functools.cache
def compute_capability(device: int | None) -> tuple[int, int]:
    """Of this device; (0, 0) where there is none."""
    if simulator.ACTIVE or not gpu_available():
        return 0, 0
    from numba import cuda

    with on_device(device):
        return tuple(cuda.get_current_device().compute_capability)


@functools.cache
def shared_limit(device: int | None) -> int:
    """Bytes of shared memory that a block may ask for on this device."""
    if simulator.ACTIVE:
        return STATIC_SHARED_LIMIT
    from numba import cuda

    with on_device(device):
        return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
