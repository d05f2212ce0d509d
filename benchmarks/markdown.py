"""Pieces of Markdown that the README's generated parts are made of."""

from collections.abc import Iterable, Sequence
from typing import Any


def machine(record: dict[str, Any]) -> str:
    """Where a record was made."""
    versions = record["versions"]
    shown = ", ".join(f"{p} {versions[p]}" for p in ("numba-cuda", "torch") if p in versions)
    return f"{record['gpu']}, driver {record['driver']}, {shown}"


def provenance(record: dict[str, Any]) -> str:
    """One line: where and when a record was made, and of which commit."""
    return f"{machine(record)}, commit {record['commit'][:7]}, {record['date']}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], below: str) -> str:
    """A Markdown table, and the paragraph below it."""
    head, *lines = (f"| {' | '.join(map(str, line))} |" for line in (header, *rows))
    return "\n".join([head, "|---" * len(header) + "|", *lines, "", below])
