"""FlashAttention in Numba CUDA, and every byte it moves.

The public names load on first use, so that ``import fa2_numba`` needs no Numba (``fa2-numba
doctor`` must run where Numba does not).
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "attention": "api",
    "attention_backward": "backward",
    "measure_backward": "backward",
    "predict_backward": "backward",
    "BackwardMeasurement": "backward",
    "METHODS_BACKWARD": "backward",
    "PORTABLE_BACKWARD": "backward",
    "measure": "api",
    "predict": "api",
    "trace": "api",
    "Measurement": "api",
    "Trace": "api",
    "METHODS": "api",
    "PORTABLE": "api",
    "Tiling": "tiling",
    "Traffic": "traffic",
    "masking": "masking",
}
__all__ = [
    "METHODS",
    "METHODS_BACKWARD",
    "PORTABLE",
    "PORTABLE_BACKWARD",
    "BackwardMeasurement",
    "Measurement",
    "Tiling",
    "Trace",
    "Traffic",
    "attention",
    "attention_backward",
    "masking",
    "measure",
    "measure_backward",
    "predict",
    "predict_backward",
    "trace",
]

if TYPE_CHECKING:
    from fa2_numba import masking
    from fa2_numba.api import (
        METHODS,
        PORTABLE,
        Measurement,
        Trace,
        attention,
        measure,
        predict,
        trace,
    )
    from fa2_numba.backward import (
        METHODS_BACKWARD,
        PORTABLE_BACKWARD,
        BackwardMeasurement,
        attention_backward,
        measure_backward,
        predict_backward,
    )
    from fa2_numba.tiling import Tiling
    from fa2_numba.traffic import Traffic


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fa2_numba' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"fa2_numba.{_HOME[name]}")
    return module if name == _HOME[name] else getattr(module, name)
