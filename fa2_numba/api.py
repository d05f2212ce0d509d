"""attention, measure, predict: check the arguments, choose method and tiling, launch.

Everything after q, k and v is keyword-only. Semantics are the ones of ``docs/contract.md``: causal
is bottom-right aligned, windows include both ends, a row that sees no key gives 0 and LSE -inf.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa2_numba import arrays, io_model, masking, plan, problem, simulator, tensor_map
from fa2_numba.clock import Timeline
from fa2_numba.kernels import fa1, fa2, fa3, standard, tile_map
from fa2_numba.launch import (
    Operands,
    compute_capability,
    gpu_available,
    on_device,
    shared_limit,
)
from fa2_numba.problem import Layout, Problem, acc_type
from fa2_numba.tiling import (
    BOX_COLUMNS,
    DTYPE_BYTES,
    HOPPER_SHARED_BYTES,
    MAX_HEAD_DIM,
    WARPGROUP_ROWS,
    Tiling,
    acc_bytes,
    ceil_div,
    choose,
    choose_hopper,
)
from fa2_numba.traffic import SharedTraffic, Traffic

METHODS: dict[str, Callable[[Problem, Operands], None]] = {
    "standard": standard.launch,
    "fa1": fa1.launch,
    "fa2": fa2.launch,
    "fa3": fa3.launch,
}
PORTABLE = {name: METHODS[name] for name in problem.PORTABLE}  # for every GPU and the simulator
FLOATS = ("float32", "float64", "float16", "bfloat16")
FLOAT32_MAX = float(np.finfo(np.float32).max)
SIMULATED_TILING = Tiling(16, 16, 4, 8)  # one warp a block: the simulator runs it fastest


def backend() -> str:
    """Where kernels run in this process: "gpu" or "simulator"."""
    return "simulator" if simulator.ACTIVE else "gpu"


@dataclass(frozen=True)
class Measurement:
    """What `measure` returns.

    Attributes
    ----------
    out, lse : array
        As `attention` returns them.
    rows : list of Traffic
        What the kernels that computed them moved, counted.
    problem : Problem
        The call, for `io_model.predict`.
    on_chip : list of SharedTraffic
        What they moved between shared memory and registers, if that was asked for.
    """

    out: Any
    lse: Any
    rows: list[Traffic]
    problem: Problem
    on_chip: list[SharedTraffic]


@dataclass(frozen=True)
class Trace:
    """What `trace` returns.

    Attributes
    ----------
    out, lse : array
        As `attention` returns them.
    timelines : list of clock.Timeline
        Phases of each timed kernel, in the order of their launch.
    problem : Problem
        The call.
    """

    out: Any
    lse: Any
    timelines: list[Timeline]
    problem: Problem


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    mask: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score: masking.Score | None = None,
    scale: float | None = None,
    method: str = "auto",
    tiling: Tiling | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """softmax(scale Q K^T) V, exactly.

    Parameters
    ----------
    q : array, (N_q, d), (H, N_q, d) or (B, H, N_q, d)
        Queries. fp32, fp64, fp16 or bf16; any strides. CuPy, torch (autograd: adapters) or Numba
        arrays, or others with ``__cuda_array_interface__`` or DLPack, on one GPU. Kernels run on
        that device, on CuPy's or torch's current stream, else on the default stream. Under the
        simulator, NumPy arrays.
    k, v : array, (N_k, d), (H_k, N_k, d) or (B, H_k, N_k, d)
        Keys and values, as `q`. H is a multiple of H_k; query head h reads head h // (H // H_k).
    causal : bool, "bound" or "skip"
        Key j is visible to row i iff ``j <= i + N_k - N_q``. The loop over key tiles ends at the
        diagonal ("bound", as True), or visits every tile and skips the empty ones ("skip").
    window : (left, right), optional
        Row i sees keys ``i + N_k - N_q - left .. i + N_k - N_q + right``; -1 is unbounded.
    mask : boolean array or masking.Mask, optional
        True is visible; broadcasts to (..., N_q, N_k). Combined with `causal` and `window` by and.
        A NumPy array is copied to the GPU.
    softcap : float, optional
        Scores become ``softcap * tanh(s / softcap)``, before ALiBi and mask.
    alibi_slopes : array (H,) or (B, H), optional
        ``-slope * |i + N_k - N_q - j|`` is added to the scores. Slopes on a GPU are copied to the
        host first.
    score : masking.Score, optional
        A change of your own, after the others.
    scale : float, optional
        Default ``1 / sqrt(d)``.
    method : str
        "standard", "fa1", "fa2", "fa3", or "auto": "fa3" where it can do the call, else "fa2".
        "fa3" takes fp16 and bf16 on GPUs of compute capability 9.0; arrays whose address and
        strides are multiples of 16 bytes, the last axis contiguous; masks and score changes
        without arrays of their own (no boolean array, no documents, no ALiBi).
    tiling : Tiling, optional
        Default: `tiling.choose` for this device; under the simulator a small fixed one.
    return_lse : bool
        Also return the natural-log LSE of each row.
    out : array, optional
        Where to write the output: q's shape, dtype and kind; its memory range must not overlap
        the inputs'.

    Returns
    -------
    out : array, q's shape, dtype and kind
    lse : array, q's shape without d; fp32 (fp64 for fp64 inputs)
        Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        Before any launch; the message names the argument, what was given and what is accepted.
    """
    given = (q, k, v) if out is None else (q, k, v, out)
    key = done = None
    if mask is None and alibi_slopes is None and score is None:
        key, done = plan.replay(given, (causal, window, softcap, scale, method, tiling))
    if done is None:
        call = _Call(q, k, v, method=method, tiling=tiling, scale=scale, out=out)
        call.change(causal, window, mask, softcap, alibi_slopes, score)
        ran = call.run()
        done = call.out, call.lse
        if key is not None:
            plan.record(key, "QKVO"[: len(given)], {"O": call.out, "L": call.lse}, ran)
    return done if return_lse else done[0]


def measure(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    mask: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score: masking.Score | None = None,
    scale: float | None = None,
    method: str = "auto",
    tiling: Tiling | None = None,
    out: Any = None,
    on_chip: bool = False,
) -> Measurement:
    """Run `attention` with counting kernels.

    The other parameters are those of `attention`. The kernels are the same source, compiled for
    counted arrays; the result is bit for bit the same.

    Parameters
    ----------
    on_chip : bool
        Count shared memory as well; "auto" is then "fa2", as fa3 does not count it.

    Returns
    -------
    Measurement
        Output, LSE and the traffic rows, source "counted".
    """
    method = _with_marks(method, "on_chip") if on_chip else method
    call = _Call(q, k, v, method=method, tiling=tiling, scale=scale, out=out)
    call.change(causal, window, mask, softcap, alibi_slopes, score)
    ran = call.run(counted=True, on_chip=on_chip)
    with on_device(call.like.device):
        return Measurement(call.out, call.lse, ran.rows(), ran.problem, ran.on_chip_rows())


def trace(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    mask: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score: masking.Score | None = None,
    scale: float | None = None,
    method: str = "auto",
    tiling: Tiling | None = None,
    out: Any = None,
    capacity: int = 0,
) -> Trace:
    """Run `attention` with kernels that time their phases.

    The other parameters are those of `attention`. The kernels are the same source, compiled with a
    clock; the result is bit for bit the same. One launch, and the clock of an idle GPU is low: warm
    up first, repeat, and compare with the plain kernel (`accounting.timing` does all three).

    Parameters
    ----------
    method : str
        "auto" is "fa2": fa3 has no marks.
    capacity : int
        How many marks of each warp to keep for a timeline; 0 for sums alone.

    Returns
    -------
    Trace
        Output, LSE and a `clock.Timeline` for each kernel. Under the simulator its cycles are
        emulated steps and measure no time.
    """
    if _size("capacity", capacity) < 0:
        raise ValueError(f"capacity: got {capacity}, accepted: 0 or more")
    method = _with_marks(method, "trace")
    call = _Call(q, k, v, method=method, tiling=tiling, scale=scale, out=out)
    call.change(causal, window, mask, softcap, alibi_slopes, score)
    ran = call.run(timed=True, capacity=capacity)
    with on_device(call.like.device):
        return Trace(call.out, call.lse, ran.timelines(), ran.problem)


def predict(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    shape: tuple[int, ...] | None = None,
    heads_kv: int | None = None,
    n_k: int | None = None,
    dtype: str | None = None,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    mask: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score: masking.Score | None = None,
    method: str = "auto",
    tiling: Tiling | None = None,
) -> list[Traffic]:
    """The rows that `measure` would return (without `out`), without running anything.

    Parameters
    ----------
    q, k, v : array, optional
        As for `attention`; or give `shape`.
    shape : tuple, optional
        q's shape: (N_q, d), (H, N_q, d) or (B, H, N_q, d). Arrays are taken as contiguous and
        aligned.
    heads_kv, n_k : int, optional
        Key/value heads and keys; default as q.
    dtype : str, optional
        "fp32" (default), "fp64", "fp16" or "bf16". It, `heads_kv` and `n_k` go with `shape`.
        Without a GPU, "auto" for fp16 and bf16 is what it is on a Hopper GPU.

    Returns
    -------
    list of Traffic
        Source "predicted".

    Raises
    ------
    TypeError, ValueError
        As `attention`; or neither or both of arrays and `shape`.
    """
    given = [x is not None for x in (q, k, v)]
    if any(given) == (shape is not None) or any(given) != all(given):
        raise ValueError("predict: give q, k and v, or shape")
    call: _Call | _Shape
    for name, value in (("heads_kv", heads_kv), ("n_k", n_k), ("dtype", dtype)):
        if shape is None and value is not None:
            raise ValueError(f"{name}: got {value!r} beside arrays, accepted: only with shape")
    if shape is None:
        call = _Call(q, k, v, method=method, tiling=tiling, scale=None, out=None)
    else:
        call = _Shape(shape, heads_kv, n_k, dtype or "fp32", method, tiling)
    call.change(causal, window, mask, softcap, alibi_slopes, score)
    return io_model.predict(call.problem())


def _with_marks(method: str, what: str) -> str:
    """The method whose kernels can time themselves and count shared memory, as `what` asks."""
    if method == "fa3":
        raise NotImplementedError(f"method: {what} with fa3, accepted: auto, standard, fa1, fa2")
    return "fa2" if method == "auto" else method


# ---- one call ---------------------------------------------------------------------------------


ARGUMENTS = {"Q": "q", "K": "k", "V": "v", "dO": "dout"}  # as errors name them


class _Shape:
    """Sizes, method and tiling of a call, checked."""

    heads_argument = "heads_kv"  # the argument that gives the key/value heads
    methods = tuple(METHODS)  # that may be asked for, besides "auto"
    hopper = "fa3"  # what "fa3" is called in full

    def __init__(
        self,
        shape: tuple[int, ...],
        heads_kv: int | None,
        n_k: int | None,
        dtype: str,
        method: str,
        tiling: Tiling | None,
        device: int | None = None,
    ):
        sizes = [int(n) for n in shape if isinstance(n, int | np.integer) and n >= 0]
        if not 2 <= len(sizes) == len(shape) <= 4:
            raise ValueError(
                f"shape: got {shape}, accepted: (N, d), (H, N, d) or (B, H, N, d), each 0 or more"
            )
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype: got {dtype!r}, accepted: {', '.join(DTYPE_BYTES)}")
        if method != "auto" and method not in self.methods:
            raise ValueError(f"method: got {method!r}, accepted: auto, {', '.join(self.methods)}")
        self.ndim, self.dtype = len(sizes), dtype
        self.method = method
        self.B, self.H, self.N_q, self.d = (*(1,) * (4 - self.ndim), *sizes)
        self.H_k = self.H if heads_kv is None else _size("heads_kv", heads_kv)
        self.N_k = self.N_q if n_k is None else _size("n_k", n_k)
        if not 1 <= self.d <= MAX_HEAD_DIM:
            raise ValueError(f"q: got head dimension {self.d}, accepted: 1 to {MAX_HEAD_DIM}")
        for name, size in (("heads_kv", heads_kv), ("n_k", n_k)):
            if size is not None and size < 0:
                raise ValueError(f"{name}: got {size}, accepted: 0 or more")
        if (self.H_k == 0 and self.H) or (self.H_k and self.H % self.H_k):
            raise ValueError(
                f"{self.heads_argument}: got {self.H_k} heads for q's {self.H}, "
                f"accepted: a divisor of {self.H}"
            )
        if tiling is not None and not isinstance(tiling, Tiling):
            raise TypeError(f"tiling: got {type(tiling).__qualname__}, accepted: Tiling")
        self.given_tiling, self.device = tiling, device
        self.layouts: dict[str, Layout] = {}
        self.mask, self.score = masking.none(), masking.unchanged()
        # Names of mask and score arrays, and how many bear each; those of the kernels are taken.
        self.names = dict.fromkeys(("Q", "K", "V", "O", "L", "S", "P", "l", "m", "O_acc"), 1)
        self.names |= dict.fromkeys(("dO", "dL", "D", "dS", "dQ", "dQ_acc", "dK", "dV"), 1)

    def change(
        self,
        causal: bool | str,
        window: Any,
        mask: Any,
        softcap: Any,
        alibi_slopes: Any,
        score: masking.Score | None,
    ) -> None:
        """Set mask and score change from the arguments."""
        self.mask = _causal(causal)
        if window is not None:
            self.mask &= _window(window)
        if mask is not None:
            self.mask &= self._mask(mask)
        if softcap is not None:
            self.score = masking.softcap(_positive("softcap", softcap))
        if alibi_slopes is not None:
            self.score = self.score.then(self._alibi(alibi_slopes))
        if score is not None:
            if not isinstance(score, masking.Score):
                raise TypeError(f"score: got {type(score).__qualname__}, accepted: masking.Score")
            self.score = self.score.then(score)
        self.score = dataclasses.replace(self.score, args=self._checked(self.score.args))
        self.method = self._settled()
        self.tiling = self._tiling()

    def _settled(self) -> str:
        """The method: for "auto" the fastest that can do this call."""
        if self.method == "auto":
            return "fa2" if self._fa3_error() else "fa3"
        if self.method == "fa3":
            error = self._fa3_error()
            if error:
                raise error
        return self.method

    def _fa3_error(self) -> Exception | None:
        """Why fa3 cannot do this call; None if it can. Without a GPU: one of sm_90 is assumed."""
        known = self.device is not None or gpu_available()
        if simulator.ACTIVE or (known and compute_capability(self.device) != (9, 0)):
            return ValueError(
                "method: got fa3, accepted on this GPU (or the simulator): auto, standard, fa1, "
                "fa2; fa3 needs compute capability 9.0"
            )
        if not self.N_k:
            return NotImplementedError("k: got no keys with method=fa3, accepted: 1 or more")
        if self.dtype not in tensor_map.DTYPES:
            return TypeError(f"q: got dtype {self.dtype} with method=fa3, accepted: fp16, bf16")
        if self.given_tiling is not None:
            try:
                self.given_tiling.check(self.d, self.dtype, self.hopper, HOPPER_SHARED_BYTES)
            except ValueError as error:
                return error
        for name, args in (("mask", self.mask.args), ("score", self.score.args)):
            for arg in _flat(args):
                if isinstance(arg, masking.Table | masking.BooleanArray):
                    what = "alibi_slopes" if isinstance(arg, masking.SlopeTable) else name
                    return NotImplementedError(
                        f"{what}: got an array of its own with method=fa3, accepted: none"
                    )
        most = 2**31 - 256  # rows and keys are numbered with 32 bits, a tile beyond the last too
        for name, size in (("q", self.N_q), ("k", self.N_k)):
            if size > most:
                return ValueError(
                    f"{name}: got length {size} with method=fa3, accepted: up to {most}"
                )
        row_tiles = self.B * self.H * ceil_div(self.N_q, WARPGROUP_ROWS)
        if row_tiles >= 2**31:
            return ValueError(
                f"q: got {row_tiles} tiles of 64 rows with method=fa3, accepted: below 2**31"
            )
        return self._box_error()

    def _box_error(self) -> Exception | None:
        """Why the hardware cannot copy boxes of Q, K or V; None if it can."""
        box = (1, 1, WARPGROUP_ROWS, BOX_COLUMNS)
        queries, keys = (self.H, self.N_q), (self.H_k, self.N_k)
        for name, (heads, rows) in self._boxed(queries, keys):
            shape = (self.B, heads, rows, self.d)
            layout = self.layouts.get(name) or Layout.contiguous(shape, DTYPE_BYTES[self.dtype])
            if 0 not in layout.shape:
                try:
                    tensor_map.check(ARGUMENTS[name], layout, box, self.dtype)
                except ValueError as error:
                    return error
        return None

    def _boxed(self, queries: Any, keys: Any) -> tuple[tuple[str, Any], ...]:
        """The arrays that are copied in boxes, each with its part of the sizes."""
        return (("Q", queries), ("K", keys), ("V", keys))

    def _tiling(self) -> Tiling:
        """The tiling given, if it fits; else the one for this device and problem."""
        if self.given_tiling is None and simulator.ACTIVE:
            return SIMULATED_TILING
        if not simulator.ACTIVE and self.device is None and not gpu_available():
            if self.given_tiling is not None:
                return self.given_tiling
            if self.method.startswith(self.hopper):
                return self._hopper_tiling()
            raise ValueError(
                "tiling: no GPU here to choose one for, accepted: a Tiling (or run under "
                "NUMBA_ENABLE_CUDASIM=1)"
            )
        limit = shared_limit(self.device)
        if self.given_tiling is not None:
            self.given_tiling.check(self.d, self.dtype, self.method, limit)
            return self.given_tiling
        if self.method.startswith(self.hopper):
            return self._hopper_tiling()
        plain = self.score.change is masking.UNCHANGED and not self.mask.rule.elementwise
        return choose(self.d, self.dtype, self.method, limit, plain)

    def _hopper_tiling(self) -> Tiling:
        rule = self.mask.rule
        plain = self.score.change is masking.UNCHANGED and not rule.elementwise
        return choose_hopper(self.d, self.N_q, rule.bounded, plain)

    def _mask(self, mask: Any) -> masking.Mask:
        if not isinstance(mask, masking.Mask):
            mask = masking.boolean(mask)
        return dataclasses.replace(mask, args=self._checked(mask.args))

    def _checked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of a mask, their arrays checked, each with a name of its own."""
        out: list[Any] = []
        for arg in args:
            if isinstance(arg, tuple):
                out.append(self._checked(arg))
            elif isinstance(arg, masking.Table):
                self._check_table(arg)
                values = arg.values
                if isinstance(arg, masking.SlopeTable):
                    values = values.astype(acc_type(self.dtype))
                name = self._own_name(arg.name)
                out.append(dataclasses.replace(arg, name=name, values=values))
            elif isinstance(arg, masking.BooleanArray):
                name, values = self._own_name("mask"), self._boolean(arg.values)
                if not isinstance(values, np.ndarray):
                    view = arrays.operand(name, values)
                    if view.device != self.device:
                        raise ValueError(
                            f"mask: on GPU {view.device}, accepted: q's, {self.device}"
                        )
                    self.layouts[name] = view.layout
                out.append(masking.BooleanArray(values, name, arrays.to_host))
            else:
                out.append(arg)
        return tuple(out)

    def _own_name(self, name: str) -> str:
        """`name`, numbered if this call has an array of that name already."""
        self.names[name] = self.names.get(name, 0) + 1
        return name if self.names[name] == 1 else f"{name} {self.names[name]}"

    def _boolean(self, mask: Any) -> Any:
        """A boolean mask with four axes, each 1 or of the full size."""
        if not hasattr(mask, "shape") or not hasattr(mask, "dtype"):
            raise TypeError(
                f"mask: got {type(mask).__qualname__}, accepted: a boolean array or masking.Mask"
            )
        if str(mask.dtype).removeprefix("torch.") not in ("bool", "bool_"):
            raise TypeError(f"mask: got dtype {mask.dtype}, accepted: bool (True is visible)")
        want = (self.B, self.H, self.N_q, self.N_k)
        have = tuple(mask.shape)
        full = (1,) * (4 - len(have)) + have
        if len(have) > self.ndim or any(h not in (1, w) for h, w in zip(full, want, strict=True)):
            raise ValueError(
                f"mask: got shape {have}, accepted: what broadcasts to {want[4 - self.ndim :]}"
            )
        return mask.reshape(full)

    def _check_table(self, table: masking.Table) -> None:
        if isinstance(table, masking.DocumentTable):
            what, length = "mask: documents", self.N_k
        elif isinstance(table, masking.SlopeTable):
            what, length = "alibi_slopes: slopes", self.H
        else:
            return
        if table.values.shape not in ((1, length), (self.B, length)):
            raise ValueError(
                f"{what} for shape {table.values.shape}, accepted: ({length},) or "
                f"({self.B}, {length})"
            )

    def _alibi(self, slopes: Any) -> masking.Score:
        if not hasattr(slopes, "shape"):
            slopes = np.asarray(slopes)
        if not isinstance(slopes, np.ndarray):
            arrays.operand("alibi_slopes", slopes)  # refuses what asks for a gradient
        if str(slopes.dtype).removeprefix("torch.") not in FLOATS:
            raise TypeError(
                f"alibi_slopes: got dtype {slopes.dtype}, accepted: {', '.join(FLOATS)}"
            )
        if tuple(slopes.shape) not in ((self.H,), (self.B, self.H)):
            raise ValueError(
                f"alibi_slopes: got shape {tuple(slopes.shape)}, accepted: ({self.H},) or "
                f"({self.B}, {self.H})"
            )
        return masking.alibi(arrays.to_host(slopes))

    def problem(self) -> Problem:
        """This call as the kernels and the model see it."""
        return Problem(
            self.method,
            self.dtype,
            self.B,
            self.H,
            self.H_k,
            self.N_q,
            self.N_k,
            self.d,
            self.tiling,
            self.mask,
            self.score,
            self.layouts,
        )


class _Call(_Shape):
    """A call with arrays."""

    heads_argument = "k"

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        method: str,
        tiling: Tiling | None,
        scale: float | None,
        out: Any,
    ):
        self._take(q, k, v, method, tiling, scale)
        Q = self.like
        self.out = Q.empty(Q.layout.shape, Q.dtype) if out is None else out
        self.views["out"] = arrays.operand("out", self.out)
        if out is not None:
            self._check_out()
        acc = "fp64" if acc_bytes(self.dtype) == 8 else "fp32"
        self.lse = Q.empty(Q.layout.shape[:-1], acc)
        self.views["lse"] = arrays.operand("lse", self.lse)
        for name, view in zip("QKVOL", self.views.values(), strict=True):
            self.layouts[name] = self._four_axes(view.layout, 4 if name != "L" else 3)

    def _take(
        self, q: Any, k: Any, v: Any, method: str, tiling: Tiling | None, scale: float | None
    ) -> None:
        """Look at q, k and v, and check the sizes that they give."""
        self.views = {n: arrays.operand(n, a) for n, a in (("q", q), ("k", k), ("v", v))}
        Q, K = self.views["q"], self.views["k"]
        self._check_arrays()
        super().__init__(
            Q.layout.shape,
            None if len(Q.layout.shape) == 2 else K.layout.shape[-3],
            K.layout.shape[-2],
            Q.dtype,
            method,
            tiling,
            Q.device,
        )
        self.scale = 1 / math.sqrt(self.d) if scale is None else _finite("scale", scale)
        self.like = Q

    def _check_arrays(self) -> None:
        q = self.views["q"]
        for name, x in self.views.items():
            shape = x.layout.shape
            if len(shape) not in (2, 3, 4):
                raise ValueError(
                    f"{name}: got shape {shape}, accepted: (N, d), (H, N, d) or (B, H, N, d)"
                )
            if x.dtype not in DTYPE_BYTES:
                raise TypeError(
                    f"{name}: got dtype {x.dtype}, accepted: float32, float64, float16, bfloat16"
                )
            if x.dtype != q.dtype:
                raise TypeError(f"{name}: got dtype {x.dtype}, accepted: q's, {q.dtype}")
            if x.device != q.device:
                raise ValueError(f"{name}: on GPU {x.device}, accepted: q's, {q.device}")
            if len(shape) != len(q.layout.shape):
                raise ValueError(f"{name}: got shape {shape}, accepted: as many axes as q")
            if shape[-1] != q.layout.shape[-1]:
                raise ValueError(
                    f"{name}: got head dimension {shape[-1]}, accepted: q's, {q.layout.shape[-1]}"
                )
            if len(shape) == 4 and shape[0] != q.layout.shape[0]:
                raise ValueError(
                    f"{name}: got batch {shape[0]}, accepted: q's, {q.layout.shape[0]}"
                )
        k, v = self.views["k"].layout.shape, self.views["v"].layout.shape
        if k != v:
            raise ValueError(f"v: got shape {v}, accepted: k's, {k}")

    def _check_out(self) -> None:
        view, q = self.views["out"], self.views["q"]
        if view.layout.shape != q.layout.shape or view.dtype != q.dtype:
            raise ValueError(
                f"out: got shape {view.layout.shape} and dtype {view.dtype}, accepted: q's, "
                f"{q.layout.shape} and {q.dtype}"
            )
        if view.family != q.family or view.device != q.device:
            raise ValueError("out: accepted: the same kind of array as q, on the same device")
        if isinstance(self.out, np.ndarray) and not self.out.flags.writeable:
            raise ValueError("out: got a read-only array, accepted: a writable one")
        if arrays.overlaps_itself(view.layout):
            raise ValueError(
                f"out: got strides {view.layout.strides}, with stride 0 or elements that share "
                "bytes, accepted: elements of their own"
            )
        for name in ("q", "k", "v"):
            if arrays.overlap(view.layout, self.views[name].layout):
                raise ValueError(
                    f"out: its memory range overlaps {name}'s, accepted: one of its own"
                )

    def _four_axes(self, layout: Layout, ndim: int) -> Layout:
        """The layout with batch and head axes of size 1 in front where they are missing."""
        missing = ndim - len(layout.shape)
        shape = (1,) * missing + layout.shape
        strides = (0,) * missing + layout.strides
        return Layout(shape, strides, layout.itemsize, layout.address)

    def run(
        self,
        launch: Callable[[Problem, Operands], None] | None = None,
        counted: bool = False,
        on_chip: bool = False,
        timed: bool = False,
        capacity: int = 0,
    ) -> Operands:
        """Launch the method, or `launch`; returns the operands and what they counted and timed."""
        problem = self.problem()
        with on_device(self.like.device):
            operands = Operands(
                problem,
                {
                    name: self._kernel_array(view, name)
                    for name, view in zip("QKVOL", self.views.values(), strict=True)
                },
                self._workspace,
                arrays.numba_stream(self.like.stream),
                self.scale,
                counted,
                on_chip,
                timed,
                capacity,
                self.like.device,
            )
            self._upload(operands, (self.mask.args, self.score.args))
            (launch or METHODS[self.method])(problem, operands)
        return operands

    def _kernel_array(self, view: arrays.Operand, name: str) -> Any:
        layout = self.layouts[name]
        return arrays.kernel_array(view, layout.shape, layout.strides, view.dtype)

    def _workspace(self, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        name = arrays.DTYPE_NAMES.get(np.dtype(dtype), "bool")  # one byte: as a boolean array
        owner = self.like.empty(shape, name)
        view = arrays.operand("workspace", owner)
        return arrays.kernel_array(view, shape, view.layout.strides, name), owner

    def _upload(self, operands: Operands, args: tuple[Any, ...]) -> None:
        """Put the arrays of mask and score change on the device."""
        for arg in args:
            if isinstance(arg, tuple):
                self._upload(operands, arg)
            elif isinstance(arg, masking.Table):
                operands.arrays[arg.name] = _to_device(arg.values, operands)
            elif isinstance(arg, masking.BooleanArray):
                operands.arrays[arg.name] = self._mask_array(arg, operands)
                tile_map.launch(operands.problem, operands, arg)

    def _mask_array(self, mask: masking.BooleanArray, operands: Operands) -> Any:
        if isinstance(mask.values, np.ndarray):
            return _to_device(mask.values.view(np.uint8), operands)
        view = arrays.operand(mask.name, mask.values)
        return arrays.kernel_array(view, view.layout.shape, view.layout.strides, "bool")


def _to_device(values: np.ndarray, operands: Operands) -> Any:
    values = np.ascontiguousarray(values)
    if simulator.ACTIVE:
        copy = arrays.aligned_empty(values.shape, values.dtype)
        copy[...] = values
        return copy
    from numba import cuda

    return cuda.to_device(values, stream=operands.stream)


def _flat(args: tuple[Any, ...]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, tuple):
            yield from _flat(arg)
        else:
            yield arg


def _causal(causal: bool | str) -> masking.Mask:
    if isinstance(causal, bool | np.bool_):
        return masking.causal() if causal else masking.none()
    if causal == "bound":
        return masking.causal()
    if causal == "skip":
        return masking.causal_skip()
    raise ValueError(f'causal: got {causal!r}, accepted: True, False, "bound", "skip"')


def _window(window: Any) -> masking.Mask:
    try:
        left, right = window
    except (TypeError, ValueError):
        raise TypeError(f"window: got {window!r}, accepted: a pair (left, right)") from None
    return masking.window(left, right)


def _size(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, accepted: an integer") from None


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name}: got {value!r}, accepted: a number")
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:
        raise ValueError(f"{name}: got {value}, accepted: a finite number that float32 holds")
    return float(value)


def _positive(name: str, value: Any) -> float:
    number = _finite(name, value)
    if number <= 0:
        raise ValueError(f"{name}: got {value}, accepted: a positive number")
    return number
