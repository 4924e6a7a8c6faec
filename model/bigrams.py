"""A second embedding: a vector for each pair of neighbouring tokens."""

import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import KVCache


class BigramEmbedding(nn.Embedding):
    """Tells each token which token stands before it (token 0 before the first).

    Pairs are numbered, and share one of `n_vector` vectors where the remainders of their numbers
    are the same: the hashing trick on n-grams (Joulin et al. 2017, "Bag of Tricks for Efficient
    Text Classification", section 2.2). Without it heads must learn to look one token back.
    """

    def __init__(self, n_vector: int, d_model: int, vocab_size: int):
        super().__init__(n_vector, d_model)
        self.vocab_size = vocab_size

    def forward(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """The pairs' vectors, (B, T, D). With a `cache` the tokens stand behind those it holds."""
        if cache is None:
            before_BT = F.pad(tokens_BT[:, :-1], (1, 0))
        else:
            before_BT = cache.tokens_before(tokens_BT)
        pairs_BT = (before_BT * self.vocab_size + tokens_BT) % self.num_embeddings
        return super().forward(pairs_BT)
