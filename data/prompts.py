"""What goes into sampling and what comes out, as text: prompts from the command line or a file, and
rows cut at stop strings.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.encodings import SAMPLE_BYTES, likely_encodings
from errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from data.tokenizer import StreamDecoder, Tokenizer

SEARCHED = 1 << 24
"""Tokens of a training split that are searched for what a text may start from."""


def read_escapes(text: str) -> str:
    r"""The text with \n, \t and \\ read as a newline, a tab and a backslash: some terminals can't
    write them otherwise. Any other backslash is one.

    >>> read_escapes(r"A:\n\d") == "A:\n" + r"\d"
    True
    >>> read_escapes(r"\\n") == r"\n"
    True
    """
    meaning = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda match: meaning[match[1]], text)


def read_prompts(
    prompt: str | Sequence[str] = "", prompt_file: str = "", prompts_file: str = ""
) -> list[str]:
    """The prompts themselves, their escapes read; or the whole text of a file, or each line of one,
    as it stands; "-" is standard input. Raises UserError.
    """
    name = prompt_file or prompts_file
    if not name:
        given = [prompt] if isinstance(prompt, str) else prompt
        return [read_escapes(text) for text in given] or [""]
    lines = split_lines(read_utf8(name, "prompt file"))
    if prompt_file:
        return ["\n".join(lines)]
    if lines == [""]:
        raise UserError(f"the prompts file {name} is empty: write a prompt on each line")
    return lines if lines[-1] else lines[:-1]


def read_utf8(name: str, kind: str) -> str:
    """The text of a file, without a byte order mark; "-" is standard input. Raises UserError, which
    calls the file a `kind`.
    """
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"the {kind} {name} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        at = error.start
        line = len(split_lines(error.object[:at].decode("utf-8")))
        found = f"byte {error.object[at]:#04x} at offset {at}, in line {line}"
        near = slice(max(0, at - SAMPLE_BYTES // 2), at + SAMPLE_BYTES // 2)
        likely = likely_encodings(error.object[near], at - near.start, near.start)
        way = f"\nmake it UTF-8, as iconv -f {likely[0].encoding} -t utf-8 may" if likely else ""
        raise UserError(f"the {kind} {name} isn't UTF-8: {found}{way}") from None


def split_lines(text: str) -> list[str]:
    """The lines of a text, whichever of the three ways they end: one more than it has line ends."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def encode_prompts(
    prompts: Sequence[str], tokenizer: "Tokenizer", prompts_file: str = ""
) -> list[list[int]]:
    """The ids of each prompt, one at least: an empty one starts from what `empty_prompt` says.

    Raises UserError for one that has no ids, by its line where they are the lines of a file.
    """
    ids = []
    bad: dict[int, UserError] = {}
    for number, prompt in enumerate(prompts, start=1):
        try:
            ids.append(tokenizer.encode(prompt).tolist() or empty_prompt(tokenizer))
        except UserError as error:
            bad[number] = error
    if not bad:
        return ids
    number, reason = next(iter(bad.items()))
    if len(prompts) == 1 and not prompts_file:
        raise reason
    others = f" ({len(bad) - 1:,} more can't be read either)" if len(bad) > 1 else ""
    raise UserError(f"{name_of(number, prompts_file)}{others}: {reason}")


def name_of(number: int, prompts_file: str = "") -> str:
    """How a prompt is called, counted from 1: by its line where it stands in a file."""
    if not prompts_file:
        return f"prompt {number}"
    return f"line {number} of {'standard input' if prompts_file == '-' else prompts_file}"


def note_prompts(options, prompts, ids, tokenizer, limit: int) -> None:
    """Print the `prompt_notes` on standard error. `options` say which files the prompts are of."""
    files = options.prompt_file, options.prompts_file
    for note in prompt_notes(prompts, ids, tokenizer, limit, *files):
        print(note, file=sys.stderr)


def prompt_notes(
    prompts: Sequence[str],
    ids: Sequence[Sequence[int]],
    tokenizer: "Tokenizer",
    limit: int,
    prompt_file: str = "",
    prompts_file: str = "",
) -> list[str]:
    """What there is to say about prompts before they are continued, a line a kind: they start from
    something chosen for them, are longer than the context of `limit` tokens, or end in white space
    that their writer may not have meant.
    """
    notes = []
    if "" in prompts:
        notes.append(f"note: an empty prompt starts from {start_text(tokenizer)}")
    longest = max(map(len, ids))
    if longest > limit:
        kept = f"its last {max(1, limit // 2)} are read"
        notes.append(f"note: a prompt has {longest} tokens, the context holds {limit}: {kept}")
    ending = [number for number, prompt in enumerate(prompts, start=1) if prompt.endswith(" ")]
    if ending and not tokenizer.cuts_anywhere:
        which = "the prompt ends"
        if len(prompts) > 1:
            which = f"{len(ending):,} of {len(prompts):,} prompts end"
            which += f" (the first is {name_of(ending[0], prompts_file)})"
        notes.append(
            f"note: {which} in a space, which the {tokenizer.kind} tokenizer joins to the word "
            "behind it: without it, what follows is likelier to be a word"
        )
    if prompt_file and prompts[0].endswith("\n"):
        origin = "standard input" if prompt_file == "-" else prompt_file
        notes.append(
            f"note: {origin} ends in a newline, as editors leave one, and the text goes on behind "
            "it: remove it to go on in the last line"
        )
    return notes


def find_start(tokenizer: "Tokenizer", tokens: "np.ndarray", n_document: int) -> int:
    """The id that a text without a prompt starts from: one that training meets in `tokens`, the
    (n,) ids of its split, of which `n_document` documents were made.

    It is the separator if there is one between two of them, else a newline, else the first id of
    all. A long split is searched at its beginning only.
    """
    separator = tokenizer.separator
    if separator is not None and (n_document > 1 or is_among(separator, tokens)):
        return separator
    newline = newline_id(tokenizer)
    if newline is not None and is_among(newline, tokens):
        return newline
    return int(tokens[0])


def is_among(token: int, tokens: "np.ndarray") -> bool:
    """Whether `token` is one of the first SEARCHED `tokens`."""
    part = 1 << 20  # a newline comes soon, where there are some
    beginning = tokens[:SEARCHED]
    return any(
        (beginning[first : first + part] == token).any() for first in range(0, len(beginning), part)
    )


def newline_id(tokenizer: "Tokenizer") -> int | None:
    """The id of a newline by itself; None in a character vocabulary without one."""
    try:
        return int(tokenizer.encode("\n")[0])
    except UserError:
        return None


def empty_prompt(tokenizer: "Tokenizer") -> list[int]:
    """What an empty prompt starts from: `tokenizer.start`, where it is known what training has
    seen; else the separator, else a newline, else the first symbol.
    """
    if tokenizer.start is not None:
        return [tokenizer.start]
    if tokenizer.separator is not None:
        return [tokenizer.separator]
    return [newline_id(tokenizer) or 0]


def start_text(tokenizer: "Tokenizer") -> str:
    """What `empty_prompt` has chosen, and why, for a line that says so."""
    (start,) = empty_prompt(tokenizer)
    known = tokenizer.start is not None
    if start == tokenizer.separator:
        return "the separator of documents" + ("" if known else ", if training has seen one")
    if start == newline_id(tokenizer):
        lacks = known and tokenizer.separator is not None
        return "a newline" + (", as training has seen no separator of documents" if lacks else "")
    first = tokenizer.decode([start])
    if not known:
        return f"{first!r}, the first of the vocabulary"
    return f"{first!r}, the training text's first token, as that holds no newline"


class Output:
    """Prints the texts that continue each of `prompts` `n_sample` times, in their order: each as
    soon as it and all before it are whole, a single one as it grows.
    """

    def __init__(self, prompts: Sequence[str], n_sample: int = 1, show_prompt: bool = True):
        shown = prompts if show_prompt else [""] * len(prompts)
        self.prompts = [prompt for prompt in shown for _ in range(n_sample)]
        self.n_shown = 0
        self.n_character = 0
        if len(self.prompts) == 1:  # one text is shown as it is drawn
            print(self.prompts[0], end="", flush=True)

    def show(self, first: int, rows: "Sequence[TextRow]") -> None:
        """Print what is certain of `rows`, which are the texts from number `first` on."""
        if len(self.prompts) == 1 and not self.n_shown:
            end = "\n" if rows[0].done else ""
            print(rows[0].text[self.n_character :], end=end, flush=True)
            self.n_character = len(rows[0].text)
            self.n_shown += rows[0].done
        while self.n_shown < first + len(rows) and rows[self.n_shown - first].done:
            between = "\n" if self.n_shown else ""
            head = f"{between}--- {self.n_shown + 1} of {len(self.prompts)} ---"
            text = rows[self.n_shown - first].text
            print(f"{head}\n{self.prompts[self.n_shown]}{text}", flush=True)
            self.n_shown += 1


class TextRow:
    """The text one row has grown so far. What might yet become a stop string, and half a character,
    is held back.
    """

    def __init__(self, decoder: "StreamDecoder", stops: tuple[str, ...]):
        self.decoder = decoder
        self.stops = stops
        self.text = ""
        self.held = ""
        self.done = False

    def push(self, token: int | None) -> str:
        """Take one more token, or None at the end; return the text that is now certain."""
        if self.done:
            return ""
        self.done = token is None
        self.held += self.decoder.finish() if token is None else self.decoder.push(token)
        found = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            self.done = True
            certain = min(found)
        else:
            possible = (
                n
                for stop in self.stops
                for n in range(1, len(stop))
                if self.held.endswith(stop[:n])
            )
            certain = len(self.held) - (0 if self.done else max(possible, default=0))
        shown = self.held[:certain]
        self.held = self.held[certain:]
        self.text += shown
        return shown
