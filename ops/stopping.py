"""Why a run ends: its last step, a step asked for, the clock, a signal, or no improvement."""

import contextlib
import signal
import time
from types import FrameType

from configs import Config
from training.state import State

BY_A_SIGNAL = 75
"""Exit code of a run that a signal stopped; its checkpoint can be resumed (EX_TEMPFAIL)."""


class Stop:
    """Owns the clock, the signals and the patience of a run, and says when it is over and why.

    Ctrl-C, SIGTERM, a terminal that goes away (SIGHUP, unless it is ignored as under nohup) and the
    warnings of batch systems (SIGUSR1 of Slurm, SIGUSR2 of LSF and Grid Engine, SIGXCPU before the
    CPU time is up) end the run after the step in hand, with a checkpoint. A second Ctrl-C ends it
    at once; further signals of the other kinds change nothing, so that none can tear what
    is being saved. Of several processes each may be told first, so what one has heard counts for
    all only once `agree` has been given the sums of what each of them says in `news`.
    """

    SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")

    def __init__(self, config: Config):
        self.config = config
        self.received = ""
        self.signalled = False
        self.late = False
        self.began = time.perf_counter()
        for number in (getattr(signal, name, None) for name in self.SIGNALS):
            ignored = number is not None and signal.getsignal(number) is signal.SIG_IGN
            if number is not None and not (ignored and number != signal.SIGINT):
                with contextlib.suppress(ValueError):  # a notebook's thread may set no handler
                    signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    def news(self) -> tuple[bool, bool]:
        """Whether this process has received a signal, and whether its time is up."""
        seconds = self.config.run.max_minutes * 60
        return bool(self.received), 0 < seconds < time.perf_counter() - self.began

    def agree(self, signalled: float, late: float) -> None:
        """Take what `news` says in all processes, summed."""
        self.signalled = signalled > 0
        self.late = late > 0

    def reason(self, state: State) -> str | None:
        """Why the run ends where it stands, in a word or two; None where it goes on."""
        run, optim = self.config.run, self.config.optim
        if state.step == optim.max_steps:
            return "done"
        if 0 < run.patience <= state.evaluations_since_best:
            return "no improvement"
        if self.late:
            return "time is up"
        if self.signalled:
            return self.received or "signal"
        if 0 < run.stop_at <= state.step:
            return "as asked"
        return None

    @property
    def exit_code(self) -> int:
        """Of the whole command: 0, or BY_A_SIGNAL."""
        return BY_A_SIGNAL if self.signalled else 0
