"""Masks and score changes, injected into the kernels as device functions.

A mask says which keys a query row may see. Positions are on the key axis: ``i`` is the row's place
there, ``i = row + N_k - N_q`` (bottom-right alignment), ``j`` the key's. So causal is ``j <= i``
whatever the lengths.

Most masks are an interval of keys per row, ``bounds``; its ends never move left as i grows, so the
interval of a whole tile of rows is known from its first and last row, and tiles outside it are
never visited. Masks that are no interval add ``visible``, asked for each score of a tile, and
perhaps ``tile``, which tells without asking each score that a tile is empty or full.

Functions are plain Python here: the kernels compile them, the model (`io_model.py`) calls them.
Whatever varies between calls (window, document table, mask array) travels in `args`, so that it
does not recompile the kernel.

An own mask, every second key:

>>> def every_second(args, b, h, i, j):
...     return (i - j) % 2 == 0
>>> mask = custom(every_second)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

EMPTY, PARTIAL, FULL = 0, 1, 2
BEYOND_ANY_LENGTH = 2**62  # and still an int64 after a position is added
Function = Callable[..., Any]
Wrap = Callable[[Function], Any]


# ---- what a mask is ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """The compiled part of a mask.

    Attributes
    ----------
    bounds : callable ``(args, b, h, i, N_k) -> (lo, hi)``
        Row i sees no key outside ``lo <= j < hi``. Both ends are non-decreasing in i.
    visible : callable ``(args, b, h, i, j) -> bool``, optional
        Which keys inside the bounds the row sees. None: all.
    tile : callable ``(args, b, h, i_first, i_last, j_first, j_last) -> EMPTY | PARTIAL | FULL``
        What `visible` would say of a tile of rows and keys (ends included). None: PARTIAL.
    """

    bounds: Function
    visible: Function | None = None
    tile: Function | None = None

    def functions(self, wrap: Wrap) -> tuple[Any, Any, Any]:
        """``bounds``, ``visible``, ``tile``, each passed through `wrap`; none is None."""
        visible = self.visible or _always
        tile = self.tile or (_full if self.visible is None else _partial)
        return wrap(self.bounds), wrap(visible), wrap(tile)

    @property
    def elementwise(self) -> bool:
        """Whether a score inside the bounds can be masked."""
        return self.visible is not None

    @property
    def bounded(self) -> bool:
        """Whether the bounds of a row can leave keys out."""
        return self.bounds is not _all_bounds


@dataclass(frozen=True)
class _Joined:
    """Visible where both rules say so; ``args`` is the pair of their args."""

    a: Any
    b: Any

    def functions(self, wrap: Wrap) -> tuple[Any, Any, Any]:
        bounds_a, visible_a, tile_a = self.a.functions(wrap)
        bounds_b, visible_b, tile_b = self.b.functions(wrap)

        def bounds(args, b, h, i, N_k):
            lo_a, hi_a = bounds_a(args[0], b, h, i, N_k)
            lo_b, hi_b = bounds_b(args[1], b, h, i, N_k)
            return max(lo_a, lo_b), min(hi_a, hi_b)

        def visible(args, b, h, i, j):
            return visible_a(args[0], b, h, i, j) and visible_b(args[1], b, h, i, j)

        def tile(args, b, h, i_first, i_last, j_first, j_last):
            kind_a = tile_a(args[0], b, h, i_first, i_last, j_first, j_last)
            kind_b = tile_b(args[1], b, h, i_first, i_last, j_first, j_last)
            return min(kind_a, kind_b)

        return wrap(bounds), wrap(visible), wrap(tile)

    @property
    def elementwise(self) -> bool:
        return self.a.elementwise or self.b.elementwise

    @property
    def bounded(self) -> bool:
        return self.a.bounded or self.b.bounded


def _always(args, b, h, i, j):
    return True


def _full(args, b, h, i_first, i_last, j_first, j_last):
    return FULL


def _partial(args, b, h, i_first, i_last, j_first, j_last):
    return PARTIAL


@dataclass(frozen=True, eq=False)
class Mask:
    """A rule, its arguments and a name for tables.

    Attributes
    ----------
    name : str
        As the `mask` column shows it.
    rule : Rule
        What the kernel is compiled with.
    args : tuple
        Integers and arrays (`Table`, `BooleanArray`) that the rule's functions get.
    """

    name: str
    rule: Any
    args: tuple[Any, ...] = ()

    def __and__(self, other: "Mask") -> "Mask":
        """Keys that both masks show."""
        if self.rule is _NONE:
            return other
        if other.rule is _NONE:
            return self
        return Mask(
            f"{self.name}&{other.name}", _Joined(self.rule, other.rule), (self.args, other.args)
        )


@dataclass(frozen=True, eq=False)
class Table:
    """An array argument of a mask or score change; `name` is its row in the traffic table."""

    name: str
    values: np.ndarray


class DocumentTable(Table):
    """A table of `documents`: (1 or B, N_k)."""


class SlopeTable(Table):
    """The table of `alibi`: (1 or B, H)."""


@dataclass(frozen=True, eq=False)
class BooleanArray:
    """The arguments of `boolean`, made at launch, when the tiling is known.

    They become ``(mask, tile_map, B_r, B_c, shift)``: the array broadcast to (B, H, N_q, N_k), the
    kind of each of its tiles, the tile sizes and N_k - N_q.

    Attributes
    ----------
    values : array of bool
        Where it is: on the device or the host.
    name : str
        Its row in the traffic table.
    to_host : callable
        Makes a NumPy array of `values`, for the model.
    """

    values: Any
    name: str = "mask"
    to_host: Callable[[Any], np.ndarray] = np.asarray

    @property
    def map_name(self) -> str:
        """The row of its tile map."""
        return f"tile map{self.name.removeprefix('mask')}"


# ---- the masks --------------------------------------------------------------------------------


def _all_bounds(args, b, h, i, N_k):
    return 0, N_k


_NONE = Rule(_all_bounds)


def none() -> Mask:
    """Every key is visible."""
    return Mask("none", _NONE)


def _causal_bounds(args, b, h, i, N_k):
    return 0, i + 1


_CAUSAL = Rule(_causal_bounds)


def causal() -> Mask:
    """Key j is visible to row i iff j <= i. The loop over j ends at the diagonal ("bound")."""
    return Mask("causal", _CAUSAL)


def _below(args, b, h, i, j):
    return j <= i


def _causal_tile(args, b, h, i_first, i_last, j_first, j_last):
    if j_first > i_last:
        return EMPTY
    return FULL if j_last <= i_first else PARTIAL


_CAUSAL_SKIP = Rule(_all_bounds, _below, _causal_tile)


def causal_skip() -> Mask:
    """The same mask by the general loop: visit every j, skip a tile found empty ("skip")."""
    return Mask("causal-skip", _CAUSAL_SKIP)


def _window_bounds(args, b, h, i, N_k):
    left, right = args
    lo = 0 if left < 0 else i - left
    hi = N_k if right < 0 else i + right + 1
    return lo, hi


_WINDOW = Rule(_window_bounds)


def window(left: int, right: int) -> Mask:
    """Row i sees keys i - left .. i + right, both included; -1 is unbounded."""
    given = (left, right)
    if not all(map(_is_integer, given)):
        raise TypeError(f"window: got {given!r}, accepted: two integers")
    if min(given) < -1:
        raise ValueError(f"window: got {given!r}, accepted: -1 (unbounded), 0 or more")
    ends = tuple(min(int(end), BEYOND_ANY_LENGTH) for end in given)
    return Mask(f"window({left},{right})", _WINDOW, ends)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _prefix_bounds(args, b, h, i, N_k):
    return 0, max(i + 1, args[0])


_PREFIX = Rule(_prefix_bounds)


def prefix_lm(prefix: int) -> Mask:
    """The first `prefix` keys are visible to all rows, the others causally."""
    if not _is_integer(prefix):
        raise TypeError(f"prefix: got {prefix!r}, accepted: an integer")
    if prefix < 0:
        raise ValueError(f"prefix: got {prefix}, accepted: 0 or more")
    return Mask(f"prefix({prefix})", _PREFIX, (min(int(prefix), BEYOND_ANY_LENGTH),))


def _document_bounds(args, b, h, i, N_k):
    if i < 0:
        return 0, 0
    return args[0][b % args[0].shape[0], i], args[1][b % args[1].shape[0], i]


_DOCUMENTS = Rule(_document_bounds)


def documents(ids: Any) -> Mask:
    """A row sees the keys of its own document.

    Parameters
    ----------
    ids : array of int, (N_k,) or (B, N_k)
        Document of each place on the key axis, non-decreasing.

    Raises
    ------
    TypeError, ValueError
        Not integers, wrong ndim, or an id that decreases.
    """
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"ids: got dtype {ids.dtype}, accepted: integers")
    if ids.ndim not in (1, 2):
        raise ValueError(f"ids: got shape {ids.shape}, accepted: (N_k,) or (B, N_k)")
    ids = np.atleast_2d(ids)
    if (ids[:, 1:] < ids[:, :-1]).any():
        raise ValueError("ids: documents must not decrease along the key axis")
    first, end = np.empty(ids.shape, np.int32), np.empty(ids.shape, np.int32)
    for b, row in enumerate(ids):
        first[b] = np.searchsorted(row, row, "left")
        end[b] = np.searchsorted(row, row, "right")
    tables = (DocumentTable("document start", first), DocumentTable("document end", end))
    return Mask(f"documents({len(np.unique(ids))})", _DOCUMENTS, tables)


def _boolean_visible(args, b, h, i, j):
    mask, _, _, _, shift = args
    return mask[b, h, i - shift, j]


def _boolean_tile(args, b, h, i_first, i_last, j_first, j_last):
    _, tile_map, B_r, B_c, shift = args
    return tile_map[b, h, (i_first - shift) // B_r, j_first // B_c]


_BOOLEAN = Rule(_all_bounds, _boolean_visible, _boolean_tile)


def boolean(values: Any) -> Mask:
    """Any mask, given as a boolean array that broadcasts to (B, H, N_q, N_k); True is visible."""
    return Mask("boolean", _BOOLEAN, (BooleanArray(values),))


def custom(visible: Function, *args: Any, name: str | None = None) -> Mask:
    """Your own predicate ``visible(args, b, h, i, j) -> bool``; every tile is visited.

    `args` may be integers and `Table`s. The function must be one that Numba can compile.
    """
    return Mask(name or visible.__name__, Rule(_all_bounds, visible), args)


# ---- what the kernels and the model ask of a mask ----------------------------------------------


def tile_functions(rule: Any, B_r: int, B_c: int, wrap: Wrap) -> tuple[Any, Any, Any]:
    """A mask's questions for one tiling.

    Returns
    -------
    tile_range : ``(args, b, h, t, N_q, N_k) -> (j_begin, j_end, lo_last, hi_first)``
        Row tile t visits key tiles j_begin <= j < j_end; keys in [lo_last, hi_first) are inside
        the bounds of each of its rows.
    tile_kind : ``(args, b, h, t, j, lo_last, hi_first, N_q, N_k) -> EMPTY | PARTIAL | FULL``
        What to do with tile (t, j) in that range.
    rows : the pair ``row_bounds(args, b, h, row, N_q, N_k) -> (i, lo, hi)``, ``visible``
        A row's position and bounds, clamped to the keys that exist (none for a row past N_q).
    """
    bounds, visible, tile = rule.functions(wrap)

    def row_bounds(args, b, h, row, N_q, N_k):
        i = row + N_k - N_q
        if row >= N_q:
            return i, 0, 0
        lo, hi = bounds(args, b, h, i, N_k)
        return i, min(max(lo, 0), N_k), max(min(hi, N_k), 0)

    row_bounds = wrap(row_bounds)

    def tile_range(args, b, h, t, N_q, N_k):
        first = t * B_r
        last = min(first + B_r, N_q) - 1
        _, lo_first, hi_first = row_bounds(args, b, h, first, N_q, N_k)
        _, lo_last, hi_last = row_bounds(args, b, h, last, N_q, N_k)
        if lo_first >= hi_last:
            return 0, 0, 0, 0
        return lo_first // B_c, (hi_last + B_c - 1) // B_c, lo_last, hi_first

    def tile_kind(args, b, h, t, j, lo_last, hi_first, N_q, N_k):
        i_first = t * B_r + N_k - N_q
        i_last = min(i_first + B_r, N_k) - 1
        j_first = j * B_c
        kind = tile(args, b, h, i_first, i_last, j_first, min(j_first + B_c, N_k) - 1)
        if kind == FULL and (j_first < lo_last or j_first + B_c > hi_first):
            kind = PARTIAL
        return kind

    return wrap(tile_range), wrap(tile_kind), (row_bounds, visible)


# ---- score changes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """The compiled part of a score change.

    Attributes
    ----------
    make : callable ``(acc) -> (prepare, change)``
        Functions for scores of dtype `acc`. ``prepare(args, b, h) -> state`` runs once a block,
        ``change(state, i, j, s) -> s`` for each score.
    make_derivative : callable ``(acc) -> derivative``, optional
        ``derivative(state, i, j, s)`` is that of ``change`` by s. None: it is 1.
    """

    make: Callable[[Any], tuple[Function, Function]]
    make_derivative: Callable[[Any], Function] | None = None
    differentiable = True

    def functions(self, wrap: Wrap, acc: Any) -> tuple[Any, Any]:
        """``prepare`` and ``change``, passed through `wrap`."""
        prepare, change = self.make(acc)
        return wrap(prepare), wrap(change)

    def derivative(self, wrap: Wrap, acc: Any) -> Any:
        """``derivative``, passed through `wrap`; None: it is 1."""
        return self.make_derivative and wrap(self.make_derivative(acc))


@dataclass(frozen=True)
class _Sequence:
    """First `a`, then `b`; ``args`` is the pair of their args."""

    a: Any
    b: Any

    def functions(self, wrap: Wrap, acc: Any) -> tuple[Any, Any]:
        prepare_a, change_a = self.a.functions(wrap, acc)
        prepare_b, change_b = self.b.functions(wrap, acc)

        def prepare(args, b, h):
            return prepare_a(args[0], b, h), prepare_b(args[1], b, h)

        def change(state, i, j, s):
            return change_b(state[1], i, j, change_a(state[0], i, j, s))

        return wrap(prepare), wrap(change)

    def derivative(self, wrap: Wrap, acc: Any) -> Any:
        """The chain rule."""
        by_a, by_b = (part.derivative(wrap, acc) for part in (self.a, self.b))
        change_a = self.a.functions(wrap, acc)[1]

        def of_a(state, i, j, s):
            return by_a(state[0], i, j, s)

        def of_b(state, i, j, s):
            return by_b(state[1], i, j, change_a(state[0], i, j, s))

        def of_both(state, i, j, s):
            return by_a(state[0], i, j, s) * by_b(state[1], i, j, change_a(state[0], i, j, s))

        if by_a is None and by_b is None:
            return None
        return wrap(of_a if by_b is None else of_b if by_a is None else of_both)

    @property
    def differentiable(self) -> bool:
        """Whether the backward pass can go through it."""
        return self.a.differentiable and self.b.differentiable


@dataclass(frozen=True, eq=False)
class Score:
    """A change of the scaled scores before the mask: name, compiled part, arguments."""

    name: str
    change: Any
    args: tuple[Any, ...] = ()

    def then(self, other: "Score") -> "Score":
        """This change, then `other`."""
        if self.change is UNCHANGED:
            return other
        if other.change is UNCHANGED:
            return self
        return Score(
            f"{self.name}+{other.name}",
            _Sequence(self.change, other.change),
            (self.args, other.args),
        )


def _make_unchanged(acc):
    def prepare(args, b, h):
        return 0

    def change(state, i, j, s):
        return s

    return prepare, change


UNCHANGED = Change(_make_unchanged)


def unchanged() -> Score:
    """Scores as they are."""
    return Score("", UNCHANGED)


def _make_softcap(acc):
    def prepare(args, b, h):
        return acc(args[0])

    def change(cap, i, j, s):
        return cap * acc(math.tanh(s / cap))

    return prepare, change


def _make_softcap_derivative(acc):
    def derivative(cap, i, j, s):
        t = acc(math.tanh(s / cap))
        return acc(1) - t * t

    return derivative


_SOFTCAP = Change(_make_softcap, _make_softcap_derivative)


def softcap(cap: float) -> Score:
    """``cap * tanh(s / cap)``."""
    return Score(f"softcap({cap:g})", _SOFTCAP, (float(cap),))


def _make_alibi(acc):
    def prepare(args, b, h):
        return args[0][b % args[0].shape[0], h]

    def change(slope, i, j, s):
        return s - slope * acc(abs(i - j))

    return prepare, change


_ALIBI = Change(_make_alibi)


def alibi(slopes: Any) -> Score:
    """``s - slope * |i - j|``, slopes (H,) or (B, H)."""
    return Score("alibi", _ALIBI, (SlopeTable("slopes", np.atleast_2d(np.asarray(slopes))),))


@dataclass(frozen=True)
class _Own:
    """A user's score change, and its derivative where it was given."""

    change: Function
    by_s: Function | None = None

    def functions(self, wrap: Wrap, acc: Any) -> tuple[Any, Any]:
        own = wrap(self.change)

        def prepare(args, b, h):
            return args

        def change(args, i, j, s):
            return acc(own(args, i, j, s))

        return wrap(prepare), wrap(change)

    def derivative(self, wrap: Wrap, acc: Any) -> Any:
        """The user's, rounded to `acc`."""
        assert self.by_s is not None, "the caller asks `differentiable` first"
        own = wrap(self.by_s)

        def derivative(args, i, j, s):
            return acc(own(args, i, j, s))

        return wrap(derivative)

    @property
    def differentiable(self) -> bool:
        """Whether the backward pass can go through it."""
        return self.by_s is not None


def score(
    change: Function, *args: Any, name: str | None = None, derivative: Function | None = None
) -> Score:
    """Your own ``change(args, i, j, s) -> s`` of the scaled score s.

    `args` may be numbers. The function must be one that Numba can compile. So must its
    ``derivative(args, i, j, s)`` by s, which the backward pass needs: 1 where `change` adds a
    constant.
    """
    return Score(name or change.__name__, _Own(change, derivative), args)
