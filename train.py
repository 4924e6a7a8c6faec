"""Train a GPT: a configuration in, a run folder out.

    python train.py shakespeare-char --out runs/one
    python train.py runs/one/config.json --n-layer 6 --out runs/two

Step s is a function of the state and of s: its batch and its dropout are drawn from (seed, s), with
nothing else to remember.
"""

import sys

from errors import MachineError, run_command
from training.command_line import check_data, list_presets, parse


def main() -> int:
    config = parse(sys.argv[1:])
    if config is None:
        print(list_presets())
        return 0
    if config.run.plan:
        from training.plan import report

        print(report(config))
        return 0
    check_data(config)
    try:
        return train(config)
    except (RuntimeError, MemoryError, OSError) as error:
        from training.plan import advise

        if advice := advise(error, config):
            raise MachineError(advice) from None
        raise


def train(config) -> int:
    """Run `config` to its end, or on from where its folder stands. Returns the exit code: 0, or 75
    where a signal stopped it.
    """
    import contextlib
    import dataclasses
    import math
    import time

    import torch

    from data.batches import Dataset, training_batch
    from data.tokenizer import load_tokenizer
    from model.gpt import GPT
    from training import checkpoint as checkpoints, distributed, run as runs, runtime
    from training.evaluate import cross_entropy, evaluate
    from training.log import RunLog, plot_losses
    from training.optimizer import learning_rate, make_optimizers, set_learning_rate
    from training.plan import warn_at_start
    from viz.probe import cut_probe, save_probe

    # What is to be done, and by whom.
    dataset = Dataset(config.data.data)
    folder, config, resumed = runs.open_folder(config, dataset)
    config = runtime.resolve(config)
    runs.check_sizes(config, dataset)
    optim, run, context_length = config.optim, config.run, config.model.context_length
    processes = distributed.start(config)
    device, rows_here = processes.device(run.device), optim.batch_size // processes.count
    micro_batch_size = optim.micro_batch_size or rows_here
    n_micro = rows_here // micro_batch_size

    # The state: weights, the optimisers' moments, and a few numbers.
    tokenizer = load_tokenizer(dataset.tokenizer_spec)
    warn_at_start(config, tokenizer.vocab_size, processes.count)
    runtime.set_up(run)
    model = GPT(config.model, tokenizer.vocab_size, runtime.ATTENTION[run.attention])
    state = runs.starting_state(config, dataset, resumed, model)
    processes.shard(model.to(device))
    if run.recompute:
        runtime.recompute_blocks(model)
    optimizers = make_optimizers(model, optim, run.precision)
    scaler = torch.amp.GradScaler(enabled=run.precision == "float16")
    if resumed:
        for optimizer, moments in zip(optimizers, state.optimizer, strict=True):
            optimizer.load_state_dict(distributed.scatter_optimizer(optimizer, moments))
        scaler.load_state_dict(state.scaler)
    state = dataclasses.replace(state, optimizer=[])  # it lives in the optimisers now
    start, best_val_loss, since_best = (
        state.step,
        state.best_val_loss,
        state.counters.get("since_best", 0),
    )

    def micro_batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, (micro_batch_size, context_length): micro-batch `index` of the global
        batch of `step`.
        """
        rows = range(index * micro_batch_size, (index + 1) * micro_batch_size)
        tokens, targets = training_batch(
            dataset.tokens["train"], context_length, optim.batch_size, run.seed, step, rows
        )
        return tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    def save(step: int, names: list[str]) -> None:
        """Copy the state after `step` updates and have it written under each name; all processes
        take part.
        """
        saver.wait()  # so that there is never more than one copy
        tensors = runs.snapshot(model, optimizers, scaler, processes.is_main)
        numbers = {
            "step": step,
            "best_val_loss": best_val_loss,
            "counters": {"since_best": since_best},
        }
        if processes.is_main:
            saver.save(
                dataclasses.replace(state, **tensors, **numbers), *(folder / name for name in names)
            )

    if processes.is_main:
        runs.start_folder(folder, config, resumed)
        cut_probe(folder / "attention", start if resumed else -1)
        print(runs.introduce(config, model, dataset, tokenizer, resumed, processes))
    processes.barrier()
    step_model = processes.wrap(runtime.compile_or_not(model, run, micro_batch(0, 0)[0]), device)
    peak = processes.count * runtime.matrix_rate(device, run.precision)
    log = RunLog(folder, config, start, runtime.flops_per_token(model), peak, processes.is_main)
    saver, stop, began, bad_steps = checkpoints.Saver(), runs.StopSignal(), time.perf_counter(), 0
    signalled, late, recorded = False, False, start if resumed else -1

    with contextlib.closing(log):
        for step in range(start, optim.max_steps + 1):
            # First, what `step` updates have made; a resumed run has recorded that already.
            is_last, names = step == optim.max_steps, []
            if step > recorded and (is_last or (run.eval_every and step % run.eval_every == 0)):
                with log.phase("evaluate"):
                    with runtime.autocast(run.device, run.precision):
                        losses = evaluate(
                            model,
                            dataset,
                            micro_batch_size,
                            run.eval_batches * optim.batch_size,
                            processes,
                        )
                        sample = runs.draw_sample(model, tokenizer, run.sample_tokens, run.seed)
                    if run.probe_tokens and processes.is_main and not processes.is_sharded:
                        save_probe(
                            folder / "attention",
                            step,
                            model,
                            dataset.tokens["val"][: run.probe_tokens].tolist(),
                        )
                is_best = losses["val_loss"] < best_val_loss
                best_val_loss, since_best = (
                    min(best_val_loss, losses["val_loss"]),
                    0 if is_best else since_best + 1,
                )
                names = [checkpoints.BEST] * is_best
                log.evaluation(step, losses, sample, is_best)
                model.train()
            worn_out = 0 < run.patience <= since_best
            is_end = is_last or 0 < run.stop_at <= step or signalled or late or worn_out
            if step > recorded and (
                is_end or step == 0 or (run.save_every and step % run.save_every == 0)
            ):
                names.append(checkpoints.LATEST)
            if names:
                with log.phase("save"):
                    save(step, names)
                    if step == 0:
                        saver.wait()  # from here on there is a whole checkpoint at any instant
            if is_end:
                break

            # Then one update: the mean loss over the global batch, a micro-batch at a time.
            loss = torch.zeros((), device=device)
            for index in range(processes.rank * n_micro, (processes.rank + 1) * n_micro):
                with log.phase("data"):
                    tokens, targets = micro_batch(step, index)
                if config.model.dropout:
                    torch.manual_seed(runs.dropout_seed(run.seed, step, index))
                with processes.accumulating(step_model, is_last=(index + 1) % n_micro == 0):
                    with log.phase("forward"), runtime.autocast(run.device, run.precision):
                        micro_loss = cross_entropy(step_model(tokens), targets) / n_micro
                    with log.phase("backward"):
                        scaler.scale(micro_loss).backward()
                loss += micro_loss.detach()
            overtime = 0 < run.max_minutes * 60 < time.perf_counter() - began
            loss, signals, overtimes = processes.sum(
                loss / processes.count, bool(stop.received), overtime, device=device
            )
            signalled, late, lr = signals > 0, overtimes > 0, learning_rate(step, optim)
            with log.phase("optimizer"):
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                grad_norm = float(runtime.clip_gradients(model, optim.grad_clip))
                is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
                if is_finite:
                    set_learning_rate(optimizers, lr)
                    for optimizer in optimizers:
                        scaler.step(optimizer)
                scaler.update()
                model.zero_grad(set_to_none=True)
            bad_steps = 0 if is_finite else bad_steps + 1
            if bad_steps:
                log.say(
                    f"step {step + 1:,}: loss {loss}, gradient norm {grad_norm}: update skipped"
                )
            if bad_steps == runs.BAD_STEPS_ALLOWED[run.precision]:
                raise MachineError(runs.not_finite(step + 1, config))
            if (step + 1) % run.log_every == 0 or step + 1 == optim.max_steps:
                log.train(step + 1, loss, lr, grad_norm)
            saver.check()
        saver.wait()

    if processes.is_main:
        plot_losses(folder)
        reasons = {
            "no improvement": worn_out,
            "time is up": late,
            stop.received or "signal": signalled,
        }
        print(
            runs.farewell(
                step,
                best_val_loss,
                config,
                next((why for why, holds in reasons.items() if holds), "as asked"),
            )
        )
    return distributed.leave(75 if signalled else 0)


if __name__ == "__main__":
    run_command(main)
