"""The decoder-only transformer: embeddings, a stack of blocks, a prediction for the next token at
every position.
"""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import (
    Attend,
    CausalSelfAttention,
    KVCache,
    Mask,
    Remember,
    Rotation,
    fused_attention,
)
from model.config import ModelConfig
from model.positions import KINDS


def make_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm (Ba et al. 2016), or RMSNorm, which neither centres nor shifts (Zhang and Sennrich
    2019).
    """
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=1e-5)
    return nn.LayerNorm(config.d_model, bias=config.bias)


class MLP(nn.Module):
    """What each token does by itself, in a wider space, with what attention brought.

    gelu: down(gelu(up x)), GPT-2's tanh form; gelu_exact: x Phi(x) itself (Hendrycks and Gimpel
    2016). relu2: down(relu(up x)^2), So et al. 2021, "Primer". swiglu: down(silu(gate x) * up x),
    Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.mlp
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        if self.kind == "swiglu":
            self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.project = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        if self.kind in ("gelu", "gelu_exact"):
            h_BTF = F.gelu(h_BTF, approximate="tanh" if self.kind == "gelu" else "none")
        elif self.kind == "relu2":
            h_BTF = F.relu(h_BTF).square()
        else:
            h_BTF = F.silu(self.gate(x_BTD)) * h_BTF
        return F.dropout(self.project(h_BTF), self.dropout, self.training)


class Block(nn.Module):
    """Attention, then MLP, each on a normed copy and added to the stream that runs past them
    (pre-norm, as GPT-2).
    """

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = CausalSelfAttention(config, attend)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x_BTD: Tensor,
        mask: Mask,
        rotation: Rotation | None = None,
        remember: Remember | None = None,
    ) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), mask, rotation, remember)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    """A GPT of the given shape, over `vocab_size` tokens. `attend` is how every layer computes
    attention: fused or explicit.

    With `bigrams` a token's embedding tells which token stands before it, too (token 0 before the
    first). Pairs are numbered, and share a vector, zero to begin with, where the remainders are the
    same: the hashing trick on n-grams (Joulin et al. 2017, "Bag of Tricks for Efficient Text
    Classification", section 2.2). Without it heads must learn to look one token back.

    Initialised as GPT-2: normal with standard deviation 0.02, biases zero, and the projections that
    write to the residual stream (two a block) smaller by sqrt(2 n_layer), so that the stream's
    variance does not grow with depth (Radford et al. 2019, section 2.3); or zero with `zero_init`
    (Zhang et al. 2019, "Fixup Initialization").
    """

    def __init__(self, config: ModelConfig, vocab_size: int, attend: Attend = fused_attention):
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.embed = nn.Embedding(vocab_size, config.d_model)
        self.bigrams = nn.Embedding(config.bigrams, config.d_model) if config.bigrams else None
        self.positions = KINDS[config.positions](config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        self.unembed = nn.Linear(config.d_model, vocab_size, bias=False)
        stds = {
            "project": 0.0 if config.zero_init else 0.02 / math.sqrt(2 * config.n_layer),
            "bigrams": 0.0,
        }
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=stds.get(name.rpartition(".")[2], 0.02))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if config.tie_embeddings:
            self.unembed.weight = self.embed.weight

    def mask(self, lengths: Tensor | None = None) -> Mask:
        """The mask this model is trained with: causal, its window, and padding behind `lengths`
        (B,) tokens of each row.
        """
        return Mask(causal=True, window=self.config.window, lengths=lengths)

    def features(
        self, tokens_BT: Tensor, mask: Mask | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """The stream after the last norm, features_BTD: what `unembed` turns into logits. Arguments
        as in `forward`.
        """
        mask = mask or self.mask()
        n_token = tokens_BT.shape[1]
        x_BTD, n_read = self.embed(tokens_BT), 0
        if cache:
            read, last = cache.lengths, cache.last
            if mask.lengths is None and len(set(read)) > 1:
                mask = replace(mask, lengths=torch.tensor(read, device=tokens_BT.device) + n_token)
            ends = [n + n_token for n in read] if mask.lengths is None else mask.lengths.tolist()
            if [max(end - n_token, 0) for end in ends] != read:
                raise ValueError(
                    f"rows of {read} tokens cannot end at {ends}: {n_token} new ones stand behind a filled cache"
                )
            n_read = (
                read[0]
                if len(set(read)) == 1
                else torch.tensor(read, device=tokens_BT.device)[:, None]
            )
        if self.bigrams is not None:
            before_BT = F.pad(tokens_BT[:, :-1], (1, 0))
            if cache:
                before_BT[:, 0] = torch.tensor(
                    [token if n else 0 for token, n in zip(last, read, strict=True)]
                )
                last = [
                    row[end - n - 1]
                    for row, end, n in zip(tokens_BT.tolist(), ends, read, strict=True)
                ]
            x_BTD = x_BTD + self.bigrams(
                (before_BT * self.vocab_size + tokens_BT) % self.config.bigrams
            )
        positions_BT = torch.arange(n_token, device=tokens_BT.device)[None] + n_read
        x_BTD = self.dropout(self.positions.add(x_BTD, positions_BT))
        rotation = self.positions.rotation(positions_BT)
        for layer, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, mask, rotation, partial(cache.write, layer) if cache else None)
        if cache:
            cache.lengths, cache.last = ends, last
        return self.norm(x_BTD)

    def forward(
        self, tokens_BT: Tensor, mask: Mask | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """logits_BTV for the token after each position.

        `mask` is the model's own unless given. With a `cache`, tokens are read behind those it
        holds, and it is extended; `mask.lengths`, needed where rows end at different places, counts
        all tokens of a row, those in the cache and those that are new.
        """
        return self.unembed(self.features(tokens_BT, mask, cache))
