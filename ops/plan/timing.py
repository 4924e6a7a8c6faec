"""How long a step takes on this machine, measured on a few of them."""

import itertools
import statistics
import time

import torch

from model.fast_attention import ATTENTION
from model.gpt import GPT
from ops.compiling import WithLoss, compile_or_not, recompute_blocks
from ops.device import autocast, set_up
from ops.plan.counting import Plan
from ops.speed import matrix_rate
from training.loss import cross_entropy
from training.optimizer import clip_gradients, make_optimizers

SECONDS_A_PASS = 10.0
"""Seconds a timed micro-batch may be expected to take, at half the machine's matrix rate; fewer
rows are timed, or none.
"""

WIDE_PRODUCT = 1024
"""Width of a product that tells the rate of a busy machine better than those tried first."""


def time_steps(plan: Plan) -> dict[str, float]:
    """Seconds of one "step" and one "evaluation", and the machine's matrix "rate" in FLOP/s, from a
    few passes on random tokens.

    "rows" of a micro-batch are timed and the rest reckoned from them; the rate alone comes where
    one would outlast `SECONDS_A_PASS`. The exchange between processes is not in it.
    """
    run, optim, share = plan.config.run, plan.config.optim, plan.share
    context_length = plan.config.model.context_length
    set_up(run)
    rate = matrix_rate(run.device, run.precision)
    flops_per_row = plan.flops_per_token * context_length
    rows = min(share.micro_batch_size, int(SECONDS_A_PASS * rate / 2 / flops_per_row))
    if rows == 0:  # small products are slow where others use the cores too: ask a wider one
        rate = max(rate, matrix_rate(run.device, run.precision, WIDE_PRODUCT))
        rows = min(share.micro_batch_size, int(SECONDS_A_PASS * rate / 2 / flops_per_row))
    if rows == 0:
        return {"rate": rate}
    forward, backward, update = _time_passes(plan, rows)
    passes = share.n_micro * share.micro_batch_size / rows
    if run.eval_batches:
        windows = 2 * run.eval_batches * optim.batch_size
    else:
        # All of validation, which is taken for a tenth of the text, and a fifth as many windows of
        # the training split.
        windows = 1.2 * (plan.n_token or 0) / 9 / context_length
    return {
        "rate": rate,
        "rows": rows,
        "step": passes * (forward + backward) + update,
        "evaluation": windows / share.n_process / rows * forward,
    }


def _time_passes(plan: Plan, rows: int) -> tuple[float, float, float]:
    """Seconds of a forward pass of `rows` sequences, of its backward pass, and of an update: the
    medians of 3 to 39 steps, after one to warm up.
    """
    run, optim, shape = plan.config.run, plan.config.optim, plan.config.model
    model = GPT(shape, plan.vocab_size, ATTENTION[run.attention]).to(run.device)
    if run.recompute:
        recompute_blocks(model)
    optimizers = make_optimizers(model, optim, run.precision)
    tokens = torch.randint(plan.vocab_size, (rows, shape.context_length), device=run.device)
    loss_of = compile_or_not(WithLoss(model, cross_entropy), run, tokens, tokens)
    laps: list[list[float]] = []
    while len(laps) < 4 or (len(laps) < 40 and sum(map(sum, laps)) < 2):
        clock = [time.perf_counter()]
        with autocast(run.device, run.precision):
            loss = loss_of(tokens, tokens)
        loss.item()  # waits for a GPU, as does what ends the other laps
        clock.append(time.perf_counter())
        loss.backward()
        clip_gradients(model, optim.grad_clip).item()
        clock.append(time.perf_counter())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        next(model.parameters()).sum().item()
        clock.append(time.perf_counter())
        laps.append([b - a for a, b in itertools.pairwise(clock)])
    forward, backward, update = map(statistics.median, zip(*laps[1:], strict=True))
    return forward, backward, update
