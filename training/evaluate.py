"""What a model has learned: mean loss over a split, perplexity, bits per byte."""

import math

import numpy as np
import torch

from data.batches import split_windows
from data.dataset import Dataset
from data.prompts import empty_prompt
from data.tokenizer import Tokenizer
from model.generate import generate
from model.gpt import GPT
from model.transfer import on_device
from training.head_loss import model_loss


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Nats per token as bits per byte of text, which can be compared across tokenizers."""
    return loss / math.log(2) / bytes_per_token


class OneProcess:
    """Stands for a single process where `ops.distributed.Processes` would speak for several."""

    rank, count = 0, 1

    def sum(self, *numbers: float, device: str | torch.device = "cpu") -> list[float]:
        """Each number summed over the processes."""
        return list(numbers)


@torch.no_grad()
def split_loss(
    model: GPT,
    tokens: np.ndarray,
    batch_size: int,
    n_window: int = 0,
    processes: OneProcess | None = None,
) -> float:
    """Mean loss in nats per token over consecutive windows of the split; the model's mode is kept,
    its dropout is off.

    With `n_window` 0 it is the whole-split loss: non-overlapping windows of context_length, every
    token but the first predicted exactly once. Else it reads `n_window` of those windows, evenly
    spaced, the same ones each time. `batch_size` windows are read at once; several processes take
    turns.
    """
    processes = processes or OneProcess()
    windows = split_windows(tokens, model.config.context_length)
    if 0 < n_window < len(windows):
        windows = [windows[i * len(windows) // n_window] for i in range(n_window)]
    batches = [windows[i : i + batch_size] for i in range(0, len(windows), batch_size)]
    lengths = {end - start for start, end in batches[-1]}
    if len(lengths) > 1:  # the last window is short, and tensors are rectangular
        batches[-1:] = [batches[-1][:-1], batches[-1][-1:]]
    device = next(model.parameters()).device
    sums, count = [], 0
    was_training = model.training
    model.eval()
    for first in range(0, len(batches), processes.count):
        mine = first + processes.rank
        # Sharded models run in step: a process with nothing left reads along.
        batch = batches[min(mine, len(batches) - 1)]
        rows = np.stack([tokens[start : end + 1] for start, end in batch]).astype(np.int64)
        both = on_device(torch.from_numpy(rows), device)
        loss = model_loss(model, both[:, :-1], both[:, 1:], reduction="sum")
        if mine < len(batches):
            sums.append(loss)
            count += both.numel() - len(both)
    model.train(was_training)
    total = 0.0
    for number in torch.stack(sums).tolist() if sums else ():  # read once, when all is launched
        total += number
    total_loss, n_target = processes.sum(total, count, device=device)
    return total_loss / n_target


def evaluate(
    model: GPT,
    dataset: Dataset,
    batch_size: int,
    n_window: int,
    processes: OneProcess | None = None,
) -> dict[str, float]:
    """train_loss and val_loss (nats per token), val_perplexity and val_bits_per_byte; arguments as
    in `split_loss`.

    With `n_window` 0 val_loss is of the whole split, and train_loss, beside it for comparison, of a
    fifth as many windows.
    """
    fifth = -(-len(split_windows(dataset.tokens["val"], model.config.context_length)) // 5)
    train_loss = split_loss(
        model, dataset.tokens["train"], batch_size, n_window or fifth, processes
    )
    val_loss = split_loss(model, dataset.tokens["val"], batch_size, n_window, processes)
    return {
        "train_loss": train_loss,
        "val_loss": val_loss,
        "val_perplexity": math.exp(min(val_loss, 700.0)),
        "val_bits_per_byte": bits_per_byte(val_loss, dataset.bytes_per_token("val")),
    }


def draw_sample(model: GPT, tokenizer: Tokenizer, n_token: int, seed: int) -> str:
    """A text of `n_token` tokens from the model as it stands, always with the same random numbers;
    the model's mode is kept. Where its logits are no numbers, training goes on: a line says so.
    """
    was_training = model.training
    model.eval()
    prompt, generator = empty_prompt(tokenizer), torch.Generator().manual_seed(seed)
    try:
        tokens = [row[0] for row in generate(model, [prompt], n_token, generators=[generator])]
        text = tokenizer.decode(tokens)
    except FloatingPointError as error:
        text = f"(no text: {error})"
    model.train(was_training)
    return text
