"""The names that a command line may say. Imports nothing that is slow, so that --help is instant.

Each name stands here once: `data.sources` knows how a named corpus is opened, `data.tokenizer` how
a tokenizer is made.
"""

from typing import Literal, get_args

TokenizerName = Literal["char", "byte", "bpe", "gpt2"]
TOKENIZERS: tuple[str, ...] = get_args(TokenizerName)

PatternName = Literal["gpt4", "gpt2"]
"""How text is cut into pieces before a BPE merges anything."""

SHAKESPEARE = "shakespeare"
TINYSHAKESPEARE = "tinyshakespeare"
STDLIB = "stdlib"
INDUCTION = "induction"
CORPORA = (SHAKESPEARE, TINYSHAKESPEARE, STDLIB, INDUCTION)
