"""What an exercise is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "exercises"


@dataclass(frozen=True)
class Case:
    """One thing that is tried."""

    words: str
    """What it is, as the learner is told."""
    run: Callable[[Callable], Any]
    """Takes a function, calls it on arguments made anew, gives what is compared."""
    hint: str
    """The usual cause where this case alone fails and no known mistake explains it."""


@dataclass(frozen=True)
class Mistake:
    """A function that is wrong in a known way."""

    words: str
    """What is wrong with it and what is right."""
    function: Callable


@dataclass(frozen=True)
class Exercise:
    """A function to write: docs/exercises/NUMBER_NAME.md and .py."""

    number: int
    name: str
    function: str
    """What it is called in the learner's file."""
    solution: Callable
    """The product's own."""
    cases: list[Case]
    mistakes: list[Mistake]

    @property
    def stem(self) -> str:
        """The name of its page and of its stub, without .md and .py."""
        return f"{self.number:02d}_{self.name}"
