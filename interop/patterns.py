"""The patterns that cut text for a BPE, as tiktoken and as `tokenizers` spell them."""

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""tiktoken's spelling of GPT-2's pattern."""
GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""rustbpe's, which is GPT-4's."""
PATTERNS = {
    GPT2: r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    GPT4: GPT4,
}
"""Ours -> what `tokenizers`, whose regular expressions are Oniguruma's, takes for it: `$` would
end a line there, not the text.
"""
