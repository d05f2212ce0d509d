"""The attention problems that the property tests draw, and how to run one.

A `Case` is a problem in numbers and words only, so that a failing one is printed as code that can
stand in an ``@example``. Its arrays come from a seed, and each is placed in memory by a layout;
every byte around them is NaN, so each property is a test that nothing outside is read.

Bounds, and why:

* The simulator runs kernels in Python, about 1 us for a multiply-add: lengths stay within three
  tiles and tiles within 8 x 16. Every edge (0, 1, tile - 1, tile, tile + 1, a tile that nobody
  sees) lies within that.
* On a GPU lengths cost nothing, but what a kernel is compiled for (`Kernel`) costs seconds. There
  it is drawn from a short list; the profile "deep" draws it freely.
"""

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_numba import api, backward, launch, masking, reference, simulator
from fa2_numba.tiling import Tiling

DTYPES = {
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}

# ---- how often, and how long ------------------------------------------------------------------

EXAMPLES_FACTOR = {"ci": 1, "gpu": 6, "deep": 40}
# By the properties of this process, for the record of a test run: examples that ran, and those that
# its time limit left out.
examples = {"run": 0, "left_out": 0}


def deadline() -> float | None:
    """When the test run has to end (seconds since 1970), if it has a limit."""
    return float(os.environ["FA2_TEST_DEADLINE"]) if "FA2_TEST_DEADLINE" in os.environ else None


def too_late() -> bool:
    """Whether the time limit of the test run is over."""
    limit = deadline()
    return limit is not None and time.time() > limit


def forall(number: int, *drawn: Any) -> Callable[[Callable[..., None]], Any]:
    """``given(*drawn)`` for `number` examples in the profile "ci", more in the others.

    Counts what runs. After the time limit of the run the remaining examples pass unrun, counted as
    left out.
    """
    factor = EXAMPLES_FACTOR.get(settings.get_current_profile_name(), 1)

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def counted(*args: Any, **kwargs: Any) -> None:
            if too_late():
                examples["left_out"] += 1
                return
            test(*args, **kwargs)
            examples["run"] += 1

        return settings(max_examples=number * factor)(given(*drawn)(counted))

    return decorate


# ---- where an array lies ----------------------------------------------------------------------
# Each layout: the shape of the buffer that holds an array (B, H, N, d), and the view into it.
# Views work on NumPy and CuPy alike.

Shape = tuple[int, int, int, int]
LAYOUTS: dict[str, tuple[Callable[[Shape], tuple[int, ...]], Callable[[Any, Shape], Any]]] = {
    "contiguous": (lambda s: s, lambda x, s: x),
    # (B, N, H, d), the layout of flash-attn's functions
    "heads inside": (
        lambda s: (s[0], s[2], s[1], s[3]),
        lambda x, s: x.transpose(0, 2, 1, 3),
    ),
    "time outside": (
        lambda s: (s[2], s[0], s[1], s[3]),
        lambda x, s: x.transpose(1, 2, 0, 3),
    ),
    # columns of a wider buffer, still in whole 16-byte pieces
    "wide rows": (lambda s: (*s[:3], s[3] + 16), lambda x, s: x[..., : s[3]]),
    # a block out of the middle of a bigger array: rows and columns around it, nothing aligned
    "gaps": (
        lambda s: (s[0], s[1], s[2] + 3, s[3] + 3),
        lambda x, s: x[:, :, 2 : 2 + s[2], 1 : 1 + s[3]],
    ),
    # contiguous, one element away from the allocation's start
    "offset": (
        lambda s: (int(np.prod(s)) + 2,),
        lambda x, s: x[1:-1].reshape(s),
    ),
    "reversed rows": (lambda s: s, lambda x, s: x[:, :, ::-1]),
    "reversed columns": (lambda s: s, lambda x, s: x[..., ::-1]),
    "every second column": (lambda s: (*s[:3], 2 * s[3]), lambda x, s: x[..., ::2]),
    # stride 0; `Case.arrays` makes heads (rows) alike, so that they fit
    "one head for all": (
        lambda s: (s[0], min(s[1], 1), s[2], s[3]),
        lambda x, s: np.broadcast_to(x, s),
    ),
    "one row for all": (
        lambda s: (s[0], s[1], min(s[2], 1), s[3]),
        lambda x, s: np.broadcast_to(x, s),
    ),
}
ALIGNED_LAYOUTS = ("contiguous", "heads inside", "time outside", "wide rows")
OUT_LAYOUTS = ("contiguous", "heads inside", "wide rows", "gaps", "offset", "reversed columns")


def place(host: np.ndarray, layout: str, to_device: Callable[[np.ndarray], Any]) -> tuple[Any, Any]:
    """`host` in a buffer of NaN on the device: the buffer and the view that is the array."""
    buffer_shape, view = LAYOUTS[layout]
    buffer = np.full(buffer_shape(host.shape), np.nan, host.dtype)
    if "for all" in layout:
        buffer[...] = host[tuple(slice(n) for n in buffer.shape)]
    else:
        view(buffer, host.shape)[...] = host
    on_device = to_device(buffer)
    return on_device, view(on_device, host.shape)


# ---- masks and score changes ------------------------------------------------------------------
# A mask is written as a tuple of parts that all hold, each a tuple (kind, parameters...).

CAUSAL = {"causal": True, "bound": "bound", "skip": "skip"}
MASK_KINDS: tuple[tuple[str, ...], ...] = (
    (),
    ("causal",),
    ("skip",),
    ("window",),
    ("prefix",),
    ("documents",),
    ("boolean",),
    ("custom",),
    ("bound", "window"),
    ("causal", "documents"),
    ("causal", "boolean"),
    ("skip", "boolean"),
    ("window", "prefix"),
    ("window", "custom"),
    ("documents", "custom"),
    ("boolean", "custom"),
)
SCORE_KINDS: tuple[tuple[str, ...], ...] = (
    (),
    ("softcap",),
    ("alibi",),
    ("staircase",),
    ("softcap", "alibi"),
    ("alibi", "staircase"),
)


def every_nth(args: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """An own mask: every args[0]-th key, counted from the row, other heads elsewhere."""
    return (i + j + h) % args[0] == 0


def staircase(args: Any, i: Any, j: Any, s: Any) -> Any:
    """An own score change: steps of 1/4, exact in every format."""
    return s + (j % 3 - 1) * 0.25


def one(args: Any, i: Any, j: Any, s: Any) -> Any:
    """The derivative of a change that adds a constant."""
    return 1.0


# ---- one problem ------------------------------------------------------------------------------

ONE_WARP = Tiling(4, 8, 4, 8)


@dataclass(frozen=True)
class Kernel:
    """What a kernel is compiled for, dtype and method apart."""

    d: int = 4
    tiling: Tiling | None = ONE_WARP
    mask: tuple[str, ...] = ()
    score: tuple[str, ...] = ()
    q: str = "contiguous"
    k: str = "contiguous"
    v: str = "contiguous"
    out: str = "contiguous"


@dataclass(frozen=True)
class Case:
    """A problem: a kernel, sizes, parameters of the mask, and the seed of the values."""

    kernel: Kernel = Kernel()
    B: int = 1
    H_k: int = 1
    group: int = 1
    N_q: int = 5
    N_k: int = 9
    mask: tuple[tuple[Any, ...], ...] = ()
    seed: int = 0
    spread: float = 1.0
    scale: float | None = None

    @property
    def H(self) -> int:
        """Query heads."""
        return self.H_k * self.group

    def rng(self, purpose: str) -> np.random.Generator:
        """Random numbers that do not change when another purpose draws more."""
        return np.random.default_rng([self.seed, *purpose.encode()])

    def arrays(self, dtype: str) -> list[np.ndarray]:
        """q, k, v on the host, C-contiguous.

        Normal, with a mean that is not zero: then neither is O, and its relative error means
        something.
        """
        d = self.kernel.d
        shapes = {"q": (self.B, self.H, self.N_q, d)}
        shapes |= dict.fromkeys("kv", (self.B, self.H_k, self.N_k, d))
        made = []
        for name, shape in shapes.items():
            x = self.rng(name).standard_normal(shape) * self.spread + 0.3
            layout = getattr(self.kernel, name)
            if layout == "one head for all":
                x = np.broadcast_to(x[:, :1], shape)
            if layout == "one row for all":
                x = np.broadcast_to(x[:, :, :1], shape)
            made.append(np.ascontiguousarray(x.astype(DTYPES[dtype])))
        return made

    def upstream(self, dtype: str, dlse: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
        """dout, as `arrays` makes its arrays, and dlse on the host."""
        shape = (self.B, self.H, self.N_q, self.kernel.d)
        acc = np.float64 if dtype == "fp64" else np.float32
        dout = (self.rng("dout").standard_normal(shape) + 0.3).astype(DTYPES[dtype])
        return dout, self.rng("dlse").standard_normal(shape[:3]).astype(acc) if dlse else None

    def dense_mask(self) -> np.ndarray | None:
        """The mask's parts as one boolean array that broadcasts to (B, H, N_q, N_k)."""
        N_q, N_k = self.N_q, self.N_k
        i, j = np.arange(N_q)[:, None] + N_k - N_q, np.arange(N_k)
        dense: np.ndarray | None = None
        for kind, *how in self.mask:
            if kind in CAUSAL:
                part = reference.causal_mask(N_q, N_k)
            elif kind == "window":
                part = reference.window_mask(N_q, N_k, *how)
            elif kind == "prefix":
                part = reference.prefix_lm_mask(N_q, N_k, *how)
            elif kind == "documents":
                part = reference.document_mask(self.documents(*how), N_q, N_k)
            elif kind == "boolean":
                part = self.boolean(*how)
            else:
                h = np.arange(self.H)[:, None, None]
                part = (i + j + h) % how[0] == 0
            dense = part if dense is None else dense & part
        return dense

    def documents(self, count: int, per_batch: bool) -> np.ndarray:
        """Document of every key, up to `count` of them, some perhaps empty."""
        shape = (self.B, self.N_k) if per_batch else (self.N_k,)
        return np.sort(self.rng("documents").integers(0, count, shape), axis=-1)

    def boolean(self, axes: str, density: float) -> np.ndarray:
        """Random, of full size along `axes` (letters of "bhqk") and 1 along the others.

        Blocks of 4 x 4 are all visible or all hidden in two thirds of their places, so that tiles
        of each kind occur.
        """
        full = (self.B, self.H, self.N_q, self.N_k)
        shape = tuple(n if a in axes else 1 for a, n in zip("bhqk", full, strict=True))
        rng = self.rng("boolean")
        fine = rng.random(shape) < density
        coarse = rng.random((*shape[:2], -(-shape[2] // 4), -(-shape[3] // 4)))
        coarse = coarse.repeat(4, 2).repeat(4, 3)[:, :, : shape[2], : shape[3]]
        return np.where(coarse < 1 / 3, False, (coarse < 2 / 3) | fine)

    def slopes(self, dtype: str) -> np.ndarray:
        """ALiBi slopes, per head or per batch and head."""
        shape = (self.B, self.H) if self.seed % 2 else (self.H,)
        acc = np.float64 if dtype == "fp64" else np.float32
        return (self.rng("slopes").random(shape) * 0.5).astype(acc)

    def options(self, dtype: str, to_device: Callable[[np.ndarray], Any]) -> dict[str, Any]:
        """Keyword arguments for `attention`, `measure`."""
        options: dict[str, Any] = {"tiling": self.kernel.tiling}
        masks: list[masking.Mask] = []
        booleans = []
        for kind, *how in self.mask:
            if kind in CAUSAL:
                options["causal"] = CAUSAL[kind]
            elif kind == "window":
                options["window"] = tuple(how)
            elif kind == "boolean":
                booleans.append(to_device(self.boolean(*how)))
            elif kind == "prefix":
                masks.append(masking.prefix_lm(*how))
            elif kind == "documents":
                masks.append(masking.documents(self.documents(*how)))
            else:
                masks.append(masking.custom(every_nth, *how))
        if booleans and not masks:
            options["mask"] = booleans[0]
        elif booleans or masks:
            masks += [masking.boolean(b) for b in booleans]
            options["mask"] = functools.reduce(lambda a, b: a & b, masks)
        if "softcap" in self.kernel.score:
            options["softcap"] = 3.0
        if "alibi" in self.kernel.score:
            options["alibi_slopes"] = to_device(self.slopes(dtype))
        if "staircase" in self.kernel.score:
            options["score"] = masking.score(staircase, derivative=one)
        if self.scale is not None:
            options["scale"] = self.scale
        return options

    def reference_options(self, dtype: str) -> dict[str, Any]:
        """Keyword arguments for `reference.attention_reference`."""
        options: dict[str, Any] = {"mask": self.dense_mask(), "scale": self.scale}
        if "softcap" in self.kernel.score:
            options["softcap"] = 3.0
        if "alibi" in self.kernel.score:
            options["alibi_slopes"] = self.slopes(dtype)
        if "staircase" in self.kernel.score:
            options["bias"] = (np.arange(self.N_k) % 3 - 1) * 0.25
        return options

    def with_kernel(self, **changes: Any) -> "Case":
        """The same problem for another kernel."""
        return replace(self, kernel=replace(self.kernel, **changes))


# ---- running one ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """Arrays of the place where kernels run in this process."""

    name: str
    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]

    def place(self, host: np.ndarray, layout: str = "contiguous") -> tuple[Any, Any]:
        """The array with this layout in a buffer of NaN: (buffer, array)."""
        return place(host, layout, self.to_device)

    def operands(self, case: Case, dtype: str) -> list[Any]:
        """q, k, v of a case, placed."""
        return [
            self.place(x, getattr(case.kernel, name))[1]
            for name, x in zip("qkv", case.arrays(dtype), strict=True)
        ]

    def attention(
        self, method: str, q: Any, k: Any, v: Any, **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """out and LSE on the host; host arrays are put on the device."""
        device = [self.to_device(x) if isinstance(x, np.ndarray) else x for x in (q, k, v)]
        out, lse = api.attention(*device, method=method, return_lse=True, **options)
        return self.to_host(out), self.to_host(lse)

    def backward(
        self, method: str, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """dq, dk, dv on the host by a method of `METHODS_BACKWARD`."""
        arrays = [
            self.to_device(x) if isinstance(x, np.ndarray) else x for x in (dout, q, k, v, out, lse)
        ]
        dlse = options.pop("dlse", None)
        options["dlse"] = self.to_device(dlse) if isinstance(dlse, np.ndarray) else dlse
        got = backward.attention_backward(*arrays, **backward_method(method), **options)
        return tuple(self.to_host(x) for x in got)  # type: ignore[return-value]

    def run(self, method: str, dtype: str, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """`attention` of a case."""
        options = case.options(dtype, self.to_device)
        return self.attention(method, *self.operands(case, dtype), **options)


def backward_method(name: str) -> dict[str, Any]:
    """The arguments of `attention_backward` that ask for a method of `METHODS_BACKWARD`."""
    return {"method": name.split("_")[0], "deterministic": name.endswith("_deterministic")}


def bits(*arrays: np.ndarray) -> bytes:
    """The bytes of arrays in C order: equal bits, NaN and the sign of zero included."""
    return b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)


# ---- drawing one ------------------------------------------------------------------------------

# One warp or less, with and without register tiles of several rows and columns; two warps, whose
# barriers count; one thread; sizes that are no power of two.
SMALL_TILINGS = (
    ONE_WARP,
    Tiling(4, 4, 2, 4),
    Tiling(8, 4, 8, 4),
    Tiling(8, 8, 4, 8),
    Tiling(8, 8, 8, 8),
    Tiling(2, 16, 2, 16),
    Tiling(6, 5, 3, 1),
    Tiling(1, 1, 1, 1),
)

# What the GPU profile compiles: each dimension in several values, each pair of ideas that share
# code (mask x score, layout x width) at least once.
GPU_KERNELS = (
    Kernel(64, None, ("causal",)),
    Kernel(59, Tiling(32, 16, 8, 16), ("window",), ("alibi", "staircase"), out="gaps"),
    Kernel(32, Tiling(16, 32, 4, 8), ("causal", "boolean"), (), "wide rows", "gaps", "gaps"),
    Kernel(128, None, (), ("softcap", "alibi"), "heads inside", "heads inside", "heads inside"),
    Kernel(256, None, ("documents", "custom"), (), "contiguous", "one head for all", "offset"),
    Kernel(
        5, Tiling(6, 5, 3, 1), ("skip", "boolean"), ("softcap",), "reversed rows", "one row for all"
    ),
)


@st.composite
def free_kernels(draw: Any) -> Kernel:
    """Any `Kernel` of this backend's sizes."""
    # Half of the kernels move 16 bytes at once: d and all three layouts have to allow it.
    wide = draw(st.booleans())
    layouts = st.sampled_from(ALIGNED_LAYOUTS if wide else tuple(LAYOUTS))
    if simulator.ACTIVE:
        d = draw(st.sampled_from((8, 4, 12)) if wide else st.integers(1, 12))
        tiling = draw(st.sampled_from(SMALL_TILINGS))
    else:
        d = draw(st.integers(1, 256) | st.sampled_from((32, 64, 80, 128, 192, 256)))
        limit = launch.shared_limit(None)
        fitting = [
            t
            for t in (*SMALL_TILINGS, Tiling(32, 32, 8, 16), Tiling(64, 64, 8, 16))
            if all(t.fits(d, dtype, m, limit) for dtype in DTYPES for m in api.PORTABLE)
        ]
        tiling = draw(st.none() | st.sampled_from(fitting))
    return Kernel(
        d,
        tiling,
        mask=draw(st.sampled_from(MASK_KINDS)),
        score=draw(st.sampled_from(SCORE_KINDS)),
        q=draw(layouts),
        k=draw(layouts),
        v=draw(layouts),
        out=draw(st.sampled_from(OUT_LAYOUTS)),
    )


def kernels() -> Any:
    """Kernels for a property: free where compiling costs nothing or time is no matter."""
    if simulator.ACTIVE or settings.get_current_profile_name() == "deep":
        return free_kernels()
    return st.sampled_from(GPU_KERNELS[:3])  # each costs up to 14 compilations of some seconds


def lengths(tile: int) -> Any:
    """Lengths around the edges of a tile; a GPU also gets some that need many tiles."""
    near = {0, 1, tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1, 3 * tile - 1}
    if simulator.ACTIVE:
        return st.sampled_from(sorted(n for n in near if 0 <= n <= 24))
    return st.sampled_from(sorted(n for n in near if n >= 0)) | st.integers(1, 700)


@st.composite
def masks(draw: Any, kinds: tuple[str, ...], N_q: int, N_k: int) -> tuple[tuple[Any, ...], ...]:
    """Parameters for the parts of a mask."""
    ends = st.integers(-1, max(N_q, N_k) + 1)
    parts: list[tuple[Any, ...]] = []
    for kind in kinds:
        if kind == "window":
            parts.append((kind, draw(ends), draw(ends)))
        elif kind == "prefix":
            parts.append((kind, draw(st.integers(0, N_k + 1))))
        elif kind == "documents":
            parts.append((kind, draw(st.integers(1, 5)), draw(st.booleans())))
        elif kind == "boolean":
            axes = draw(st.sampled_from(("bhqk", "qk", "bk", "hqk", "bq", "")))
            parts.append((kind, axes, draw(st.sampled_from((0.5, 0.1, 0.9)))))
        elif kind == "custom":
            parts.append((kind, draw(st.integers(1, 4))))
        else:
            parts.append((kind,))
    return tuple(parts)


@st.composite
def cases(draw: Any, kernel: Any = None, empty: bool = True) -> Case:
    """Any problem; with `empty` False, B, H, N_q and N_k are at least 1."""
    compiled = draw(kernels() if kernel is None else kernel)
    tile = compiled.tiling or Tiling(64, 64, 8, 16)
    least = 0 if empty else 1
    N_q = draw(lengths(tile.B_r).filter(lambda n: n >= least))
    N_k = draw(lengths(tile.B_c).filter(lambda n: n >= least))
    return Case(
        compiled,
        B=draw(st.sampled_from((1, 2, 0) if empty else (1, 2))),
        H_k=draw(st.sampled_from((1, 2))),
        group=draw(st.sampled_from((1, 2, 3))),
        N_q=N_q,
        N_k=N_k,
        mask=draw(masks(compiled.mask, N_q, N_k)),
        seed=draw(st.integers(0, 2**32 - 1)),
        spread=draw(st.sampled_from((1.0, 0.1, 4.0))),
        scale=draw(st.sampled_from((None, None, 0.25, -0.5))),
    )
