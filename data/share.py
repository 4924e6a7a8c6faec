"""The share of each global batch that one process reads, and the micro-batches it is cut into."""

from dataclasses import dataclass

from errors import UserError


@dataclass(frozen=True)
class Share:
    """One process's part of every global batch, read a micro-batch at a time."""

    batch_size: int
    """Sequences of the global batch."""
    micro_batch_size: int
    """Sequences of one forward and backward pass."""
    rank: int = 0
    """The process, of `n_process`."""
    n_process: int = 1

    @property
    def n_micro(self) -> int:
        """Micro-batches that this process reads in a step."""
        return self.batch_size // self.n_process // self.micro_batch_size

    def micro_batches(self) -> range:
        """The numbers of this process's micro-batches, counted through the global batch."""
        return range(self.rank * self.n_micro, (self.rank + 1) * self.n_micro)

    def rows(self, index: int) -> range:
        """The rows of the global batch that micro-batch `index` consists of."""
        return range(index * self.micro_batch_size, (index + 1) * self.micro_batch_size)


def share_batch(batch_size: int, micro_batch_size: int, rank: int = 0, n_process: int = 1) -> Share:
    """The share of process `rank`; a `micro_batch_size` of 0 means all of it at once.

    Raises UserError where the batch does not divide.
    """
    if batch_size % (n_process * (micro_batch_size or 1)):
        micro = f" x micro_batch_size {micro_batch_size}" if micro_batch_size else ""
        among = f"among {n_process} processes{micro}"
        if n_process == 1:
            among = f"into micro-batches of {micro_batch_size}"
        raise UserError(f"batch_size {batch_size} does not divide {among}: choose a multiple")
    return Share(batch_size, micro_batch_size or batch_size // n_process, rank, n_process)
