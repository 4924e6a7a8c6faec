"""Train a GPT: a configuration in, a run folder out.

    python train.py shakespeare-char --out runs/one
    python train.py runs/one/config.json --n-layer 6 --out runs/two

Step s is a function of the state and of s: its batch and its dropout are drawn from (seed, s), with
nothing else to remember.
"""

import dataclasses
import sys

from errors import MachineError, run_command
from ops.command_line import list_presets, parse
from ops.streams import outlive_readers


def main() -> int:
    outlive_readers()
    config = parse(sys.argv[1:])
    if config is None:
        print(list_presets())
        return 0
    if config.run.plan:
        from ops.plan import report

        print(report(config))
        return 0
    try:
        return train(config)
    except (RuntimeError, MemoryError, OSError) as error:
        from ops.plan import advise

        if advice := advise(error, config):
            raise MachineError(advice) from None
        raise


def train(config) -> int:
    """Run `config` to its end, or on from where its folder stands. Returns the exit code: 0, or 75
    where a signal stopped it.
    """
    from ops.session import Session
    from training.trainer import Trainer
    from viz.probe import Watch, cut_probe

    with Session(config) as session:
        trainer = Trainer(session)
        if session.resumed_at is not None and session.processes.is_main:
            cut_probe(session.folder / "attention", session.resumed_at)
        state, optim, run = trainer.state, session.config.optim, session.config.run
        watch = Watch(*session.to_watch())
        for step in range(state.step, optim.max_steps + 1):
            # First, what `step` updates have made; a resumed run has recorded that already.
            state.step = step
            is_last, is_recorded = step == optim.max_steps, step == session.resumed_at
            is_evaluated, is_best = False, False
            if not is_recorded and (is_last or is_due(step, run.eval_every)):
                is_evaluated, is_best = True, evaluate(session, trainer)
            if not is_recorded and watch.is_due(step, is_evaluated):
                with session.log.looking(step):
                    watch.look(step, trainer.model)
            reason = session.stop.reason(state)
            if reason and not (is_evaluated or is_recorded or session.stop.signalled):
                take_last_look(session, trainer)
            if not is_recorded:
                is_latest = bool(reason) or step == 0 or is_due(step, run.save_every)
                session.save(trainer, state, is_best, is_latest)
            if reason:
                break

            # Then one update: the mean loss over the global batch, a micro-batch at a time.
            loss = session.agree(trainer.accumulate())
            with session.log.phase("optimizer"):
                lr, grad_norm = trainer.update(loss)
            session.record(step + 1, loss, lr, grad_norm)
    return session.finish(state, reason)


def is_due(step: int, every: int) -> bool:
    """Whether something done `every` so many steps (0: never) falls on `step`."""
    return every > 0 and step % every == 0


def evaluate(session, trainer) -> bool:
    """Measure the model as it stands, sample from it, and record both; whether it is the best."""
    state = trainer.state
    with session.log.phase("evaluate"):
        losses, sample = trainer.evaluate()
        is_best = state.record(losses["val_loss"])
        session.log.evaluation(state.step, losses, sample, is_best)
    return is_best


def take_last_look(session, trainer) -> None:
    """Evaluate a run that stops between two evaluations, so that its best is not an older one.

    The run does not remember it: when it goes on, it is as if it had never been stopped.
    """
    seen = dataclasses.replace(trainer.state)
    with session.log.phase("evaluate"):
        losses, sample = trainer.evaluate()
        is_best = seen.record(losses["val_loss"])
        session.log.evaluation(seen.step, losses, sample, is_best, is_extra=True)
    session.save(trainer, seen, is_best, is_latest=False)


if __name__ == "__main__":
    run_command(main)
