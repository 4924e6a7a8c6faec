"""What the options of every command share. Imports no torch and no numpy, so that --help is
instant.
"""

import os
import sys
from collections import Counter
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import tyro

Options = TypeVar("Options")


def parse_options(kind: type[Options], arguments: list[str] | None = None, **settings) -> Options:
    """The options of dataclass `kind` from `arguments` (those of the command line), as `tyro.cli`
    reads them, to which `settings` go. Exits with code 2, as that does, where they are wrong.

    Of an option that takes one value and is given again the last value counts, as elsewhere; a line
    on standard error says so.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = tyro.cli(kind, args=arguments, **settings)
    if os.environ.get("RANK", "0") == "0":  # torchrun starts the command many times
        for note in repeated_options(kind, arguments):
            print(note, file=sys.stderr)
    return options


def repeated_options(kind: Any, arguments: list[str]) -> list[str]:
    """A line for each option of dataclass `kind` that `arguments` give more than once, but for
    those that collect their values.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Some:
    ...     top_k: int = 0
    >>> repeated_options(Some, ["--top-k", "1", "--top_k=2"])
    ['note: --top-k is given 2 times: the last one counts']
    """
    names, collecting = option_names(kind)
    options = [word.partition("=")[0] for word in arguments if word.startswith("-")]
    given = Counter(names.get(option.replace("_", "-")) for option in options)
    return [
        f"note: {name} is given {count} times: the last one counts"
        for name, count in given.items()
        if count > 1 and name is not None and name not in collecting
    ]


def option_names(kind: Any) -> tuple[dict[str, str], set[str]]:
    """How the options of a dataclass may be written -> the name of each, sections flattened; and
    the names of those that collect their values, as --stop does.
    """
    names: dict[str, str] = {}
    collecting: set[str] = set()
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            inner, more = option_names(hint)
            names |= inner
            collecting |= more
            continue
        name = "--" + field.name.replace("_", "-")
        names[name] = name
        names["--no-" + name[2:]] = name
        for extra in getattr(hint, "__metadata__", ()):
            names |= dict.fromkeys(getattr(extra, "aliases", None) or (), name)
            if extra is tyro.conf.UseAppendAction:
                collecting.add(name)
    return names, collecting
