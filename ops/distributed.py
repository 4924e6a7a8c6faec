"""One process or many: torchrun's group, DDP, FSDP2. With one process nothing here does anything.

DDP holds the whole model in every process and averages gradients. FSDP2 holds a share of every
tensor and gathers a block when it is its turn (Rajbhandari et al. 2020, "ZeRO", stage 3). Either
makes the same steps as one process, up to the order of float sums.
"""

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs import Config
from errors import UserError


@dataclass(frozen=True)
class Processes:
    """This process's place among those that share a run."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    strategy: str = "ddp"

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints and writes."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds but a share of each tensor."""
        return self.count > 1 and self.strategy == "fsdp"

    def device(self, device: str) -> str:
        """The device of this process: of several GPUs each takes its own."""
        return f"cuda:{self.local_rank}" if device == "cuda" and self.count > 1 else device

    def shard(self, model: nn.Module) -> None:
        """With FSDP2, leave in this process its share of each tensor: block by block, then what is
        left.
        """
        if self.is_sharded:
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            register_fsdp_forward_method(model, "features")  # sampling calls it instead of forward

    def wrap(self, model: nn.Module, device: str) -> nn.Module:
        """With DDP, the module whose backward pass averages gradients; else `model` itself."""
        if self.count > 1 and self.strategy == "ddp":
            ids = [torch.device(device).index] if device.startswith("cuda") else None
            return nn.parallel.DistributedDataParallel(
                model, device_ids=ids, gradient_as_bucket_view=True
            )
        return model

    def accumulating(self, model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager:
        """The context of one micro-batch: DDP exchanges gradients with the last one only.

        FSDP2 does so with each, as unsharded gradients are what it is there to avoid.
        """
        return (
            model.no_sync()
            if self.count > 1 and not self.is_sharded and not is_last
            else contextlib.nullcontext()
        )

    def sum(self, *numbers: float | Tensor, device: str = "cpu") -> list[float]:
        """Each number summed over the processes."""
        if self.count == 1:
            return [float(number) for number in numbers]
        total = torch.tensor(
            [float(number) for number in numbers], dtype=torch.float64, device=device
        )
        dist.all_reduce(total)
        return total.tolist()

    def barrier(self) -> None:
        """Wait for the others."""
        if self.count > 1:
            dist.barrier()


def world_size() -> int:
    """Processes that torchrun has started for this run; 1 where there is no torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the process that writes, as torchrun has numbered them."""
    return os.environ.get("RANK", "0") == "0"


def start(config: Config) -> Processes:
    """Join the group that torchrun has announced in the environment; without one, a single process
    needs no group.

    `config` is resolved. Raises UserError where the configuration can't be shared among the
    processes.
    """
    count, optim, run = world_size(), config.optim, config.run
    if count == 1:
        return Processes(strategy=run.strategy)
    if run.strategy == "fsdp" and optim.optimizer == "muon":
        raise UserError(
            "muon needs whole matrices, which fsdp does not keep in one process: "
            "use --optimizer adamw or --strategy ddp"
        )
    if run.strategy == "fsdp" and run.precision == "float16":
        raise UserError(
            "float16's gradient scaler does not work with fsdp: "
            "use --precision bfloat16 or --strategy ddp"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if run.device.startswith("cuda"):
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{local_rank + 1} processes or more on a machine with "
                f"{torch.cuda.device_count()} GPUs"
            )
        torch.cuda.set_device(local_rank)
    store, rank, _ = next(dist.rendezvous("env://"))
    attempt = os.environ.get(
        "TORCHELASTIC_RESTART_COUNT", "0"
    )  # torchrun keeps its store over a restart: set the old addresses apart
    backend = "nccl" if run.device.startswith("cuda") else "gloo"
    dist.init_process_group(
        backend, store=dist.PrefixStore(attempt, store), rank=rank, world_size=count
    )
    return Processes(dist.get_rank(), count, local_rank, run.strategy)


def leave(code: int) -> int:
    """Leave the group, if there is one, and the process with it; else give the exit code back.

    Python's own exit is passed by: gloo's threads, where FSDP2 has used them, now and then abort
    it, and torchrun would take the run for failed.
    """
    if not dist.is_initialized():
        return code
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def gather(state: Any, keep: bool) -> Any:
    """The same containers with every tensor whole and copied to the CPU, None in its place where
    `keep` is False.

    All processes must call it together; the main one alone need keep what comes of it, so that
    memory holds the state once.
    """
    if isinstance(state, dict):
        return {key: gather(value, keep) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(gather(value, keep) for value in state)
    if isinstance(state, Tensor):
        whole = state.full_tensor() if hasattr(state, "full_tensor") else state
        return whole.detach().to("cpu", copy=True) if keep else None
    return state


def scatter_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A gathered optimiser state cut up as the optimiser's own parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def cut(parameter: Tensor, value: Any) -> Any:
        if (
            not hasattr(parameter, "full_tensor")
            or not isinstance(value, Tensor)
            or value.shape != parameter.shape
        ):
            return value
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements
        )

    cut_state = {
        index: {name: cut(parameters[index], value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {"state": cut_state, "param_groups": state["param_groups"]}
