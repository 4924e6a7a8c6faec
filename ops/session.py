"""What surrounds a run: its folder and data, its device, the other processes, its log and its end.

The trainer is given a session and asks it for what depends on the machine. Everything here is the
same whatever the model is.
"""

import contextlib
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from configs import Config
from data.dataset import Dataset
from data.locking import FolderLock
from data.share import share_batch
from data.tokenizer import Tokenizer, load_tokenizer
from errors import MachineError
from model.gpt import GPT
from ops import distributed
from ops.checkpoint import BEST, LATEST, Checkpoint, Saver, find, snapshot
from ops.command_line import check_data
from ops.compiling import Loss, WithLoss, compile_or_not, recompute_blocks
from ops.device import autocast, device_name, resolve, set_up
from ops.feeding import Draw, Feeder
from ops.fitting import restore_moments
from ops.log import RunLog, plot_losses
from ops.meeting import Meeting
from ops.messages import compile_note, farewell, not_finite, opening_lines
from ops.plan import agree_on_micro_batch, warn_at_start
from ops.resume import initial_weights, resume_notes
from ops.run_folder import open_folder, start_folder
from ops.speed import flops_per_token, makers_rate, matrix_rate, seconds_left
from ops.stopping import Stop
from training.state import State

BAD_STEPS_ALLOWED = {"float32": 5, "bfloat16": 5, "float16": 25}
"""Updates in a row that may be skipped as loss or gradient is not finite; float16's scaler needs a
few to find its scale.
"""
READ_WITHIN = 10
"""Updates after which a GPU's losses are read at the latest; also how late one of several processes
hears of a signal that another has received.
"""


class Session:
    """One run of train.py, from its configuration to its exit code.

    Used as a context around the loop: leaving it waits for what is being written, closes the log
    and lets the folder go. Raises UserError where the configuration can't be run here.
    """

    log: RunLog | None = None
    """From `wrap` on."""
    feeder: Feeder | None = None
    """On an accelerator from `feed` on."""
    stop: Stop
    """From `wrap` on."""

    def __init__(self, config: Config):
        self.lock = FolderLock(config.run.out)
        try:
            self._open(config)
        except BaseException:
            self.lock.close()
            raise

    def _open(self, config: Config) -> None:
        """Decide everything that is known before there is a model."""
        optim = config.optim
        share_batch(optim.batch_size, optim.micro_batch_size, n_process=distributed.world_size())
        if note := distributed.half_announced():
            print(note, file=sys.stderr)
        with Meeting() as meeting:
            check_data(config)
            self.dataset = Dataset(config.data.data)
            if distributed.is_first():
                self.lock.take(may_create=False)
            self.folder, config, checkpoint = open_folder(config, self.dataset)
            self.tokenizer = load_tokenizer(self.dataset.tokenizer_spec)
            first = checkpoint.step if checkpoint else 0
            processes = distributed.world_size()
            left = seconds_left(config, self.tokenizer.vocab_size, first, processes)
            chosen = compile_note(config, left)
            self.config = config = resolve(config, left)
            self.tokenizer.start = self.dataset.start(self.tokenizer)
            self.dataset.check_context(config.model.context_length)
            self.dataset.check_content(self.tokenizer.vocab_size)
            distributed.check(config)
            if config.run.init_from and not checkpoint:
                find(config.run.init_from)
            meeting.tell(**what_must_agree(config, self.dataset, checkpoint))
        self.processes = distributed.start(config, meeting.store)
        config, notes = agree_on_micro_batch(config, self.tokenizer.vocab_size, self.processes)
        self.config = config
        optim, run = config.optim, config.run
        self.share = share_batch(
            optim.batch_size, optim.micro_batch_size, self.processes.rank, self.processes.count
        )
        self.device = self.processes.device(run.device)
        warn_at_start(config, self.tokenizer.vocab_size, self.processes.count)
        set_up(run)
        self.checkpoint = checkpoint
        self.resumed_at = checkpoint.step if checkpoint else None
        self.notes = notes + (resume_notes(config, checkpoint) if checkpoint else [])
        self.notes += [chosen] if chosen else []
        self.saver = Saver()
        self.bad_steps = 0
        self.unread: list[tuple[int, float, Tensor]] = []
        self.news: tuple[Tensor, ...] = ()

    # --- before the first step, in this order ---

    def load_weights(self, model: GPT) -> None:
        """Put in the weights of the checkpoint that is gone on from, or those of --init-from."""
        self.notes += initial_weights(model, self.config, self.dataset, self.checkpoint)

    def place(self, model: GPT) -> None:
        """Move the model to its device, or this process's share of it."""
        self.processes.shard(model.to(self.device), self.config.run.precision)
        if self.config.run.recompute:
            recompute_blocks(model)

    def restore(self, optimizers: list[Optimizer], scaler: torch.amp.GradScaler) -> State:
        """Where the run stands: at the checkpoint, whose moments go to the optimizers, or at 0."""
        self.processes.share_products(optimizers, self.device)
        checkpoint, self.checkpoint = self.checkpoint, None  # memory holds its tensors no longer
        if checkpoint is None:
            self.state = State()
            return self.state
        restore_moments(optimizers, checkpoint.optimizer, self.folder)
        if checkpoint.scaler:  # of a run in float16 so far
            scaler.load_state_dict(checkpoint.scaler)
        since_best = checkpoint.counters.get("since_best", 0)
        self.state = State(checkpoint.step, checkpoint.best_val_loss, since_best)
        return self.state

    def start(self, model: GPT) -> None:
        """Make the folder ready and say what is about to be done."""
        if self.processes.is_main:
            self.lock.take()
            start_folder(self.folder, self.config, self.resumed_at)
            print(opening_lines(self, model))
        self.processes.barrier()

    def feed(self, draw: Draw) -> Draw:
        """`draw`, of the numbers of a step and a micro-batch, with what it gives on the device. A
        thread draws ahead for an accelerator, which else would wait; this process is a CPU's own.
        """
        if self.device == "cpu":
            return draw
        self.feeder = Feeder(draw, self.share.micro_batches(), self.device)
        return self.feeder

    def to_watch(self) -> tuple[Path, Dataset, Tokenizer, int]:
        """What `viz.probe.Watch` takes; 0 tokens where this process looks at nothing: it is not the
        first, or holds a share of the weights only.
        """
        looks = self.processes.is_main and not self.processes.is_sharded
        n_token = self.config.run.probe_tokens if looks else 0
        return self.folder / "attention", self.dataset, self.tokenizer, n_token

    def wrap(self, model: GPT, loss: Loss, tokens: Tensor, targets: Tensor) -> nn.Module:
        """The module that a step calls with tokens and targets, for their loss: compiled where that
        is asked for, and averaging gradients among processes. `tokens` and `targets` are examples
        of the run's own shape. The log opens, and the clock starts.
        """
        run = self.config.run
        plain = WithLoss(model, loss)
        computed = compile_or_not(plain, run, tokens, targets)
        # Where compiling fails in one process, all go on without it.
        (n_eager,) = self.processes.sum(computed is plain, device=self.device)
        wrapped = self.processes.wrap(plain if n_eager else computed, self.device)
        peak = self.processes.count * matrix_rate(self.device, run.precision)
        makers = 0.0  # not given for float32, which is TF32 there or not
        if run.precision != "float32":
            makers = self.processes.count * (makers_rate(device_name(self.device)) or 0.0)
        is_main, first = self.processes.is_main, self.resumed_at or 0
        rates = flops_per_token(model), peak
        place = is_main, self.device
        self.log = RunLog(self.folder, self.config, first, *rates, *place, makers_flops=makers)
        self.stop = Stop(self.config)
        return wrapped

    # --- in the loop ---

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with contextlib.closing(self.lock):
            if self.feeder is not None:
                self.feeder.close()
            if self.log is None:
                return
            with contextlib.closing(self.log):
                if kind is None:
                    self.saver.wait()

    def autocast(self) -> contextlib.AbstractContextManager:
        """The context in which the model runs at the run's precision."""
        return autocast(self.device, self.config.run.precision)

    def accumulating(self, loss_of: nn.Module, is_last: bool) -> contextlib.AbstractContextManager:
        """The context of one micro-batch, the `is_last` of a step or not."""
        return self.processes.accumulating(loss_of, is_last)

    def agree(self, loss: Tensor) -> Tensor:
        """The mean loss over all processes, on their device; what one has heard of an early end,
        all know once the update is read.
        """
        if self.processes.count == 1:
            self.stop.agree(*self.stop.news())
            return loss
        mean, *self.news = self.processes.add(loss / self.processes.count, *self.stop.news())
        return mean

    def record(self, step: int, loss: Tensor, lr: float, grad_norm: Tensor) -> None:
        """Check and log the update that made `step`: at once where reading its loss and norm costs
        nothing, as on a CPU; on a GPU, which would run dry, where there is something to tell.
        """
        self.unread.append((step, lr, torch.stack([loss, grad_norm, *self.news])))
        if self._is_read_after(step):
            self._read()

    def _is_read_after(self, step: int) -> bool:
        """Whether the update to `step` is read before the next begins; the same in all processes.
        What is evaluated or saved must have been found finite.
        """
        run = self.config.run
        if not self.device.startswith("cuda") or len(self.unread) == READ_WITHIN:
            return True
        if any(every and step % every == 0 for every in (run.log_every, run.eval_every)):
            return True
        is_saved = run.save_every and step % run.save_every == 0
        return is_saved or bool(self.stop.reason(dataclasses.replace(self.state, step=step)))

    def _read(self) -> None:
        """Read what is unread, in one copy, and tell it."""
        unread, self.unread = self.unread, []
        rows = torch.stack([numbers for _, _, numbers in unread]).tolist()
        for (step, lr, _), (loss, grad_norm, *heard) in zip(unread, rows, strict=True):
            if heard:
                self.stop.agree(*heard)
            self.check_finite(step, loss, grad_norm)
            run, is_last = self.config.run, step == self.config.optim.max_steps
            if is_last or step % run.log_every == 0:
                self.log.train(step, loss, lr, grad_norm)

    def check_finite(self, step: int, loss: float, grad_norm: float) -> None:
        """Say that the update to `step` was left out, where it was. Raises MachineError after too
        many in a row.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.bad_steps = 0
            return
        self.bad_steps += 1
        self.log.say(f"step {step:,}: loss {loss}, gradient norm {grad_norm}: update skipped")
        if self.bad_steps == BAD_STEPS_ALLOWED[self.config.run.precision]:
            raise MachineError(not_finite(step, self.config))

    def save(self, trainer, state: State, is_best: bool, is_latest: bool) -> None:
        """Have weights, moments and `state` written as best.pt, as checkpoint.pt, as both or as
        neither; all processes take part. Raises MachineError where an earlier save has failed.
        """
        self.saver.check()
        if self.unread:  # a signal came behind the last look
            self._read()
        names = [BEST] * is_best + [LATEST] * is_latest
        if not names:
            return
        with self.log.phase("save"):
            self.saver.wait()  # so that there is never more than one copy
            keep = self.processes.is_main
            tensors = snapshot(trainer.model, trainer.optimizers, trainer.scaler, keep)
            if self.processes.is_main:
                checkpoint = Checkpoint(
                    step=state.step,
                    best_val_loss=state.best_val_loss,
                    counters={
                        "since_best": state.evaluations_since_best,
                        "start": self.tokenizer.start,
                    },
                    config=self.config.to_dict(),
                    tokenizer=self.dataset.tokenizer_spec,
                    dataset=self.dataset.fingerprint,
                    **tensors,
                )
                self.saver.save(checkpoint, *(self.folder / name for name in names))
            if state.step == 0:
                self.saver.wait()  # from here on there is a whole checkpoint at any instant

    # --- after the last step ---

    def finish(self, state: State, reason: str) -> int:
        """Draw the loss curve, say where the run stands, and leave the other processes: the exit
        code.
        """
        if self.processes.is_main:
            with self.log.dispensable("loss.png"):
                plot_losses(self.folder)
            print(farewell(self, state, reason))
        return distributed.leave(self.stop.exit_code)


def what_must_agree(
    config: Config, dataset: Dataset, checkpoint: Checkpoint | None
) -> dict[str, Any]:
    """What every process of a run must see alike, by name. `config` is resolved."""
    plain = config.to_dict()
    options = {name: value for section in plain.values() for name, value in section.items()}
    del options["threads"]
    del options["compile"]  # by auto, GPUs of two kinds may differ: then all go on without it
    options["device"] = config.run.device.partition(":")[0]  # each may have a number of its own
    # A folder may be called otherwise on another machine, as long as it holds the same.
    del options["data"]
    at = f"step {checkpoint.step:,}" if checkpoint else "none"
    return {"data": dataset.fingerprint[:12], "checkpoint": at, **options}
