"""What the sections have told, written anew as JSON and Markdown with everything that comes, so
that a run that is cut short leaves what it has.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown_table


class Report:
    """The record of a run of `benchmarks.gpu`, in `out`.json and `out`.md."""

    def __init__(self, out: Path, title: str):
        self.out, self.title = out, title
        self.sections: dict[str, dict[str, Any]] = {}
        out.parent.mkdir(parents=True, exist_ok=True)

    def open(self, section: str) -> None:
        """Begin a section."""
        self.sections[section] = {
            "ended": "cut short",
            "seconds": None,
            "tables": {},
            "notes": [],
            "figures": {},
        }
        self.write()

    def add(self, section: str, message: dict[str, Any]) -> None:
        """A row, a note or figures, as `Task` sends them."""
        record = self.sections[section]
        if "row" in message:
            row = message["row"]
            key = next(iter(row.values()))
            record["tables"].setdefault(message["table"], {})[key] = row
            self.say(section, ", ".join(f"{name} {cell}" for name, cell in row.items()))
        if "note" in message:
            record["notes"].append(message["note"])
            self.say(section, message["note"])
        record["figures"].update(message.get("figures", {}))
        self.write()

    def close(self, section: str, ended: str, seconds: float) -> None:
        """End a section: how, and after how many seconds."""
        self.sections[section].update(ended=ended, seconds=round(seconds, 1))
        self.say(section, f"{ended}, {seconds:.0f} s")
        self.write()

    def say(self, section: str, text: str) -> None:
        print(f"{section}: {text}", file=sys.stderr, flush=True)

    def failed(self) -> bool:
        """Whether a section went wrong: what is missing or out of time has not."""
        return any(record["ended"].startswith("failed") for record in self.sections.values())

    def markdown(self) -> str:
        """The tables and notes of all sections."""
        parts = [f"# {self.title}"]
        for section, record in self.sections.items():
            took = "" if record["seconds"] is None else f", {record['seconds']:.0f} s"
            parts.append(f"## {section}: {record['ended']}{took}")
            for title, rows in record["tables"].items():
                parts.append(f"{title}\n\n{markdown_table(filled(list(rows.values())))}")
            parts += record["notes"]
        return "\n\n".join(parts) + "\n"

    def write(self) -> None:
        """Both files, as things stand."""
        plain = {
            section: record
            | {"tables": {title: list(rows.values()) for title, rows in record["tables"].items()}}
            for section, record in self.sections.items()
        }
        Path(f"{self.out}.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        Path(f"{self.out}.md").write_text(self.markdown(), encoding="utf-8")


def filled(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows with every column that one of them has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name, "") for name in columns} for row in rows]
