"""Updates to be timed: train.py's, and those of a plain loop around a plain GPT-2, which is what
others train with.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs import OptimConfig
from model.config import ModelConfig
from model.gpt import GPT
from ops.compiling import WithLoss
from ops.device import autocast
from training.finite import step_if_finite
from training.loss import cross_entropy
from training.optimizer import clip_gradients, make_optimizers

Step = Callable[[], None]
"""Makes one update on random tokens."""


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device != "cpu":
        torch.accelerator.synchronize()


def lap(step: Step, device: str) -> float:
    """Seconds of a step, from an idle device to an idle device."""
    synchronize(device)
    began = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - began


class Update:
    """One update whenever it is called: the mean loss of `batch_size` sequences, a micro-batch at a
    time, all of them `tokens`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: nn.Module,
        tokens: Tensor,
        optim: OptimConfig,
        precision: str,
    ):
        self.model = model
        self.loss_of = loss_of
        self.tokens = tokens
        self.optim = optim
        self.precision = precision
        self.optimizers = self.make_optimizers()

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of train.py."""
        return make_optimizers(self.model, self.optim, self.precision)

    def apply(self, loss: Tensor, norm: Tensor) -> None:
        """Let the optimizers step, as train.py does."""
        step_if_finite(self.optimizers, self.optim.lr, loss, norm)

    def __call__(self) -> None:
        loss = torch.zeros((), device=self.tokens.device)
        n_micro = self.optim.batch_size // len(self.tokens)
        for _ in range(n_micro):
            with autocast(self.tokens.device.type, self.precision):
                micro_loss = self.loss_of(self.tokens, self.tokens) / n_micro
            micro_loss.backward()
            loss += micro_loss.detach()
        self.apply(loss, clip_gradients(self.model, self.optim.grad_clip))
        self.model.zero_grad(set_to_none=True)


class PlainUpdate(Update):
    """The same in a plain loop: PyTorch's fused AdamW over all parameters, decay on matrices."""

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        optim, parameters = self.optim, list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim == 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (optim.beta1, optim.beta2)
        return [torch.optim.AdamW(groups, lr=optim.lr, betas=betas, fused=True)]

    def apply(self, loss: Tensor, norm: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class PlainBlock(nn.Module):
    """A block of GPT-2: attention and MLP, each behind a LayerNorm and added to the stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.d_model
        self.n_head = config.n_head
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        merged = self.queries_keys_values(self.attention_norm(x_BTD))
        split = merged.unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        q_BHTK, k_BHTK, v_BHTK = split.unbind()
        heads = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.project(heads.transpose(1, 2).flatten(2))
        hidden = F.gelu(self.up(self.mlp_norm(x_BTD)), approximate="tanh")
        return x_BTD + self.down(hidden)


class PlainGPT(nn.Module):
    """GPT-2 as nanoGPT trains it: the loss inside the module that is compiled, one product for
    queries, keys and values, and a vocabulary padded to a multiple of `padding`. The shape is that
    of `config`, whose other options must be GPT-2's.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, padding: int = 64):
        super().__init__()
        n_token = -(-vocab_size // padding) * padding
        self.tokens = nn.Embedding(n_token, config.d_model)
        self.positions = nn.Embedding(config.context_length, config.d_model)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.d_model)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean loss in nats per token."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(positions)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = F.linear(self.norm(x_BTD), self.tokens.weight)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def make_step(
    config: ModelConfig,
    optim: OptimConfig,
    vocab_size: int,
    precision: str,
    compiled: bool,
    device: str = "cpu",
    backend: str = "inductor",
    plain: bool = False,
) -> Update:
    """An update as train.py makes it, or that of a `plain` loop around a plain model:
    `batch_size` sequences, `micro_batch_size` at a time.
    """
    torch.manual_seed(0)
    rows = optim.micro_batch_size or optim.batch_size
    with torch.device(device):
        model = PlainGPT(config, vocab_size) if plain else GPT(config, vocab_size)
        tokens = torch.randint(vocab_size, (rows, config.context_length))
    loss_of = model if plain else WithLoss(model, cross_entropy)
    if compiled:
        loss_of = torch.compile(loss_of, backend=backend)
    kind = PlainUpdate if plain else Update
    return kind(model, loss_of, tokens, optim, precision)
