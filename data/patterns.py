"""The regular expressions that cut text into pieces before a BPE merges anything.

A piece is a word with the space before it, digits, punctuation or white space. The two that a BPE
is trained with are those of GPT-2 and of GPT-4 (cl100k_base).
"""

from data.names import PatternName

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
TRAINED: dict[PatternName, str] = {"gpt2": GPT2, "gpt4": GPT4}
"""By the name that --pattern says."""
PATTERNS = {
    GPT2: r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    GPT4: GPT4,
}
"""Ours, which tiktoken reads -> what the library `tokenizers`, whose regular expressions are
Oniguruma's, takes for it: `$` would end a line there, not the text.
"""
