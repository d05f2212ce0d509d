"""What stands beside a sweep's counts: the GPU's counters, shared memory, and where the cycles go.

A `Proof` takes the setting of its sweep, so that most of its kernels are compiled already. What
cannot be read here says why; a part that fails stops neither the others nor the report.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from fa2_numba import api
from fa2_numba.accounting import hardware, levels, timing, verify
from fa2_numba.accounting.hardware import Case, HardwareError
from fa2_numba.accounting.launches import in_processes
from fa2_numba.accounting.plots import length
from fa2_numba.accounting.sweep import Sweep, free_pooled_memory
from fa2_numba.accounting.timing import PhaseTable
from fa2_numba.accounting.verify import Verification
from fa2_numba.problem import PORTABLE
from fa2_numba.traffic import SharedTraffic, Traffic

COMPILING, SHARED, PHASES, COUNTERS, LEVELS = PARTS = (
    "compiling",
    "shared memory",
    "phases",
    "hardware counters",
    "memory levels",
)


@dataclass
class Proof:
    """What has been found so far; None and empty is what has not.

    Attributes
    ----------
    sweep : Sweep
        What it stands beside.
    ncu : str, optional
        Path of ncu; default: it is searched.
    shared : list of SharedTraffic
        What fa2 moves between shared memory and registers, by tile, counted.
    phases : PhaseTable or None
        Phases of fa2, with the timelines of one launch.
    ncu_version : str
    verification : Verification or None
        Of the launches of `cases`.
    points : list of dict
        `levels.point` of fa2 at some N.
    rows : list of Traffic
        The traffic rows behind them, source "hardware".
    missing : dict
        Part, one of `PARTS`, to the reason why it found nothing.
    seconds : dict
        Part to how long it took.
    """

    sweep: Sweep
    ncu: str | None = None
    shared: list[SharedTraffic] = field(default_factory=list)
    phases: PhaseTable | None = None
    ncu_version: str = ""
    verification: Verification | None = None
    points: list[levels.Row] = field(default_factory=list)
    rows: list[Traffic] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def all_equal(self) -> bool:
        """Whether the hardware saw what was counted, as far as that could be compared."""
        return self.verification is None or not self.verification.differing

    def run(self) -> Iterator[str]:
        """Do the parts; before each, yield which it is."""
        parts = (self._compile, self._count_shared, self._time, self._verify, self._read_levels)
        for name, part in zip(PARTS, parts, strict=True):
            yield name
            begin = time.perf_counter()
            try:
                part()
            except Exception as error:  # whatever happens, what the sweep has found is written
                kind = "" if isinstance(error, HardwareError) else f"{type(error).__name__}: "
                self.missing[name] = " ".join(f"{kind}{error}".split())
            self.seconds[name] = time.perf_counter() - begin

    # What is run ---------------------------------------------------------------------------------

    def case(self, N: int, heads: int = 1) -> Case:
        """Full fa2 in the sweep's setting."""
        s = self.sweep.plan.setting
        return Case("fa2", s.dtype, 1, heads, heads, N, N, s.d, tiling=self._tiling)

    @cached_property
    def cases(self) -> list[Case]:
        """Of `verify.grid` those whose counting kernels the sweep has compiled."""
        s = self.sweep.plan.setting
        return [
            replace(case, tiling=self._tiling)
            for case in verify.grid(PORTABLE)
            if (case.dtype, case.d, case.mask, case.window) == (s.dtype, s.d, "", None)
        ]

    @property
    def _tiling(self) -> tuple[int, int, int, int]:
        t = self.sweep.plan.setting.tiling
        return t.B_r, t.B_c, t.n_r, t.n_c

    def _timed(self) -> Case:
        heads, N = self.sweep.plan.timed
        return self.case(N, heads)

    # The parts -----------------------------------------------------------------------------------

    def _compile(self) -> None:
        plan = self.sweep.plan
        if plan.backend == "simulator":
            return
        free_pooled_memory()  # other processes need some
        jobs = [("counted on chip", self.case(plan.small_N))]
        jobs += [(how, self._timed()) for how in ("timed", "timed and kept", "plain")]
        with contextlib.suppress(HardwareError):  # it is said where counters are to be read
            hardware.find_ncu(self.ncu)
            jobs += [("plain", case) for case in self.cases]
        for error in compile_ahead(jobs):
            raise error

    def _count_shared(self) -> None:
        case = self.case(self.sweep.plan.small_N)
        self.shared = api.measure(*case.arrays(), **case.options(), on_chip=True).on_chip

    def _time(self) -> None:
        case = self._timed()
        repeats = 1 if self.sweep.plan.backend == "simulator" else 20
        self.phases = timing.time_phases(*case.arrays(), **case.options(), repeats=repeats)

    def _verify(self) -> None:
        hardware.require_gpu()
        ncu = hardware.find_ncu(self.ncu)
        self.ncu_version = hardware.version(ncu)
        self.verification = verify.verify(self.cases, ncu=ncu)

    def _read_levels(self) -> None:
        hardware.require_gpu()
        plan, s = self.sweep.plan, self.sweep.plan.setting
        problems = [levels.problem("fa2", False, N, s.tiling, d=s.d) for N in plan.level_sizes]
        cases = [levels.case_of(p) for p in problems]
        launches = hardware.profile(cases, levels.METRICS, ncu=self.ncu)
        (SMs, l2_bytes), kernels = levels.device(), levels.launched(problems[0])
        slots, code = levels.slots(kernels, SMs), levels.code(kernels)
        for n, p in enumerate(problems):
            rows = levels.hardware_rows(p, [each for each in launches if each["case"] == n])
            counted = self._was_counted(p.N_q)
            self.points.append(levels.point(p, rows, slots, l2_bytes, counted, code))
            self.rows += rows

    def _was_counted(self, N: int) -> bool:
        """Whether the sweep counted full fa2 at N, equal to its prediction."""
        t = self.sweep.plan.setting.tiling
        wanted = ("random", "fa2", "none", N, t.B_r, t.B_c, 0)
        return any(
            (c.experiment, c.method, c.mask, c.n_q, c.block_r, c.block_c, c.differences) == wanted
            for c in self.sweep.comparisons
        )

    # What is told --------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """What was found, and what was not and why, in sentences."""
        said = verify.summary(self.verification) if self.verification else []
        if self.points:
            ratios = (f"{p['ratio']:.3f} at N = {length(p['n_q'])}" for p in self.points)
            said.append(f"DRAM loads of fa2, measured over modelled: {', '.join(ratios)}.")
        if self.phases and not self.phases.emulated:
            said += [f"Phases: {warning}." for warning in self.phases.warnings]
        reasons: dict[str, list[str]] = {}
        for part, reason in self.missing.items():
            reasons.setdefault(reason, []).append(part)
        said += [f"{', '.join(parts).capitalize()}: {why}." for why, parts in reasons.items()]
        return said

    def as_dict(self) -> dict[str, Any]:
        """Everything but the rows of table and verification, as JSON takes it."""
        found = self.verification
        return {
            "ncu": self.ncu_version,
            "verified": {
                "launches": found.launches,
                "numbers": sum(row.exact for row in found.rows),
                "differences": len(found.differing),
                "not_compared": [f"{c.quantity} ({c.op})" for c in found.unread],
            }
            if found
            else None,
            "levels": self.points,
            "shared": [asdict(row) for row in self.shared],
            "phases": self.phases.as_dict() if self.phases else None,
            "missing": self.missing,
            "seconds": {part: round(s, 2) for part, s in self.seconds.items()},
        }


_RUNS: dict[str, Any] = {
    "plain": api.attention,
    "counted on chip": partial(api.measure, on_chip=True),
    "timed": api.trace,
    "timed and kept": partial(api.trace, capacity=1),
}


def _run(how: str, case: Case) -> None:
    _RUNS[how](*case.arrays(), **case.options())


def compile_ahead(jobs: Sequence[tuple[str, Case]]) -> list[BaseException]:
    """Run each job in another process, many at a time, so that its kernels are in the kernel cache.

    Returns
    -------
    list of exception
        Of the jobs that failed; they fail again where they are needed.
    """
    return [error for call in in_processes(_run, jobs) if (error := call.exception())]
