"""How the next token is chosen. Imports no torch, so that a command line can be parsed in an
instant.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the model's distribution."""

    temperature: float = 1.0
    """Below 1 likelier tokens gain, above 1 they lose; 0 always takes the likeliest."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach p."""

    def __post_init__(self):
        """Raise ValueError for a number out of range."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0 (0: no limit)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
