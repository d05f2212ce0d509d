"""A problem: everything that decides what an attention call moves.

`api.py` launches a problem, `io_model.py` predicts it; both read the vector widths from here, so
they cannot disagree about which access is how wide.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fa2_numba.masking import Mask, Score, none, unchanged
from fa2_numba.tiling import (
    BOX_COLUMNS,
    DTYPE_BYTES,
    VECTOR_BYTES,
    WHOLE_HEAD_DIM,
    Tiling,
    acc_bytes,
    ceil_div,
    vector_width,
)

METHODS = ("standard", "fa1", "fa2", "fa3")
# Those for every GPU, every dtype and the simulator.
PORTABLE = ("standard", "fa1", "fa2")
PORTABLE_BACKWARD = (
    "standard_backward",
    "fa1_backward",
    "fa2_backward",
    "fa2_backward_deterministic",
)
METHODS_BACKWARD = (*PORTABLE_BACKWARD, "fa3_backward", "fa3_backward_deterministic")
ALLOCATION_ALIGNMENT = 256  # what CUDA allocators give at least


def acc_type(dtype: str) -> Any:
    """NumPy scalar type of everything on chip, and of L, S, P, l and m in memory."""
    return np.float64 if acc_bytes(dtype) == 8 else np.float32


@dataclass(frozen=True)
class Layout:
    """Where an array's elements lie.

    Attributes
    ----------
    shape : tuple of int
        Elements per axis.
    strides : tuple of int
        Bytes per step in each axis; may be 0 or negative.
    itemsize : int
        Bytes of an element.
    address : int
        Byte address of element (0, 0, ...); only its remainder by 256 matters.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    address: int = 0

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], itemsize: int, address: int = 0) -> "Layout":
        """C order, no gaps."""
        strides, step = [], itemsize
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return cls(shape, tuple(reversed(strides)), itemsize, address)

    def vectorises(self, width: int) -> bool:
        """Whether each aligned run of `width` elements of a row is one aligned piece of memory."""
        if width == 1:
            return True
        piece = width * self.itemsize
        return (
            self.shape[-1] % width == 0
            and (self.shape[-1] == 1 or self.strides[-1] == self.itemsize)
            and self.address % piece == 0
            and all(
                step % piece == 0
                for size, step in zip(self.shape[:-1], self.strides[:-1], strict=True)
                if size > 1
            )
        )


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention call.

    Attributes
    ----------
    method, dtype : str
        One of `METHODS` or `METHODS_BACKWARD`; "fp32", "fp64", "fp16" or "bf16".
    B, H, H_k, N_q, N_k, d : int
        Batch, query heads, key/value heads, lengths, head dimension.
    tiling : Tiling
        Tile sizes and thread grid.
    mask, score : Mask, Score
        What is visible and how scores change.
    layouts : dict
        `Layout` of Q, K, V, O and L, backward also of dO and dL; contiguous and aligned where
        absent.
    dlse : bool
        Backward: whether the loss has a gradient by the LSE.
    """

    method: str
    dtype: str
    B: int
    H: int
    H_k: int
    N_q: int
    N_k: int
    d: int
    tiling: Tiling
    mask: Mask = field(default_factory=none)
    score: Score = field(default_factory=unchanged)
    layouts: dict[str, Layout] = field(default_factory=dict)
    dlse: bool = False

    def layout(self, name: str) -> Layout:
        """The layout of an argument, a result or a workspace, by its name in the kernels."""
        if name in self.layouts:
            return self.layouts[name]
        B, H, N_q, N_k, d = self.B, self.H, self.N_q, self.N_k, self.d
        e, e_acc = DTYPE_BYTES[self.dtype], acc_bytes(self.dtype)
        shapes: dict[str, tuple[tuple[int, ...], int]] = {
            "Q": ((B, H, N_q, d), e),
            "K": ((B, self.H_k, N_k, d), e),
            "V": ((B, self.H_k, N_k, d), e),
            "O": ((B, H, N_q, d), e),
            "O_acc": ((B, H, N_q, d), e_acc),
            "S": ((B, H, N_q, N_k), e_acc),
            "P": ((B, H, N_q, N_k), e_acc),
            "L": ((B, H, N_q), e_acc),
            "l": ((B, H, N_q), e_acc),
            "m": ((B, H, N_q), e_acc),
            "dO": ((B, H, N_q, d), e),
            "dL": ((B, H, N_q), e_acc),
            "D": ((B, H, N_q), e_acc),
            "dS": ((B, H, N_q, N_k), e_acc),
            "dQ": ((B, H, N_q, d), e),
            "dQ_acc": (self._dQ_acc, e_acc),
            "dK": ((B, self.H_k, N_k, d), e),
            "dV": ((B, self.H_k, N_k, d), e),
        }
        return Layout.contiguous(*shapes[name])

    def number(self, value: Any) -> Any:
        """A number among a mask's arguments as its functions get it, compiled or called."""
        return acc_type(self.dtype)(value) if isinstance(value, float) else value

    @property
    def rounds(self) -> bool:
        """Whether O is narrower than the accumulator (fp16, bf16)."""
        return DTYPE_BYTES[self.dtype] < acc_bytes(self.dtype)

    @property
    def load_width(self) -> int:
        """Elements per load of Q, K, V and dO: 16 bytes, or 1 unless all of them are aligned."""
        return self._width(vector_width(self.dtype), "Q", "K", "V", *self._dO)

    @property
    def _dO(self) -> tuple[str, ...]:
        return ("dO",) if self.method in METHODS_BACKWARD else ()

    def _width(self, width: int, *names: str) -> int:
        """`width` elements at once if all of these arrays allow it, else 1."""
        return width if all(self.layout(n).vectorises(width) for n in names) else 1

    @property
    def store_width(self) -> int:
        """Elements per store of O from the register tile."""
        C, _ = self.tiling.columns_of_O(self.d, self.dtype)
        return C if self.layout("O").vectorises(C) else 1

    @property
    def fa3_store_width(self) -> int:
        """Elements per store of O by fa3, 16 bytes, or 1 where O is not aligned."""
        width = vector_width(self.dtype)
        return width if self.layout("O").vectorises(width) else 1

    @property
    def fa3_stores_boxes(self) -> bool:
        """Whether the copy unit stores fa3's O: d up to 64, and strides that it takes."""
        O = self.layout("O")
        steps = (step for size, step in zip(O.shape, O.strides, strict=True) if size > 1)
        return (
            self.d <= BOX_COLUMNS
            and self.fa3_store_width > 1
            and all(0 <= step < 2**40 for step in steps)
        )

    @property
    def o_acc_name(self) -> str:
        """The array in which fa1 accumulates: O itself where it is wide enough."""
        return "O_acc" if self.rounds else "O"

    @property
    def o_acc_width(self) -> int:
        """Elements per access of fa1's accumulator from the register tile."""
        C, _ = self.tiling.columns_of_O(self.d, self.dtype)
        return C if self.layout(self.o_acc_name).vectorises(C) else 1

    @property
    def o_row_width(self) -> int:
        """Elements per access of O and its accumulator in fa1's init and finish."""
        width = VECTOR_BYTES // acc_bytes(self.dtype)
        names = {"O", self.o_acc_name}
        return width if all(self.layout(n).vectorises(width) for n in names) else 1

    @property
    def p_width(self) -> int:
        """Elements per access of S and P in the standard softmax and of P in the output kernel."""
        width = VECTOR_BYTES // acc_bytes(self.dtype)
        return width if self.N_k % width == self.tiling.B_c % width == 0 else 1

    # ---- the backward pass

    @property
    def dq_acc_name(self) -> str:
        """The array to which fa1 and fa2 add dQ: dQ itself where it is wide enough."""
        return "dQ_acc" if self.rounds else "dQ"

    @property
    def d_width(self) -> int:
        """Elements per load of dO and O where D is made."""
        return self._width(vector_width(self.dtype), "dO", "O")

    @property
    def fa3_gradient_width(self) -> int:
        """Elements per store of dQ, dK and dV by fa3: 16 bytes, or 1."""
        return self._width(vector_width(self.dtype), "dQ", "dK", "dV")

    @property
    def adds_dQ(self) -> bool:
        """Whether fa3 adds dQ up in memory."""
        return self.method == "fa3_backward" and not self.splits_gradients

    @property
    def splits_gradients(self) -> bool:
        """Whether fa3 has a kernel for each gradient."""
        return self.d > WHOLE_HEAD_DIM

    @property
    def _dQ_acc(self) -> tuple[int, ...]:
        """Shape of the accumulator: dQ's; fa3's is of tiles, each in the order of registers."""
        if self.method != "fa3_backward":
            return self.B, self.H, self.N_q, self.d
        t = self.tiling
        return self.B, self.H, t.T_r(self.N_q), t.B_r * ceil_div(self.d, BOX_COLUMNS) * BOX_COLUMNS

    @property
    def gradient_width(self) -> int:
        """Elements per access of dQ, dQ_acc, dK and dV, and fa1's of O, from the register tile."""
        C, _ = self.tiling.columns_of_O(self.d, self.dtype)
        O = ("O",) if self.method == "fa1_backward" else ()
        return self._width(C, *O, "dQ", "dQ_acc", "dK", "dV")

    @property
    def dq_row_width(self) -> int:
        """Elements per access of dQ and its accumulator where they are cleared and rounded."""
        return self._width(VECTOR_BYTES // acc_bytes(self.dtype), "dQ", "dQ_acc")

    def columns(self) -> dict[str, Any]:
        """The first columns of this problem's traffic rows."""
        name = "+".join(n for n in (self.mask.name, self.score.name) if n)
        return {
            "method": self.method,
            "dtype": self.dtype,
            "batch": self.B,
            "heads": self.H,
            "heads_kv": self.H_k,
            "n_q": self.N_q,
            "n_k": self.N_k,
            "d": self.d,
            "causal": "causal" in self.mask.name.replace("-skip", "").split("&"),
            "mask": name,
            "block_r": self.tiling.B_r,
            "block_c": self.tiling.B_c,
            "level": "issued",
        }
