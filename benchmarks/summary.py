"""Speeds of one record compared: cells, ratios, geometric means."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
OURS = "fa3"
RIVALS = ("cudnn", "fa4")  # what ours is measured against
GRADIENTS = ("dq", "dk", "dv")
SHOWN = ("cudnn", "fa4", "torch-fa2")  # beside it in tables


def geometric_mean(values: Sequence[float]) -> float:
    """The n-th root of the product of n positive numbers; NaN of none."""
    if not values:
        return math.nan
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def cells(rows: Iterable[Row], regime: str | None = None) -> dict[tuple[int, bool, int], Row]:
    """(d, causal, N), ascending, to implementation to TFLOP/s."""
    found: dict[tuple[int, bool, int], Row] = {}
    for row in rows:
        if regime is None or row["regime"] == regime:
            key = (row["d"], row["causal"], row["n"])
            found.setdefault(key, {})[row["implementation"]] = row["tflops"]
    return dict(sorted(found.items()))


def regimes(rows: Iterable[Row]) -> list[str]:
    """Those that were timed, in their order."""
    return list(dict.fromkeys(row["regime"] for row in rows))


def ratios(found: dict[tuple[int, bool, int], Row], rival: str, ours: str = OURS) -> list[float]:
    """Speed of ours over a rival's, one for each cell that has both."""
    return [speed[ours] / speed[rival] for speed in found.values() if {ours, rival} <= set(speed)]


def by_head_dimension(found: dict[tuple[int, bool, int], Row], rival: str, ours: str = OURS) -> str:
    """`` (d = 64 0.967, 128 1.003)``: geometric means, where there is more than one d."""
    dimensions = sorted({d for d, _, _ in found})
    means = []
    for d in dimensions:
        values = ratios({key: speed for key, speed in found.items() if key[0] == d}, rival, ours)
        if values:
            means.append(f"{d} {geometric_mean(values):.3f}")
    return f" (d = {', '.join(means)})" if len(means) > 1 else ""


def worst(
    found: dict[tuple[int, bool, int], Row], rivals: Sequence[str] = RIVALS, ours: str = OURS
) -> tuple[float, tuple[int, bool, int]] | None:
    """The least ratio of ours to the faster of the rivals that ran, and where; None without any."""
    ratio = {
        key: speed[ours] / max(speed[name] for name in rivals if name in speed)
        for key, speed in found.items()
        if ours in speed and any(name in speed for name in rivals)
    }
    if not ratio:
        return None
    key = min(ratio, key=ratio.__getitem__)
    return ratio[key], key


def faster_from(rows: Iterable[Row], ours: str, other: str) -> int | None:
    """The least N from which on ours took less time at every N that has both; None if none."""
    times: dict[int, dict[str, float]] = {}
    for row in rows:
        times.setdefault(row["n"], {})[row["implementation"]] = row["milliseconds"]
    least = None
    for n in sorted(times, reverse=True):
        if {ours, other} <= set(times[n]):
            if times[n][ours] >= times[n][other]:
                break
            least = n
    return least


def cell_name(key: tuple[int, bool, int]) -> str:
    """``d = 128, causal, N = 4,096``."""
    d, causal, n = key
    return f"d = {d}, {'causal' if causal else 'full'}, N = {n:,}"


def means(
    found: dict[tuple[int, bool, int], Row],
    labels: Mapping[str, str] | None = None,
    ours: str = OURS,
) -> list[str]:
    """One sentence for each rival: the geometric mean of the ratios, of all and by d; last the
    worst cell."""
    shown = {name: (labels or {}).get(name, name) for name in (ours, *RIVALS)}
    lines = []
    for rival in RIVALS:
        values = ratios(found, rival, ours)
        if values:
            lines.append(
                f"{shown[ours]} / {shown[rival]}: geometric mean {geometric_mean(values):.3f} over "
                f"{len(values)} cells, {min(values):.3f} to {max(values):.3f}"
                + by_head_dimension(found, rival, ours)
            )
    if least := worst(found, ours=ours):
        ratio, key = least
        rivals = " and ".join(shown[rival] for rival in RIVALS)
        lines.append(
            f"{shown[ours]} / the faster of {rivals}: worst {ratio:.3f} ({cell_name(key)})"
        )
    return lines


def table(found: dict[tuple[int, bool, int], Row], ours: str = OURS) -> list[str]:
    """Lines for the terminal: TFLOP/s of each cell, and the ratios."""
    header = [ours, *SHOWN, *(f"/{rival}" for rival in RIVALS)]
    lines = [f"{'cell':30}" + "".join(f"{name:>13}" for name in header)]
    for key, speed in found.items():
        shown = [f"{speed[name]:.1f}" if name in speed else "-" for name in (ours, *SHOWN)]
        shown += [
            f"{speed[ours] / speed[rival]:.3f}" if {ours, rival} <= set(speed) else "-"
            for rival in RIVALS
        ]
        lines.append(f"{cell_name(key):30}" + "".join(f"{text:>13}" for text in shown))
    return lines
