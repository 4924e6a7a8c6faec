"""The same run on 1, 2 and 4 processes, with DDP and FSDP2: how far the losses part, and what each
process holds.

    python -m benchmarks.distributed                # losses over 50 steps, float32
    python -m benchmarks.distributed --memory       # peak memory of each of 2 processes, 48M

Linux only: peak memory is read from /proc.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.machine import describe_machine, markdown_table
from ops.log import read_log

TINY = {
    "n-layer": 2,
    "d-model": 64,
    "context-length": 32,
    "batch-size": 8,
    "micro-batch-size": 2,
    "dropout": 0.1,
    "log-every": 1,
}
LARGE = {
    "n-layer": 12,
    "n-head": 8,
    "d-model": 576,
    "context-length": 64,
    "batch-size": 4,
    "micro-batch-size": 1,
    "log-every": 1,
}
QUIET = {
    "eval-every": 0,
    "save-every": 0,
    "eval-batches": 1,
    "sample-tokens": 0,
    "probe-tokens": 0,
    "precision": "float32",
}


def launch(folder: Path, data: str, n_process: int, options: dict) -> tuple[list[float], list[int]]:
    """Run train.py; returns the losses and each process's peak resident memory in MiB."""
    flags = [
        f"--{name}={value}"
        for name, value in ({**QUIET, **options, "data": data, "out": str(folder)}).items()
    ]
    program = (
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n_process)]
        if n_process > 1
        else [sys.executable]
    )
    peaks: dict[int, int] = {}
    # glibc else keeps what FSDP2 frees: blocks gathered and dropped again
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    process = subprocess.Popen(
        [*program, "train.py", "shakespeare-char", *flags],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    watcher = threading.Thread(target=watch, args=(process, flags[-1], peaks), daemon=True)
    watcher.start()
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"training failed with exit code {process.returncode}:\n{errors[-2000:]}")
    losses = [
        record["loss"] for record in read_log(folder / "log.jsonl") if record["kind"] == "train"
    ]
    return losses, sorted(peaks.values(), reverse=True)


def watch(process: subprocess.Popen, flag: str, peaks: dict[int, int]) -> None:
    """Note the peak of every training process whose command line has `flag`, while `process`
    lives.
    """
    while process.poll() is None:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                if flag.encode() in command and not any(
                    b"torch.distributed.run" in part for part in command
                ):
                    status = (entry / "status").read_text()
                    peaks[int(entry.name)] = int(status.split("VmHWM:")[1].split()[0]) >> 10
            except (OSError, IndexError):
                continue
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="data/prepared/shakespeare-char", help="a prepared folder"
    )
    parser.add_argument("--memory", action="store_true", help="measure memory in place of losses")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.memory:
            for strategy in ("ddp", "fsdp"):
                options = {
                    **LARGE,
                    "optimizer": "adamw",
                    "lr": 1e-4,
                    "strategy": strategy,
                    "max-steps": 3,
                }
                _, peaks = launch(Path(folder, strategy), arguments.data, 2, options)
                rows.append(
                    {
                        "strategy": strategy,
                        "processes": 2,
                        "peak MiB of each": ", ".join(map(str, peaks)),
                    }
                )
        else:
            for optimizer in ("adamw", "muon"):
                options = {**TINY, "optimizer": optimizer, "lr": 1e-3, "max-steps": arguments.steps}
                alone, _ = launch(Path(folder, optimizer), arguments.data, 1, options)
                for n_process in (2, 4):
                    for strategy in ("ddp", "fsdp") if optimizer == "adamw" else ("ddp",):
                        place = Path(folder, f"{optimizer}-{n_process}-{strategy}")
                        losses, _ = launch(
                            place, arguments.data, n_process, options | {"strategy": strategy}
                        )
                        largest = max(abs(a - b) for a, b in zip(alone, losses, strict=True))
                        rows.append(
                            {
                                "optimizer": optimizer,
                                "strategy": strategy,
                                "processes": n_process,
                                "largest difference": f"{largest:.1e}",
                            }
                        )
    print(describe_machine())
    print(markdown_table(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
