"""Exercise 10, schedule: see 10_schedule.md. Check with `make exercise N=10`."""

import math  # noqa: F401


def learning_rate(step: int, lr: float, min_lr: float, warmup_steps: int, max_steps: int) -> float:
    """The rate of update number `step`, counted from 0."""
    raise NotImplementedError
