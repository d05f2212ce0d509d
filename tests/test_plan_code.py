"""The parameters that a plan records, against Numba's own layout and the compiled kernels' code."""

import itertools
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_codegen import STORAGE
from test_codegen import hopper as hopper

from fa2_numba import api, backward, launch, masking, plan
from fa2_numba.problem import Problem, acc_type
from fa2_numba.tiling import Tiling, hopper_backward

pytestmark = pytest.mark.codegen

SCALE = 0.37


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("standard", "fp32"),
        ("fa1", "bf16"),
        ("fa2", "fp64"),
        ("fa2_backward", "bf16"),
        ("fa2_backward_deterministic", "fp32"),
        ("fa3_backward", "fp16"),
    ],
)
def test_parameters_are_those_of_the_compiled_kernels(method: str, dtype: str) -> None:
    """As many as the code declares, of its sizes, and addresses where a plan writes them."""
    from numba.cuda import args, dispatcher

    class Pointer(args.ArgHint):
        """A device array, as far as Numba's launch asks."""

        def __init__(self, value: np.ndarray, address: int):
            super().__init__(value)
            self.ptr, self.size, self.dtype = address, value.size, value.dtype
            self.shape, self.strides = value.shape, value.strides
            self._layout = SimpleNamespace(strides_in_bytes=value.strides)

        def to_device(self, retr: Any, stream: Any = 0) -> Any:
            return self

    mask, score = masking.window(3, 4), masking.softcap(2.0)
    tiling = hopper_backward(64) if method == "fa3_backward" else Tiling(32, 32, 8, 16)
    problem = Problem(method, dtype, 2, 4, 2, 40, 50, 64, tiling, mask, score, dlse=True)
    addresses = itertools.count(1 << 40, 1 << 20)
    acc = acc_type(dtype)

    def pointer(shape: tuple[int, ...], dtype: Any) -> Pointer:
        return Pointer(np.empty(shape, dtype), next(addresses))

    operands = launch.Operands(
        problem,
        {
            name: pointer(problem.layout(name).shape, acc if "L" in name else STORAGE[dtype])
            for name in ("Q", "K", "V", "O", "L", "dO", "dL", "dQ", "dK", "dV")
        },
        lambda shape, dtype: (pointer(shape, dtype), None),
        0,
        SCALE,
        counted=False,
    )
    ran: list[launch.Launched] = []

    def compile_only(kernel: Any, blocks: int, threads: int, shared: int, *given: Any) -> None:
        types = tuple(kernel.typeof_pyval(x) for x in given)
        compiled = dispatcher._Kernel(kernel.py_func, types, **kernel.targetoptions)
        ran.append(launch.Launched(kernel.__name__, compiled, blocks, threads, shared, given))

    maps: list[Any] = []

    def boxes(name: str, *_: Any) -> Any:
        maps.append(np.uint64(next(addresses)))
        return maps[-1]

    operands.run, operands.boxes = compile_only, boxes  # type: ignore[method-assign]
    launcher = backward.launch if method in backward.METHODS_BACKWARD else api.METHODS[method]
    launcher(problem, operands)
    scale = int(acc(SCALE).view(f"u{acc().itemsize}"))
    assert any(scale in words for one in ran for words, _ in plan.parameters_of(one))
    for one in ran:
        text = one.compiled._codelibrary.get_lto_ptx((9, 0, "a"))
        (declared,) = re.findall(r"\.entry [^(]*\((.*?)\)", text, re.DOTALL)
        sizes = [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", declared)]
        parameters = list(plan.parameters_of(one))
        words = [word for part, _ in parameters for word in part]
        assert len(words) == len(sizes)
        assert all(word < 1 << 8 * size for word, size in zip(words, sizes, strict=True))
        arrays = [(part, value) for part, value in parameters if isinstance(value, Pointer)]
        assert arrays
        for part, value in arrays:
            assert part[plan.ADDRESS] == value.ptr and part.count(value.ptr) == 1
        assert all(len(part) == 1 for part, value in parameters if not isinstance(value, Pointer))
    passed = [
        part[0]
        for one in ran
        for part, value in plan.parameters_of(one)
        if any(value is m for m in maps)
    ]
    assert passed == [int(address) for address in maps]
