"""What the benchmarks of implementations side by side share: arguments, the run, its record.

`benchmarks.forward` and `benchmarks.backward` derive from `Run` and say what is compared, how an
output is checked, and which sections there are.

- In each cell the implementations take turns. A turn is a burst between two CUDA events. Before it
  the GPU is kept busy until the host is ahead, equally long for all, so that times are the GPU's.
- "sustained": bursts of 30 ms, matrix products in between, so that clock and power are those of
  long work. "burst": 10 ms after a pause and an idle wait, so that power throttles nothing. Peers
  are to be compared within one regime. SM clock, power and temperature of a row are medians over
  the turns of its cell.
- L2: the operands of a cell are several times the L2, and every call streams them anew. Nothing is
  flushed.
- No output is timed that is not right (`benchmarks.exact`). What fails or does not run is recorded
  under "skipped", with the reason.
- The record is written after every cell. After ``--minutes`` no further cell starts.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks import peers, summary
from benchmarks.environment import environment, nvidia_smi, results_folder, write_record
from benchmarks.peers import Implementation
from fa2_numba.accounting.bench import Cell, keeping_busy, take_turns

if TYPE_CHECKING:
    import torch

    from benchmarks.watch import Watch

TOKENS, HIDDEN = 16384, 2048
DIMS = (128, 64, 256)
MEMORY_N, MEMORY_D = 16384, 128
MATRIX_SIZES = (8192, 16384)
HOST_CALLS, HOST_SYNC = 600, 20
HOST_METHOD = (
    "time.perf_counter around one call that enqueues, median; the GPU is waited for after every "
    f"{HOST_SYNC} calls, outside of it; torch's choice of a backend is made once, outside of it"
)
OUTPUTS = {"forward": 1, "backward": 3}  # arrays of q's size that a call returns


@dataclass(frozen=True)
class Regime:
    """How long a burst is, of how many calls at most, and the pause before it in seconds."""

    milliseconds: float
    longest: int
    pause: float


REGIMES = {"sustained": Regime(30, 32, 0.0), "burst": Regime(10, 32, 0.1)}


def tokens_cell(n: int, d: int, causal: bool, dtype: str, direction: str = "forward") -> Cell:
    """The cell of batch x N = `TOKENS` and heads x d = `HIDDEN`."""
    return Cell(TOKENS // n, HIDDEN // d, n, d, causal, dtype, direction)


def host_cell(dtype: str, direction: str = "forward") -> Cell:
    """A problem so small that the GPU keeps up with the host."""
    return Cell(1, 8, 128, 64, False, dtype, direction)


# Arguments ----------------------------------------------------------------------------------------


def _listed(accepted: Sequence[Any]) -> Callable[[str], list[Any]]:
    """A type of argument: some of `accepted`, separated by commas."""

    def read(text: str) -> list[Any]:
        by_name = {str(value): value for value in accepted}
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in by_name:
                raise argparse.ArgumentTypeError(
                    f"got {name!r}, accepted: {', '.join(by_name)}, separated by commas"
                )
        return [by_name[name] for name in dict.fromkeys(names)]

    return read


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, accepted: 1 or more")
    return int(text)


def arguments(
    argv: Sequence[str] | None,
    about: str,
    *,
    sizes: Sequence[int],
    implementations: Sequence[str],
    default: Sequence[str],
    sections: Sequence[str],
) -> argparse.Namespace:
    """What to run.

    Parameters
    ----------
    argv : sequence of str, optional
        Default: the command line.
    about : str
        One line for ``--help``.
    sizes, sections : sequence
        All there are; also the default.
    implementations, default : sequence of str
        All there are, and those that are timed in the cells by default.
    """
    parser = argparse.ArgumentParser(description=about)

    def add(flag: str, accepted: Sequence[Any], default: Sequence[Any], text: str) -> None:
        shown = ",".join(map(str, default))
        parser.add_argument(
            flag,
            type=_listed(accepted),
            default=list(default),
            metavar="A,B",
            help=f"{text} (default: {shown})",
        )

    add("--dims", DIMS, DIMS, "head dimensions")
    add("--sizes", sizes, sizes, "sequence lengths N")
    add("--causal", ("full", "causal"), ("full", "causal"), "masks")
    add("--implementations", implementations, default, "what is timed in the cells")
    add("--regime", tuple(REGIMES), ("sustained",), "how it is timed")
    add("--sections", sections, sections, "parts of the record")
    parser.add_argument("--dtype", choices=tuple(peers.DTYPES), default="bf16")
    parser.add_argument("--rounds", type=_positive, default=5, help="turns of each (default: 5)")
    parser.add_argument(
        "--minutes", type=float, default=4.5, help="no cell starts after that (default: 4.5)"
    )
    parser.add_argument("--output", type=Path, help="JSON (default: the GPU's folder of results)")
    return parser.parse_args(argv)


# One run ------------------------------------------------------------------------------------------

Check = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Ready:
    """An implementation whose output of a cell was right: its call, and what was found."""

    implementation: Implementation
    call: Callable[[], Any]
    check: dict[str, Any]


class Run:
    """Fills the record, section by section, and writes it as it grows.

    A direction's class says what is compared and adds its own sections: methods without arguments,
    named as in ``--sections``.

    Parameters
    ----------
    options : Namespace
        As `arguments` returns it.
    record : dict
        What is known already.
    target : Path
        Where it is written.
    watch : Watch, optional
        What all but "host" need; it may be set later.
    begin : float
        When the run began, on ``time.monotonic``'s clock.
    """

    direction: ClassVar[str]
    ours: ClassVar[str]
    implementations: ClassVar[Mapping[str, Implementation]]
    operands: ClassVar[Sequence[str]]
    """Arrays of q's size that a call reads or writes."""

    def __init__(
        self,
        options: argparse.Namespace,
        record: dict[str, Any],
        target: Path,
        watch: "Watch | None",
        begin: float,
    ) -> None:
        self.options, self.record, self.target = options, record, target
        self.watch, self.begin = watch, begin
        self.holds = {name: holding(REGIMES[name]) for name in options.regime}
        record |= {"checks": [], "skipped": []}

    def checking(self, cell: Cell, inputs: "tuple[torch.Tensor, ...]", rows: int) -> Check:
        """What says of an output of these inputs whether it is "right", and in "alike", where that
        was looked at, whether a trusted peer finds the same; `rows` of a head at least."""
        raise NotImplementedError

    def host_names(self) -> list[str]:
        """Whose host cost is measured."""
        return list(self.options.implementations)

    def all_methods(self) -> list[str]:
        """What was chosen, and what else stands beside it where time allows."""
        raise NotImplementedError

    def write(self) -> None:
        """Write what there is."""
        self.record["seconds"] = round(time.monotonic() - self.begin, 1)
        write_record(self.record, self.target)

    def late(self, section: str, cell: Cell) -> bool:
        """Whether the time is up; then the cell is recorded as skipped."""
        up = time.monotonic() - self.begin > 60 * self.options.minutes
        if up:
            self.skip("all", cell, f"{section}: not started within {self.options.minutes} minutes")
        return up

    def skip(self, name: str, cell: Cell, why: str) -> None:
        """Record what was not timed, and why."""
        sizes = {"n": cell.n, "d": cell.d, "causal": cell.causal}
        self.record["skipped"].append({"implementation": name, **sizes, "reason": why})
        print(f"skipped: {name}, {cell}: {why[:100]}", flush=True)

    def prepare(self, cell: Cell, names: Sequence[str], rows: int = 16) -> dict[str, Ready]:
        """The implementations that run and are right, ready to be called."""
        import torch

        inputs = peers.random_inputs(cell)
        check = self.checking(cell, inputs, rows)
        ready = {}
        for name in names:
            implementation = self.implementations[name]
            try:
                call = implementation.call(*inputs, causal=cell.causal)
                found = check(implementation.output(call()))
                torch.cuda.synchronize()
            except Exception as error:  # whatever a library raises is why it is left out
                self.skip(name, cell, peers.reason(error))
                torch.cuda.empty_cache()
                continue
            sizes = {"implementation": name, "n": cell.n, "d": cell.d, "causal": cell.causal}
            self.record["checks"].append({**sizes, **found})
            if found["right"] and found.get("alike", True):
                ready[name] = Ready(implementation, call, found)
            else:
                self.skip(name, cell, "its output is not right: see checks")
        return ready

    def timed(
        self, cell: Cell, ready: dict[str, Ready], rounds: int, regimes: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """A row for each implementation and regime."""
        for regime in regimes:
            how = REGIMES[regime]
            times = take_turns(
                [each.call for each in ready.values()],
                [min(rounds, each.implementation.rounds or rounds) for each in ready.values()],
                how.milliseconds,
                longest=how.longest,
                hold=self.holds[regime],
                watch=self.watch,
            )
            state = {"regime": regime, **self.watch.taken()}
            for name, own in zip(ready, times, strict=True):
                yield {**cell.row(name, own), **state}

    def rows_of(
        self, cell: Cell, names: Sequence[str], rounds: int, regimes: Sequence[str], rows: int = 16
    ) -> tuple[list[dict[str, Any]], dict[str, Ready]]:
        """Rows of a cell, and what was timed; a failure is recorded, and the next cell goes on."""
        import torch

        ready: dict[str, Ready] = {}
        try:
            ready = self.prepare(cell, names, rows)
            return list(self.timed(cell, ready, rounds, regimes)), ready
        except Exception as error:  # of any library: out of memory, a failed launch
            self.skip("all", cell, peers.reason(error))
            return [], ready
        finally:
            self.watch.taken()
            torch.cuda.empty_cache()

    # --- sections ---

    def matrix_product(self) -> None:
        """The rate of large matrix products in the same run: the peak of the tables."""
        import torch

        dtype = getattr(torch, peers.DTYPES[self.options.dtype])
        rows = []
        for size, regime in itertools.product(MATRIX_SIZES, self.options.regime):
            a, b, c = (torch.randn(size, size, device=peers.DEVICE, dtype=dtype) for _ in range(3))
            how = REGIMES[regime]
            (times,) = take_turns(
                [lambda a=a, b=b, c=c: torch.mm(a, b, out=c)],
                self.options.rounds,
                how.milliseconds,
                hold=self.holds[regime],
                watch=self.watch,
            )
            rate = 2 * size**3 / statistics.median(times) / 1e9
            state = {"regime": regime, **self.watch.taken()}
            rows.append({"size": size, "tflops": round(rate, 1), **state})
        self.record["matrix_product"] = rows

    def host(self) -> None:
        """Host microseconds of one call on a small problem."""
        import torch

        cell = host_cell(self.options.dtype, self.direction)
        inputs = peers.random_inputs(cell)
        rows = []
        for name in self.host_names():
            implementation = self.implementations[name]
            try:
                with implementation.within():
                    call = implementation.make(*inputs, causal=cell.causal)
                    times = host_microseconds(call, torch.cuda.synchronize)
            except Exception as error:  # as in prepare
                self.skip(name, cell, f"host: {peers.reason(error)}")
                continue
            rows.append({"implementation": name, **quantiles(times), "calls": len(times)})
        self.record["host"] = {"method": HOST_METHOD, "problem": str(cell), "rows": rows}

    def memory(self) -> None:
        """Peak memory that one call takes, what it returns included."""
        heads, dtype = HIDDEN // MEMORY_D, self.options.dtype
        cell = Cell(1, heads, MEMORY_N, MEMORY_D, False, dtype, self.direction)
        inputs = peers.random_inputs(cell)
        rows = []
        for name in self.all_methods():
            try:
                extra = extra_bytes(self.implementations[name].call(*inputs, causal=cell.causal))
            except Exception as error:  # as in prepare
                self.skip(name, cell, f"memory: {peers.reason(error)}")
                continue
            rows.append({"implementation": name, "extra_bytes": extra})
        out = OUTPUTS[self.direction] * inputs[0].numel() * inputs[0].element_size()
        method = "peak of torch's allocator in one call, less what was allocated before it"
        about = {"method": method, "problem": str(cell), "output_bytes": out}
        self.record["memory"] = {**about, "rows": rows}

    def cells(self) -> None:
        """Every implementation at every size."""
        given = self.options
        self.record["rows"] = []
        for d, mask, n in itertools.product(given.dims, given.causal, given.sizes):
            cell = tokens_cell(n, d, mask == "causal", given.dtype, self.direction)
            if self.late("cells", cell):
                continue
            names = [name for name in given.implementations if self.wanted(name, n)]
            rows, _ = self.rows_of(cell, names, given.rounds, given.regime)
            self.record["rows"] += rows
            self.write()
            speeds = (f"{row['implementation']} {row['tflops']:.1f}" for row in rows)
            print(f"{cell}: {', '.join(speeds)}", flush=True)

    def wanted(self, name: str, n: int) -> bool:
        """Whether it is timed at N: what compiles for each size is, at some sizes."""
        sizes = self.implementations[name].sizes
        return not sizes or n in sizes


def holding(regime: Regime) -> Callable[[float], None]:
    """What keeps the GPU busy before a burst: a pause and a wait, or matrix products."""
    import torch

    if regime.pause:
        wait = keeping_busy(lambda: torch.cuda._sleep(1_000_000))

        def hold(duration: float) -> None:
            time.sleep(regime.pause)
            wait(duration)

        return hold
    a, b, c = (torch.randn(4096, 4096, device=peers.DEVICE).bfloat16() for _ in range(3))
    return keeping_busy(lambda: torch.mm(a, b, out=c))


def host_microseconds(call: Callable[[], Any], synchronize: Callable[[], None]) -> list[float]:
    """Time that the host spends in each of many calls."""
    times = []
    for n in range(HOST_SYNC + HOST_CALLS):
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
        if n % HOST_SYNC == HOST_SYNC - 1:
            synchronize()
    return times[HOST_SYNC:]  # the first compile


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Median, and what a tenth and nine tenths of the calls took at most."""
    tenths = statistics.quantiles(times, n=10)
    return {
        "microseconds": round(statistics.median(times), 1),
        "microseconds_p10": round(tenths[0], 1),
        "microseconds_p90": round(tenths[-1], 1),
    }


def extra_bytes(call: Callable[[], Any]) -> int:
    """Peak memory of torch's allocator in one call beyond what was allocated before."""
    import torch

    call()  # what is made once is not the call's
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


# From the first to the last section ---------------------------------------------------------------


def measured(run: Run) -> None:
    """The sections that were asked for but "host", in their order."""
    run.matrix_product()
    for section in run.options.sections:
        if section != "host":
            one_section(run, section)


def one_section(run: Run, section: str) -> None:
    """One section; what breaks it is recorded."""
    try:
        getattr(run, section)()
    except Exception as error:  # what the others find is not lost
        run.record["skipped"].append({"section": section, "reason": peers.reason(error)})
        print(f"skipped: the rest of {section}: {peers.reason(error)}", flush=True)
    run.write()


def measure(
    kind: type[Run],
    options: argparse.Namespace,
    warm: Callable[[str, Cell], str],
    jobs: Sequence[tuple[str, Cell]],
) -> None:
    """Measure, write the record as it grows, print the comparison.

    Parameters
    ----------
    kind : class
        Of the direction.
    options : Namespace
        As `arguments` returns it.
    warm : callable
        Calls an implementation once on a cell: a function of a module.
    jobs : sequence of (str, Cell)
        What `warm` does ahead, in other processes, so that this one finds it compiled.
    """
    # The processes that compile for the others, and this one, share what they compile on disk.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # processes there are enough
    try:
        import torch
    except ImportError:
        raise SystemExit(
            f"{kind.direction}: compares with torch; install it first (see CONTRIBUTING.md)"
        ) from None
    from benchmarks.gpu_time import compile_ahead  # needs CuPy
    from benchmarks.watch import Watch

    begin = time.monotonic()
    try:
        compile_ahead(warm, jobs)
    except BrokenProcessPool as error:  # a peer has killed its process; here it is asked again
        print(f"not all is compiled ahead: {peers.reason(error)}", flush=True)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    about = environment()
    about["versions"]["cudnn"] = str(torch.backends.cudnn.version())
    target = options.output or results_folder(about["gpu"]) / f"{kind.direction}.json"
    *others, last = kind.operands
    size = len(kind.operands) * TOKENS * HIDDEN * 2
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    record: dict[str, Any] = {
        **about,
        "setting": {
            "tokens": TOKENS,
            "hidden": HIDDEN,
            "dtype": options.dtype,
            "data": "normal",
            "regimes": {name: vars(REGIMES[name]) for name in options.regime},
            "l2": (
                f"{', '.join(others)} and {last} are {size} bytes, L2 has {l2}; nothing is flushed"
            ),
        },
        "before": state(),
    }
    run = kind(options, record, target, None, begin)
    if "host" in options.sections:
        one_section(run, "host")  # before a thread reads the clock: both would need the interpreter
    run.watch = watch = Watch()
    try:
        measured(run)
    finally:
        watch.close()
        record["after"] = state()
        record["watch_failure"] = watch.failure
        run.write()
    report(record, kind.ours)
    print(f"wrote {target.name} after {time.monotonic() - begin:.0f} s")


def state() -> dict[str, str]:
    """SM clock, power and temperature now."""
    clock, power, heat = nvidia_smi("clocks.sm", "power.draw", "temperature.gpu")
    return {"sm_clock": clock, "power": power, "temperature": heat}


def report(record: dict[str, Any], ours: str) -> None:
    """Print what was found, in short."""
    for row in record["matrix_product"]:
        print(f"matrix product {row['size']}^3, {row['regime']}: {row['tflops']} TFLOP/s")
    for row in record.get("host", {}).get("rows", ()):
        print(f"host: {row['implementation']} {row['microseconds']} us a call")
    rows = record.get("rows", ())
    for regime in summary.regimes(rows):
        found = summary.cells(rows, regime)
        lines = [*summary.table(found, ours), *summary.means(found, ours=ours)]
        print(f"TFLOP/s, {regime}", *lines, sep="\n")
