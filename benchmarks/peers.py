"""What tensor-core attention is compared with: our methods, torch's backends, flash-attn-4.

Every implementation turns the same q, k and v, (B, H, N, d) on the GPU, into a call without
arguments. What it needs besides (another layout, a block mask) is made before, not in the call.
Their gradients are in `benchmarks.peers_backward`.
"""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fa2_numba
from fa2_numba.accounting.bench import Call, Cell

if TYPE_CHECKING:  # arguments are checked, and records read, where torch is not installed
    import torch

DEVICE = "cuda"
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # ours to torch's name
TORCH_DTYPES = {**DTYPES, "fp32": "float32"}
INPUTS = {"forward": 3, "backward": 4}  # q, k, v; and the gradient of the output


@dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes
    ----------
    name : str
        As rows and arguments name it.
    make : callable ``(q, k, v, causal) -> call``
        Of the backward pass ``(q, k, v, dout, causal) -> call``.
    output : callable
        What a call returns, as a tensor (B, H, N, d); of the backward pass as three.
    within : callable
        Makes the context in which calls are made.
    rounds : int, optional
        Turns of a cell at most, for what is slow.
    sizes : tuple of int
        N to time it at by default; empty for all.
    """

    name: str
    make: Callable[..., Call]
    output: Callable[[Any], Any] = lambda out: out
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    rounds: int | None = None
    sizes: tuple[int, ...] = ()

    def call(self, *inputs: "torch.Tensor", causal: bool) -> Callable[[], Any]:
        """A call that enters its context by itself."""
        inner = self.make(*inputs, causal=causal)

        def call() -> Any:
            with self.within():
                return inner()

        return call


def random_inputs(cell: Cell) -> "tuple[torch.Tensor, ...]":
    """q, k, v and, of a backward cell, dout: random normal numbers, the same each time."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (cell.batch, cell.heads, cell.n, cell.d)
    dtype = getattr(torch, TORCH_DTYPES[cell.dtype])
    return tuple(
        torch.randn(shape, device=DEVICE, dtype=dtype, generator=generator)
        for _ in range(INPUTS[cell.direction])
    )


def reason(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _ours(method: str) -> Callable[..., Call]:
    def make(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool) -> Call:
        return lambda: fa2_numba.attention(q, k, v, causal=causal, method=method)

    return make


def sdpa(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool) -> Call:
    """torch's own attention; which kernel it takes is for the context to say."""
    from torch.nn.functional import scaled_dot_product_attention

    return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    import torch
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    # Every size is compiled for itself: a kernel for any size would be another, slower one.
    config.recompile_limit = config.accumulated_recompile_limit = 1000
    return torch.compile(flex_attention, dynamic=False)


def _is_visible(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def flex(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool) -> Call:
    """FlexAttention, compiled for the size."""
    from torch.nn.attention.flex_attention import create_block_mask

    n, compiled = q.shape[2], _compiled_flex()
    mask = create_block_mask(_is_visible, None, None, n, n, device=DEVICE) if causal else None
    return lambda: compiled(q, k, v, block_mask=mask)


def _fa4(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool) -> Call:
    from flash_attn.cute import flash_attn_func

    Q, K, V = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return lambda: flash_attn_func(Q, K, V, causal=causal)


def _heads_first(out: Any) -> "torch.Tensor":
    """O of what flash-attn-4 returns: (O, LSE), or O alone; O is (B, N, H, d)."""
    O: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return O.transpose(1, 2)


def backend(name: str) -> Callable[[], AbstractContextManager[Any]]:
    """What makes the context in which torch takes this kernel or none."""

    def within() -> AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, name))

    return within


IMPLEMENTATIONS = {
    each.name: each
    for each in (
        Implementation("fa3", _ours("fa3")),
        Implementation("cudnn", sdpa, within=backend("CUDNN_ATTENTION")),
        Implementation("fa4", _fa4, output=_heads_first),
        Implementation("torch-fa2", sdpa, within=backend("FLASH_ATTENTION")),
        Implementation("torch-efficient", sdpa, within=backend("EFFICIENT_ATTENTION")),
        Implementation("flex", flex, sizes=(1024, 4096, 16384)),
        Implementation("fa2", _ours("fa2"), rounds=2),
        Implementation("torch-math", sdpa, within=backend("MATH"), rounds=1),
        Implementation("standard", _ours("standard"), rounds=2),
        Implementation("fa1", _ours("fa1"), rounds=2),
    )
}
TRUSTED = ("cudnn", "torch-fa2", "torch-efficient")  # the first that runs is compared with
COMPILED = ("fa3", "fa2", "fa4", "standard", "fa1")  # once for d, mask and dtype
COMPILED_BY_SIZE = ("flex",)


def warm(name: str, cell: Cell) -> str:
    """`call_once` of the implementation of this name."""
    return call_once(IMPLEMENTATIONS[name], cell)


def call_once(implementation: Implementation, cell: Cell) -> str:
    """Call an implementation, which puts what it compiles into its cache on disk.

    Returns
    -------
    str
        Why it did not run; empty if it did.
    """
    import torch

    try:
        implementation.call(*random_inputs(cell), causal=cell.causal)()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a library raises is recorded when it is its turn
        return reason(error)
    return ""
