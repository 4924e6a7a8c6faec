"""One process or many: torchrun's group, DDP, FSDP2. With one process nothing here does anything.

DDP holds the whole model in every process and averages gradients. FSDP2 holds a share of every
tensor and gathers a block when it is its turn (Rajbhandari et al. 2020, "ZeRO", stage 3). Either
makes the same steps as one process, up to the order of float sums.
"""

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from configs import Config
from errors import UserError
from model.transfer import on_device
from training.muon import BatchedMuon

FAST_LINKS = {"cuda"}
"""Kinds of device between which sending a matrix is cheaper than making it anew. A CPU's runs are
also to stay what they were, bit for bit.
"""


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

    def shard(self, model: nn.Module, precision: str = "float32") -> None:
        """With FSDP2, leave in this process its share of each tensor: block by block, then what is
        left.

        On CUDA in bfloat16 the blocks are gathered in bfloat16, half of the bytes, as autocast
        would round them anyway; gradients are averaged in float32. The stream between the blocks,
        and the embeddings that it starts from, stay in float32.
        """
        if self.is_sharded:
            from torch.distributed.fsdp import (
                MixedPrecisionPolicy,
                fully_shard,
                register_fsdp_forward_method,
            )

            policy = MixedPrecisionPolicy()
            if precision == "bfloat16" and next(model.parameters()).device.type in FAST_LINKS:
                half, full = torch.bfloat16, torch.float32
                policy = MixedPrecisionPolicy(half, full, cast_forward_inputs=False)
            for block in model.blocks:
                fully_shard(block, mp_policy=policy)
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
        if self.count > 1 and not self.is_sharded and not is_last:
            return model.no_sync()
        return contextlib.nullcontext()

    def share_products(self, optimizers: list[torch.optim.Optimizer], device: str) -> None:
        """Under DDP on CUDA, have each process orthogonalise its share of Muon's matrices."""
        if self.count == 1 or self.is_sharded or device.partition(":")[0] not in FAST_LINKS:
            return
        for optimizer in optimizers:
            if isinstance(optimizer, BatchedMuon):
                own = optimizer.orthogonalize
                optimizer.orthogonalize = functools.partial(self.in_shares, own)  # type: ignore

    def in_shares(self, function: Callable[..., Tensor], stack: Tensor, *rest: Any) -> Tensor:
        """`function(stack, *rest)`, which treats the matrices of a stack (N, rows, columns) one by
        one: each process computes some, and all get all of them, the same bits.
        """
        n_each = math.ceil(len(stack) / self.count)
        n_missing = n_each * self.count - len(stack)
        mine = F.pad(stack, (0, 0, 0, 0, 0, n_missing)).chunk(self.count)[self.rank]
        done = function(mine, *rest).contiguous()
        whole = done.new_empty(n_each * self.count, *done.shape[1:])
        dist.all_gather_into_tensor(whole, done)
        return whole[: len(stack)]

    def sum(self, *numbers: float | Tensor, device: str = "cpu") -> list[float]:
        """Each number summed over the processes."""
        if self.count == 1:
            return [float(number) for number in numbers]
        place = device if str(device).startswith("cuda") else "cpu"  # where gloo adds
        total = torch.tensor([float(number) for number in numbers], dtype=torch.float64).to(place)
        dist.all_reduce(total)
        return total.tolist()

    def add(self, first: Tensor, *others: float) -> Tensor:
        """Each number summed over the processes: a float64 tensor on the device of the first, which
        no process waits for.
        """
        place = first.device if first.is_cuda else torch.device("cpu")  # MPS has no float64
        numbers = on_device(torch.tensor([0.0, *others], dtype=torch.float64), place)
        numbers[0] = first
        dist.all_reduce(numbers)
        return numbers

    def barrier(self) -> None:
        """Wait for the others."""
        if self.count > 1:
            dist.barrier()


NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables through which torchrun announces a group; all of them are needed."""


def announced() -> tuple[int, int]:
    """This process's rank and the count of processes, as torchrun has announced them; (0, 1) where
    nothing, or not everything that is needed, is announced.
    """
    rank, count, address, port = (os.environ.get(name, "") for name in NEEDED)
    if not (rank.isdecimal() and count.isdecimal() and port.isdecimal() and address):
        return 0, 1
    return (int(rank), int(count)) if int(rank) < int(count) else (0, 1)


def half_announced() -> str | None:
    """A line where the environment names a group of processes but not all that is needed to join
    it, so that this process goes on alone.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if count == "1" or announced()[1] > 1:
        return None
    found = ", ".join(f"{name} is {os.environ.get(name) or 'not set'}" for name in NEEDED)
    return f"note: going on as one process ({found}); torchrun sets all of these"


def world_size() -> int:
    """Processes that torchrun has started for this run; 1 where there is no torchrun."""
    return announced()[1]


def is_first() -> bool:
    """Whether this is the process that writes, as torchrun has numbered them."""
    return announced()[0] == 0


def local_rank() -> int:
    """This process's number on its machine."""
    number = os.environ.get("LOCAL_RANK", "")
    return int(number) if number.isdecimal() else 0


def check(config: Config) -> None:
    """Raise UserError where a resolved configuration can't be shared among the processes there
    are.
    """
    optim, run = config.optim, config.run
    if world_size() == 1:
        return
    if run.device.startswith("cuda:"):
        raise UserError(
            f"device is {run.device}, and each of the {world_size()} processes takes a GPU of its "
            "own: use --device cuda"
        )
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
    if run.device.startswith("cuda") and local_rank() >= torch.cuda.device_count():
        raise UserError(
            f"{local_rank() + 1} processes or more on a machine with "
            f"{torch.cuda.device_count()} GPUs"
        )


def start(config: Config, store: dist.Store | None) -> Processes:
    """Join the group of the processes that have met at `store`; a single process needs none.

    `config` is resolved.
    """
    rank, count = announced()
    if store is None:
        return Processes(strategy=config.run.strategy)
    on_cuda = config.run.device.startswith("cuda")
    if on_cuda:
        torch.cuda.set_device(local_rank())
    backend = "nccl" if on_cuda else "gloo"
    card = torch.device("cuda", local_rank()) if on_cuda else None  # NCCL would guess at barriers
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, device_id=card)
    return Processes(rank, count, local_rank(), config.run.strategy)


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
