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


def random_tokens(vocab_size: int, rows: int, context_length: int, device: str) -> Tensor:
    return torch.randint(vocab_size, (rows, context_length), device=device)


def accumulate(loss_of: nn.Module, tokens: Tensor, n_micro: int, precision: str) -> None:
    """Add up the gradients of the mean loss over `n_micro` micro-batches, all of them `tokens`."""
    for _ in range(n_micro):
        with autocast(tokens.device.type, precision):
            loss = loss_of(tokens, tokens) / n_micro
        loss.backward()


def make_step(
    config: ModelConfig,
    optim: OptimConfig,
    vocab_size: int,
    precision: str,
    compiled: bool,
    device: str = "cpu",
    backend: str = "inductor",
) -> Step:
    """An update as train.py makes it: `batch_size` sequences, `micro_batch_size` at a time."""
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config, vocab_size)
    optimizers = make_optimizers(model, optim, precision)
    rows = optim.micro_batch_size or optim.batch_size
    tokens = random_tokens(vocab_size, rows, config.context_length, device)
    whole = WithLoss(model, cross_entropy)
    loss_of = torch.compile(whole, backend=backend) if compiled else whole

    def step() -> None:
        accumulate(loss_of, tokens, optim.batch_size // rows, precision)
        clip_gradients(model, optim.grad_clip).item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


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


def make_plain_step(
    config: ModelConfig,
    optim: OptimConfig,
    vocab_size: int,
    precision: str,
    compiled: bool,
    device: str = "cpu",
    backend: str = "inductor",
) -> Step:
    """The same update in a plain loop: PyTorch's fused AdamW over all parameters, decay on its
    matrices, clipping by PyTorch's function.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = PlainGPT(config, vocab_size)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (optim.beta1, optim.beta2)
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, fused=True)
    rows = optim.micro_batch_size or optim.batch_size
    tokens = random_tokens(vocab_size, rows, config.context_length, device)
    loss_of = torch.compile(model, backend=backend) if compiled else model

    def step() -> None:
        accumulate(loss_of, tokens, optim.batch_size // rows, precision)
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
