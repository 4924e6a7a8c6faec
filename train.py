"""Train a GPT: a configuration in, a run folder out.

    python train.py                                                list the presets
    python train.py shakespeare-char --out runs/one                train one
    python train.py runs/one/config.json --n-layer 6 --out runs/two

Step s is a pure function of the state and of s: its batch and its dropout are drawn from (seed, s), so there is nothing else to remember.
"""

import sys

from errors import MachineError, run_command
from training.command_line import check_data, list_presets, parse

BAD_STEPS_ALLOWED = {"float32": 5, "bfloat16": 5, "float16": 25}
"""Updates in a row that may be skipped because loss or gradient is not finite; float16's scaler needs a few to find its scale."""


def main() -> int:
    config = parse(sys.argv[1:])
    if config is None:
        print(list_presets())
        return 0
    check_data(config)
    return train(config)


def train(config) -> int:
    """Run `config` to its end, or on from where its folder stands. Returns the exit code: 0, or 75 where a signal stopped it."""
    import math
    import time

    import torch

    from data.batches import Dataset, training_batch
    from data.tokenizer import load_tokenizer
    from model.gpt import GPT
    from training import checkpoint as checkpoints
    from training import run as runs
    from training import runtime
    from training.evaluate import cross_entropy, evaluate
    from training.log import RunLog, plot_losses
    from training.optimizer import learning_rate, make_optimizers, set_learning_rate

    dataset = Dataset(config.data.data)
    folder, config, resumed = runs.open_folder(config, dataset)
    config = runtime.resolve(config)
    runs.check_sizes(config, dataset)
    optim, run, context_length = config.optim, config.run, config.model.context_length
    micro_batch_size = optim.micro_batch_size or optim.batch_size

    runtime.set_up(run)
    tokenizer = load_tokenizer(dataset.tokenizer_spec)
    model = GPT(config.model, tokenizer.vocab_size, runtime.ATTENTION[run.attention]).to(run.device)
    optimizers = make_optimizers(model, optim)
    scaler = torch.amp.GradScaler(enabled=run.precision == "float16")
    start, best_val_loss = 0, math.inf
    if resumed:
        checkpoints.load_weights(model, resumed, folder)
        for optimizer, state in zip(optimizers, resumed.optimizer, strict=True):
            optimizer.load_state_dict(state)
        scaler.load_state_dict(resumed.scaler)
        start, best_val_loss = resumed.step, resumed.best_val_loss
    elif run.init_from:
        source = checkpoints.find(run.init_from)
        checkpoints.load_weights(model, checkpoints.load(source), source)

    runs.start_folder(folder, config, resumed)
    print(runs.introduce(config, model, dataset, tokenizer, start))

    def micro_batch(step: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, (micro_batch_size, context_length): some rows of the global batch of `step`."""
        rows = range(first, first + micro_batch_size)
        tokens, targets = training_batch(dataset.tokens["train"], context_length, optim.batch_size, run.seed, step, rows)
        return tokens.to(run.device, non_blocking=True), targets.to(run.device, non_blocking=True)

    def save(step: int, name: str) -> None:
        state = checkpoints.Checkpoint(
            step=step, model=model.state_dict(), optimizer=[o.state_dict() for o in optimizers], scaler=scaler.state_dict(),
            config=config.to_dict(), tokenizer=tokenizer.spec(), dataset=dataset.fingerprint, best_val_loss=best_val_loss,
        )  # fmt: skip
        checkpoints.save(state, folder / name)

    step_model = runtime.compile_or_not(model, run, micro_batch(0, 0)[0])
    log, stop, began, bad_steps = RunLog(folder, config, start), runs.StopSignal(), time.perf_counter(), 0
    last_step = min(run.stop_at or optim.max_steps, optim.max_steps)
    for step in range(start, last_step + 1):
        # First what the state after `step` updates is worth; a resumed run has that behind it.
        time_is_up = run.max_minutes and time.perf_counter() - began > 60 * run.max_minutes
        is_end = step >= last_step or stop.received or time_is_up
        if step > start or not resumed:
            with log.paused():
                if step == optim.max_steps or (run.eval_every and step % run.eval_every == 0):
                    with runtime.autocast(run.device, run.precision):
                        losses = evaluate(model, dataset, micro_batch_size, run.eval_batches * optim.batch_size)
                        sample = runs.draw_sample(model, tokenizer, run.sample_tokens, run.seed)
                    is_best = losses["val_loss"] < best_val_loss
                    log.evaluation(step, losses, sample, is_best)
                    if is_best:
                        best_val_loss = losses["val_loss"]
                        save(step, checkpoints.BEST)
                if is_end or (run.save_every and step % run.save_every == 0):
                    save(step, checkpoints.LATEST)
        if is_end:
            break

        # Then one update: the mean loss over the global batch, in micro-batches.
        model.train()
        loss = 0.0
        for index, first in enumerate(range(0, optim.batch_size, micro_batch_size)):
            tokens, targets = micro_batch(step, first)
            if config.model.dropout:
                torch.manual_seed(runs.dropout_seed(run.seed, step, index))
            with runtime.autocast(run.device, run.precision):
                micro_loss = cross_entropy(step_model(tokens), targets) * (micro_batch_size / optim.batch_size)
            scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip or math.inf)
        lr = learning_rate(step, optim)
        if math.isfinite(loss) and math.isfinite(grad_norm):
            set_learning_rate(optimizers, lr)
            for optimizer in optimizers:
                scaler.step(optimizer)
            bad_steps = 0
        else:
            bad_steps += 1
            log.say(f"step {step + 1}: loss {float(loss)}, gradient norm {float(grad_norm)}: update skipped")
            if bad_steps >= BAD_STEPS_ALLOWED[run.precision]:
                raise MachineError(runs.not_finite(step + 1, config))
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % run.log_every == 0 or step + 1 == optim.max_steps:
            log.train(step + 1, float(loss), lr, float(grad_norm))

    log.close()
    plot_losses(folder)
    print(runs.farewell(step, best_val_loss, config, stop.received))
    return 75 if stop.received else 0


if __name__ == "__main__":
    run_command(main)
