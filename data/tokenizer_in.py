"""A published model's tokenizer, as one of ours: GPT-2's, a byte-level BPE, or, where it is another
kind, run as it is by the library `tokenizers`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from data.foreign import LETTERS
from data.json_file import read_json
from data.patterns import GPT2, PATTERNS
from data.tokenizer import (
    ALL_BYTES,
    SEPARATOR_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    ForeignTokenizer,
    Tokenizer,
)
from data.tokenizer_out import tokenizer_json
from errors import UserError

GPT2_TOKENS = "f5f299f91c3753a53068cda7a6ab8e10"
"""The beginning of the SHA-256 of GPT-2's tokens."""
ENDS = (SEPARATOR_TEXT, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>")
"""What usually ends a document, where nothing else says it."""


def read_tokenizer(path: Path, end: int | None) -> Tokenizer:
    """The tokenizer of a tokenizer.json, in which the id `end` ends a document; None: the first of
    `ENDS` that it has. Raises UserError where the file holds no tokenizer.
    """
    plain = read_json(path)
    if not isinstance(plain.get("model"), dict):
        raise UserError(f"{path} is no tokenizer of the library tokenizers: it has no model")
    try:
        ours = _without_merges(plain) or _byte_level(plain)
        if ours is not None:
            return ours
        return ForeignTokenizer(json.dumps(plain), _usual_end(plain) if end is None else end)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error!r})") from None


def _usual_end(plain: dict[str, Any]) -> int | None:
    """The id that ends a document, by the words that usually say so."""
    ids = {token["content"]: token["id"] for token in plain.get("added_tokens") or []}
    return next((ids[word] for word in ENDS if word in ids), None)


def read_old_files(folder: Path, end: int | None) -> Tokenizer:
    """GPT-2's vocab.json and merges.txt."""
    vocabulary = read_json(folder / "vocab.json")
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    plain = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "decoder": {"type": "ByteLevel"},
    }
    return _byte_level(plain) or ForeignTokenizer(json.dumps(plain), end)


def _byte_level(plain: dict[str, Any]) -> BPETokenizer | None:
    """The byte-level BPE that a tokenizer.json describes, if it is one such as ours: a known
    pattern, ids in the order of merging, and the separator's behind them.
    """
    model = plain["model"]
    pattern = _pattern(plain.get("pre_tokenizer"))
    is_other = plain.get("normalizer") or model.get("type", "BPE") != "BPE"
    changes = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if pattern is None or is_other or any(model.get(name) for name in changes):
        return None
    words = {i: word for word, i in model["vocab"].items()}
    special = {token["id"]: token["content"] for token in plain.get("added_tokens") or []}
    words |= special
    last = len(words) - 1
    if sorted(words) != list(range(last + 1)) or words[last] != SEPARATOR_TEXT:
        return None
    if special.keys() - {last}:
        return None
    if any(letter not in LETTERS for i in range(last) for letter in words[i]):
        return None
    tokens = [bytes(LETTERS[letter] for letter in words[i]) for i in range(last)]
    if not set(tokens).issuperset(ALL_BYTES) or not _in_order(model["merges"], words, last):
        return None
    digest = hashlib.sha256(b" ".join(tokens)).hexdigest()
    kind = "gpt2" if pattern == GPT2 and digest.startswith(GPT2_TOKENS) else "bpe"
    return BPETokenizer(kind, pattern, tokens)


def _without_merges(plain: dict[str, Any]) -> Tokenizer | None:
    """The characters or bytes that a tokenizer.json names, if it is as `data.tokenizer_out`
    writes it.
    """
    words = list(plain["model"].get("vocab", {}))
    has_separator = words[-1:] == [SEPARATOR_TEXT]
    if has_separator:
        words.pop()
    candidates: list[Tokenizer] = []
    if len(words) == 256:
        candidates.append(ByteTokenizer(has_separator))
    if words and words == sorted(set(words)) and all(len(word) == 1 for word in words):
        candidates.append(CharTokenizer("".join(words), has_separator))
    return next((ours for ours in candidates if tokenizer_json(ours) == plain), None)


def _pattern(cutter: dict[str, Any] | None) -> str | None:
    """The pattern here that cuts as the pre-tokenizer does, if there is one."""
    if not cutter:
        return None
    parts = cutter["pretokenizers"] if cutter["type"] == "Sequence" else [cutter]
    *before, last = parts
    if last["type"] != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if last.get("use_regex", True):
        return GPT2 if not before else None
    if len(before) != 1 or before[0]["type"] != "Split" or before[0].get("invert"):
        return None
    if before[0]["behavior"] != "Isolated":
        return None
    written = before[0]["pattern"].get("Regex")
    return next((ours for ours, theirs in PATTERNS.items() if theirs == written), None)


def _in_order(merges: list[Any], words: dict[int, str], last: int) -> bool:
    """Whether merges make the token of each id in turn, by one pair of words or several, as where
    ids are ranks.
    """
    made = ["".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in merges]
    longer = [words[i] for i in range(last) if len(words[i]) > 1]
    return list(dict.fromkeys(made)) == longer
