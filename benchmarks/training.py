"""A small GPT trained with this package's attention and with torch's, from the same start.

``python -m benchmarks.training`` writes ``benchmarks/results/<gpu>/training.json``. It needs torch.

- The model reads bytes: learned positions, blocks of causal attention and an MLP, bf16 autocast,
  AdamW. The runs differ in the attention alone, or in the seed of the initial weights; the batches
  are the same in all.
- The text is this project's pages and sources, and then the standard library of the Python that
  runs, which is on every machine and is not shipped here.
- Two runs never have the same bits: gradients are added up in an order of chance, and every kernel
  rounds otherwise. How far apart that leaves them, and how far another seed, is measured beside:
  torch's attention a second time, another of torch's kernels, two other seeds.
  `loss_curves.overlay` says what "the same curve" means.
- Times are from step to step on the GPU, medians without the first steps.

``--tiny`` runs a model of few numbers for two steps, without a GPU on the simulator: a trial of
this script.
"""

import argparse
import contextlib
import hashlib
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError:
    raise SystemExit("training: needs torch; install it first (see CONTRIBUTING.md)") from None

from benchmarks import loss_curves, peers
from benchmarks.environment import RESULTS, environment, results_folder, write_record

ROOT = RESULTS.parent.parent
TEXT = "this project's pages and sources, then the standard library of Python"
TEXT_BYTES = 8 * 2**20
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests"}
BYTES = 256  # there are so many
LEARNING_RATE, WARM_UP, CLIP = 6e-4, 30, 1.0  # the rate rises for WARM_UP steps
UNTIMED = 20  # steps: compilation, and torch's first allocations

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """How large the model is, and how long it is trained."""

    layers: int
    heads: int
    head_dim: int
    context: int
    batch: int
    steps: int

    @property
    def width(self) -> int:
        """Numbers that stand for a byte between the blocks."""
        return self.heads * self.head_dim


FULL = Sizes(layers=4, heads=4, head_dim=128, context=1024, batch=32, steps=300)
TINY = Sizes(layers=1, heads=2, head_dim=8, context=8, batch=1, steps=2)


# The attention that is exchanged ------------------------------------------------------------------


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of this package; q, k and v are (B, H, N, d)."""
    from fa2_numba.adapters.torch import attention

    out: Tensor = attention(q, k, v, causal=True)
    return out


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of torch, by the kernel that the context allows."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


Within = Callable[[], AbstractContextManager[Any]]
ATTENTION: dict[str, tuple[Attend, Within]] = {
    loss_curves.OURS: (ours, contextlib.nullcontext),
    loss_curves.TORCH: (torchs, peers.backend("FLASH_ATTENTION")),
    "torch, cuDNN": (torchs, peers.backend("CUDNN_ATTENTION")),
}
RUNS = (
    (loss_curves.OURS, 0),
    (loss_curves.TORCH, 0),
    (loss_curves.TORCH, 0),
    ("torch, cuDNN", 0),
    (loss_curves.TORCH, 1),
    (loss_curves.TORCH, 2),
)


# The model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        width = sizes.width
        self.attend, self.heads = attend, sizes.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, width) to the same."""
        B, N, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(B, N, 3, self.heads, width // self.heads)
        out = self.attend(*qkv.permute(2, 0, 3, 1, 4))  # (B, H, N, d) each
        x = x + self.mix(out.transpose(1, 2).reshape(B, N, width))
        x = x + self.mlp(self.norms[1](x))
        return x


class GPT(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, sizes.width)
        self.places = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes, attend) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.scores = nn.Linear(sizes.width, BYTES)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N) bytes to (B, N, 256)."""
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        scores: Tensor = self.scores(self.norm(self.blocks(x)))
        return scores


# One run ------------------------------------------------------------------------------------------


def text(limit: int = TEXT_BYTES) -> bytes:
    """`TEXT`, so many bytes of it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    own = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "fa2_numba").rglob("*.py")]
    theirs = (p for p in library.rglob("*.py") if not LEFT_OUT & {*p.relative_to(library).parts})
    found = bytearray()
    for path in (*sorted(own), *sorted(theirs)):
        if len(found) >= limit:
            break
        found += path.read_bytes()
    return bytes(found[:limit])


class Clock:
    """Milliseconds from tick to tick: of the GPU's work, or without one of the host's."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.ticks: list[Any] = []

    def tick(self) -> None:
        """Mark the end of what was enqueued so far."""
        if self.on_gpu:
            self.ticks.append(torch.cuda.Event(enable_timing=True))
            self.ticks[-1].record()
        else:
            self.ticks.append(1e3 * time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between each tick and the next."""
        pairs = list(zip(self.ticks, self.ticks[1:], strict=False))
        if not self.on_gpu:
            return [end - begin for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


def trained(sizes: Sizes, name: str, seed: int, data: Tensor) -> dict[str, Any]:
    """One run: its losses, times and memory.

    Parameters
    ----------
    sizes : Sizes
    name : str
        Of `ATTENTION`.
    seed : int
        Of the initial weights.
    data : Tensor, uint8
        The text, on the device to train on.
    """
    attend, within = ATTENTION[name]
    device = data.device.type
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    torch.manual_seed(seed)
    model = GPT(sizes, attend).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu
    )
    batches = torch.Generator().manual_seed(0)
    last = len(data) - sizes.context - 1
    starts = torch.randint(last, (sizes.steps, sizes.batch), generator=batches).to(device)
    window = torch.arange(sizes.context + 1, device=device)
    losses: list[Tensor] = []
    clock = Clock(device)
    clock.tick()
    with within():
        for step in range(sizes.steps):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
            tokens = data[starts[step][:, None] + window].long()
            with torch.autocast(device, dtype=torch.bfloat16):
                scores = model(tokens[:, :-1])
            loss = functional.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.detach())
            clock.tick()
    times = clock.milliseconds()
    step_time = statistics.median(times[UNTIMED:] or times)
    return {
        "attention": name,
        "seed": seed,
        "step_milliseconds": round(step_time, 3),
        "tokens_per_second": round(1e3 * sizes.batch * sizes.context / step_time),
        "peak_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None,
        "losses": [round(float(loss), 5) for loss in torch.stack(losses).cpu()],
    }


# All of them --------------------------------------------------------------------------------------


def compared(sizes: Sizes, device: str, record: dict[str, Any], target: Path | None) -> None:
    """Every run of `RUNS` into the record, which is written after each.

    What fails is recorded under "failed", with the reason.
    """
    written = text()
    data = torch.frombuffer(bytearray(written), dtype=torch.uint8).to(device)
    record["setting"] = {
        **asdict(sizes),
        "width": sizes.width,
        "dtype": "bf16 autocast",
        "text": f"{TEXT} {platform.python_version()}",
        "text_bytes": len(written),
        "text_sha256": hashlib.sha256(written).hexdigest(),
        "learning_rate": LEARNING_RATE,
        "warm_up_steps": WARM_UP,
    }
    record |= {"runs": [], "failed": []}
    for name, seed in RUNS:
        try:
            run = trained(sizes, name, seed, data)
        except Exception as error:  # whatever a library raises: the others go on
            why = {"attention": name, "seed": seed, "reason": peers.reason(error)}
            record["failed"].append(why)
            print(f"failed: {why}", flush=True)
        else:
            record["runs"].append(run)
            print(
                f"{name}, seed {seed}: loss {run['losses'][0]} to {run['losses'][-1]}, "
                f"{run['step_milliseconds']} ms a step, {run['tokens_per_second']:,} tokens a "
                f"second, peak {run['peak_bytes']} bytes",
                flush=True,
            )
        record["overlay"] = loss_curves.overlay(record["runs"])
        if target:
            write_record(record, target)


def main() -> None:
    """Train, write the record as it grows, say whether the curves are the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="two steps of a model of few numbers")
    parser.add_argument("--output", type=Path, help="JSON (default: the GPU's folder of results)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("no GPU: only --tiny runs without one")
    about = environment() if device == "cuda" else {}
    target = options.output
    if target is None and not options.tiny:
        target = results_folder(about["gpu"]) / "training.json"
    begin, record = time.monotonic(), dict(about)
    compared(TINY if options.tiny else FULL, device, record, target)
    print(record["overlay"])
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
