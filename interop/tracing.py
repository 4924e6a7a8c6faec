"""The step of one token a row, traced: its cache of a fixed size, its place told by a tensor.

What a GPU repeats as a graph (`model.static_decoding`) is what can be traced, too: no shape in it
depends on how much has been read. A `KVCache` grows by numbers of Python's, which a trace freezes.
"""

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from data.tokenizer_out import tokenizer_json
from errors import MachineError, UserError
from model.cache import KVCache
from model.gpt import GPT
from model.static_decoding import OneToken, static_step
from ops.checkpoint import find, open_run


class DecodingStep(nn.Module):
    """A model with a cache of `n_row` texts of up to context_length tokens each, as buffers."""

    def __init__(self, model: GPT, n_row: int):
        super().__init__()
        self.model = model
        config = model.config
        shape = (n_row, config.n_key_head, config.context_length, config.d_head)
        for layer in range(config.n_layer):
            self.register_buffer(f"keys_{layer}", torch.zeros(shape))
            self.register_buffer(f"values_{layer}", torch.zeros(shape))
        self.register_buffer("last_tokens", torch.zeros(n_row, dtype=torch.int64))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The logits behind `tokens`, (B, V), which stand at `positions` of their texts, int64 (B,)
        each. Keys and values of what stands behind a position are left from before, and unseen.
        """
        last_tokens: Tensor = self.get_buffer("last_tokens")
        before = last_tokens * (positions > 0)
        config = self.model.config
        cache = KVCache(len(last_tokens), config.context_length)
        cache.layers = [
            (self.get_buffer(f"keys_{layer}"), self.get_buffer(f"values_{layer}"))
            for layer in range(config.n_layer)
        ]
        inputs = torch.stack([tokens, before, positions])
        logits = static_step(self.model, OneToken(cache, inputs, config.context_length))
        last_tokens.copy_(tokens)
        return logits


def write_program(run: str, out: Path, n_row: int) -> str:
    """Trace a run's step and write it to the file `out`; a line about it. Raises UserError where
    the run or the folder is not there, MachineError where the disk fails; `out` is whole or not
    touched.
    """
    model, tokenizer, checkpoint = open_run(run)
    limit = model.config.context_length
    if not out.parent.is_dir():
        raise UserError(
            f"the folder {out.parent} is not there: make it, or name another with --out"
        )
    first = torch.zeros(2, n_row, dtype=torch.int64).unbind()  # two: one tensor would be one input
    with torch.no_grad():
        program = torch.export.export(DecodingStep(model, n_row), first)
    files = {"tokenizer.json": json.dumps(tokenizer_json(tokenizer), ensure_ascii=False)}
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            torch.export.save(program, file, extra_files=files)
        os.replace(partial, out)
    except (OSError, RuntimeError) as error:  # torch's own, of a full disk
        raise MachineError(f"{out} can't be written ({error})") from None
    finally:
        partial.unlink(missing_ok=True)
    return (
        f"wrote {out}: {find(run)}, step {checkpoint.step:,}, for {n_row:,} rows of up to "
        f"{limit:,} tokens; {tokenizer.vocab_size:,} ids ({tokenizer.kind})"
    )
