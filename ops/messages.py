"""What a run says before its first step, when it has lost its way, and after its last step."""

from configs import Config, RunConfig
from data.batches import n_windows
from data.prompts import newline_id, start_text
from model.attention import Mask
from model.fast_attention import holds_weights
from model.flex_windows import why_not
from model.gpt import GPT
from ops.device import COMPILE_PAYS_AFTER, DTYPES, device_name
from training.optimizer import learning_rate
from training.state import State


def opening_lines(session, model: GPT) -> str:
    """The lines printed before the first step: device, precision, parameters, data, tokens per step
    spelt out, epochs.
    """
    config, share = session.config, session.share
    dataset, tokenizer = session.dataset, session.tokenizer
    optim, run, shape = config.optim, config.run, config.model
    train, val = len(dataset.tokens["train"]), len(dataset.tokens["val"])
    tokens_per_step = optim.batch_size * shape.context_length
    epochs = optim.max_steps * optim.batch_size / n_windows(train, shape.context_length)
    parameters = sum(p.numel() for p in model.parameters())
    going_on = ""
    if session.resumed_at is not None:
        going_on = f", going on from step {session.resumed_at:,}"
    lines = [
        f"device   {run.device} ({device_name(run.device)}, {run.threads} threads), "
        f"{precision_text(run)}, {run.attention} attention, compile {run.compile}",
        f"model    {parameters:,} parameters: {shape.n_layer} layers, {shape.n_head} heads, "
        f"width {shape.d_model}, {shape.positions} positions, {shape.norm}, {shape.mlp}",
        f"data     {dataset.folder}: {train:,} training and {val:,} validation tokens; "
        f"{tokenizer.vocab_size:,} ids ({tokenizer.kind})",
        f"step     micro-batch {share.micro_batch_size} x accumulation {share.n_micro} "
        f"x processes {share.n_process} x context {shape.context_length} "
        f"= {tokens_per_step:,} tokens",
        f"run      {optim.max_steps:,} steps of {optim.optimizer} "
        f"= {optim.max_steps * tokens_per_step:,} tokens = {epochs:.2f} epochs{going_on} "
        f"-> {run.out}",
    ]
    notes = (attention_note(config), schedule_note(config), start_note(session))
    lines += [note for note in notes if note]
    return "\n".join(lines + session.notes)


def precision_text(run: RunConfig) -> str:
    """The precision of matrix products, and whether a GPU rounds those of float32 to TF32."""
    if run.precision == "float32" and run.device.startswith("cuda") and not run.deterministic:
        return "float32 (products in TF32; --deterministic: not)"
    return run.precision


def attention_note(config: Config) -> str | None:
    """A line where fast attention on a CPU holds the n^2 weights after all, or on a GPU takes a
    window in blocks; None elsewhere.
    """
    run, shape = config.run, config.model
    if run.attention == "explicit":
        return None
    device, dtype = run.device.partition(":")[0], DTYPES[run.precision]
    mask = Mask(window=shape.window)
    if 0 < shape.window < shape.context_length and device == "cuda":
        place = (mask, shape.context_length, device, shape.d_head, shape.dropout)
        reason = why_not(*place, run.compile == "on")
        return f"note     the window is not for flex_attention: {reason}" if reason else None
    if not holds_weights(run.attention, mask, shape.context_length, device, dtype, shape.dropout):
        return None
    if shape.dropout:
        why = "with dropout"
    else:
        why = f"in {run.precision} at context {shape.context_length}"
    return f"note     {why}, fast attention on a CPU holds the n^2 weights, as explicit does"


def compile_note(config: Config, seconds_left: float) -> str | None:
    """A line on why `compile` at auto becomes what it does on a GPU; None elsewhere. `config` is
    not resolved, `seconds_left` is as in `ops.device.resolve`.
    """
    if config.run.compile != "auto" or not seconds_left:
        return None
    found = "on" if seconds_left >= COMPILE_PAYS_AFTER else "off"
    return (
        f"note     compile {found}: it takes about a minute, and saves about 0.3 of the "
        f"{seconds_left:,.0f} s or so that are left (--compile on, off)"
    )


def schedule_note(config: Config) -> str | None:
    """A line where the warm-up outlasts the run, so that the rate never reaches its peak."""
    optim = config.optim
    if not 0 < optim.max_steps <= optim.warmup_steps:
        return None
    highest = learning_rate(optim.max_steps - 1, optim)
    return (
        f"note     a warm-up of {optim.warmup_steps:,} steps in a run of {optim.max_steps:,}: the "
        f"rate rises to {highest:.3g} and never reaches its peak of {optim.lr:g}; "
        "lower --warmup-steps"
    )


def start_note(session) -> str | None:
    """A line where samples.txt starts from something else than a user would expect; None where it
    starts from the separator of documents, or from a newline where there is no separator.
    """
    tokenizer = session.tokenizer
    usual = tokenizer.separator
    if usual is None:
        usual = newline_id(tokenizer)
    if not session.config.run.sample_tokens or tokenizer.start == usual:
        return None
    return f"note     samples.txt starts from {start_text(tokenizer)}"


def farewell(session, state: State, reason: str) -> str:
    """The last lines printed: where the run stands, and what can be done with it."""
    out = session.config.run.out
    max_steps = session.config.optim.max_steps
    if reason != "done":
        return (
            f"{reason}: stopped after step {state.step:,} of {max_steps:,}; "
            f"saved in {out}; --resume goes on"
        )
    names = ("log.jsonl", "loss.png", "samples.txt")
    there = ", ".join(name for name in names if (session.folder / name).exists())
    return (
        f"done: best validation loss {state.best_val_loss:.4f}; saved in {out} ({there})\n"
        f"next: python sample.py {out}\n"
        f"      python attention_map.py {out} --out {out}/attention.html"
    )


def not_finite(step: int, config: Config) -> str:
    """What to say when a run has lost its way."""
    return (
        f"loss or gradient is not finite at step {step:,} and those before it "
        f"(seed {config.run.seed}); best.pt is as it was.\n"
        f"Lower --lr (now {config.optim.lr:g}), raise --warmup-steps "
        f"(now {config.optim.warmup_steps}), or use --precision float32 "
        f"(now {config.run.precision})"
    )
