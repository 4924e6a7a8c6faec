"""Before the processes of a run compute together: do they all see the same run?

A process without the checkpoint would start at another step than the others, and one without the
data, or with another kind of device, would leave them waiting in their first exchange. So each
tells what it sees through the store that torchrun has set up, and where it isn't the same, all end
with the same line.
"""

import contextlib
import json
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from errors import MachineError, UserError
from ops.distributed import announced

PATIENCE = timedelta(minutes=30)
"""How long a process waits for what the others tell; reading a large checkpoint takes minutes."""
REMEDIES = {
    "data": "have the same prepared folder on every machine",
    "checkpoint": "have --out on storage that all machines share",
}
"""What to do where the processes see different things; of the configuration, see the options."""


class Meeting:
    """The processes of a run, from when they are started until they know that they agree.

    Used as a context: in it, each finds out what it can and says so with `tell`. At its end all
    hear all. Where one has met a UserError, or sees something else than process 0, every process
    ends with exit code 2; the one that writes prints the line. A single process meets nobody.
    """

    def __init__(self):
        self.rank, self.count = announced()
        self.store: dist.Store | None = None
        self.facts: dict[str, Any] = {"host": socket.gethostname()}
        if self.count == 1:
            return
        store, *_ = next(dist.rendezvous("env://"))
        # torchrun keeps its store over a restart: the old addresses are set apart.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(attempt, store)

    def tell(self, **facts: Any) -> None:
        """What this process sees: plain values that must be the same in all."""
        self.facts |= facts

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        understood = error is None or isinstance(error, UserError | MachineError)
        if self.store is None or not understood:
            return
        if error is not None:
            self.facts["error"] = str(error)
        told = self._exchange()
        if difference := disagreement(told):
            self._part()
            if self.rank == 0:
                raise UserError(difference) from None
            raise SystemExit(2)

    def _exchange(self) -> list[dict[str, Any]]:
        """What all processes tell, in the order of their ranks."""
        self.store.set(f"facts/{self.rank}", json.dumps(self.facts))
        keys = [f"facts/{rank}" for rank in range(self.count)]
        try:
            self.store.wait(keys, PATIENCE)
        except RuntimeError:
            raise MachineError(
                f"process {self.rank} ({self.facts['host']}) has waited for the others for "
                f"{PATIENCE.seconds // 60} minutes in vain"
            ) from None
        return [json.loads(self.store.get(key)) for key in keys]

    def _part(self) -> None:
        """Process 0 may keep the store: it leaves last."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"parted/{self.rank}", "")
            if self.rank == 0:
                everybody = [f"parted/{rank}" for rank in range(self.count)]
                self.store.wait(everybody, timedelta(seconds=10))


def disagreement(told: list[dict[str, Any]]) -> str | None:
    """A line on the first process that has failed or sees something else than process 0; None
    where all agree. `told`: what each process tells, by rank.
    """
    for rank, facts in enumerate(told):
        if "error" in facts:
            return f"process {rank} ({facts['host']}): {facts['error']}"
    first = told[0]
    for rank, facts in enumerate(told):
        for name in first:
            if name == "host" or facts.get(name) == first[name]:
                continue
            flag = f"--{name.replace('_', '-')}"
            remedy = REMEDIES.get(name, f"give {flag} the same value on every machine")
            return (
                f"process {rank} ({facts['host']}) has {name} {facts.get(name)}, "
                f"process 0 ({first['host']}) has {first[name]}: {remedy}"
            )
    return None
