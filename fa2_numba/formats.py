"""The four element formats: how they are stored, and in what they are computed.

fp16 and bf16 are widened to float32 when a tile enters shared memory; everything on chip is in the
accumulation dtype; only O is rounded back, once. Numba has no bfloat16 arithmetic, so inside
kernels a bf16 array is its bit patterns (uint16).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa2_numba import simulator
from fa2_numba.hbm import device
from fa2_numba.ptx import cvt_rn_bf16_f32, ex2_approx_ftz_f32, mov_f32_bf16
from fa2_numba.tiling import DTYPE_BYTES

LOG2_E = np.float32(math.log2(math.e))


@dataclass(frozen=True)
class Format:
    """One element format.

    Attributes
    ----------
    name : str
        "fp32", "fp64", "fp16" or "bf16".
    storage : np.dtype
        Element type of the arrays that a kernel gets.
    acc : type
        NumPy scalar type of everything on chip.
    to_acc, from_acc, exp, log : device functions
        Conversions, and exp and log in `acc`.
    """

    name: str
    storage: Any
    acc: Any
    to_acc: Any
    from_acc: Any
    exp: Any
    log: Any

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return DTYPE_BYTES[self.name]


@device
def _same(x):
    return x


@device
def _to_float32(x):
    return np.float32(x)


@device
def _to_float16(x):
    return np.float16(x)


@device
def _bf16_to_float32(x):
    return mov_f32_bf16(x)


@device
def _float32_to_bf16(x):
    return cvt_rn_bf16_f32(x)


@device
def _exp_float32(x):
    return ex2_approx_ftz_f32(x * LOG2_E)


@device
def _log_float32(x):
    return np.float32(math.log(x))


if simulator.ACTIVE:
    # math.exp of Python raises where a GPU returns 0 or inf; NumPy's does as the GPU.
    _exp_float64, _log_float64 = np.exp, np.log
else:

    @device
    def _exp_float64(x):
        return math.exp(x)

    @device
    def _log_float64(x):
        return math.log(x)


_float32 = {"acc": np.float32, "exp": _exp_float32, "log": _log_float32}
_float64 = {"acc": np.float64, "exp": _exp_float64, "log": _log_float64}

FORMATS = {
    f.name: f
    for f in (
        Format("fp32", np.float32, to_acc=_same, from_acc=_same, **_float32),
        Format("fp64", np.float64, to_acc=_same, from_acc=_same, **_float64),
        Format("fp16", np.float16, to_acc=_to_float32, from_acc=_to_float16, **_float32),
        Format("bf16", np.uint16, to_acc=_bf16_to_float32, from_acc=_float32_to_bf16, **_float32),
    )
}
