"""Knowing before paying: what a run takes in parameters, FLOPs, memory and time, and which dial to
turn when memory has run out.

Memory is counted, not guessed: a step of the real model runs on fake tensors, which have shapes but
no data, and every storage is followed from birth to death. Not counted are kernels' scratch space,
the gaps that an allocator leaves (glibc's from a few per cent to a third, if MALLOC_MMAP_THRESHOLD_
is left as it is), what a compiler adds or saves, the block that FSDP2 gathers, and the page cache's
share of a large corpus, which the system takes back when it must.
"""

import contextlib
import dataclasses
import datetime
import errno
import functools
import itertools
import os
import re
import statistics
import sys
import time
import traceback
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs import Config
from data.batches import Dataset, n_windows
from data.tokenizer import load_tokenizer
from errors import UserError
from model.attention import SHORT
from model.gpt import GPT
from training import runtime
from training.command_line import preparing_command
from training.evaluate import cross_entropy
from training.optimizer import make_optimizers

PARTS = {
    "embeddings": r"^(embed|bigrams)\.",
    "positions": r"^positions\.",
    "attention": r"\.attention\.(?!.*norm)",
    "MLP": r"\.mlp\.",
    "norms": r"norm",
    "unembedding": r"^unembed\.",
}
"""Part of a model -> the names of its parameters."""
USUAL_VOCABULARY = {"char": 65, "byte": 256, "bpe": 4096, "gpt2": 50_257}
"""Ids assumed where the data isn't prepared, by the tokenizer its folder is named after; GPT-2's
where it names none.
"""
FITS = 0.7
"""Share of a memory limit that an estimate may fill: the allocator's gaps have been seen to add a
third to what is counted.
"""
THREADS = 2 * (64 + 8) << 20
"""Bytes of addresses for arena and stack of two threads that training starts: autograd's and the
one that saves.
"""
PATIENCE = 10.0
"""Seconds a timed micro-batch may be expected to take, at half the machine's matrix rate; fewer
rows are timed, or none.
"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one process of a run takes."""

    config: Config
    """Resolved: nothing is left at `auto`, and micro_batch_size is not 0."""
    vocab_size: int
    n_token: int | None
    """Tokens of the training split, where known."""
    processes: int
    end: int
    """The step after which the run ends."""
    parameters: dict[str, int]
    """By part; a tied matrix counts as embeddings."""
    flops_per_token: float
    memory: dict[str, int]
    """Bytes held at the run's worst moment, by part: of a GPU, or resident, interpreter and
    libraries among them.
    """
    limit: int
    """Bytes the process may hold, those it holds now included; 0: unknown."""

    @property
    def peak(self) -> int:
        """Bytes held at the run's worst moment."""
        return sum(self.memory.values())

    @property
    def n_micro(self) -> int:
        """Forward and backward passes of one process in one step."""
        return self.config.optim.batch_size // self.processes // self.config.optim.micro_batch_size


class LiveBytes(TorchDispatchMode):
    """While active, knows the bytes of all storages alive, by the `part` in force when they were
    made, and each stage's peak.
    """

    def __init__(self):
        super().__init__()
        self.part, self.stage = "weights", 0
        self.live: Counter[str] = Counter()
        self.peaks: dict[int, Counter[str]] = {}
        self.part_of: dict[int, str] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        casts = (
            function is torch.ops.aten._to_copy.default
            and self.part_of.get(args[0].untyped_storage()._cdata) == "weights"
        )
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.add(tensor, "weights as autocast copies them" if casts else self.part)
        return made

    def enter(self, part: str, stage: int) -> None:
        """Count what is made from now on as `part`, and look for the peak of `stage`."""
        self.part, self.stage = part, stage
        self._look()

    def _look(self) -> None:
        if self.live.total() >= self.peaks.get(self.stage, Counter()).total():
            self.peaks[self.stage] = self.live.copy()

    def add(self, tensor: Tensor, part: str) -> None:
        """Count the tensor's storage, unless it is known already, until it is freed."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self.part_of:
            self.part_of[key], self.live[part] = part, self.live[part] + storage.nbytes()
            weakref.finalize(storage, self._drop, key, storage.nbytes())
            self._look()

    def _drop(self, key: int, size: int) -> None:
        self.live[self.part_of.pop(key)] -= size

    def book_gradient(self, parameter: nn.Parameter) -> None:
        """A hook for accumulated gradients: what was workspace is a gradient from now on."""
        storage = parameter.grad.untyped_storage()
        self.live[self.part_of[storage._cdata]] -= storage.nbytes()
        self.live["gradients"] += storage.nbytes()
        self.part_of[storage._cdata] = "gradients"


def _step_bytes(config: Config, vocab_size: int, n_layer: int) -> dict[Any, Counter[str]]:
    """Bytes alive in a step of `n_layer` blocks, by part: the peaks of its stages, which are 0 the
    forward pass, 1 the backward pass down to the first block, 2 the rest of it, 3 the optimisers;
    and what is "kept" when the blocks have been passed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    optim, run = config.optim, config.run
    device = "cuda" if run.device.startswith("cuda") else "cpu"
    with FakeTensorMode(), torch.device(device), LiveBytes() as memory:
        model = GPT(
            dataclasses.replace(config.model, n_layer=n_layer),
            vocab_size,
            runtime.ATTENTION[run.attention],
        )
        for parameter in model.parameters():
            memory.add(parameter, "weights")
            parameter.register_post_accumulate_grad_hook(memory.book_gradient)
        if run.recompute:
            runtime.recompute_blocks(model)

        def at_first_block(_module: nn.Module, _inputs: tuple, out_BTD: Tensor) -> None:
            out_BTD.register_hook(lambda _: memory.enter(memory.part, 2))

        def at_unembedding(*_) -> None:
            kept.update(memory.live)
            memory.part = "logits and loss"

        model.blocks[0].register_forward_hook(at_first_block)
        model.unembed.register_forward_pre_hook(at_unembedding)
        optimizers, kept = make_optimizers(model, optim, run.precision), Counter()
        for accumulates in (
            False,
            optim.batch_size > optim.micro_batch_size,
        ):  # the first step makes the optimisers' state
            memory.peaks = {}
            for _ in range(1 + accumulates):
                memory.enter("activations", 0)
                kept.clear()
                tokens = torch.zeros(
                    optim.micro_batch_size, config.model.context_length, dtype=torch.long
                )
                with runtime.autocast(device, run.precision):
                    loss = cross_entropy(model(tokens), tokens)
                memory.enter("workspace of the backward pass", 1)
                loss.backward()
                del loss
            memory.enter("optimizer", 3)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    return {**memory.peaks, "kept": kept}


def training_bytes(config: Config, vocab_size: int) -> tuple[list[Counter[str]], Counter[str]]:
    """Bytes alive, by part, at the peak of each of a step's stages; and what is kept for the
    backward pass.

    `config` is one process's: batch_size is its share. In one stage each further block adds the
    same, be it activations or gradients; so blocks beyond the third are extrapolated, exactly.
    """
    n_layer = config.model.n_layer
    shallow, deep = (_step_bytes(config, vocab_size, min(n, n_layer)) for n in (2, 3))
    for moment, parts in deep.items():
        for part in parts:
            parts[part] += max(0, n_layer - 3) * (parts[part] - shallow[moment][part])
    return [deep[stage] for stage in range(4)], deep["kept"]


def vary(config: Config, section: str, **changes: Any) -> Config:
    """The configuration with other values in one section."""
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **changes)}
    )


@functools.cache
def baseline() -> tuple[int, int]:
    """Bytes of memory and of addresses that this process holds with the libraries that training
    loads. Measured once, when first asked, which should be before a model is built.
    """
    layer = nn.Linear(8, 8)
    for dtype in (torch.float32, torch.bfloat16):  # kernels' code is read when first used
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            layer(torch.randn(8, 8)).float().sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()
    resident, addresses = (_kibibytes("/proc/self/status", name) for name in ("VmRSS", "VmSize"))
    return resident or 320 << 20, addresses  # Linux's figure, where another system tells none


def _kibibytes(path: str, name: str) -> int:
    """A line `name: 123 kB` of one of Linux's tables, in bytes; 0 where there is none."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)


def memory_limit(device: str) -> int:
    """Bytes this process may hold, those it holds already included; 0 where it can't be told.

    On CUDA, what others leave of the device; else the least of the memory available, the control
    group's limit and RLIMIT_AS (`ulimit -v`). The last counts addresses, so what is mapped but not
    resident is taken off.
    """
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    available = _kibibytes("/proc/meminfo", "MemAvailable")
    limits = [available + _kibibytes("/proc/self/status", "VmRSS")] if available else []
    for path in map(
        Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    ):
        if path.exists() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    with contextlib.suppress(ImportError):  # Windows
        import resource

        if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
            held, addresses = baseline()
            limits.append(max(1, limit - (addresses - held) - THREADS))
    return min(limits, default=0)


def make_plan(
    config: Config, vocab_size: int, n_token: int | None = None, processes: int = 1
) -> Plan:
    """Plan `config` for a vocabulary, a training split of `n_token` tokens and a number of
    processes; no weight is made.

    Raises UserError where the device isn't there or the batch doesn't divide.
    """
    optim, rows = config.optim, config.optim.batch_size // processes
    if optim.batch_size % (processes * (optim.micro_batch_size or 1)):
        shares = f"{processes} processes x micro_batch_size {optim.micro_batch_size or 1}"
        raise UserError(
            f"batch_size {optim.batch_size} does not divide among {shares}: choose a multiple"
        )
    config = vary(runtime.resolve(config), "optim", micro_batch_size=optim.micro_batch_size or rows)
    run, on_gpu = config.run, config.run.device.startswith("cuda")
    base = Counter({} if on_gpu else {"interpreter and libraries": baseline()[0]})
    with torch.device("meta"):
        model = GPT(config.model, vocab_size)
    parameters = Counter(dict.fromkeys(PARTS, 0))
    for name, parameter in model.named_parameters():
        parameters[next(part for part, names in PARTS.items() if re.search(names, name))] += (
            parameter.numel()
        )
    moments, kept = training_bytes(vary(config, "optim", batch_size=rows), vocab_size)
    state = Counter({part: kept[part] for part in ("weights", "optimizer")})
    copy = Counter(
        {"checkpoint being written": 0 if on_gpu else state.total()}
    )  # a GPU's copy lies in the host's memory
    for held in (*moments, state) if run.strategy == "fsdp" else ():
        held.update(
            {
                part: held[part] // processes - held[part]
                for part in ("weights", "gradients", "optimizer")
            }
        )
    end = min(run.stop_at or optim.max_steps, optim.max_steps)
    if any(
        0 < every < end for every in (run.eval_every, run.save_every)
    ):  # the next step goes on while a thread writes
        moments = [held + copy for held in moments]
    memory = base + max(*moments, state + copy, key=Counter.total)
    flops, limit = runtime.flops_per_token(model), memory_limit(run.device)
    return Plan(
        config, vocab_size, n_token, processes, end, dict(parameters), flops, dict(memory), limit
    )


def time_steps(plan: Plan) -> dict[str, float]:
    """Seconds of one "step" and one "evaluation", and the machine's matrix "rate" in FLOP/s, from a
    few passes on random tokens.

    "rows" of a micro-batch are timed and the rest reckoned from them; the rate alone comes where
    one would outlast `PATIENCE`. The exchange between processes is not in it.
    """
    config, run, optim, context_length = (
        plan.config,
        plan.config.run,
        plan.config.optim,
        plan.config.model.context_length,
    )
    runtime.set_up(run)
    rate = runtime.matrix_rate(run.device, run.precision)
    rows = min(
        optim.micro_batch_size, int(PATIENCE * rate / 2 / (plan.flops_per_token * context_length))
    )
    if rows == 0:
        return {"rate": rate}
    model = GPT(config.model, plan.vocab_size, runtime.ATTENTION[run.attention]).to(run.device)
    if run.recompute:
        runtime.recompute_blocks(model)
    optimizers = make_optimizers(model, optim, run.precision)
    tokens = torch.randint(plan.vocab_size, (rows, context_length), device=run.device)
    step_model = runtime.compile_or_not(model, run, tokens)
    laps: list[list[float]] = []
    while len(laps) < 4 or (len(laps) < 40 and sum(map(sum, laps)) < 2):
        clock = [time.perf_counter()]
        with runtime.autocast(run.device, run.precision):
            loss = cross_entropy(step_model(tokens), tokens)
        loss.item()  # waits for a GPU, as does what ends the other laps
        clock.append(time.perf_counter())
        loss.backward()
        runtime.clip_gradients(model, optim.grad_clip).item()
        clock.append(time.perf_counter())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        next(model.parameters()).sum().item()
        clock.append(time.perf_counter())
        laps.append([b - a for a, b in itertools.pairwise(clock)])
    forward, backward, update = (
        statistics.median(column) for column in zip(*laps[1:], strict=True)
    )
    step = plan.n_micro * optim.micro_batch_size / rows * (forward + backward) + update
    whole = (
        (plan.n_token or 0) / 9 / context_length
    )  # windows of validation, a tenth of all, of which 0 batches means all
    windows = 2 * run.eval_batches * optim.batch_size or 1.2 * whole
    return {
        "rate": rate,
        "rows": rows,
        "step": step,
        "evaluation": windows / plan.processes / rows * forward,
    }


def describe(plan: Plan, times: dict[str, float] | None = None) -> str:
    """The plan in words and figures; with what `time_steps` gives, the time to finish and the model
    FLOPs utilisation.
    """
    config, optim, run, shape, n_token = (
        plan.config,
        plan.config.optim,
        plan.config.run,
        plan.config.model,
        plan.n_token,
    )
    attention, tokens = (
        12 * shape.n_layer * shape.d_model * shape.context_length,
        optim.batch_size * shape.context_length,
    )
    holds = shape.dropout or (run.precision == "bfloat16" and shape.context_length <= SHORT)
    epochs = (
        f" = {plan.end * optim.batch_size / n_windows(n_token, shape.context_length):.2f} epochs"
        if n_token
        else ""
    )
    ways = {
        "fused": {},
        "explicit": {"attention": "explicit"},
        "either, with recompute": {"recompute": True},
    }
    kept = {
        way: training_bytes(
            vary(config, "run", **{"attention": "fused", "recompute": False} | changes),
            plan.vocab_size,
        )[1]
        for way, changes in ways.items()
    }
    if times is None:
        pace = "not measured: the run takes more memory than there is"
    elif "step" not in times:
        pace = f"not measured: one sequence would take over {PATIENCE:.0f} s"
    else:
        evaluating = times["evaluation"] * (
            1 + (plan.end // run.eval_every if run.eval_every else 0)
        )
        whole, evaluating = (
            datetime.timedelta(seconds=round(s))
            for s in (plan.end * times["step"] + evaluating, evaluating)
        )
        speed = tokens / times["step"]
        share = speed * plan.flops_per_token / plan.processes / times["rate"]
        pace = (
            f"{times['step']:.3g} s a step = {speed:,.0f} tokens/s (timed with {times['rows']} sequences at once); "
            f"{whole} to finish, {evaluating} of it evaluating\n"
            f"utilisation {share:.0%} of the {times['rate'] / 1e9:,.0f} GFLOP/s at which this machine multiplies matrices now"
        )
    here = f"{plan.limit / 2**20:,.0f} MiB" if plan.limit else "an unknown amount"
    lines = [
        f"device      {run.device} ({runtime.device_name(run.device)}, {run.threads} threads), {run.precision}, "
        f"{run.attention} attention, recompute {'on' if run.recompute else 'off'}, compile {run.compile}",
        f"parameters  {sum(plan.parameters.values()):,} with {plan.vocab_size:,} ids:",
        *(f"{size:>16,}  {part}" for part, size in plan.parameters.items()),
        f"FLOPs       {plan.flops_per_token:,.0f} per token = 6 x {(plan.flops_per_token - attention) / 6:,.0f} weights "
        f"+ 12 x {shape.n_layer} layers x width {shape.d_model} x context {shape.context_length}",
        f"step        micro-batch {optim.micro_batch_size} x accumulation {plan.n_micro} x processes {plan.processes} "
        f"x context {shape.context_length} = {tokens:,} tokens",
        f"run         {plan.end:,} steps of {optim.optimizer} = {plan.end * tokens:,} tokens{epochs}",
        f"memory      {plan.peak / 2**20:,.0f} MiB in each process at its worst moment, {here} to be had here:",
        *(f"{size / 2**20:>16,.0f}  {part}" for part, size in plan.memory.items() if size),
        "activations for the backward pass, MiB: "
        + ", ".join(f"{parts['activations'] / 2**20:,.0f} {way}" for way, parts in kept.items()),
        *(
            ["            (on this CPU fused attention holds the n^2 weights too)"]
            if run.device == "cpu" and holds
            else []
        ),
        f"time        {pace}",
    ]
    return "\n".join(lines)


def report(config: Config) -> str:
    """What `train.py PRESET --plan` prints. Where the data isn't prepared, the usual vocabulary of
    its tokenizer is assumed, and the last lines say so. Raises UserError as `make_plan` and
    `Dataset` do.
    """
    folder, n_token, note, command = (
        Path(config.data.data),
        None,
        "",
        preparing_command(config.data.data),
    )
    if (folder / "dataset.json").exists():
        dataset = Dataset(folder)
        vocab_size, n_token = (
            load_tokenizer(dataset.tokenizer_spec).vocab_size,
            len(dataset.tokens["train"]),
        )
    else:
        vocab_size = USUAL_VOCABULARY.get(folder.name.rpartition("-")[2], USUAL_VOCABULARY["gpt2"])
        note = f"\nnote        {folder} isn't prepared: {vocab_size:,} ids assumed. To prepare it:\n  {command}"
    plan = make_plan(config, vocab_size, n_token, int(os.environ.get("WORLD_SIZE", "1")))
    fits = not plan.limit or plan.peak <= FITS * plan.limit
    return describe(plan, time_steps(plan) if fits else None) + note


def memory_warning(plan: Plan) -> str | None:
    """A line for the start of a run on CPU that takes more memory than there is; None where it
    fits, or nobody can tell.
    """
    if plan.config.run.device != "cpu" or not plan.limit or plan.peak <= plan.limit:
        return None
    figures = f"{plan.peak / 2**20:,.0f} MiB, {plan.limit / 2**20:,.0f} MiB can be had"
    return f"warning: the run will hold about {figures}: lower --micro-batch-size or use --recompute; --plan tells more"


def warn_at_start(config: Config, vocab_size: int, processes: int = 1) -> None:
    """Print `memory_warning` for a resolved configuration. It is planned only where a rough
    reckoning comes near the limit.
    """
    shape, optim, (held, _) = config.model, config.optim, baseline()
    rows = (optim.micro_batch_size or optim.batch_size // processes) * shape.context_length
    n_weight = 12 * shape.n_layer * shape.d_model**2 + 2 * vocab_size * shape.d_model
    heads = (
        shape.n_layer * shape.n_head * shape.context_length
        if shape.dropout or config.run.attention == "explicit"
        else 0
    )
    rough = (
        held
        + 24 * n_weight
        + 4 * rows * (4 * vocab_size + 40 * shape.n_layer * shape.d_model + 4 * heads)
    )
    near = config.run.device == "cpu" and 2 * rough > memory_limit("cpu")
    if near and (warning := memory_warning(make_plan(config, vocab_size, processes=processes))):
        print(warning, file=sys.stderr)


def advise(error: BaseException, config: Config) -> str | None:
    """`out_of_memory_advice` with the vocabulary of the configuration's data, for this many
    processes as torchrun has started.
    """
    vocab_size = load_tokenizer(Dataset(config.data.data).tokenizer_spec).vocab_size
    return out_of_memory_advice(error, config, vocab_size, int(os.environ.get("WORLD_SIZE", "1")))


def out_of_memory_advice(
    error: BaseException, config: Config, vocab_size: int, processes: int = 1
) -> str | None:
    """What to change when an allocation has failed, the global batch kept; None where `error` is
    something else.

    The micro-batch named is the largest for which the plan finds room. What the failed calls hold
    is freed; `baseline` must have been asked, as `make_plan` does, when the run began.
    """
    words = (
        "can't allocate memory",
        "bad_alloc",
        "out of memory",
        "Cannot allocate memory",
        "can't start new thread",
    )
    known = (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or getattr(error, "errno", None) == errno.ENOMEM
    )
    if not known and not (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    ):
        return None
    traceback.clear_frames(error.__traceback__)
    rows = config.optim.batch_size // processes
    micro = config.optim.micro_batch_size or rows
    sizes = [size for size in range(micro - 1, 0, -1) if rows % size == 0]
    ways = [("", size, config) for size in sizes]
    if not config.run.recompute:
        ways.append(("--recompute ", 1, vary(config, "run", recompute=True)))
    for option, size, way in ways:
        plan = make_plan(vary(way, "optim", micro_batch_size=size), vocab_size, processes=processes)
        if not plan.limit or plan.peak <= FITS * plan.limit:
            keeps = (
                f"keeps batch_size {config.optim.batch_size} ({plan.n_micro} accumulation steps)"
            )
            return f"out of memory at micro_batch_size {micro}; {option}--micro-batch-size {size} should fit and {keeps}"
    return (
        f"out of memory at micro_batch_size {micro}, and even 1 with --recompute would not fit: "
        "choose a smaller model (--n-layer, --d-model) or a shorter --context-length; --plan tells what they take"
    )
