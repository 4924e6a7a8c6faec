"""Tokens per second of sampling, against transformers and against reading every weight once."""

import importlib.util
import statistics
from collections.abc import Callable

from benchmarks.gpu.facts import READ_BYTES
from benchmarks.gpu.task import Task
from benchmarks.gpu.training import flops_of, free
from benchmarks.sample import ours, read_rate, theirs
from benchmarks.steps import lap
from benchmarks.tables import spread
from model.config import ModelConfig
from ops.device import DTYPES, best_precision, is_out_of_memory

ROUNDS = 5


def sampling(task: Task) -> None:
    """Each size and batch: programs take turns, after a text each that isn't timed."""
    if importlib.util.find_spec("transformers") is None:
        task.note("transformers isn't installed (requirements-dev.txt): its column stays empty")
    bandwidth = read_rate(READ_BYTES["cuda" if task.on_gpu else "cpu"], task.device)
    for name, shape, n_token in task.scale.generators:
        for batch in task.scale.batches:
            if task.left() < 0:
                task.note(f"{name}, batch {batch}: left out, the time was up")
                continue
            try:
                compare(task, name, shape, n_token, batch, bandwidth)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                task.note(f"{name}, batch {batch}: out of memory")
            free(task.device)
    task.note(
        "Greedy, random weights, GPT-2's shape, from one token on; median and ends of the rounds. "
        f"The limit: every weight that multiplies read once a step, at {bandwidth / 1e9:,.0f} GB/s "
        "as measured here; keys and values, which are read too, are not counted."
    )


def read_weights(shape: ModelConfig, vocab_size: int) -> float:
    """Weights that a token's logits are computed with; what is only looked up isn't counted."""
    attention = 12 * shape.n_layer * shape.d_model * shape.context_length
    return (flops_of(shape, vocab_size) - attention) / 6


def compare(
    task: Task, name: str, shape: ModelConfig, n_token: int, batch: int, bandwidth: float
) -> None:
    """The row of one size and batch."""
    precision, vocab = best_precision(task.device), task.scale.vocab_size
    programs: dict[str, Callable[[], None]] = {
        "ours": ours(shape, vocab, n_token, batch, precision, task.device)
    }
    if importlib.util.find_spec("transformers"):
        programs["transformers"] = theirs(shape, vocab, n_token, batch, precision, task.device)
    for draw in programs.values():
        lap(draw, task.device)
    rates: dict[str, list[float]] = {program: [] for program in programs}
    for _ in range(ROUNDS):
        for program, draw in programs.items():
            rates[program].append(batch * n_token / lap(draw, task.device))
        if task.left() < 0:
            break
    n_byte = read_weights(shape, vocab) * DTYPES[precision].itemsize
    limit = batch * bandwidth / n_byte
    middle = statistics.median(rates["ours"])
    cells = {
        "tokens/s": spread(rates["ours"], ",.0f"),
        "of the bandwidth limit": f"{middle / limit:.0%}",
        "limit, tokens/s": f"{limit:,.0f}",
    }
    if "transformers" in rates:
        cells["transformers"] = spread(rates["transformers"], ",.0f")
        cells["ratio"] = f"{middle / statistics.median(rates['transformers']):.2f}"
    task.row("Sampling", model=f"{name}, batch {batch}, {precision}", **cells)
    task.figures(**{f"{name}, {batch}": rates, f"{name}, {batch}, limit": limit})
