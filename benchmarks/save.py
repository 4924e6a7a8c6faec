"""What a checkpoint costs at about 100 million parameters: the wait (a copy in memory), the writing
behind training's back, and, when it is read, the check that it is whole.

python -m benchmarks.save --folder .
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.machine import describe_machine, markdown_table
from configs import Config, OptimConfig
from model.config import ModelConfig
from model.gpt import GPT
from ops.checkpoint import Checkpoint, Saver, snapshot
from ops.integrity import check_whole
from training.optimizer import make_optimizers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default=".", help="a folder on the disk to write to")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = GPT(ModelConfig(n_layer=12, n_head=12, d_model=768, context_length=256), 20_000)
    optimizers = make_optimizers(model, OptimConfig())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    copies, writes, checks = [], [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for _ in range(arguments.rounds):
            began = time.perf_counter()
            tensors = snapshot(model, optimizers, torch.amp.GradScaler(enabled=False), keep=True)
            copies.append(time.perf_counter() - began)
            saver = Saver()
            saver.save(
                Checkpoint(0, config=Config().to_dict(), tokenizer={}, dataset="", **tensors),
                Path(folder, "checkpoint.pt"),
            )
            saver.wait()
            writes.append(time.perf_counter() - began - copies[-1])
            began = time.perf_counter()
            check_whole(Path(folder, "checkpoint.pt"))
            checks.append(time.perf_counter() - began)
        size = Path(folder, "checkpoint.pt").stat().st_size
    row = {
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "file": f"{size / 1e6:,.0f} MB",
        "training waits": f"{statistics.median(copies):.2f} s",
        "written behind": f"{statistics.median(writes):.2f} s",
        "checked when read": f"{statistics.median(checks):.2f} s",
    }
    print(describe_machine())
    print(markdown_table([row]))
    print(json.dumps(row))


if __name__ == "__main__":
    main()
