"""One shape without data: what it moves, and whether it can be counted here."""

from dataclasses import dataclass

import numpy as np

from fa2_numba import masking
from fa2_numba.accounting.sweep import SM_90_SHARED, lack_of_memory, mask_of, to_device
from fa2_numba.io_model import predict
from fa2_numba.problem import Problem
from fa2_numba.tiling import MAX_HEAD_DIM, Tiling, choose
from fa2_numba.traffic import Traffic

# B H N_q N_k d that is counted in about ten seconds a method.
SIMULATED_WORK = 2**19
GPU_WORK = 2**46
GPU_WORK_OF_A_BLOCK = 2**40  # fa1 gives a head to one block


@dataclass(frozen=True)
class Shape:
    """Sizes and mask of one call.

    Raises
    ------
    ValueError
        A size below 1, heads that do not divide, d above the limit, or a window below -1.
    """

    B: int
    H: int
    H_k: int
    N_q: int
    N_k: int
    d: int
    dtype: str = "fp32"
    causal: bool = False
    window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("--batch", self.B),
            ("--heads", self.H),
            ("--heads-kv", self.H_k),
            ("--n", self.N_q),
            ("--n-k", self.N_k),
            ("--d", self.d),
        ):
            if value < 1:
                raise ValueError(f"{name}: got {value}, accepted are 1 and more")
        if self.d > MAX_HEAD_DIM:
            raise ValueError(f"--d: got {self.d}, accepted are 1 to {MAX_HEAD_DIM}")
        if self.H % self.H_k:
            raise ValueError(f"--heads-kv: got {self.H_k}, accepted are divisors of {self.H}")
        if self.window is not None and min(self.window) < -1:
            raise ValueError(
                f"--window: got {self.window}, accepted are -1 (unbounded), 0 and more"
            )

    @property
    def work(self) -> int:
        """Multiply-adds of Q K^T."""
        return self.B * self.H * self.N_q * self.N_k * self.d

    def problem(self, method: str, tiling: Tiling) -> Problem:
        """Contiguous, aligned arrays of this shape."""
        mask = mask_of(self.causal)
        if self.window is not None:
            mask &= masking.window(*self.window)
        sizes = (self.B, self.H, self.H_k, self.N_q, self.N_k, self.d)
        return Problem(method, self.dtype, *sizes, tiling, mask)

    def predict(self, method: str, tiling: Tiling) -> list[Traffic]:
        """What it moves, without running it."""
        return predict(self.problem(method, tiling))

    def count(self, method: str, tiling: Tiling) -> tuple[list[Traffic], list[Traffic]]:
        """Rows counted on random data, and predicted for the addresses of that data."""
        from fa2_numba import api
        from fa2_numba.accounting.inputs import DTYPES

        dtype = {name: dtype for dtype, name in DTYPES.items()}[self.dtype]
        rng = np.random.default_rng(0)
        kv = (self.B, self.H_k, self.N_k, self.d)
        shapes = ((self.B, self.H, self.N_q, self.d), kv, kv)
        arrays = (rng.standard_normal(s, np.float32).astype(dtype) for s in shapes)
        m = api.measure(
            *(to_device(a) for a in arrays),
            causal=self.causal,
            window=self.window,
            method=method,
            tiling=tiling,
        )
        return m.rows, predict(m.problem)

    def obstacle(self, method: str, tiling: Tiling) -> str:
        """Why it cannot be counted here, empty if it can."""
        from fa2_numba.api import backend
        from fa2_numba.launch import shared_limit

        if backend() == "simulator" and self.work > SIMULATED_WORK:
            return f"{self.work:,} multiply-adds are too many for the simulator"
        try:
            tiling.check(self.d, self.dtype, method, shared_limit(None))
        except ValueError as error:
            return str(error)
        if backend() == "simulator":
            return ""
        if self.work > GPU_WORK:
            return f"{self.work:,} multiply-adds would take minutes"
        if method == "fa1" and self.work > GPU_WORK_OF_A_BLOCK * self.B * self.H:
            return "fa1 gives each head to one block, which would take minutes"
        return lack_of_memory(method, (self.B, self.H, self.N_q), self.N_k, self.dtype)

    def __str__(self) -> str:
        heads = f"{self.H} heads" if self.H > 1 else "1 head"
        if self.H_k != self.H:
            heads += f" on {self.H_k}"
        batch = f"batch {self.B}, " if self.B > 1 else ""
        keys = f"{self.N_q:,}" if self.N_q == self.N_k else f"{self.N_q:,} × {self.N_k:,}"
        return f"N = {keys}, d = {self.d}, {batch}{heads}, {self.dtype}"


def default_tiling(shape: Shape, method: str, backend: str) -> Tiling:
    """The tiling of `attention` on this GPU.

    Without a GPU, the simulator's if it can count the shape, else that of an H100 or H200.
    """
    from fa2_numba.api import SIMULATED_TILING
    from fa2_numba.launch import shared_limit

    if backend == "gpu":
        return choose(shape.d, shape.dtype, method, shared_limit(None))
    if shape.work <= SIMULATED_WORK:
        return SIMULATED_TILING
    return choose(shape.d, shape.dtype, method, SM_90_SHARED)


def tiling_with(B_r: int | None, B_c: int | None, default: Tiling) -> Tiling:
    """The default tiling with another B_r or B_c, and a thread grid that divides them.

    Raises
    ------
    ValueError
        A size below 1.
    """
    for name, size in (("--block-r", B_r), ("--block-c", B_c)):
        if size is not None and size < 1:
            raise ValueError(f"{name}: got {size}, accepted are 1 and more")
    B_r, B_c = B_r or default.B_r, B_c or default.B_c
    grids = [(default.n_r, default.n_c)]
    grids += [(n // n_c, n_c) for n in (256, 128, 64, 32) for n_c in (32, 16, 8, 4, 2, 1)]
    if default.threads <= 32:
        grids = [grids[0], *reversed(grids)]
    grids += [(n_r, n_c) for n_c in (4, 2, 1) for n_r in (4, 2, 1)]  # the last, 1 x 1, divides all
    n_r, n_c = next((r, c) for r, c in grids if B_r % r == 0 and B_c % c == 0)
    return Tiling(B_r, B_c, n_r, n_c)
