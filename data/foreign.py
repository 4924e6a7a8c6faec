"""Tokenizers of other programs: what a tokenizer.json describes, as the library `tokenizers` runs
it, and the bytes that its words stand for.
"""

import json
import re
from typing import Any

from errors import UserError

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece spells a byte that no other token covers."""
SPACE = "\u2581"
"""How it spells a space."""


def open_reader(text: str) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json, for which all text is ordinary. Raises
    UserError where there is none, or the library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError(
            "this tokenizer is run by the package tokenizers, which is not installed: "
            "pip install tokenizers"
        ) from None
    try:
        reader = Tokenizer.from_str(text)
        reader.no_truncation()
        reader.no_padding()
        reader.encode_special_tokens = True
        return reader
    except Exception as error:  # the library raises Exception itself
        why = " ".join(str(error).split())[:120]
        raise UserError(f"that is no tokenizer.json which tokenizers can read ({why})") from None


def word_bytes(text: str, reader: Any) -> list[bytes]:
    """The text of each id in UTF-8, as far as an id has one by itself. Raises UserError for a
    vocabulary of absurd size.
    """
    plain = json.loads(text)
    words = {i: word for word, i in reader.get_vocab(with_added_tokens=True).items()}
    n_word = max(words, default=0) + 1
    if n_word > 1 << 24:
        raise UserError(f"the tokenizer's ids go up to {n_word - 1:,}: it is damaged")
    special = {token["id"] for token in plain.get("added_tokens") or []}
    by_letters = "ByteLevel" in json.dumps(plain.get("decoder"))
    pieces = []
    for i in range(n_word):
        word = words.get(i, "")
        if i in special:
            pieces.append(word.encode())
        elif by_letters:
            pieces.append(bytes(LETTERS[letter] for letter in word if letter in LETTERS))
        elif match := BYTE.fullmatch(word):
            pieces.append(bytes([int(match[1], 16)]))
        else:
            pieces.append(word.replace(SPACE, " ").encode())
    return pieces


def byte_letters() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level BPE's files, as in GPT-2's
    encoder.py -> the byte.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}


LETTERS = byte_letters()
