"""Loss curves of training.json: whether they are the same, and what the README shows of them.

Two runs are as far apart as the largest difference of their curves, each smoothed over `WINDOW`
steps. What chance does to a curve where nothing is wrong is seen in torch's runs of different
seeds. They are far apart at first, for they start from other weights, and close later. So there are
two questions to this package's run and torch's of the same seed: over all steps, are they closer
than any two seeds are; in the second half, are they no farther apart than some two seeds are.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.markdown import provenance, table
from fa2_numba.accounting.plots import DASHES, INK, STYLE, Drawing, size

Run = dict[str, Any]
Record = dict[str, Any]

OURS, TORCH = "fa2_numba", "torch, FlashAttention-2"
SEEDS = 3  # of torch's runs, that say what a seed does
WINDOW = 20
COLOURS = {OURS: "#0072b2", TORCH: "#cc79a7", "torch, cuDNN": "#009e73"}
RULE = (
    f"the largest difference of two curves of one seed, smoothed over {WINDOW} steps, is at most "
    "the least such difference of two of torch's seeds over all steps, and the largest in the "
    "second half"
)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means over `WINDOW` steps, one for each step that ends such a window."""
    width = min(WINDOW, len(losses))
    return [sum(losses[n : n + width]) / width for n in range(len(losses) - width + 1)]


def differences(a: Run, b: Run) -> list[float]:
    """How far apart two smoothed curves are, step by step."""
    pairs = zip(smoothed(a["losses"]), smoothed(b["losses"]), strict=True)
    return [abs(x - y) for x, y in pairs]


def apart(a: Run, b: Run, late: bool = False) -> float:
    """The largest of `differences`, or of their second half."""
    found = differences(a, b)
    return max(found[len(found) // 2 :] if late else found)


def _of(runs: Sequence[Run], name: str, seed: int = 0) -> list[Run]:
    return [run for run in runs if (run["attention"], run["seed"]) == (name, seed)]


def overlay(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Whether the curves are the same by `RULE`.

    Parameters
    ----------
    runs : sequence of dict
        ``attention``, ``seed`` and ``losses`` of each.

    Returns
    -------
    dict or None
        The `rule`, and by it how far apart: ``ours`` and ``ours_late`` from torch's of the same
        seed; ``again``, torch's from itself; ``other_kernels``, torch's other kernels from it;
        ``seeds``, the least of torch's seeds, and ``seeds_late``, the largest; ``same``, None while
        one of `SEEDS` is missing. None while there is nothing to compare.
    """
    mine, same_seed = _of(runs, OURS), _of(runs, TORCH)
    of_torch = [run for run in runs if run["attention"] == TORCH]
    pairs = [p for p in itertools.combinations(of_torch, 2) if p[0]["seed"] != p[1]["seed"]]
    if not (mine and same_seed and pairs):
        return None
    first, *again = same_seed
    others = [run for run in runs if run["attention"] not in (OURS, TORCH)]
    ours, ours_late = (apart(first, mine[0], late) for late in (False, True))
    seeds = min(apart(*pair) for pair in pairs)
    seeds_late = max(apart(*pair, late=True) for pair in pairs)
    found = {
        "ours": ours,
        "ours_late": ours_late,
        "again": max((apart(first, run) for run in again), default=None),
        "other_kernels": max((apart(first, run) for run in others), default=None),
        "seeds": seeds,
        "seeds_late": seeds_late,
    }
    complete = len({run["seed"] for run in of_torch}) >= SEEDS
    return {"rule": RULE, **found, "same": within(found) if complete else None}


def within(found: dict[str, Any]) -> bool:
    """Whether `RULE` holds, of the seeds that ran."""
    return bool(found["ours"] <= found["seeds"] and found["ours_late"] <= found["seeds_late"])


# The README ---------------------------------------------------------------------------------------


def training_part(record: Record) -> str:
    """The section of training.json: figure, table, and whether the curves are the same."""
    setting, runs = record["setting"], record["runs"]
    heading = "## Training with it"
    picture = (
        "![Training loss of a small GPT with this package's attention and with torch's, and how "
        "far apart the curves are](docs/figures/training.svg)"
    )
    lines = [
        (
            run["attention"],
            run["seed"],
            f"{smoothed(run['losses'])[-1]:.4f}",
            f"{run['step_milliseconds']:.2f}",
            f"{run['tokens_per_second']:,}",
            size(run["peak_bytes"]),
        )
        for run in runs
    ]
    header = ("attention", "seed", "loss at the end", "ms a step", "tokens a second", "peak memory")
    below = (
        f"A GPT on bytes: {setting['layers']} layers, width {setting['width']:,}, "
        f"{setting['heads']} heads of {setting['head_dim']}, {setting['batch']} x "
        f"{setting['context']:,} bytes a step, {setting['steps']} steps, {setting['dtype']}, "
        f"AdamW; {setting['text_bytes']:,} bytes of text ({setting['text']}). Losses are means of "
        f"the last {WINDOW} steps. {verdict(overlay(runs))}{provenance(record)}."
    )
    return "\n\n".join((heading, picture, table(header, lines, below)))


def verdict(found: dict[str, Any] | None) -> str:
    """What `overlay` found, in words."""
    if found is None:
        return ""
    beside = []
    if found["again"] is not None:
        beside.append(f"torch's own, run again, {found['again']:.4f}")
    if found["other_kernels"] is not None:
        beside.append(f"with cuDNN's kernel {found['other_kernels']:.4f}")
    told = f" ({'; '.join(beside)})" if beside else ""
    answers = {True: "Within the noise of the seed", False: "Not within the noise of the seed"}
    answer = answers.get(
        found["same"],
        "Not decided, since the run ended before the last seed (by the two that ran, "
        f"{'within' if within(found) else 'not within'} their noise)",
    )
    return (
        f"{answer}: from one seed the smoothed curves of fa2_numba and of "
        f"torch are at most {found['ours']:.4f} apart{told}, in the second half "
        f"{found['ours_late']:.4f}; torch's of two seeds are at least {found['seeds']:.4f} apart, "
        f"in the second half up to {found['seeds_late']:.4f}. "
    )


def draw(record: Record | None) -> list[Drawing]:
    """The curves, and how far they are from torch's first."""
    if not record or not _of(record["runs"], TORCH):
        return []
    runs = record["runs"]
    first = _of(runs, TORCH)[0]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.4), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05))
        left, right = figure.subplots(1, 2)
        for run in runs:
            name, curve = run["attention"], smoothed(run["losses"])
            steps = range(len(run["losses"]) - len(curve) + 1, len(run["losses"]) + 1)
            again = run is not first and (name, run["seed"]) == (TORCH, 0)
            other = run["seed"] != 0
            label = f"{name}, seed {run['seed']}" if other else name + (", again" if again else "")
            look: Any = {
                "color": INK if other else COLOURS[name],
                "linewidth": 0.7 if other else 1.1 if name == OURS else 2.2,
                "zorder": 3 if name == OURS else 2,
                "linestyle": DASHES if other or again else "-",
                "label": label,
            }
            left.plot(steps, curve, **look)
            if run is not first:
                right.plot(steps, differences(run, first), **look)
        left.set(xlabel="step", ylabel=f"loss, mean of {WINDOW} steps")
        right.set(xlabel="step", ylabel=f"apart from {TORCH}", yscale="log")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    caption = f"Nats a byte, means of {WINDOW} steps. {record['setting']['dtype']}."
    return [Drawing("training", "Training loss", caption, figure)]
