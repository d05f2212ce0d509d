"""``fa2-numba report | check | io | verify | trace | bench | example | doctor``.

Nothing that imports Numba is imported before a command needs it: `doctor` must work where Numba
does not, and without a GPU the simulator has to be switched on first.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console

    from fa2_numba.accounting.hardware import Case
    from fa2_numba.accounting.inputs import Inputs
    from fa2_numba.accounting.proof import Proof
    from fa2_numba.accounting.sweep import Experiment, Sweep
    from fa2_numba.clock import Timeline

OK, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130
SIMULATOR = "NUMBA_ENABLE_CUDASIM"
VERIFIED = (
    *("standard", "fa1", "fa2", "fa3"),
    *("standard_backward", "fa1_backward", "fa2_backward", "fa2_backward_deterministic"),
    *("fa3_backward", "fa3_backward_deterministic"),
)


class Refusal(Exception):
    """What the user gave cannot be used; the message is one line that names it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : list of str, optional
        Default: the process's arguments.

    Returns
    -------
    int
        0: done and exact. 1: an output is not exact, a count differs, or doctor found a failure.
        2: what was given cannot be used, said in one line on stderr. 130: interrupted.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        return int(arguments.run(arguments))
    except Refusal as error:
        print(f"fa2-numba {arguments.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"fa2-numba {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


# Arguments ----------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fa2-numba",
        description="FlashAttention in Numba CUDA: exact outputs, and every byte that they move, "
        "predicted and counted. Runs on a CUDA GPU, else on Numba's simulator.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        new = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        new.set_defaults(run=run)
        new.add_argument("--json", action="store_true", help="print the rows as JSON, nothing else")
        return new

    report = command("report", run_report, "count, predict and check every method; write a report")
    report.add_argument(
        "--input", metavar="FILE", nargs="+", help="real input instead of the shipped, as for check"
    )
    report.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("fa2_report"),
        help="folder to write (default: %(default)s)",
    )
    report.add_argument("--ncu", metavar="PATH", help="Nsight Compute's ncu (default: searched)")

    check = command("check", run_check, "check every method's output on your own arrays")
    check.add_argument(
        "file",
        metavar="FILE",
        nargs="+",
        help=".npz or .safetensors with q, k, v and perhaps mask (bool, True = visible) and out, "
        "alone or with a prefix; or one .npy with q, k, v stacked; or three .npy files q k v",
    )
    check.add_argument(
        "--all", action="store_true", help="on the simulator too: the whole input, in any time"
    )
    check.add_argument("--scale", type=float, help="of the scores (default: 1/sqrt(d))")

    io = command("io", run_io, "what one shape moves: predicted and, where it can run, counted")
    for flag, text, default in (
        ("--n", "query rows N_q", None),
        ("--n-k", "keys N_k (default: N_q)", None),
        ("--d", "head dimension", 64),
        ("--heads", "query heads", 1),
        ("--heads-kv", "key/value heads (default: as query heads)", None),
        ("--batch", "batch size", 1),
        ("--block-r", "B_r, rows of a query tile", None),
        ("--block-c", "B_c, rows of a key/value tile", None),
    ):
        shown = text if default is None else f"{text} (default: {default})"
        io.add_argument(
            flag, type=int, default=default, required=flag == "--n", metavar="INT", help=shown
        )
    io.add_argument("--dtype", choices=("fp32", "fp64", "fp16", "bf16"), default="fp32")
    for new in (check, io):
        new.add_argument(
            "--method", choices=("standard", "fa1", "fa2"), help="default: every method"
        )
        new.add_argument("--causal", action="store_true", help="key j is visible to rows i >= j")
        new.add_argument(
            "--window",
            type=_window,
            metavar="LEFT,RIGHT",
            help="keys a row sees on either side of itself; -1: all",
        )

    verify = command("verify", run_verify, "counted numbers against the GPU's own counters (ncu)")
    verify.add_argument("--ncu", metavar="PATH", help="Nsight Compute's ncu (default: searched)")
    verify.add_argument(
        "--on-chip", action="store_true", help="shared memory too; its kernels compile slowly"
    )
    verify.add_argument("--n", type=int, metavar="INT", help="rows and keys (default: 1024)")
    verify.add_argument("--d", type=int, metavar="INT", help="head dimension (default: 64)")
    verify.add_argument("--dtype", choices=("fp32", "fp64", "fp16", "bf16"), help="default: fp32")
    verify.add_argument(
        "--method",
        choices=VERIFIED,
        metavar="NAME",
        action="append",
        help=f"{', '.join(VERIFIED)}; may be given several times (default: standard, fa1 and fa2)",
    )
    verify.add_argument(
        "--causal", action="store_true", default=None, help="key j is visible to rows i >= j"
    )
    verify.add_argument(
        "--grid", action="store_true", help="a dozen cases of all dtypes and masks instead of one"
    )

    trace = command("trace", run_trace, "time the phases of one shape; write a timeline of them")
    for flag, text, default in (
        ("--n", "rows and keys (default: 1024, on the simulator 64)", None),
        ("--d", "head dimension (default: 64)", 64),
        ("--heads", "query heads (default: 1)", 1),
        ("--batch", "batch size (default: 1)", 1),
        ("--capacity", "marks of a warp to write (default: all that memory holds)", None),
    ):
        trace.add_argument(flag, type=int, default=default, metavar="INT", help=text)
    trace.add_argument("--method", choices=("standard", "fa1", "fa2"), default="fa2")
    trace.add_argument("--dtype", choices=("fp32", "fp64", "fp16", "bf16"), default="fp32")
    trace.add_argument("--causal", action="store_true", help="key j is visible to rows i >= j")
    trace.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("trace.json"),
        help="Chrome trace to write, for ui.perfetto.dev (default: %(default)s)",
    )
    trace.add_argument(
        "--svg", metavar="FILE", type=Path, help="figure to write: some SMs of the longest kernel"
    )

    bench = command("bench", run_bench, "time the methods on one shape, beside torch if it is here")
    for flag, text, default in (
        ("--n", "rows and keys (default: 4096)", 4096),
        ("--d", "head dimension (default: 128)", 128),
        ("--heads", "query heads (default: 16)", 16),
        ("--batch", "batch size (default: 1)", 1),
        ("--rounds", "turns of each (default: 5)", 5),
    ):
        bench.add_argument(flag, type=int, default=default, metavar="INT", help=text)
    bench.add_argument(
        "--method",
        action="append",
        metavar="NAME",
        help="may be given several times (default: every method)",
    )
    bench.add_argument("--dtype", choices=("fp32", "fp64", "fp16", "bf16"), default="bf16")
    bench.add_argument("--causal", action="store_true", help="key j is visible to rows i >= j")

    command("example", run_example, "a small example, every inner step shown")
    command("doctor", run_doctor, "what this machine has, and what to do next")
    return parser


def _window(text: str) -> tuple[int, int]:
    try:
        left, right = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, accepted are two integers: LEFT,RIGHT"
        ) from None
    return left, right


# Output -------------------------------------------------------------------------------------------


def _consoles() -> tuple["Console", "Console"]:
    """For stdout and stderr; a pipe is as wide as the tables need."""
    from rich.console import Console

    def console(stream: Any) -> Console:
        return Console(file=stream, width=None if stream.isatty() else 140, highlight=False)

    return console(sys.stdout), console(sys.stderr)


def _print_json(rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    print(f"[\n{lines}\n]" if rows else "[]")


# Machine ------------------------------------------------------------------------------------------


def _choose_backend(errors: "Console") -> str:
    """Switch the simulator on if no GPU can be used, before Numba is imported; say which it is."""
    from fa2_numba import doctor

    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # small grids are meant here
    if "numba" not in sys.modules and not doctor.gpu_usable():
        setting = os.environ.get(SIMULATOR)
        if setting is None:
            os.environ[SIMULATOR] = "1"
            errors.print("no GPU: simulator")
        elif setting == "0":
            raise Refusal(
                f"{SIMULATOR}: got 0 where no GPU can be used, accepted are 1 and not set; "
                "fa2-numba doctor says why"
            )
    with _refusals():
        from fa2_numba.accounting.sweep import here

        return here()[0]


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Say what the API refuses as the user's error."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise Refusal(str(error)) from error


def _read(files: Sequence[str]) -> list["Inputs"]:
    from fa2_numba.accounting.inputs import InputError, read

    try:
        return read(files)
    except InputError as error:
        raise Refusal(str(error)) from error


# report -------------------------------------------------------------------------------------------


def run_report(arguments: argparse.Namespace) -> int:
    """Sweep, ask the hardware, write the folder; what is interrupted keeps its finished part."""
    out, errors = _consoles()
    inputs = _read(arguments.input) if arguments.input else None
    folder: Path = arguments.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"--output: {folder} cannot be made: {error.strerror}") from error
    _choose_backend(errors)

    from fa2_numba.accounting import report, tables, terminal
    from fa2_numba.accounting.proof import Proof
    from fa2_numba.accounting.sweep import start

    sweep = start(inputs)
    proof = Proof(sweep, arguments.ncu)
    _show_progress(sweep, proof, errors)
    if sweep.stopped:
        errors.print(
            f"{sweep.stopped} after {sweep.done} of {sweep.total} experiments: the report has those"
        )
    index = report.write(sweep, folder, proof)
    if arguments.json:
        _print_json([row.as_dict() for row in report.table(sweep, proof)])
    else:
        out.print(terminal.summary(sweep, tables.growth(sweep.table, sweep.plan.setting)))
        parts = sorted({e.input for e in sweep.exactness if " (" in e.input})
        for line in (*parts, *sweep.notes, *proof.lines()):
            out.print(line, soft_wrap=True)
        seconds = sweep.seconds + sum(proof.seconds.values())
        out.print(f"{_verdict(sweep)} {seconds:.0f} s. Report: {index}", soft_wrap=True)
    if sweep.stopped:
        return INTERRUPTED
    return OK if sweep.all_exact and sweep.all_equal and proof.all_equal else WRONG


def _show_progress(sweep: "Sweep", proof: "Proof", errors: "Console") -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with (
        _interrupt_on_terminate(),
        Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as bar,
    ):
        task = bar.add_task("", total=None)
        try:
            for label in sweep.run():
                bar.update(task, total=sweep.total, completed=sweep.done, description=label)
            for part in proof.run():
                bar.update(task, completed=sweep.total, description=part)
        except KeyboardInterrupt:
            sweep.stopped = "Interrupted"


@contextlib.contextmanager
def _interrupt_on_terminate() -> Iterator[None]:
    """Let SIGTERM (a job's time limit) end the sweep as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _verdict(sweep: "Sweep") -> str:
    rows = sum(c.rows for c in sweep.comparisons)
    wrong = sum(c.differences for c in sweep.comparisons)
    exact = sum(e.exact for e in sweep.exactness)
    return (
        f"{exact} of {len(sweep.exactness)} outputs exact, {rows - wrong:,} of {rows:,} counted "
        f"rows equal to their prediction, on {sweep.plan.machine}."
    )


# check --------------------------------------------------------------------------------------------


def run_check(arguments: argparse.Namespace) -> int:
    """Run methods on the user's arrays and compare outputs with the reference."""
    out, errors = _consoles()
    inputs = _read(arguments.file)
    backend = _choose_backend(errors)

    from fa2_numba.accounting import sweep, terminal

    limits = sweep.SIMULATED_PART if backend == "simulator" and not arguments.all else None
    problem = {"causal": arguments.causal, "window": arguments.window, "scale": arguments.scale}
    found, good = [], True
    for whole in inputs:
        part = sweep.cut(whole, limits)
        if part.part:
            errors.print(f"{part.name}: {part.part} only, --all for everything")
        data = sweep.real_data(part, problem)
        for method in _methods(arguments):
            run = _run(sweep.Experiment(method, data, None), errors)
            if run is not None:
                found.append(run.exactness)
                good &= run.exactness.exact
        if whole.out is not None:
            found.append(sweep.given_out(whole, problem))
    if arguments.json:
        _print_json([e.as_dict() for e in found])
    else:
        out.print(terminal.exactness(found))
        for e in found:
            if e.message:
                out.print(f"{e.method}, {e.input}: {e.message}", soft_wrap=True)
    return OK if good else WRONG


def _methods(arguments: argparse.Namespace) -> tuple[str, ...]:
    from fa2_numba.problem import PORTABLE

    return (arguments.method,) if arguments.method else PORTABLE


def _run(experiment: "Experiment", errors: "Console") -> Any:
    """The result of an experiment, or None with the reason on stderr."""
    from fa2_numba.accounting.sweep import obstacle

    reason = obstacle(experiment)
    if reason:
        errors.print(f"{experiment.label}: not run, {reason}")
        return None
    with _refusals():
        return experiment.run()


# io -----------------------------------------------------------------------------------------------


def run_io(arguments: argparse.Namespace) -> int:
    """Predict one shape, and count it if it can run here."""
    out, errors = _consoles()
    given = arguments
    backend = _choose_backend(errors)

    from fa2_numba.accounting import shapes, terminal
    from fa2_numba.traffic import differences

    with _refusals():
        shape = shapes.Shape(
            given.batch,
            given.heads,
            given.heads if given.heads_kv is None else given.heads_kv,
            given.n,
            given.n if given.n_k is None else given.n_k,
            given.d,
            given.dtype,
            given.causal,
            given.window,
        )
        tilings = {
            method: shapes.tiling_with(
                given.block_r, given.block_c, shapes.default_tiling(shape, method, backend)
            )
            for method in _methods(given)
        }
    rows, equal = [], True
    for method, tiling in tilings.items():
        predicted, counted = shape.predict(method, tiling), None
        reason = shape.obstacle(method, tiling)
        if not reason:
            counted, predicted = shape.count(method, tiling)
            equal &= not differences(counted, predicted)
        rows += [*predicted, *(counted or ())]
        if not given.json:
            title = f"{method}: {shape}, tiles {tiling.B_r} × {tiling.B_c}"
            out.print(terminal.traffic(title, predicted, counted))
            out.print(f"not counted: {reason}\n" if reason else "")
    if given.json:
        _print_json([row.as_dict() for row in rows])
    return OK if equal else WRONG


# verify -------------------------------------------------------------------------------------------


def run_verify(arguments: argparse.Namespace) -> int:
    """Count some cases, read the hardware's counters for them, and compare launch by launch."""
    out, errors = _consoles()
    from fa2_numba.accounting import hardware, verify

    try:
        hardware.require_gpu()
        ncu = hardware.find_ncu(arguments.ncu)
        _choose_backend(errors)
        with _refusals():
            cases = _cases(arguments)
            errors.print(f"{len(cases)} cases: counted here, then read by {ncu}", soft_wrap=True)
            found = verify.verify(cases, ncu=ncu, on_chip=arguments.on_chip)
    except hardware.HardwareError as error:
        raise Refusal(str(error)) from error
    if arguments.json:
        _print_json([row.as_dict() for row in found.rows])
    else:
        out.print(verify.table(found))
    for line in verify.summary(found):
        (errors if arguments.json else out).print(line, soft_wrap=True)
    return WRONG if found.differing else OK


def _cases(arguments: argparse.Namespace) -> list["Case"]:
    """What `verify` runs: the grid, or one shape."""
    from fa2_numba.accounting import shapes, verify
    from fa2_numba.accounting.hardware import Case
    from fa2_numba.problem import PORTABLE

    given = arguments
    methods = given.method or PORTABLE
    if given.grid:
        for name in ("n", "d", "dtype", "causal"):
            if getattr(given, name) is not None:
                raise Refusal(f"--grid: got it beside --{name}, accepted is --method alone")
        return verify.grid(methods)
    n, d = 1024 if given.n is None else given.n, 64 if given.d is None else given.d
    shape = shapes.Shape(1, 2, 2, n, n, d, given.dtype or "fp32", bool(given.causal))
    sizes = (shape.B, shape.H, shape.H_k, shape.N_q, shape.N_k, shape.d)
    return [Case(method, shape.dtype, *sizes, causal=shape.causal) for method in methods]


# trace --------------------------------------------------------------------------------------------


def run_trace(arguments: argparse.Namespace) -> int:
    """Time the phases of one shape, and write the timeline of a launch."""
    out, errors = _consoles()
    given = arguments
    for flag, path in (("--output", given.output), ("--svg", given.svg)):
        if path is not None and not path.absolute().parent.is_dir():
            raise Refusal(f"{flag}: got {path}, accepted is a file in a folder that exists")
    backend = _choose_backend(errors)

    from dataclasses import asdict

    from fa2_numba.accounting import hardware, shapes, timing

    n = given.n if given.n is not None else 64 if backend == "simulator" else 1024
    with _refusals():
        shape = shapes.Shape(
            given.batch, given.heads, given.heads, n, n, given.d, given.dtype, given.causal
        )
        reason = shape.obstacle(given.method, shapes.default_tiling(shape, given.method, backend))
        if reason:
            raise Refusal(f"--n: {reason}")
        sizes = (shape.B, shape.H, shape.H_k, shape.N_q, shape.N_k, shape.d)
        try:
            q, k, v = hardware.Case(given.method, shape.dtype, *sizes).arrays()
        except hardware.HardwareError as error:
            raise Refusal(str(error)) from error
        found = timing.time_phases(
            q,
            k,
            v,
            method=given.method,
            causal=given.causal,
            repeats=1 if backend == "simulator" else 20,
            capacity=given.capacity,
        )
    for warning in found.warnings:
        errors.print(f"warning: {warning}", soft_wrap=True)
    _write_timelines(found.timelines, given.output, given.svg, errors)
    if given.json:
        _print_json([asdict(row) for row in found.rows])
        return OK
    for table in timing.tables(found):
        out.print(table, "")
    if found.overhead:
        out.print(timing.summary(found.overhead), soft_wrap=True)
    written = " and ".join(str(path) for path in (given.output, given.svg) if path is not None)
    out.print(f"{given.method}: {shape}. Written: {written}", soft_wrap=True)
    return OK


def _write_timelines(
    timelines: Sequence["Timeline"], output: Path, svg: Path | None, errors: "Console"
) -> None:
    """Write the Chrome trace and, if asked for, the figure; say what they lack."""
    from fa2_numba.accounting import plots, trace

    dropped, made = sum(t.dropped for t in timelines), sum(int(t.count.sum()) for t in timelines)
    if dropped:
        errors.print(f"{dropped:,} of {made:,} marks did not fit the capacity: they are not shown")
    try:
        output.write_text(json.dumps(trace.chrome_trace(timelines)) + "\n")
        if svg is not None:
            longest = max(timelines, key=lambda t: int(t.cycles.sum()))
            plots.save_svg(trace.gantt(longest), svg)
    except OSError as error:
        raise Refusal(f"{error.filename}: cannot be written: {error.strerror}") from error


# bench --------------------------------------------------------------------------------------------


def run_bench(arguments: argparse.Namespace) -> int:
    """Time every method that this GPU runs on one shape, side by side."""
    out, errors = _consoles()
    given = arguments
    from fa2_numba import doctor

    if not doctor.gpu_usable():
        raise Refusal("no GPU can be used, and only a GPU can be timed; fa2-numba doctor says why")
    _choose_backend(errors)

    from fa2_numba.accounting import bench
    from fa2_numba.accounting.hardware import HardwareError

    cell = bench.Cell(given.batch, given.heads, given.n, given.d, given.causal, given.dtype)
    with _refusals():
        try:
            rows, refused = bench.compare(cell, given.method, given.rounds)
        except HardwareError as error:
            raise Refusal(str(error)) from error
    for reason in refused:
        errors.print(f"not timed: {reason}", soft_wrap=True)
    if given.json:
        _print_json(rows)
    else:
        out.print(str(cell), bench.table(rows), sep="\n", soft_wrap=True)
    return OK if rows else WRONG


# example ------------------------------------------------------------------------------------------


def run_example(arguments: argparse.Namespace) -> int:
    """The worked example by hand, then by the kernel, and how far they are apart."""
    out, errors = _consoles()
    _choose_backend(errors)

    from fa2_numba.accounting import example, terminal

    steps, rows = example.trace(), example.agreement()
    if arguments.json:
        _print_json([*map(terminal.step_row, steps), *(row.as_dict() for row in rows)])
    else:
        out.print(example.INTRODUCTION, soft_wrap=True)
        for step in steps:
            out.print(terminal.step(step), soft_wrap=True)
        out.print(terminal.exactness(rows))
    return OK if all(row.exact for row in rows) else WRONG


# doctor -------------------------------------------------------------------------------------------


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 1 if something has to be mended first."""
    from dataclasses import asdict

    from fa2_numba.doctor import diagnose

    found = diagnose()
    if arguments.json:
        _print_json([asdict(finding) for finding in found])
    else:
        from fa2_numba.accounting.diagnosis import findings

        _consoles()[0].print(findings(found))
    return WRONG if any(finding.status == "fail" for finding in found) else OK
