"""The decoder-only transformer: embeddings, a stack of blocks, a prediction for the next token at
every position.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Attend, CausalSelfAttention, Mask, Remember, Rotation
from model.bigrams import BigramEmbedding
from model.cache import KVCache
from model.config import ModelConfig
from model.fast_attention import fast_attention
from model.positions import KINDS


def make_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm (Ba et al. 2016), or RMSNorm, which neither centres nor shifts (Zhang and Sennrich
    2019).
    """
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class MLP(nn.Module):
    """What each token does by itself, in a wider space, with what attention brought.

    gelu        project(gelu(up x)), with GPT-2's tanh form of GELU
    gelu_exact  the same with x Phi(x) itself (Hendrycks and Gimpel 2016)
    relu2       project(relu(up x)^2), So et al. 2021, "Primer"
    swiglu      project(silu(gate x) * up x), Shazeer 2020, "GLU Variants Improve Transformer"
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.kind = config.mlp
        self.dropout = config.dropout
        self.up = nn.Linear(config.d_model, config.d_mlp, bias=config.bias)
        if self.kind == "swiglu":
            self.gate = nn.Linear(config.d_model, config.d_mlp, bias=config.bias)
        self.project = nn.Linear(config.d_mlp, config.d_model, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        if self.kind == "gelu":
            h_BTF = F.gelu(h_BTF, approximate="tanh")
        elif self.kind == "gelu_exact":
            h_BTF = F.gelu(h_BTF)
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
    attention: `fast_attention` or `explicit_attention`.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, attend: Attend = fast_attention):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.embed = nn.Embedding(vocab_size, config.d_model)
        self.bigrams = None
        if config.bigrams:
            self.bigrams = BigramEmbedding(config.bigrams, config.d_model, vocab_size)
        self.positions = KINDS[config.positions](config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        self.unembed = nn.Linear(config.d_model, vocab_size, bias=False)
        self.initialize()
        if config.tie_embeddings:
            self.unembed.weight = self.embed.weight

    def initialize(self) -> None:
        """Draw the weights as GPT-2 does: normal with standard deviation 0.02, biases zero.

        The projections that write to the residual stream, two a block, are smaller by
        sqrt(2 n_layer), so that the stream's variance does not grow with depth (Radford et al.
        2019, section 2.3); with `zero_init` they are zero (Zhang et al. 2019, "Fixup
        Initialization"). The bigrams' vectors start at zero.
        """
        into_stream = 0.02 / math.sqrt(2 * self.config.n_layer)
        if self.config.zero_init:
            into_stream = 0.0
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = into_stream if name.endswith(".project") else 0.02
                if module is self.bigrams:
                    std = 0.0
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def mask(self, lengths: Tensor | list[int] | None = None) -> Mask:
        """The mask this model is trained with: causal, its window, and padding behind `lengths`
        (B,) tokens of each row.
        """
        known = None if lengths is None else tuple(int(length) for length in lengths)
        return Mask(causal=True, window=self.config.window, lengths=known)

    def features(
        self, tokens_BT: Tensor, mask: Mask | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """features_BTD, the stream after the last norm: what `unembed` turns into logits.

        Arguments as in `forward`.
        """
        mask = mask or self.mask()
        if cache is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        else:
            positions_BT, mask = cache.place(tokens_BT, mask)
        x_BTD = self.embed(tokens_BT)
        if self.bigrams is not None:
            x_BTD = x_BTD + self.bigrams(tokens_BT, cache)
        x_BTD = self.dropout(self.positions.add(x_BTD, positions_BT))
        rotation = self.positions.rotation(positions_BT)
        for layer, block in enumerate(self.blocks):
            remember = None if cache is None else partial(cache.write, layer)
            x_BTD = block(x_BTD, mask, rotation, remember)
        if cache is not None:
            cache.advance()
        return self.norm(x_BTD)

    def forward(
        self, tokens_BT: Tensor, mask: Mask | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """logits_BTV for the token after each position.

        `mask` is the model's own unless given. With a `cache`, tokens are read behind those it
        holds, and it is extended. `mask.lengths`, needed where rows end at different places, counts
        all tokens of a row, those in the cache and those that are new. Raises ValueError where the
        cache can't take them.
        """
        return self.unembed(self.features(tokens_BT, mask, cache))
