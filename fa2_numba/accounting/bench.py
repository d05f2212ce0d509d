"""Times of attention on the GPU: bursts between two CUDA events, the implementations taking turns.

Turns, so that a drift of the clock hits all alike. A burst, so that a call's time is the GPU's: if
the host takes longer to prepare a call than the GPU to run it, other work keeps the GPU busy until
the host is far enough ahead (`keeping_busy`). All of it needs CuPy, whose events read the clock.
"""

import contextlib
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from fa2_numba import api
from fa2_numba.accounting.hardware import Case, HardwareError
from fa2_numba.accounting.terminal import new_table

Call = Callable[[], Any]

BURST_MILLISECONDS = 50
LONGEST_BURST = 16  # calls
AHEAD = 1.25  # of the measured time that the host needs to get ahead
COPIED_BYTES = 2**28

# Operations of a direction for each of the N^2 d elements of a matrix product: a multiplication and
# an addition in each of the 2 products forward, of the 5 backward (FlashAttention-2, section 4.1).
OPERATIONS = {"forward": 4, "backward": 10}


@dataclass(frozen=True)
class Cell:
    """One problem that implementations are compared on: self-attention, N rows and keys.

    Attributes
    ----------
    batch, heads, n, d : int
        q, k and v are (batch, heads, n, d).
    causal : bool
    dtype : str
        As `fa2_numba.attention` names it.
    direction : {"forward", "backward"}
    """

    batch: int
    heads: int
    n: int
    d: int
    causal: bool
    dtype: str
    direction: str = "forward"

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        sizes = f"batch {self.batch}, {self.heads} heads, N = {self.n:,}, d = {self.d}"
        return f"{sizes}, {self.dtype}, {mask}, {self.direction}"

    def teraflop(self) -> float:
        """4 N^2 d for each head forward, 10 N^2 d backward, half if causal; in 1e12."""
        products = self.n**2 * self.d * self.heads * self.batch
        return OPERATIONS[self.direction] * products * (0.5 if self.causal else 1.0) / 1e12

    def row(self, implementation: str, times: Sequence[float]) -> dict[str, Any]:
        """The recorded row of one implementation.

        Parameters
        ----------
        implementation : str
        times : sequence of float
            Milliseconds of a call, one for each turn.
        """
        speeds = [self.teraflop() / (ms / 1e3) for ms in times]
        return {
            "implementation": implementation,
            **{name: asdict(self)[name] for name in ("direction", "dtype", "batch", "heads")},
            **{name: asdict(self)[name] for name in ("n", "d", "causal")},
            "tflops": round(statistics.median(speeds), 2),
            "tflops_min": round(min(speeds), 2),
            "tflops_max": round(max(speeds), 2),
            "milliseconds": round(statistics.median(times), 4),
            "rounds": len(times),
        }


# Timing -------------------------------------------------------------------------------------------


def milliseconds(call: Call, burst: int = 1) -> float:
    """Time of one call on the GPU, averaged over a burst."""
    import cupy

    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(burst):
        call()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / burst


def burst_length(one: float, burst_milliseconds: float, longest: int) -> int:
    """Calls of `one` millisecond each that fill a burst, 1 to `longest`."""
    return max(1, min(longest, math.ceil(burst_milliseconds / one)))


def lead(host: float, one: float, burst: int) -> float:
    """How long before a burst the host must begin, so that the GPU never waits for it.

    Parameters
    ----------
    host, one : float
        Time that the host needs to prepare one call, and the GPU to run it; any unit.
    burst : int
        Calls. The last is ready after ``burst * host``, and due after ``(burst - 1) * one``.
    """
    return host + (burst - 1) * max(0.0, host - one)


def keeping_busy(work: Call) -> Callable[[float], None]:
    """A function that enqueues `work` for at least so many milliseconds of the GPU's time."""
    for _ in range(2):  # the first may compile, or start at a low clock
        each = milliseconds(work, LONGEST_BURST)

    def hold(duration: float) -> None:
        for _ in range(math.ceil(duration / each)):
            work()

    return hold


def take_turns(
    calls: Sequence[Call],
    rounds: int | Sequence[int],
    burst_milliseconds: float = BURST_MILLISECONDS,
    *,
    longest: int = LONGEST_BURST,
    hold: Callable[[float], Any] | None = None,
    watch: AbstractContextManager[Any] | None = None,
) -> list[list[float]]:
    """Milliseconds of each call, `rounds` times, the calls taking turns after two warm-ups each.

    Parameters
    ----------
    calls : sequence of callable
        Each enqueues its work on the current stream.
    rounds : int or sequence of int
        Turns, of all or of each call.
    burst_milliseconds, longest
        A turn is a burst of up to `longest` calls, `burst_milliseconds` long where that suffices.
    hold : callable, optional
        Called before each turn with the milliseconds that the GPU should be kept busy from then on,
        equal for all calls, so that none of them waits for the host.
    watch : context manager, optional
        Entered for each turn; must be reusable.
    """
    bursts, ahead = [], 0.0
    for call in calls:
        call()
        host = 0.0
        if hold:
            begin = time.perf_counter()
            call()
            host = 1e3 * (time.perf_counter() - begin)
            hold(AHEAD * host)
        one = milliseconds(call)
        bursts.append(burst_length(one, burst_milliseconds, longest))
        ahead = max(ahead, lead(host, one, bursts[-1]))
    counts = [rounds] * len(calls) if isinstance(rounds, int) else list(rounds)
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(max(counts, default=0)):
        for own, call, burst, count in zip(times, calls, bursts, counts, strict=True):
            if turn >= count:
                continue
            if hold:
                hold(AHEAD * ahead)
            with watch or contextlib.nullcontext():
                own.append(milliseconds(call, burst))
    return times


# A short comparison -------------------------------------------------------------------------------


def compare(
    cell: Cell, methods: Iterable[str] | None, rounds: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time methods against torch's own choice for the same call, where torch is installed.

    Parameters
    ----------
    cell : Cell
        Forward.
    methods : iterable of str, optional
        Of `fa2_numba.METHODS`; None for all of them.
    rounds : int
        Turns of each, 1 or more.

    Returns
    -------
    rows : list of dict
        As `Cell.row` makes them.
    refused : list of str
        What did not run, and why.

    Raises
    ------
    ValueError
        A size or rounds below 1; a method that does not exist.
    HardwareError
        CuPy is not installed.
    """
    methods = list(api.METHODS if methods is None else methods)
    for name in ("batch", "heads", "n", "d"):
        if getattr(cell, name) < 1:
            raise ValueError(f"{name}: got {getattr(cell, name)}, accepted: 1 or more")
    for method in methods:
        if method not in api.METHODS:
            raise ValueError(f"method: got {method!r}, accepted: {', '.join(api.METHODS)}")
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}, accepted: 1 or more")
    try:
        import cupy
    except ImportError:
        raise HardwareError("CuPy is not installed (extras cuda13, cuda12)") from None

    calls, refused = {}, []
    for name, call in _calls(cell, methods).items():
        try:
            call()
            cupy.cuda.runtime.deviceSynchronize()
        except (TypeError, ValueError, MemoryError, RuntimeError) as error:
            refused.append(f"{name}: {' '.join(str(error).split())}")
        else:
            calls[name] = call
    source, target = (cupy.empty(COPIED_BYTES, cupy.uint8) for _ in range(2))
    hold = keeping_busy(lambda: cupy.copyto(target, source))
    times = take_turns(list(calls.values()), rounds, hold=hold)
    return [cell.row(name, own) for name, own in zip(calls, times, strict=True)], refused


def _calls(cell: Cell, methods: Iterable[str]) -> dict[str, Call]:
    """Name to call, on the same random normal data; torch's last."""
    sizes = (cell.batch, cell.heads, cell.heads, cell.n, cell.n, cell.d)
    q, k, v = Case("fa2", cell.dtype, *sizes).arrays()
    theirs: dict[str, Call] = {}
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            kinds = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16}
            dtype = {**kinds, "bf16": torch.bfloat16}[cell.dtype]
            shape = (cell.batch, cell.heads, cell.n, cell.d)
            q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
            attention = torch.nn.functional.scaled_dot_product_attention
            theirs["torch SDPA"] = lambda: attention(q, k, v, is_causal=cell.causal)

    def ours(method: str) -> Call:
        return lambda: api.attention(q, k, v, causal=cell.causal, method=method)

    return {method: ours(method) for method in methods} | theirs


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each implementation, the fastest first."""
    header = ["", "ms", "TFLOP/s", "least", "most", "times\nthe first"]
    made = new_table("Speed, medians of turns", header, 1)
    ordered = sorted(rows, key=lambda row: row["milliseconds"])
    for row in ordered:
        speeds = (f"{row[name]:.1f}" for name in ("tflops", "tflops_min", "tflops_max"))
        ratio = row["milliseconds"] / ordered[0]["milliseconds"]
        made.add_row(row["implementation"], f"{row['milliseconds']:.4g}", *speeds, f"{ratio:.2f}")
    return made
