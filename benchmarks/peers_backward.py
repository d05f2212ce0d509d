"""What the gradients of tensor-core attention are compared with.

As `benchmarks.peers`. Every implementation computes its own output and LSE before; a call is the
backward pass alone, and returns dq, dk and dv. torch's are what autograd runs for an output that it
has recorded, so a call of theirs costs the host autograd's bookkeeping, too, as it does in
training.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import fa2_numba
from benchmarks import peers
from benchmarks.peers import Implementation, backend, flex, sdpa
from fa2_numba.accounting.bench import Call, Cell

if TYPE_CHECKING:
    import torch


def _ours(method: str, deterministic: bool = False) -> Callable[..., Call]:
    def make(
        q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", dout: "torch.Tensor", causal: bool
    ) -> Call:
        out, lse = fa2_numba.attention(q, k, v, causal=causal, method=method, return_lse=True)
        return lambda: fa2_numba.attention_backward(
            dout, q, k, v, out, lse, causal=causal, method=method, deterministic=deterministic
        )

    return make


def _recorded(
    forward: Callable[..., Call],
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[..., Call]:
    """The backward pass of what autograd records of a forward call, made in a context."""

    def make(
        q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", dout: "torch.Tensor", causal: bool
    ) -> Call:
        import torch

        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with within():
            out = forward(*leaves, causal)()
        in_order = torch.empty_like(out, requires_grad=False).copy_(dout)  # of out's axes
        return lambda: torch.autograd.grad(out, leaves, in_order, retain_graph=True)

    return make


def _adapter(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool) -> Call:
    from fa2_numba.adapters.torch import attention

    return lambda: attention(q, k, v, causal=causal)


def _flex(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool) -> Call:
    from torch._functorch import config

    config.donated_buffer = False  # what is saved for the backward pass is needed again and again
    return flex(q, k, v, causal)


def _fa4(
    q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", dout: "torch.Tensor", causal: bool
) -> Call:
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.interface import _flash_attn_bwd

    Q, K, V, dO = (x.transpose(1, 2).contiguous() for x in (q, k, v, dout))
    O, lse = flash_attn_func(Q, K, V, causal=causal, return_lse=True)
    return lambda: _flash_attn_bwd(Q, K, V, O, dO, lse, causal=causal)


def _heads_first(gradients: Any) -> "tuple[torch.Tensor, ...]":
    """flash-attn-4's are (B, N, H, d)."""
    return tuple(x.transpose(1, 2) for x in gradients)


IMPLEMENTATIONS = {
    each.name: each
    for each in (
        Implementation("fa3_backward", _ours("fa3")),
        Implementation("cudnn", _recorded(sdpa, backend("CUDNN_ATTENTION"))),
        Implementation("fa4", _fa4, output=_heads_first),
        Implementation("torch-fa2", _recorded(sdpa, backend("FLASH_ATTENTION"))),
        Implementation("torch-efficient", _recorded(sdpa, backend("EFFICIENT_ATTENTION"))),
        Implementation("flex", _recorded(_flex), sizes=(1024, 4096, 16384)),
        Implementation("fa3_backward_deterministic", _ours("fa3", deterministic=True)),
        Implementation("fa2_backward", _ours("fa2"), rounds=2),
        Implementation("fa3_autograd", _recorded(_adapter)),
    )
}
COMPILED = ("fa3_backward", "fa3_backward_deterministic", "fa2_backward", "fa3_autograd", "fa4")


def warm(name: str, cell: Cell) -> str:
    """`peers.call_once` of the implementation of this name."""
    return peers.call_once(IMPLEMENTATIONS[name], cell)
