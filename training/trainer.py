"""The work of a step: read a micro-batch, add up gradients, update, evaluate.

`train.py` calls these methods in order. What surrounds a run (its folder, device, other processes,
clock and log) is a `session`, which nothing here needs to understand.
"""

import torch
from torch import Tensor

from data.batches import dropout_seed, training_batch
from model.fast_attention import ATTENTION
from model.gpt import GPT
from training.evaluate import draw_sample, evaluate
from training.finite import step_if_finite
from training.loss import cross_entropy
from training.optimizer import clip_gradients, learning_rate, make_optimizers
from training.state import State


class Trainer:
    """A model, its optimizers, and where the run stands.

    `loss_of` is the loss of the same model, with the same weights, as a step computes it: compiled,
    or averaging gradients among processes, where the session has wrapped it so.
    """

    def __init__(self, session):
        self.session, self.config, self.share = session, session.config, session.share
        optim, run = self.config.optim, self.config.run
        vocab_size = session.tokenizer.vocab_size
        self.model = GPT(self.config.model, vocab_size, ATTENTION[run.attention])
        session.load_weights(self.model)
        session.place(self.model)
        self.optimizers = make_optimizers(self.model, optim, run.precision)
        self.scaler = torch.amp.GradScaler(enabled=run.precision == "float16")
        self.state: State = session.restore(self.optimizers, self.scaler)
        session.start(self.model)
        self.feed = session.feed(self.micro_batch)  # the same, on the device
        self.loss_of = session.wrap(self.model, cross_entropy, *self.feed(0, 0))

    def micro_batch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (micro_batch_size, context_length), on the CPU: micro-batch `index`
        of the global batch of `step`.
        """
        return training_batch(
            self.session.dataset.tokens["train"],
            self.config.model.context_length,
            self.config.optim.batch_size,
            self.config.run.seed,
            step,
            self.share.rows(index),
        )

    def accumulate(self) -> Tensor:
        """Add up the gradients of the mean loss over this process's share of the batch, a
        micro-batch at a time. Returns that loss, in nats per token.

        `backward` adds each parameter's gradient to its `grad`, where `update` finds the sum.
        """
        session, log, step = self.session, self.session.log, self.state.step
        loss = torch.zeros((), device=session.device)
        indices = self.share.micro_batches()
        for index in indices:
            with log.phase("data"):
                tokens, targets = self.feed(step, index)
            if self.config.model.dropout:
                torch.manual_seed(dropout_seed(self.config.run.seed, step, index))
            # Several processes exchange gradients once a step, with the last micro-batch.
            with session.accumulating(self.loss_of, is_last=index == indices[-1]):
                with log.phase("forward"), session.autocast():
                    micro_loss = self.loss_of(tokens, targets) / self.share.n_micro
                with log.phase("backward"):
                    self.scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        return loss

    def update(self, loss: Tensor) -> tuple[float, Tensor]:
        """Clip the gradients, let the optimizers step, and clear them: the learning rate and the
        gradient's norm before clipping.

        Where `loss` or norm is not finite, the step is left out; the session says so, and ends the
        run when it happens again and again. The scaler undoes the scaling of
        float16's losses (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2); in
        other precisions it does nothing.
        """
        lr = learning_rate(self.state.step, self.config.optim)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        grad_norm = clip_gradients(self.model, self.config.optim.grad_clip)
        step_if_finite(self.optimizers, lr, loss, grad_norm)
        self.scaler.update()
        self.model.zero_grad(set_to_none=True)
        return lr, grad_norm

    def evaluate(self) -> tuple[dict[str, float], str]:
        """The losses on both splits, and a sample, with the weights as they stand."""
        session, run = self.session, self.config.run
        n_window = run.eval_batches * self.config.optim.batch_size
        with session.autocast():
            losses = evaluate(
                self.model,
                session.dataset,
                self.share.micro_batch_size,
                n_window,
                session.processes,
            )
            sample = draw_sample(self.model, session.tokenizer, run.sample_tokens, run.seed)
        return losses, sample
