"""nanoGPT's checkpoints: `model`, `model_args`, and names that torch.compile has prefixed."""

from typing import Any

from torch import Tensor

from interop.keys import Keys
from model.config import ModelConfig


def read_config(keys: Keys, is_tied: bool) -> ModelConfig:
    """The shape that `model_args` describes. Raises UserError, by name, for an argument that is not
    nanoGPT's, ValueError where the numbers don't fit together.
    """
    keys.take("vocab_size")  # the weights say it
    config = ModelConfig(
        n_layer=keys.whole("n_layer"),
        n_head=keys.whole("n_head"),
        d_model=keys.whole("n_embd"),
        context_length=keys.whole("block_size"),
        mlp="gelu_exact",
        bias=keys.truth("bias", True),
        dropout=keys.number("dropout", 0.0),
        tie_embeddings=is_tied,
    )
    unknown = keys.plain.keys() - keys.used
    if unknown:
        raise keys.refuse(sorted(map(str, unknown))[0], "nanoGPT has no such argument")
    return config


def is_checkpoint(state: Any) -> bool:
    """Whether a file's contents are such a checkpoint."""
    return isinstance(state, dict) and {"model", "model_args"} <= state.keys()


def step_and_loss(state: dict[str, Any]) -> tuple[int, float]:
    """Updates made, and the best validation loss; 0 and infinity where the checkpoint doesn't
    say.
    """
    step, loss = state.get("iter_num", 0), state.get("best_val_loss", float("inf"))
    if isinstance(loss, Tensor) and loss.numel() == 1:
        loss = loss.item()
    is_step = type(step) is int and 0 <= step < 2**63
    is_loss = isinstance(loss, float) and loss == loss
    return step if is_step else 0, loss if is_loss else float("inf")
