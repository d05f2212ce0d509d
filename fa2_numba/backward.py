"""attention_backward, measure_backward, predict_backward: the gradients of attention.

As `api`, whose checks of arguments hold here too. Everything after the arrays is keyword-only.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa2_numba import api, arrays, io_model, masking, plan, problem
from fa2_numba.kernels import (
    fa1_backward,
    fa2_backward,
    fa3_backward,
    fa3_gradients,
    gradient_rows,
    standard_backward,
)
from fa2_numba.launch import Operands, on_device
from fa2_numba.problem import Problem
from fa2_numba.tiling import Tiling, acc_bytes, hopper_backward
from fa2_numba.traffic import SharedTraffic, Traffic


def _fa3(problem: Problem, A: Operands) -> None:
    """Each gradient by itself where they do not fit together; dQ alone to be deterministic."""
    if not problem.B * problem.H:
        return
    if problem.splits_gradients:
        fa3_gradients.launch(problem, A, "dV", "dK", "dQ")
        return
    fa3_backward.launch(problem, A)
    if not problem.adds_dQ:
        fa3_gradients.launch(problem, A, "dQ")


METHODS_BACKWARD: dict[str, Callable[[Problem, Operands], None]] = {
    "standard_backward": standard_backward.launch,
    "fa1_backward": fa1_backward.launch,
    "fa2_backward": fa2_backward.launch,
    "fa2_backward_deterministic": fa2_backward.launch,
    "fa3_backward": _fa3,
    "fa3_backward_deterministic": _fa3,
}
PORTABLE_BACKWARD = {name: METHODS_BACKWARD[name] for name in problem.PORTABLE_BACKWARD}
GIVEN = ("dO", "Q", "K", "V", "O", "L", "dL")  # arrays of a call, in the order of its arguments
GRADIENTS = ("dQ", "dK", "dV")


def launch(problem: Problem, A: Operands) -> None:
    """Run the method of `problem` on its operands `A`, with what comes before and after it."""
    gradient_rows.before(problem, A)
    METHODS_BACKWARD[problem.method](problem, A)
    gradient_rows.after(problem, A)


@dataclass(frozen=True)
class BackwardMeasurement:
    """What `measure_backward` returns.

    Attributes
    ----------
    dq, dk, dv : array
        As `attention_backward` returns them.
    rows : list of Traffic
        What the kernels that computed them moved, counted.
    problem : Problem
        The call, for `io_model.predict`.
    on_chip : list of SharedTraffic
        What they moved between shared memory and registers, if that was asked for.
    """

    dq: Any
    dk: Any
    dv: Any
    rows: list[Traffic]
    problem: Problem
    on_chip: list[SharedTraffic]


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    dlse: Any = None,
    deterministic: bool = False,
) -> tuple[Any, Any, Any]:
    """Gradients of a loss by q, k and v, given its gradients by out and LSE.

    Parameters
    ----------
    dout : array, q's shape and dtype
        Gradient of the loss by `out`; any strides.
    q, k, v : array
        As for `attention`, and on the same device as all others.
    out, lse : array
        What `attention` returned for the same arguments, with ``return_lse=True``.
    causal, window, mask, softcap, alibi_slopes, scale
        As for `attention`. They are constants and get no gradient.
    score : masking.Score, optional
        As for `attention`; it needs its `derivative`.
    method : str
        "standard", "fa1", "fa2", "fa3" (Hopper GPUs, fp16 and bf16), or "auto": "fa3" where it can
        do the call, else "fa2". Not necessarily the forward pass's.
    tiling : Tiling, optional
        Default: `tiling.choose` for this device; under the simulator a small fixed one.
    dlse : array, lse's shape and dtype, optional
        Gradient of the loss by `lse`; default 0.
    deterministic : bool
        Give the same bits each time. "fa2" and "fa3" then sum dq in a second pass, which computes
        the scores again, instead of by atomic adds, whose order is that of chance. The other
        methods use no atomics, nor does "fa3" for d above 128; dk and dv are repeatable in any
        case.

    Returns
    -------
    dq, dk, dv : array
        Shape, dtype and kind of q, k, v.

    Raises
    ------
    TypeError, ValueError
        Before any launch; the message names the argument, what was given and what is accepted.
    """
    given = (dout, q, k, v, out, lse) if dlse is None else (dout, q, k, v, out, lse, dlse)
    key = done = None
    if mask is None and alibi_slopes is None and score is None:
        options = causal, window, softcap, scale, method, tiling, deterministic
        key, done = plan.replay(given, options)
    if done is None:
        call = _Backward(
            dout, q, k, v, out, lse, dlse,
            method=method, tiling=tiling, scale=scale, deterministic=deterministic,
        )  # fmt: skip
        call.change(causal, window, mask, softcap, alibi_slopes, score)
        ran = call.run_backward()
        done = call.gradients
        if key is not None:
            plan.record(key, GIVEN[: len(given)], dict(zip(GRADIENTS, done, strict=True)), ran)
    return done


def measure_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    dlse: Any = None,
    deterministic: bool = False,
    on_chip: bool = False,
) -> BackwardMeasurement:
    """Run `attention_backward` with counting kernels.

    The other parameters are those of `attention_backward`. The kernels are the same source,
    compiled for counted arrays.

    Parameters
    ----------
    on_chip : bool
        Count shared memory as well.

    Returns
    -------
    BackwardMeasurement
        The gradients and the traffic rows, source "counted".
    """
    call = _Backward(
        dout, q, k, v, out, lse, dlse,
        method=method, tiling=tiling, scale=scale, deterministic=deterministic,
    )  # fmt: skip
    call.change(causal, window, mask, softcap, alibi_slopes, score)
    ran = call.run_backward(counted=True, on_chip=on_chip)
    with on_device(call.like.device):
        return BackwardMeasurement(*call.gradients, ran.rows(), ran.problem, ran.on_chip_rows())


def predict_backward(
    dout: Any = None,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    out: Any = None,
    lse: Any = None,
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
    dlse: Any = None,
    deterministic: bool = False,
) -> list[Traffic]:
    """The rows that `measure_backward` would return, without running anything.

    Parameters
    ----------
    dout, q, k, v, out, lse : array, optional
        As for `attention_backward`; or give `shape`.
    shape, heads_kv, n_k, dtype
        As for `predict`.
    dlse : array, or bool with `shape`
        The gradient by LSE, or whether there is one.

    Returns
    -------
    list of Traffic
        Source "predicted".

    Raises
    ------
    TypeError, ValueError
        As `attention_backward`; or neither or both of arrays and `shape`.
    """
    given = [x is not None for x in (dout, q, k, v, out, lse)]
    if any(given) == (shape is not None) or any(given) != all(given):
        raise ValueError("predict_backward: give dout, q, k, v, out and lse, or shape")
    for name, value in (("heads_kv", heads_kv), ("n_k", n_k), ("dtype", dtype)):
        if shape is None and value is not None:
            raise ValueError(f"{name}: got {value!r} beside arrays, accepted: only with shape")
    call: _Backward | _BackwardShape
    if shape is None:
        call = _Backward(
            dout, q, k, v, out, lse, dlse,
            method=method, tiling=tiling, scale=None, deterministic=deterministic,
        )  # fmt: skip
    else:
        if dlse is not None and not isinstance(dlse, bool):
            raise TypeError(f"dlse: got {type(dlse).__qualname__} beside shape, accepted: a bool")
        call = _BackwardShape(shape, heads_kv, n_k, dtype or "fp32", method, tiling)
        call.turn(deterministic, bool(dlse))
    call.change(causal, window, mask, softcap, alibi_slopes, score)
    return io_model.predict(call.problem())


# ---- one call ---------------------------------------------------------------------------------


class _BackwardShape(api._Shape):
    """Sizes, method and tiling of a backward call, checked."""

    methods = ("standard", "fa1", "fa2", "fa3")
    hopper = "fa3_backward"

    def turn(self, deterministic: bool, dlse: bool) -> None:
        """Keep what only a backward call has."""
        if not isinstance(deterministic, bool):
            raise TypeError(f"deterministic: got {deterministic!r}, accepted: True, False")
        self.deterministic, self.dlse = deterministic, dlse

    def _settled(self) -> str:
        """The full name of the method."""
        name = super()._settled()
        second_pass = self.deterministic and name in ("fa2", "fa3")
        return f"{name}_backward_deterministic" if second_pass else f"{name}_backward"

    def _fa3_error(self) -> Exception | None:
        """Why fa3 cannot do this call, backward."""
        if not self.N_q:
            return NotImplementedError("q: got no rows with method=fa3, accepted: 1 or more")
        return super()._fa3_error()

    def _boxed(self, queries: Any, keys: Any) -> tuple[tuple[str, Any], ...]:
        return (*super()._boxed(queries, keys), ("dO", queries))

    def _hopper_tiling(self) -> Tiling:
        return hopper_backward(self.d)

    def change(self, *how: Any) -> None:
        """Set mask and score change from the arguments."""
        super().change(*how)
        if not self.score.change.differentiable:
            raise ValueError(
                f"score: got {self.score.name} without a derivative, accepted: "
                "masking.score(..., derivative=...)"
            )

    def problem(self) -> Problem:
        """This call as the kernels and the model see it."""
        return dataclasses.replace(super().problem(), dlse=self.dlse)


class _Backward(_BackwardShape, api._Call):
    """A backward call with arrays."""

    def __init__(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dlse: Any,
        *,
        method: str,
        tiling: Tiling | None,
        scale: float | None,
        deterministic: bool,
    ):
        self._take(q, k, v, method, tiling, scale)
        self.turn(deterministic, dlse is not None)
        Q, acc = self.like, "fp64" if acc_bytes(self.dtype) == 8 else "fp32"
        of_q, of_lse = (Q.layout.shape, self.dtype), (Q.layout.shape[:-1], acc)
        named = {"Q": self.views["q"], "K": self.views["k"], "V": self.views["v"]}
        for letter, name, array, expected in (
            ("dO", "dout", dout, of_q),
            ("O", "out", out, of_q),
            ("L", "lse", lse, of_lse),
            ("dL", "dlse", dlse, of_lse),
        ):
            if array is not None or letter != "dL":
                named[letter] = self._operand(name, array, *expected)
        dq, dk, dv = (view.empty(view.layout.shape, self.dtype) for view in self.views.values())
        self.gradients = dq, dk, dv
        for letter, array in zip(GRADIENTS, self.gradients, strict=True):
            named[letter] = arrays.operand(letter, array)
        for letter, view in named.items():
            self.layouts[letter] = self._four_axes(view.layout, 3 if letter in ("L", "dL") else 4)
        self.named = named

    def _operand(self, name: str, array: Any, shape: tuple[int, ...], dtype: str) -> arrays.Operand:
        """An array of this shape and dtype, on q's device."""
        view = arrays.operand(name, array)
        if view.dtype != dtype:
            raise TypeError(
                f"{name}: got dtype {view.dtype}, accepted: {dtype}, for q's {self.dtype}"
            )
        if view.layout.shape != shape:
            raise ValueError(f"{name}: got shape {view.layout.shape}, accepted: {shape}")
        if view.device != self.like.device:
            raise ValueError(f"{name}: on GPU {view.device}, accepted: q's, {self.like.device}")
        return view

    def run_backward(self, counted: bool = False, on_chip: bool = False) -> Operands:
        """Launch the method; returns the operands and what they counted."""
        problem = self.problem()
        with on_device(self.like.device):
            operands = Operands(
                problem,
                {name: self._kernel_array(view, name) for name, view in self.named.items()},
                self._workspace,
                arrays.numba_stream(self.like.stream),
                self.scale,
                counted,
                on_chip,
                device=self.like.device,
            )
            self._upload(operands, (self.mask.args, self.score.args))
            launch(problem, operands)
        return operands
