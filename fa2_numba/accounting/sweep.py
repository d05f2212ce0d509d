"""The experiments: every method over sizes and tilings, counted, predicted, and checked.

One `Sweep` collects everything; `Sweep.run` is a generator, so that the caller shows progress and
may stop between experiments: what is finished stays.
"""

import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa2_numba import masking
from fa2_numba.accounting.exactness import Exactness, Expected, sample_rows
from fa2_numba.accounting.inputs import DTYPES, Inputs, shipped
from fa2_numba.accounting.tables import Setting
from fa2_numba.io_model import predict
from fa2_numba.problem import ALLOCATION_ALIGNMENT, PORTABLE, Problem
from fa2_numba.tiling import Tiling, acc_bytes, choose
from fa2_numba.traffic import Traffic, differences

Array = NDArray[Any]

MILLION = 2**20
ROWS_CHECKED = 64  # of each head, where N is too large to check every row
CHECK_ALL_UP_TO = 2048
SIMULATED_PART = (2, 1, 48)  # batches, heads and tokens of a real input: about a second a method
SM_90_SHARED = 232_448  # bytes of shared memory that a block may ask for on an H100 or H200


@dataclass(frozen=True)
class Plan:
    """What a sweep does.

    Attributes
    ----------
    backend, machine : str
        "gpu" or "simulator"; the GPU's name, or what stands in for it.
    setting : Setting
        Of the counted points and of the curves through them.
    sizes : tuple of int
        The counted N.
    curve : tuple of int
        The predicted N, up to a million, with the same setting.
    other : Setting or None
        A second family of curves that is predicted only: a GPU's sizes, where none is here.
    bars_N : int
        N of the comparison by array, one of `sizes`.
    tile_N : int
        N of the tile sweep.
    tile_tilings : tuple of Tiling
        Its tilings: B_r varies at fixed B_c, B_c varies at fixed B_r.
    small_N : int
        N of the shared-memory table.
    timed : (heads, N)
        Of the timeline.
    level_sizes : tuple of int
        N at which the memory levels beyond L1 are read, where counters can be.
    limits : (batches, heads, tokens) or None
        What of the real input is run; None: all of it.
    """

    backend: str
    machine: str
    setting: Setting
    sizes: tuple[int, ...]
    curve: tuple[int, ...]
    other: Setting | None
    bars_N: int
    tile_N: int
    tile_tilings: tuple[Tiling, ...]
    small_N: int
    timed: tuple[int, int]
    level_sizes: tuple[int, ...]
    limits: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Comparison:
    """Counted against predicted rows of one run.

    Attributes
    ----------
    experiment : str
        What was run.
    method, mask, n_q, n_k, d, block_r, block_c
        As in the traffic table.
    rows : int
        (array, phase, op) rows in either.
    differences : int
        Rows in which elements, bytes, requests or sectors differ.
    counted_bytes, predicted_bytes : int
        Their sums.
    first : str
        The first row that differs, empty if none.
    """

    experiment: str
    method: str
    mask: str
    n_q: int
    n_k: int
    d: int
    block_r: int
    block_c: int
    rows: int
    differences: int
    counted_bytes: int
    predicted_bytes: int
    first: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Field to value."""
        return asdict(self)


@dataclass
class Sweep:
    """What has been found so far.

    Attributes
    ----------
    plan : Plan
    inputs : list of Inputs
        Real input for the exactness check.
    rows : dict
        The traffic table, by (key of the row, source).
    exactness : list of Exactness
    comparisons : list of Comparison
    notes : list of str
        What was left out, and why.
    done, total : int
        Experiments finished, experiments planned.
    stopped : str
        Why it ended early, empty if it did not.
    seconds : float
        How long `run` took.
    """

    plan: Plan
    inputs: list[Inputs]
    rows: dict[tuple[Any, str], Traffic] = field(default_factory=dict)
    exactness: list[Exactness] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    done: int = 0
    total: int = 0
    stopped: str = ""
    seconds: float = 0.0

    @property
    def table(self) -> list[Traffic]:
        """The tidy table."""
        return list(self.rows.values())

    @property
    def all_exact(self) -> bool:
        """Whether every checked output is within its tolerance."""
        return all(e.exact for e in self.exactness)

    @property
    def all_equal(self) -> bool:
        """Whether every counted row equals its prediction."""
        return not any(c.differences for c in self.comparisons)

    def run(self) -> Iterator[str]:
        """Do the experiments; before each, yield what it is."""
        begin = time.perf_counter()
        experiments = [*_growth(self.plan), *_tiles(self.plan), *_real(self.plan, self.inputs)]
        self.total = len(experiments)
        try:
            yield "predictions"
            self._add(predicted_rows(self.plan))
            for experiment in experiments:
                yield experiment.label
                self._one(experiment)
                self.done += 1
        finally:
            self.seconds += time.perf_counter() - begin

    def _add(self, rows: Sequence[Traffic], *, replace: bool = False) -> None:
        for row in rows:
            if replace or (row.key, row.source) not in self.rows:
                self.rows[row.key, row.source] = row

    def _one(self, experiment: "Experiment") -> None:
        reason = obstacle(experiment)
        if reason:
            self.notes.append(f"{experiment.label}: not run, {reason}")
            return
        run = experiment.run()
        self.comparisons.append(run.comparison)
        self.exactness.append(run.exactness)
        # Predictions for the very addresses of this run take the place of those for aligned arrays.
        # Two runs may differ in addresses alone: the first one's rows stand for both.
        if run.counted and (run.counted[0].key, "counted") not in self.rows:
            self._add(run.counted)
            self._add(run.predicted, replace=True)


# What is planned ----------------------------------------------------------------------------------


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(first.bit_length() - 1, last.bit_length()))


def _curve(first: int) -> tuple[int, ...]:
    """Powers of two up to a million; below 64 times the first also what is midway between them."""
    powers = _powers(first, MILLION)
    return tuple(sorted({*powers, *(n * 3 // 2 for n in powers if n < 64 * first)}))


def plan(backend: str, machine: str) -> Plan:
    """The plan for this kind of machine.

    The simulator counts tiny problems, in seconds; the same kernels' closed forms carry the curves
    on. The GPU counts each point up to N = 32,768.
    """
    if backend == "gpu":
        setting = Setting(64, _default_tiling(64, backend))
        return Plan(
            backend,
            machine,
            setting,
            sizes=_powers(512, 32_768),
            curve=_curve(512),
            other=None,
            bars_N=16_384,
            tile_N=4096,
            tile_tilings=(
                *(Tiling(B_r, 32, 8, 32) for B_r in (8, 16, 32, 64)),
                *(Tiling(32, B_c, 8, 32) for B_c in (64, 96)),
            ),
            small_N=512,
            timed=(32, 1024),
            level_sizes=(1024, 4096, 16_384, 32_768),
        )
    return Plan(
        backend,
        machine,
        Setting(16, Tiling(8, 8, 4, 8)),
        sizes=(8, 16, 24, 32, 48, 64),
        curve=_curve(8),
        other=Setting(64, _default_tiling(64, backend)),
        bars_N=64,
        tile_N=32,
        tile_tilings=(
            *(Tiling(B_r, 8, 4, 8) for B_r in (4, 8, 16, 32)),
            *(Tiling(8, B_c, 4, 8) for B_c in (16, 32)),
        ),
        small_N=32,
        timed=(1, 32),
        level_sizes=(),
        limits=SIMULATED_PART,
    )


def _default_tiling(d: int, backend: str) -> Tiling:
    """One tiling for all methods: what `attention` would choose for fa1, which needs most memory.

    Without a GPU, what it would choose on an H100 or H200.
    """
    limit = SM_90_SHARED
    if backend == "gpu":
        from fa2_numba.launch import shared_limit

        limit = shared_limit(None)
    return choose(d, "fp32", "fa1", limit)


def here() -> tuple[str, str]:
    """(backend, machine) of this process."""
    from fa2_numba.api import backend
    from fa2_numba.doctor import probe

    kind = backend()
    if kind == "gpu":
        gpus = probe(import_numba=False).gpus
        return kind, gpus[0].name if gpus else "CUDA GPU"
    return kind, f"the simulator ({platform.system()} {platform.machine()})"


# Predictions --------------------------------------------------------------------------------------


def mask_of(causal: bool | str) -> masking.Mask:
    """The mask of a causal argument."""
    if causal == "skip":
        return masking.causal_skip()
    return masking.causal() if causal else masking.none()


def problem(method: str, causal: bool | str, N: int, setting: Setting) -> Problem:
    """One head of contiguous, aligned arrays."""
    d, dtype, tiling = setting.d, setting.dtype, setting.tiling
    return Problem(method, dtype, 1, 1, 1, N, N, d, tiling, mask_of(causal))


def predicted_rows(plan: Plan) -> list[Traffic]:
    """Every curve of the plan."""
    rows = []
    for method in PORTABLE:
        for causal in (False, True):
            for N in plan.curve:
                rows += predict(problem(method, causal, N, plan.setting))
            if plan.other:
                for N in _curve(512):
                    rows += predict(problem(method, causal, N, plan.other))
    for tiling in plan.tile_tilings:
        setting = replace(plan.setting, tiling=tiling)
        rows += predict(problem("fa2", False, plan.tile_N, setting))
    return rows


# Experiments --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The result of one experiment."""

    counted: list[Traffic]
    predicted: list[Traffic]
    comparison: Comparison
    exactness: Exactness


@dataclass(eq=False)
class Data:
    """q, k, v of an experiment on the host, and the reference's results for them.

    Experiments that differ in method or tiling alone share one, so that the reference runs once.
    """

    name: str
    q: Array
    k: Array
    v: Array
    problem: dict[str, Any]
    rows: Array | None = None
    _expected: Expected | None = None

    @property
    def expected(self) -> Expected:
        """The reference's results, computed at the first use."""
        if self._expected is None:
            known = dict(self.problem, causal=bool(self.problem.get("causal")))
            self._expected = Expected(self.q, self.k, self.v, self.rows, **known)
        return self._expected


@dataclass(frozen=True, eq=False)
class Experiment:
    """One method, run once on one input."""

    method: str
    data: Data
    tiling: Tiling | None

    @property
    def label(self) -> str:
        """A few words for the progress bar."""
        causal = self.data.problem.get("causal")
        mask = {False: "", True: " causal", "skip": " causal (skip)"}[causal or False]
        tiles = f", {self.tiling.B_r} × {self.tiling.B_c}" if self.tiling else ""
        return f"{self.method}{mask}, N = {self.data.q.shape[-2]}{tiles}, {self.data.name}"

    def run(self) -> Run:
        """Count, predict, compare."""
        from fa2_numba import api
        from fa2_numba.arrays import to_host

        data = self.data
        arguments = dict(data.problem, method=self.method, tiling=self.tiling)
        if data.problem.get("mask") is not None:
            arguments["mask"] = to_device(data.problem["mask"])
        m = api.measure(*(to_device(x) for x in (data.q, data.k, data.v)), **arguments)
        predicted = predict(m.problem)
        columns = m.problem.columns()
        exactness = data.expected.compare(to_host(m.out), to_host(m.lse), data.name, columns)
        return Run(m.rows, predicted, compare(data.name, columns, m.rows, predicted), exactness)


def compare(
    experiment: str, columns: dict[str, Any], counted: list[Traffic], predicted: list[Traffic]
) -> Comparison:
    """Counted against predicted rows of one problem with these columns."""
    pairs = differences(counted, predicted)
    kept = {n: columns[n] for n in Comparison.__dataclass_fields__ if n in columns}
    first = ""
    if pairs:
        a, b = pairs[0]
        first = f"{a.array} {a.phase} {a.op}: counted {a.numbers}, predicted {b.numbers}"
    return Comparison(
        experiment,
        **kept,
        rows=len({r.key for r in (*counted, *predicted)}),
        differences=len(pairs),
        counted_bytes=sum(r.bytes for r in counted),
        predicted_bytes=sum(r.bytes for r in predicted),
        first=first,
    )


def to_device(array: Array) -> Any:
    """A copy where kernels can read it, at an address that is as aligned as a GPU allocation's."""
    from fa2_numba.api import backend

    if backend() == "simulator":
        return _aligned(array)
    try:
        import cupy
    except ImportError:
        from numba import cuda

        return cuda.to_device(np.ascontiguousarray(array))
    return cupy.asarray(array)


def _aligned(array: Array) -> Array:
    raw = np.empty(array.nbytes + ALLOCATION_ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALLOCATION_ALIGNMENT
    copy = raw[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def obstacle(experiment: Experiment) -> str:
    """Why an experiment cannot run here, empty if it can."""
    q, k = experiment.data.q, experiment.data.k
    return lack_of_memory(experiment.method, q.shape[:3], k.shape[-2], DTYPES[q.dtype])


def lack_of_memory(method: str, rows: tuple[int, ...], N_k: int, dtype: str) -> str:
    """Why S and P do not fit the GPU, empty if they do or are not needed.

    `rows` is (B, H, N_q).
    """
    from fa2_numba.api import backend

    if backend() == "simulator" or method != "standard":
        return ""
    from numba import cuda

    need = 2 * math.prod(rows) * N_k * acc_bytes(dtype)
    free_pooled_memory()
    free = int(cuda.current_context().get_memory_info()[0])
    if need <= 0.9 * free:
        return ""
    return f"S and P need {need / 2**30:.1f} GiB of GPU memory and {free / 2**30:.1f} are free"


def free_pooled_memory() -> None:
    """Give back what CuPy keeps in a pool: freed memory that the driver counts as used."""
    try:
        import cupy
    except ImportError:
        return
    cupy.get_default_memory_pool().free_all_blocks()


def random_qkv(
    N: int, d: int, dtype: Any = np.float32, seed: int = 0
) -> tuple[Array, Array, Array]:
    """Normal q, k, v of shape (1, 1, N, d); v has mean 1, so that the output is not near 0."""
    rng = np.random.default_rng([seed, N, d])
    q, k, v = rng.standard_normal((3, 1, 1, N, d))
    return q.astype(dtype), k.astype(dtype), (v + 1).astype(dtype)


def _random_data(N: int, d: int, causal: bool | str) -> Data:
    rows = sample_rows(N, ROWS_CHECKED) if N > CHECK_ALL_UP_TO else None
    q, k, v = random_qkv(N, d)
    return Data("random", q, k, v, {"causal": causal}, rows)


def _growth(plan: Plan) -> Iterator[Experiment]:
    """Every method, full and causal, at each counted N; at one N also the skipping loop."""
    for N in plan.sizes:
        for causal in (False, True):
            data = _random_data(N, plan.setting.d, causal)
            for method in PORTABLE:
                yield Experiment(method, data, plan.setting.tiling)
    data = _random_data(plan.tile_N, plan.setting.d, "skip")
    yield Experiment("fa2", data, plan.setting.tiling)


def _tiles(plan: Plan) -> Iterator[Experiment]:
    """FlashAttention-2 at one N over tilings."""
    data = _random_data(plan.tile_N, plan.setting.d, False)
    for tiling in plan.tile_tilings:
        if tiling != plan.setting.tiling or plan.tile_N not in plan.sizes:
            yield Experiment("fa2", data, tiling)


def _real(plan: Plan, inputs: list[Inputs]) -> Iterator[Experiment]:
    """Every method on each real input, with its mask."""
    for whole in inputs:
        data = real_data(cut(whole, plan.limits), {})
        for method in PORTABLE:
            yield Experiment(method, data, None)


def real_data(x: Inputs, problem: dict[str, Any]) -> Data:
    """An input as the data of experiments; `problem` is what the call has beyond its mask."""
    x = x.four_dimensions()
    name = f"{x.name} ({x.part})" if x.part else x.name
    N_q = x.q.shape[2]
    rows = sample_rows(N_q, ROWS_CHECKED) if N_q > CHECK_ALL_UP_TO else None
    return Data(name, x.q, x.k, x.v, {**problem, "mask": x.mask}, rows)


def cut(x: Inputs, limits: tuple[int, int, int] | None) -> Inputs:
    """The part of an input that the simulator can run in seconds; all of it without limits.

    Tokens are taken from where the first padding begins, half before it and half after, so that the
    part has masked keys where the whole has. The head is the one with the largest scores.
    """
    x = x.four_dimensions()
    if limits is None or 0 in (*x.q.shape, *x.k.shape):
        return x
    batches, heads, tokens = limits
    first = 0
    if x.mask is not None and not x.mask.all() and x.q.shape[2] == x.k.shape[2]:
        hidden = np.flatnonzero(~x.mask.reshape(-1, x.mask.shape[-1]).all(axis=0))
        first = int(np.clip(hidden[0] - tokens // 2, 0, max(x.k.shape[2] - tokens, 0)))
    return x.cut(batches, heads, tokens, first=first, head=hardest_head(x))


def hardest_head(x: Inputs) -> int:
    """The query head whose scores may be the largest, by the norms of its rows and keys."""
    q, k = (np.linalg.norm(a.astype(np.float64), axis=-1).max(axis=(0, 2)) for a in (x.q, x.k))
    return int((q * np.repeat(k, len(q) // len(k))).argmax())


def given_out(x: Inputs, problem: dict[str, Any]) -> Exactness:
    """The output that an input brings, judged like a method's, on a sample of its rows."""
    x = x.four_dimensions()
    assert x.out is not None
    (B, H, N_q, d), (H_k, N_k) = x.q.shape, x.k.shape[1:3]
    rows = sample_rows(N_q, ROWS_CHECKED) if N_q > 4 * ROWS_CHECKED else None
    expected = Expected(x.q, x.k, x.v, rows, **problem, mask=x.mask)
    columns = {
        "method": "out of the file",
        "dtype": DTYPES[x.q.dtype],
        "batch": B,
        "heads": H,
        "heads_kv": H_k,
        "n_q": N_q,
        "n_k": N_k,
        "d": d,
        "causal": bool(problem.get("causal")),
        "mask": "boolean" if x.mask is not None else "none",
        "block_r": 0,
        "block_c": 0,
    }
    return expected.compare(x.out.astype(x.q.dtype), None, x.name, columns)


def start(inputs: list[Inputs] | None = None) -> Sweep:
    """A sweep for this machine, not yet run; real input is the shipped one unless given."""
    return Sweep(plan(*here()), shipped() if inputs is None else inputs)
