"""What goes into sampling and what comes out, as text: prompts from the command line or a file, and
rows cut at stop strings.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from data.encodings import SAMPLE_BYTES, likely_encodings
from errors import UserError

if TYPE_CHECKING:
    from data.tokenizer import StreamDecoder, Tokenizer


def read_prompts(prompt: str = "", prompt_file: str = "", prompts_file: str = "") -> list[str]:
    """The prompt itself, the whole text of a file, or each line of one; "-" is standard input.
    Raises UserError.
    """
    name = prompt_file or prompts_file
    if not name:
        return [prompt]
    try:
        text = (sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()).decode("utf-8")
    except OSError as error:
        raise UserError(f"the prompt file {name} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        near = slice(max(0, error.start - SAMPLE_BYTES // 2), error.start + SAMPLE_BYTES // 2)
        sample = error.object[near]
        likely = likely_encodings(sample, error.start - near.start, near.start)
        way = f"\nmake it UTF-8, as iconv -f {likely[0].encoding} -t utf-8 may" if likely else ""
        raise UserError(f"the prompt file {name} isn't UTF-8: {found}{way}") from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if prompt_file:
        return [text]
    lines = text.split("\n")
    return lines[:-1] if len(lines) > 1 and not lines[-1] else lines


def empty_prompt(tokenizer: "Tokenizer") -> list[int]:
    """What an empty prompt starts from: the separator, else a newline, else the first symbol."""
    if tokenizer.separator is not None:
        return [tokenizer.separator]
    try:
        return tokenizer.encode("\n").tolist()
    except UserError:  # a character vocabulary without a newline
        return [0]


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
