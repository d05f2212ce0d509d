"""One sweep of N at four memory levels, read from the GPU's counters.

``python -m benchmarks.levels`` writes ``benchmarks/results/<gpu>/levels.json``.

fp32, d = 64, the tiling that `attention` chooses. Issued bytes are predicted, and counted where
that is cheap; the other levels are what ncu reads, each kernel with empty caches; for DRAM the
model stands beside. The cases run in groups, the most important first. After each group the file is
written, and none starts once ``--seconds`` are over.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.environment import environment, results_folder, write_record
from fa2_numba import api
from fa2_numba.accounting import levels
from fa2_numba.accounting.hardware import HardwareError
from fa2_numba.accounting.sweep import lack_of_memory, random_qkv, to_device
from fa2_numba.io_model import predict
from fa2_numba.launch import shared_limit
from fa2_numba.problem import Problem
from fa2_numba.tiling import choose
from fa2_numba.traffic import Traffic, differences

D = 64
K = 1024
COUNTED_UP_TO = 4 * K  # one head; counting makes a kernel several times slower
SMALL_N = 512  # kernels and their occupancy do not depend on N: asked at this one


def powers(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first ... last."""
    return [first << n for n in range((last // first).bit_length())]


FULL, CAUSAL = False, True
# name: (method, causal, heads, sizes) of its cases
GROUPS: dict[str, list[tuple[str, bool, int, list[int]]]] = {
    "one head": [
        ("fa2", FULL, 1, powers(K, 128 * K)),
        ("fa2", CAUSAL, 1, powers(K, 128 * K)),
        ("standard", FULL, 1, powers(K, 8 * K)),
        ("fa1", FULL, 1, powers(K, 4 * K)),
    ],
    "one head, large N": [
        ("standard", FULL, 1, [16 * K, 32 * K]),
        ("fa2", FULL, 1, [256 * K, 512 * K]),
        ("fa2", CAUSAL, 1, [256 * K, 512 * K]),
        ("fa1", FULL, 1, [8 * K, 16 * K]),
    ],
    "eight heads": [
        ("fa2", FULL, 8, powers(K, 64 * K)),
        ("fa2", CAUSAL, 8, powers(K, 64 * K)),
        ("fa1", FULL, 8, powers(K, 16 * K)),
    ],
    # Between one wave and the N at which K and V exceed L2.
    "around the first wave": [("fa2", FULL, 1, [24 * K, 40 * K, 48 * K, 56 * K])],
}


def problems(group: str, max_n: int) -> Iterator[Problem]:
    """The problems of a group up to an N."""
    for method, causal, heads, sizes in GROUPS[group]:
        tiling = choose(D, "fp32", method, shared_limit(None))
        for N in sizes:
            if N <= max_n:
                yield levels.problem(method, causal, N, tiling, d=D, heads=heads)


def compiled(method: str, causal: bool, counted: bool) -> None:
    """Run a method's kernels on a small input, which puts them into the kernel cache."""
    small = levels.problem(method, causal, SMALL_N, choose(D, "fp32", method, shared_limit(None)))
    count(small) if counted else levels.launched(small)


def count(p: Problem) -> tuple[list[Traffic], list[Traffic]]:
    """Rows of one head counted on random data, and predicted for the addresses of that data."""
    q, k, v = (to_device(x) for x in random_qkv(p.N_q, p.d))
    causal = bool(p.columns()["causal"])
    m = api.measure(q, k, v, causal=causal, method=p.method, tiling=p.tiling)
    return m.rows, predict(m.problem)


def key(problem: Problem) -> tuple[str, bool, int, int]:
    """What tells the sweep's problems apart."""
    return problem.method, bool(problem.columns()["causal"]), problem.H, problem.N_q


class Sweep:
    """What has been measured so far, and where it is written."""

    def __init__(self, max_n: int, seconds: float):
        self.max_n, self.seconds, self.begin = max_n, seconds, time.monotonic()
        self.SMs, self.l2_bytes = levels.device()
        self.launches: dict[tuple[str, bool], list[Any]] = {}
        self.problems: dict[Any, Problem] = {}
        self.hardware: dict[Any, list[Any]] = {}
        self.counted: dict[Any, list[Any]] = {}
        self.notes: list[str] = []

    def kernels(self, problem: Problem) -> list[Any]:
        """The launches of a problem's kernels, made once a method and mask, at a small size."""
        kind = key(problem)[:2]
        if kind not in self.launches:
            small = levels.problem(*kind, SMALL_N, problem.tiling, d=problem.d)
            self.launches[kind] = levels.launched(small)
        return self.launches[kind]

    def point(self, name: Any, problem: Problem) -> dict[str, Any]:
        """All levels of a problem, beside the model."""
        kernels = self.kernels(problem)
        return levels.point(
            problem,
            self.hardware[name],
            levels.slots(kernels, self.SMs),
            self.l2_bytes,
            counted=name in self.counted,
            code=levels.code(kernels),
        )

    def run(self) -> Iterator[str]:
        """Measure group by group; before each, and after the last, say how far it is."""
        for group in (*GROUPS, "counted"):
            used = time.monotonic() - self.begin
            if used > self.seconds:
                self.notes.append(f"{group}: not run, {used:.0f} s were used")
                continue
            yield f"{group} ({used:.0f} s)"
            self._count() if group == "counted" else self._profile(group)
        yield f"done ({time.monotonic() - self.begin:.0f} s)"

    def _profile(self, group: str) -> None:
        found = []
        for p in problems(group, self.max_n):
            lack = lack_of_memory(p.method, (p.B, p.H, p.N_q), p.N_k, p.dtype)
            self.notes += [f"{key(p)}: not run, {lack}"] if lack else []
            found += [] if lack else [p]
        try:
            measured = levels.measure(found)
        except HardwareError as error:
            self.notes.append(f"{group}: {error}")
            return
        for p, rows in zip(found, measured, strict=True):
            self.problems[key(p)], self.hardware[key(p)] = p, rows

    def _count(self) -> None:
        """Count one head's small problems; a difference from the prediction ends the run."""
        for name, p in self.problems.items():
            if p.H == 1 and p.N_q <= COUNTED_UP_TO:
                self.counted[name], predicted = count(p)
                if differences(self.counted[name], predicted):
                    raise SystemExit(f"levels: counted rows of {name} differ from the predicted")

    def record(self, about: dict[str, Any]) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        points = [self.point(name, p) for name, p in self.problems.items()]
        traffic = [row.as_dict() for rows in self.hardware.values() for row in rows]
        traffic += [row.as_dict() for rows in self.counted.values() for row in rows]
        occupancy = [
            {"method": method, "causal": causal, **vars(launch)}
            for (method, causal), launches in self.launches.items()
            for launch in launches
        ]
        return {
            **about,
            "sms": self.SMs,
            "l2_bytes": self.l2_bytes,
            "cache_control": "all",
            "seconds": round(time.monotonic() - self.begin, 1),
            "notes": self.notes,
            "occupancy": occupancy,
            "fits": levels.fits(points),
            "points": points,
            "traffic": traffic,
        }


def main() -> None:
    """Measure, and write the JSON after each group."""
    from benchmarks.gpu_time import compile_ahead  # needs CuPy

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-n", type=int, default=512 * K, help="largest N")
    parser.add_argument("--seconds", type=float, default=90, help="no group starts after that")
    options = parser.parse_args()
    about = environment()
    target = results_folder(about["gpu"]) / "levels.json"
    kinds = {(method, causal) for cases in GROUPS.values() for method, causal, _, _ in cases}
    compile_ahead(
        compiled, [(*kind, counted) for kind in sorted(kinds) for counted in (False, True)]
    )
    sweep = Sweep(options.max_n, options.seconds)
    for said in sweep.run():
        if sweep.problems:
            write_record(sweep.record(about), target)
        print(said, flush=True)
    for note in sweep.notes:
        print(note)
    if not sweep.problems:
        raise SystemExit("levels: nothing was measured")
    for row in sweep.record(about)["points"]:
        print(
            f"{row['method']:9} {'causal' if row['causal'] else 'full':7} H={row['heads']} "
            f"N={row['n_q']:<7} DRAM / model {row['ratio']:.4f} "
            f"{'' if row['in_domain'] else '(outside its domain)'}"
        )
    print(f"wrote {target.name}")


if __name__ == "__main__":
    main()
