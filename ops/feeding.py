"""Micro-batches drawn ahead: a thread reads the next ones while a GPU works on this one."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from model.transfer import pinned

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, (rows, context_length) each; the targets are the inputs, one token on."""
Draw = Callable[[int, int], Batch]
"""Of the numbers of a step and of a micro-batch in its global batch."""
N_AHEAD = 2
"""Micro-batches drawn before they are asked for."""


class Feeder:
    """Calls `draw` for micro-batch `index` of `step`, and has the result on `device`.

    What follows is drawn meanwhile, in the order of `indices`, a step's micro-batches. As a
    micro-batch is a function of its two numbers, the order decides nothing but the time: another
    one may be asked for at any time. An error in `draw` is raised where its batch is asked for.
    """

    def __init__(self, draw: Draw, indices: range, device: str):
        self.draw = draw
        self.indices = indices
        self.device = device
        self.on_cuda = device.startswith("cuda")
        self.drawn: dict[tuple[int, int], Future] = {}
        self.pool = ThreadPoolExecutor(1, "feeder", self._begin)

    def __call__(self, step: int, index: int) -> Batch:
        keys = [(step, index)]
        while len(keys) <= N_AHEAD:
            keys.append(self._after(*keys[-1]))
        for key in self.drawn.keys() - set(keys):
            self.drawn.pop(key).cancel()
        for key in keys:
            if key not in self.drawn:
                self.drawn[key] = self.pool.submit(self._draw, *key)
        rows = self.drawn.pop(keys[0]).result().to(self.device, non_blocking=self.on_cuda)
        return rows[:, :-1], rows[:, 1:]

    def close(self) -> None:
        """End the thread, once it has drawn what it is drawing."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.drawn.clear()

    def _begin(self) -> None:
        """In the thread: pinned memory belongs to a GPU, by default to the first."""
        if self.on_cuda:
            torch.cuda.set_device(self.device)

    def _draw(self, step: int, index: int) -> Tensor:
        """In the thread: inputs and targets as one tensor, (rows, context_length + 1), from which a
        GPU can copy while the host goes on.
        """
        tokens, targets = self.draw(step, index)
        rows = torch.cat([tokens, targets[:, -1:]], dim=1)
        return pinned(rows, torch.device(self.device))

    def _after(self, step: int, index: int) -> tuple[int, int]:
        """The micro-batch that will be asked for behind this one."""
        if index + 1 in self.indices:
            return step, index + 1
        return step + 1, self.indices[0]
