"""The patterns that cut text for a BPE, as tiktoken and as `tokenizers` spell them."""

from data.patterns import GPT2, GPT4

PATTERNS = {
    GPT2: r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    GPT4: GPT4,
}
"""Ours -> what `tokenizers`, whose regular expressions are Oniguruma's, takes for it: `$` would
end a line there, not the text.
"""
