"""Figures as text. Imports neither torch nor numpy."""

import statistics


def markdown_table(rows: list[dict]) -> str:
    """Rows of equal keys as a Markdown table."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *[[str(row[key]) for key in head] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: list[float], form: str = ",.1f") -> str:
    """Median, and in brackets the least and the largest."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}}" + (
        f" ({low:{form}}-{high:{form}})" if len(values) > 1 else ""
    )
