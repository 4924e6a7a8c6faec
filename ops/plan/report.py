"""The plan in words: what `train.py PRESET --plan` prints."""

import datetime
from pathlib import Path

from configs import Config
from data.batches import n_windows
from data.dataset import Dataset
from data.tokenizer import load_tokenizer
from model.attention import Mask
from model.fast_attention import holds_weights
from ops.command_line import preparing_command
from ops.device import DTYPES, device_name
from ops.distributed import world_size
from ops.plan import limits, timing
from ops.plan.advice import roomier
from ops.plan.counting import Plan, make_plan, training_bytes

USUAL_VOCABULARY = {"char": 65, "byte": 256, "bpe": 4096, "gpt2": 50_257}
"""Ids assumed where the data isn't prepared, by the tokenizer its folder is named after; GPT-2's
where it names none.
"""


def describe(plan: Plan, times: dict[str, float] | None = None, remedy: str = "") -> str:
    """The plan in words and figures; with what `time_steps` gives, the time to finish and the model
    FLOPs utilisation. `remedy` says what would fit, where the plan itself does not.
    """
    optim, run, shape, share = plan.config.optim, plan.config.run, plan.config.model, plan.share
    attention = 12 * shape.n_layer * shape.d_model * shape.context_length
    n_weight = (plan.flops_per_token - attention) / 6
    tokens_per_step = optim.batch_size * shape.context_length
    epochs = ""
    if plan.n_token:
        n_epoch = plan.end * optim.batch_size / n_windows(plan.n_token, shape.context_length)
        epochs = f" = {n_epoch:.2f} epochs"
    here = f"{_mebibytes(plan.limit)} MiB" if plan.limit else "an unknown amount"
    lines = [
        f"device      {run.device} ({device_name(run.device)}, {run.threads} threads), "
        f"{run.precision}, {run.attention} attention, "
        f"recompute {'on' if run.recompute else 'off'}, compile {run.compile}",
        f"parameters  {sum(plan.parameters.values()):,} with {plan.vocab_size:,} ids:",
        *(f"{count:>16,}  {part}" for part, count in plan.parameters.items()),
        f"FLOPs       {plan.flops_per_token:,.0f} per token = 6 x {n_weight:,.0f} weights "
        f"+ 12 x {shape.n_layer} layers x width {shape.d_model} x context {shape.context_length}",
        f"step        micro-batch {share.micro_batch_size} x accumulation {share.n_micro} "
        f"x processes {share.n_process} x context {shape.context_length} "
        f"= {tokens_per_step:,} tokens",
        f"run         {plan.end:,} steps of {optim.optimizer} "
        f"= {plan.end * tokens_per_step:,} tokens{epochs}",
        f"memory      {_mebibytes(plan.peak)} MiB in each process at its worst moment, "
        f"{here} to be had here:",
        *(f"{_mebibytes(size):>16}  {part}" for part, size in plan.memory.items() if size),
        *_room_lines(plan, remedy),
        *_host_lines(plan),
        *_activation_lines(plan),
        f"time        {_pace(plan, times)}",
    ]
    return "\n".join(lines)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def _room_lines(plan: Plan, remedy: str) -> list[str]:
    """Whether that is too much, and what would not be; on a GPU, whether more would fit."""
    if plan.fits:
        on_gpu = plan.config.run.device.startswith("cuda")
        if not on_gpu or plan.share.n_micro == 1 or 2 * plan.peak > limits.FITS * plan.limit:
            return []
        return ["room        for more: --micro-batch-size 0 takes as many sequences as fit"]
    found = "more memory than there is"
    if plan.peak <= plan.limit:
        share = plan.peak / plan.limit
        found = (
            f"{share:.0%} of what is to be had, {limits.FITS:.0%} are safe: an allocator's gaps "
            "can add a third"
        )
    nothing = "even one sequence with --recompute would not fit: choose a smaller model"
    return [f"room        {found}", f"            {remedy or nothing}"]


def _host_lines(plan: Plan) -> list[str]:
    """What a run on a GPU takes of the host's memory."""
    if not plan.config.run.device.startswith("cuda"):
        return []
    return [
        f"host        {_mebibytes(plan.checkpoint)} MiB of its memory in the first process while a "
        "checkpoint is copied and written"
    ]


def _activation_lines(plan: Plan) -> list[str]:
    """What the dials of memory would change: the activations each of them keeps for the backward
    pass.
    """
    run, shape = plan.config.run, plan.config.model
    plain = plan.config.replace(attention="fast", recompute=False)
    ways = {
        "fast": plain,
        "explicit": plain.replace(attention="explicit"),
        "either, with recompute": plain.replace(recompute=True),
    }
    figures = []
    for way, config in ways.items():
        _, kept = training_bytes(config, plan.vocab_size)
        figures.append(f"{_mebibytes(kept['activations'])} {way}")
    lines = ["activations for the backward pass, MiB: " + ", ".join(figures)]
    mask = Mask(window=shape.window)
    device = run.device.partition(":")[0]
    dtype = DTYPES[run.precision]
    if holds_weights("fast", mask, shape.context_length, device, dtype, shape.dropout):
        lines.append("            (on this CPU fast attention holds the n^2 weights too)")
    return lines


def _pace(plan: Plan, times: dict[str, float] | None) -> str:
    """Time a step, time to finish and utilisation, or why they weren't measured."""
    if times is None:
        return "not measured: the run takes more memory than there is"
    tokens_per_step = plan.config.optim.batch_size * plan.config.model.context_length
    if "step" not in times:
        flops = plan.end * tokens_per_step * plan.flops_per_token / plan.share.n_process
        reckoned = _duration(2 * flops / times["rate"])
        return (
            f"not measured: one sequence would take over {timing.SECONDS_A_PASS:.0f} s; "
            f"{reckoned} to finish, at half of the {times['rate'] / 1e9:,.3g} GFLOP/s "
            "at which this machine multiplies matrices now"
        )
    run = plan.config.run
    n_evaluation = 1 + (plan.end // run.eval_every if run.eval_every else 0)
    evaluating = times["evaluation"] * n_evaluation
    whole = plan.end * times["step"] + evaluating
    speed = tokens_per_step / times["step"]
    share = speed * plan.flops_per_token / plan.share.n_process / times["rate"]
    return (
        f"{times['step']:.3g} s a step = {speed:,.0f} tokens/s "
        f"(timed with {times['rows']} sequences at once); "
        f"{_duration(whole)} to finish, {_duration(evaluating)} of it evaluating\n"
        f"utilisation {share:.0%} of the {times['rate'] / 1e9:,.0f} GFLOP/s "
        "at which this machine multiplies matrices now"
    )


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds; days where it takes many."""
    if seconds >= 10 * 86_400:
        return f"{seconds / 86_400:,.0f} days"
    return str(datetime.timedelta(seconds=round(seconds)))


def report(config: Config) -> str:
    """What `train.py PRESET --plan` prints. Where the data isn't prepared, the usual vocabulary of
    its tokenizer is assumed, and the last lines say so. Raises UserError as `make_plan` and
    `Dataset` do.
    """
    folder = Path(config.data.data)
    if (folder / "dataset.json").exists():
        dataset = Dataset(folder)
        vocab_size = load_tokenizer(dataset.tokenizer_spec).vocab_size
        n_token = len(dataset.tokens["train"])
        note = ""
    else:
        kind = folder.name.rpartition("-")[2]
        vocab_size = USUAL_VOCABULARY.get(kind, USUAL_VOCABULARY["gpt2"])
        n_token = None
        note = (
            f"\nnote        {folder} isn't prepared: {vocab_size:,} ids assumed. To prepare it:"
            f"\n  {preparing_command(config.data.data)}"
        )
    plan = make_plan(config, vocab_size, n_token, world_size())
    fitting = plan
    remedy = ""
    may_fit = not plan.fits and plan.least < limits.FITS * plan.limit
    if may_fit and (found := roomier(plan.config, vocab_size, world_size(), n_token)):
        remedy, fitting = found
    times = timing.time_steps(fitting) if fitting.fits else None
    return describe(plan, times, remedy) + note
