"""Our tokenizers as files of the library `tokenizers`, with the same ids for every text."""

import json
from typing import Any

from data.foreign import LETTERS
from data.patterns import PATTERNS
from data.tokenizer import (
    SEPARATOR_TEXT,
    BPETokenizer,
    CharTokenizer,
    ForeignTokenizer,
    Tokenizer,
)
from errors import UserError

LETTER_OF = {byte: letter for letter, byte in LETTERS.items()}
BY_LETTERS = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """What tokenizer.json says. Raises UserError for a pattern that has no equal there.

    The separator is a word like any other, not an "added token": those are looked for in text,
    while all text is ordinary here. What the word says can't come of merging.
    """
    if isinstance(tokenizer, ForeignTokenizer):
        return json.loads(tokenizer.text)
    cutter: dict[str, Any] | None = BY_LETTERS
    decoder: dict[str, Any] = BY_LETTERS
    merges: list[list[str]] = []
    if isinstance(tokenizer, CharTokenizer):
        words = list(tokenizer.symbols)
        cutter, decoder = None, {"type": "Fuse"}
    else:
        words = ["".join(LETTER_OF[byte] for byte in piece) for piece in tokenizer.pieces]
    if isinstance(tokenizer, BPETokenizer):
        cutter = _cutter(tokenizer.pattern)
        merges = all_merges(words)
    if tokenizer.separator is not None:
        words.append(SEPARATOR_TEXT)
    vocabulary = {word: i for i, word in enumerate(words)}
    if len(vocabulary) < len(words):
        raise UserError(f"{SEPARATOR_TEXT} is a word of the vocabulary, beside the separator")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": cutter,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": bool(merges),
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _cutter(pattern: str) -> dict[str, Any]:
    """The pre-tokenizer that cuts as `pattern` does."""
    if pattern not in PATTERNS:
        raise UserError(
            f"the tokenizer's pattern {pattern[:60]!r} is not known in tokenizers' spelling"
        )
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERNS[pattern]},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"type": "Sequence", "pretokenizers": [split, BY_LETTERS]}


def all_merges(words: list[str]) -> list[list[str]]:
    """All pairs of words that make a word, in the order of the words made: tiktoken merges any two
    neighbours whose text is a word, `tokenizers` the listed ones alone.
    """
    rank = {word: i for i, word in enumerate(words)}
    merges = []
    for word in words:
        cuts = [(word[:at], word[at:]) for at in range(1, len(word))]
        pairs = [(rank[a], rank[b], a, b) for a, b in cuts if a in rank and b in rank]
        merges += [[a, b] for _, _, a, b in sorted(pairs)]
    return merges


def tokenizer_config(tokenizer: Tokenizer, context_length: int) -> dict[str, Any]:
    """What tokenizer_config.json says, for transformers' AutoTokenizer."""
    plain: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    if tokenizer.separator is not None:
        word = tokenizer.decode_bytes([tokenizer.separator]).decode("utf-8", "replace")
        plain |= {"eos_token": word, "bos_token": word}
    return plain
