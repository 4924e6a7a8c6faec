"""Where a run stands, beside its weights and its optimizers' moments."""

import math
from dataclasses import dataclass


@dataclass
class State:
    """A few numbers that a run remembers from step to step."""

    step: int = 0
    """Updates made."""
    best_val_loss: float = math.inf
    """Lowest validation loss so far, in nats per token."""
    evaluations_since_best: int = 0
    """Evaluations in a row that have not improved on it."""

    def record(self, val_loss: float) -> bool:
        """Take an evaluation into account; whether it is the best so far."""
        if val_loss < self.best_val_loss:
            self.best_val_loss = val_loss
            self.evaluations_since_best = 0
            return True
        self.evaluations_since_best += 1
        return False
