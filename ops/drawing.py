"""A model opened for drawing, many texts drawn a group at a time, as memory allows, and what is
said where drawing fails.
"""

import contextlib
import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch

from data.tokenizer import Tokenizer
from errors import MachineError, UserError
from model.attention import Mask
from model.config import ModelConfig
from model.fast_attention import holds_weights
from model.fast_sampling import prepare_for_sampling
from model.gpt import GPT
from ops.checkpoint import OTHER, open_run, what_is_read
from ops.device import (
    DTYPES,
    default_threads,
    is_out_of_memory,
    prefers_slabs,
    resolve_device,
    sampling_precision,
)
from ops.plan import limits

SHARE = 0.5
"""Of the free memory, for all that the rows of a group hold: what is freed leaves gaps."""
MOST = {"cpu": 64, "cuda": 256}
"""Texts drawn at once where memory would hold more: a step is not much faster per text with more
of them, and texts are shown when their group is done.
"""


def open_to_draw(run: str, device: str, precision: str) -> tuple[GPT, Tokenizer, str, str]:
    """The model of a run, laid out for drawing, its tokenizer, and what device and precision
    "auto" became. Says on standard error which weights are read and, off the CPU, where texts are
    drawn. Raises UserError.
    """
    device = resolve_device(device)
    precision = sampling_precision(precision, device)
    torch.set_num_threads(default_threads())
    model, tokenizer, checkpoint = open_run(run, device)
    print(what_is_read(run, checkpoint), file=sys.stderr)
    if device != "cpu":
        print(
            f"note: texts are drawn on {device} in {precision}; where rounding decides they "
            "differ from those of --device cpu with the same seed",
            file=sys.stderr,
        )
    prepare_for_sampling(model, DTYPES[precision], prefers_slabs(device, precision))
    return model, tokenizer, device, precision


def row_bytes(
    config: ModelConfig, vocab_size: int, n_prompt: int, n_new: int, device: str, precision: str
) -> int:
    """Bytes that one text of a group takes, with a prompt of `n_prompt` tokens, padding included,
    and `n_new` tokens to be drawn: keys and values, what reading the prompt holds, and the
    distribution of the next token.
    """
    itemsize = DTYPES[precision].itemsize
    n_read = min(n_prompt, config.context_length)
    n_kept = min(n_prompt + n_new, config.context_length)
    cache = 2 * config.n_layer * n_kept * config.n_key_head * config.d_head * itemsize
    # Rows read anew are read into a cache of their own first (`_logits_with_cache`).
    reading = n_read * (4 * (8 * config.d_model + 2 * config.d_mlp) + 5 * n_read)
    if holds_weights("fast", Mask(), n_read, device.partition(":")[0], DTYPES[precision], 0.0):
        reading += 4 * config.n_head * n_read**2
    choosing = 10 * 8 * vocab_size  # in float64: scaled, exponentials, sums, and the order kept
    return 2 * cache + reading + choosing


def rows_at_once(
    n_text: int,
    model: GPT,
    ids: Sequence[Sequence[int]],
    n_new: int,
    device: str,
    precision: str,
) -> int:
    """How many of `n_text` texts to draw at once, `n_new` tokens behind one of the prompts `ids`:
    as many as fit into the memory that is free now, one at least, MOST at most. A line on standard
    error says so where it isn't all.
    """
    if n_text > 1 and precision != "float32":
        print(
            f"note: {precision} rounds by the number of texts drawn at once, so one may differ "
            "from what it is alone; --precision float32 keeps it",
            file=sys.stderr,
        )
    n_row = min(n_text, MOST.get(device.partition(":")[0], MOST["cpu"]))
    longest = max(map(len, ids))
    each = row_bytes(model.config, model.vocab_size, longest, n_new, device, precision)
    free = limits.free_memory(device)
    why = "to show them as they are done"
    if free is not None and n_row > (fitting := max(1, int(SHARE * free / each))):
        n_row = fitting
        why = f"each takes about {each / 2**20:,.1f} MiB, and {free / 2**20:,.0f} MiB are free"
    if n_row < n_text:
        print(f"note: {n_text:,} texts are drawn {n_row:,} at a time: {why}", file=sys.stderr)
    return n_row


def in_groups(
    draw: Callable[[range], None], n_text: int, n_row: int, device: str, precision: str
) -> None:
    """Have texts 0 ... n_text - 1 drawn, `n_row` at a time; fewer, with a line that says so, where
    memory runs out nevertheless. A text depends on its number alone, so it may be drawn again.
    Raises MachineError where not even one fits.
    """
    first = 0
    while first < n_text:
        try:
            draw(range(first, min(first + n_row, n_text)))
            first += n_row
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the cache
            if n_row == 1:
                raise MachineError(drawing_advice(device, precision)) from None
        n_row = -(-min(n_row, n_text - first) // 2)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"note: out of memory: going on with {n_row:,} texts at a time", file=sys.stderr)


def drawing_advice(device: str, precision: str) -> str:
    """What to do where not even one text can be drawn: nothing that was done already."""
    ways = ["shorten the prompt or --max-new-tokens"]
    if precision == "float32":
        ways.append("take --precision bfloat16, half of it")
    if device != "cpu":
        ways.append("draw with --device cpu")
    return f"out of memory with one text at a time: {', or '.join(ways)}"


@contextlib.contextmanager
def explained(run: str, way_out: str = "") -> Iterator[None]:
    """Within the block memory that runs out, and logits that are no numbers, end in an error that
    says what to do: `way_out`, else more memory for the model itself, or another checkpoint than
    that of `run`.
    """
    try:
        yield
    except FloatingPointError as error:
        raise UserError(
            f"{run}: {error}, though its weights are: use --precision float32, or, where that is "
            f"used already, another checkpoint: {OTHER}"
        ) from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        way_out = way_out or "close other programs, take --device cpu on a GPU, or a larger machine"
        raise MachineError(f"out of memory, reading {run}: {way_out}") from None
