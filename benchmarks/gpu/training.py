"""Training GPT-2 124M: train.py's update against a plain loop's, alternating; micro-batches up to
memory; and train.py itself, by its own log.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from benchmarks.gpu.runs import run
from benchmarks.gpu.task import Scale, Task
from benchmarks.plan import write_random_ids
from benchmarks.steps import Step, lap, make_step
from benchmarks.tables import spread
from configs import PRESETS, OptimConfig
from model.config import ModelConfig
from model.gpt import GPT
from ops.device import best_precision, device_name, is_out_of_memory, resolve
from ops.speed import flops_per_token, makers_rate, matrix_rate

PLAIN = "plain loop, compiled"
KEPT_FOR_ROUNDS = 0.3
"""Share of the section's time that building (compiling) leaves to the rounds."""


@dataclass
class Program:
    """One of those that take turns."""

    step: Step
    flops: float
    """Of a token, forward and backward."""
    first: float
    """Seconds of the first update, compiling included."""
    gibibytes: float | None
    """Its own peak: weights, moments, gradients and activations."""
    laps: list[float] = field(default_factory=list)


def flops_of(shape: ModelConfig, vocab_size: int) -> float:
    with torch.device("meta"):
        return flops_per_token(GPT(shape, vocab_size))


def optim_of(preset: str, rows: int, n_micro: int) -> OptimConfig:
    """A preset's optimiser with so many rows in a micro-batch."""
    optim = PRESETS[preset][1].optim
    return replace(optim, batch_size=rows * n_micro, micro_batch_size=rows)


def fast_shape(scale: Scale) -> ModelConfig:
    """gpt2-124m-fast, as large as the scale's model."""
    size = {
        name: getattr(scale.model, name)
        for name in ("n_layer", "n_head", "d_model", "context_length")
    }
    fast = PRESETS["gpt2-124m-fast"][1].model
    return fast if scale.model == ModelConfig() else replace(fast, **size)


def programs(task: Task, rows: int) -> dict[str, tuple[Callable[[], Step], float]]:
    """Name -> (what makes its step, FLOPs per token); the most wanted first."""
    scale, precision = task.scale, best_precision(task.device)
    shape, fast, vocab = scale.model, fast_shape(scale), scale.vocab_size
    gpt2 = optim_of("gpt2-124m", rows, scale.n_micro)
    muon = optim_of("gpt2-124m-fast", rows, scale.n_micro)
    flops, fast_flops = flops_of(shape, vocab), flops_of(fast, vocab)

    def of(config: ModelConfig, optim: OptimConfig, compiled: bool, plain: bool) -> Callable:
        place = task.device, scale.backend
        return lambda: make_step(config, optim, vocab, precision, compiled, *place, plain=plain)

    return {
        PLAIN: (of(shape, gpt2, compiled=True, plain=True), flops),
        "train.py's update, compiled": (of(shape, gpt2, compiled=True, plain=False), flops),
        "plain loop, eager": (of(shape, gpt2, compiled=False, plain=True), flops),
        "train.py's update, eager": (of(shape, gpt2, compiled=False, plain=False), flops),
        "gpt2-124m-fast's update, compiled": (
            of(fast, muon, compiled=True, plain=False),
            fast_flops,
        ),
    }


def measure_peak(step: Step, device: str) -> tuple[float, float | None]:
    """Seconds of a step, and GiB that it held at once (None off CUDA)."""
    if not device.startswith("cuda"):
        return lap(step, device), None
    torch.cuda.reset_peak_memory_stats(device)
    seconds = lap(step, device)
    return seconds, torch.cuda.max_memory_allocated(device) / 2**30


def allocated(device: str) -> float:
    """GiB that tensors hold now."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.startswith("cuda") else 0.0


def fitting_rows(task: Task) -> int:
    """The scale's micro-batch, halved until an eager update of the plain loop fits in memory."""
    rows, scale = task.scale.rows, task.scale
    while rows > 1:
        optim = optim_of("gpt2-124m", rows, 1)
        precision = best_precision(task.device)
        try:
            step = make_step(
                scale.model, optim, scale.vocab_size, precision, False, task.device, plain=True
            )
            lap(step, task.device)
            return rows
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        task.note(f"{rows} sequences at once don't fit in memory: {rows // 2} are tried")
        rows //= 2
        free(task.device)
    return rows


def free(device: str) -> None:
    """Give memory that holds no tensor back, so that the next program has all of it."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def build(task: Task, name: str, make: Callable[[], Step], flops: float) -> Program | None:
    """Make a program and its first update; None, with a note, where that fails."""
    before = allocated(task.device)
    try:
        step = make()
        first = lap(step, task.device)
        _, peak = measure_peak(step, task.device)
    except Exception as error:  # a compiler's trouble must not cost the eager rows
        reason = (str(error).strip() or "no message").splitlines()[0][:150]
        task.note(f"{name}: failed ({type(error).__name__}: {reason})")
        free(task.device)
        return None
    return Program(step, flops, first, None if peak is None else peak - before)


def training(task: Task) -> None:
    """Tokens per second and shares of the matrix rates, programs taking turns."""
    torch.set_float32_matmul_precision("high")
    scale, share = task.scale, task.left()
    rows = fitting_rows(task)
    made: dict[str, Program] = {}
    for name, (make, flops) in programs(task, rows).items():
        if made and task.left() < KEPT_FOR_ROUNDS * share:
            task.note(f"{name}: left out, no time was left to build it")
            continue
        if program := build(task, name, make, flops):
            made[name] = program
            take_turns(task, {name: program}, rows)
    for _ in range(scale.rounds):
        if task.left() < 0:
            break
        take_turns(task, made, rows)
    if made:
        task.note(
            f"Medians (and ends) over rounds in which the programs take turns; random tokens, "
            f"{scale.n_micro} micro-batches of {rows} x {scale.model.context_length:,} an update, "
            f"{best_precision(task.device)}. MFU: 6 N + 12 n_layer d_model T FLOPs a token, over "
            "the matrix rate measured in this run and over the maker's figure, where known. GiB: "
            "the program's own peak."
        )
    task.figures(laps={name: program.laps for name, program in made.items()}, rows=rows)


def take_turns(task: Task, made: dict[str, Program], rows: int) -> None:
    """One update of each, and the rows of the table that follow from it."""
    rates = mfu_rates(task.device)
    n_token = task.scale.n_micro * rows * task.scale.model.context_length
    for program in made.values():
        program.laps.append(lap(program.step, task.device))
    for name, program in made.items():
        speeds = [n_token / seconds for seconds in program.laps]
        middle = statistics.median(speeds)
        cells = {f"MFU, {of}": f"{middle * program.flops / rate:.1%}" for of, rate in rates.items()}
        if PLAIN in made:
            plain = n_token / statistics.median(made[PLAIN].laps)
            cells["times plain, compiled"] = f"{middle / plain:.2f}"
        if program.gibibytes is not None:
            cells["GiB"] = f"{program.gibibytes:.1f}"
        task.row(
            "Training GPT-2 124M",
            program=name,
            **{"tokens/s": spread(speeds, ",.0f")},
            **cells,
            **{"first update, s": f"{program.first:.1f}"},
        )


_RATES: dict[str, dict[str, float]] = {}


def mfu_rates(device: str) -> dict[str, float]:
    """The denominators of MFU by name, measured once."""
    if device not in _RATES:
        measured = matrix_rate(device, best_precision(device))
        promised = makers_rate(device_name(device))
        _RATES[device] = {"measured rate": measured} | ({"maker's": promised} if promised else {})
    return _RATES[device]


def batches(task: Task) -> None:
    """One eager update a size, doubled until memory or time ends."""
    scale, precision, rows = task.scale, best_precision(task.device), 1
    while rows <= scale.most_rows and task.left() > 0:
        optim = optim_of("gpt2-124m", rows, 1)
        cells = {}
        try:
            step = make_step(scale.model, optim, scale.vocab_size, precision, False, task.device)
            lap(step, task.device)
            seconds, peak = measure_peak(step, task.device)
            cells["tokens/s"] = f"{rows * scale.model.context_length / seconds:,.0f}"
            cells["GiB"] = "" if peak is None else f"{peak:.1f}"
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            cells["GiB"] = "out of memory"
        task.row("Micro-batches, eager", **{"sequences at once": rows, **cells})
        if cells["GiB"] == "out of memory":
            return
        step = None
        free(task.device)
        rows *= 2


def itself(task: Task) -> None:
    """train.py as a user runs it, on random ids: what its log says of the last steps."""
    scale = task.scale
    data = write_random_ids(task.folder, scale.vocab_size)
    config = PRESETS["gpt2-124m"][1].replace(
        **{name: getattr(scale.model, name) for name in ("n_layer", "n_head", "d_model")},
        context_length=scale.model.context_length,
        data=str(data),
        out=str(task.folder / "itself"),
        device=task.device,
        compile="on" if task.on_gpu else "off",
        batch_size=scale.rows * scale.n_micro,
        micro_batch_size=scale.rows,
        max_steps=4 * scale.rounds,
        warmup_steps=2,
        eval_every=0,
        save_every=0,
        eval_batches=1,
        log_every=1,
        sample_tokens=0,
        probe_tokens=0,
        max_minutes=max(task.left(), 1) / 60,
    )
    log = [record for record in run(resolve(config)) if record["kind"] == "train"]
    late = log[len(log) // 2 :]
    task.row(
        "train.py itself",
        steps=len(log),
        **{
            "tokens/s": spread([record["tokens_per_second"] for record in late], ",.0f"),
            "MFU, as logged": f"{statistics.median(r['mfu'] for r in late):.1%}",
            "MiB": late[-1]["memory"],
        },
    )
    task.figures(log=log)
