"""What a run takes in parameters, FLOPs and memory, reckoned before a weight is made.

Memory is counted, not guessed: a step of the real model runs on fake tensors, which have shapes but
no data, and every storage is followed from birth to death. Not counted are kernels' scratch space,
the gaps that an allocator leaves (glibc's from a few per cent to a third, if MALLOC_MMAP_THRESHOLD_
is left as it is), what a compiler adds or saves, the block that FSDP2 gathers, and the page cache's
share of a large corpus, which the system takes back when it must.
"""

import dataclasses
import functools
import re
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs import Config
from data.share import Share, share_batch
from model.fast_attention import ATTENTION
from model.gpt import GPT
from ops.compiling import recompute_blocks
from ops.device import autocast, resolve
from ops.plan import limits
from ops.speed import flops_per_token, seconds_left
from training.loss import cross_entropy
from training.optimizer import make_optimizers

PARTS = {
    "embeddings": r"^(embed|bigrams)\.",
    "positions": r"^positions\.",
    "attention": r"\.attention\.(?!.*norm)",
    "MLP": r"\.mlp\.",
    "norms": r"norm",
    "unembedding": r"^unembed\.",
}
"""Part of a model -> the names of its parameters; the first that matches counts."""
FORWARD, BACKWARD, LAST_OF_BACKWARD, UPDATE = range(4)
"""The stages of a step: the forward pass, the backward pass down to the first block, the rest of
it, and the optimisers.
"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one process of a run takes."""

    config: Config
    """Resolved: nothing is left at `auto`, and micro_batch_size is not 0."""
    vocab_size: int
    n_token: int | None
    """Tokens of the training split, where known."""
    share: Share
    """How the processes share a batch."""
    end: int
    """The step after which the run ends."""
    parameters: dict[str, int]
    """By part; a tied matrix counts as embeddings."""
    flops_per_token: float
    memory: dict[str, int]
    """Bytes held at the run's worst moment, by part: of a GPU, or resident, interpreter and
    libraries among them.
    """
    limit: int
    """Bytes the process may hold, those it holds now included; 0: unknown."""

    @property
    def peak(self) -> int:
        """Bytes held at the run's worst moment."""
        return sum(self.memory.values())

    @property
    def least(self) -> int:
        """Bytes that are held whatever the micro-batch."""
        parts = ("interpreter and libraries", "weights", "optimizer")
        return sum(self.memory.get(part, 0) for part in parts)

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the limit enough room for what is not counted; True where the
        limit is unknown.
        """
        return not self.limit or self.peak <= limits.FITS * self.limit


class LiveBytes(TorchDispatchMode):
    """While active, knows the bytes of all storages alive, by the `part` in force when they were
    made, and each stage's peak.
    """

    def __init__(self):
        super().__init__()
        self.part = "weights"
        self.stage = FORWARD
        self.live: Counter[str] = Counter()
        self.peaks: dict[int, Counter[str]] = {}
        self.part_of: dict[int, str] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        part = self.part
        if function is torch.ops.aten._to_copy.default:
            source = args[0].untyped_storage()._cdata
            if self.part_of.get(source) == "weights":
                part = "weights as autocast copies them"
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.add(tensor, part)
        return made

    def enter(self, part: str, stage: int) -> None:
        """Count what is made from now on as `part`, and look for the peak of `stage`."""
        self.part = part
        self.stage = stage
        self._look()

    def _look(self) -> None:
        if self.live.total() >= self.peaks.get(self.stage, Counter()).total():
            self.peaks[self.stage] = self.live.copy()

    def add(self, tensor: Tensor, part: str) -> None:
        """Count the tensor's storage, unless it is known already, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.part_of:
            return
        self.part_of[key] = part
        self.live[part] += storage.nbytes()
        weakref.finalize(storage, self._drop, key, storage.nbytes())
        self._look()

    def _drop(self, key: int, size: int) -> None:
        self.live[self.part_of.pop(key)] -= size

    def book_gradient(self, parameter: nn.Parameter) -> None:
        """A hook for accumulated gradients: what was workspace is a gradient from now on."""
        storage = parameter.grad.untyped_storage()
        self.live[self.part_of[storage._cdata]] -= storage.nbytes()
        self.live["gradients"] += storage.nbytes()
        self.part_of[storage._cdata] = "gradients"


@functools.lru_cache(maxsize=64)
def _step_bytes(config: Config, vocab_size: int, n_layer: int) -> dict[Any, Counter[str]]:
    """Bytes alive in a step of `n_layer` blocks, by part: the peak of each stage, and what is
    "kept" when the blocks have been passed. Not to be changed by the caller, as one plan asks for
    the same more than once.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    optim, run = config.optim, config.run
    shape = dataclasses.replace(config.model, n_layer=n_layer)
    device = "cuda" if run.device.startswith("cuda") else "cpu"
    accumulates = optim.batch_size > optim.micro_batch_size
    kept: Counter[str] = Counter()
    with FakeTensorMode(), torch.device(device), LiveBytes() as memory:
        model = GPT(shape, vocab_size, ATTENTION[run.attention])
        for parameter in model.parameters():
            memory.add(parameter, "weights")
            parameter.register_post_accumulate_grad_hook(memory.book_gradient)
        if run.recompute:
            recompute_blocks(model)

        def at_first_block(_module: nn.Module, _inputs: tuple, out_BTD: Tensor) -> None:
            out_BTD.register_hook(lambda _: memory.enter(memory.part, LAST_OF_BACKWARD))

        def at_unembedding(*_) -> None:
            kept.update(memory.live)
            memory.part = "logits and loss"

        model.blocks[0].register_forward_hook(at_first_block)
        model.unembed.register_forward_pre_hook(at_unembedding)
        optimizers = make_optimizers(model, optim, run.precision)
        # The first step makes the optimisers' state. The second is the one that counts; in its last
        # pass the gradients of the passes before are there from the start.
        for n_pass in (1, 2 if accumulates else 1):
            memory.peaks = {}
            for _ in range(n_pass):
                memory.enter("activations", FORWARD)
                kept.clear()
                tokens = torch.zeros(optim.micro_batch_size, shape.context_length, dtype=torch.long)
                with autocast(device, run.precision):
                    loss = cross_entropy(model(tokens), tokens)
                memory.enter("workspace of the backward pass", BACKWARD)
                loss.backward()
                del loss
            memory.enter("optimizer", UPDATE)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    return {**memory.peaks, "kept": kept}


def training_bytes(config: Config, vocab_size: int) -> tuple[list[Counter[str]], Counter[str]]:
    """Bytes alive, by part, at the peak of each of a step's stages; and what is kept for the
    backward pass.

    `config` is one process's: batch_size is its share. In one stage each further block adds the
    same, be it activations or gradients; so blocks beyond the third are extrapolated, exactly.
    """
    n_layer = config.model.n_layer
    shallow = _step_bytes(config, vocab_size, min(2, n_layer))
    counted = _step_bytes(config, vocab_size, min(3, n_layer))
    deep = {moment: parts.copy() for moment, parts in counted.items()}
    n_further = max(0, n_layer - 3)
    for moment, parts in deep.items():
        for part in parts:
            parts[part] += n_further * (parts[part] - shallow[moment][part])
    stages = [deep[stage] for stage in (FORWARD, BACKWARD, LAST_OF_BACKWARD, UPDATE)]
    return stages, deep["kept"]


def make_plan(
    config: Config, vocab_size: int, n_token: int | None = None, processes: int = 1
) -> Plan:
    """Plan `config` for a vocabulary, a training split of `n_token` tokens and a number of
    processes; no weight is made.

    Raises UserError where the device isn't there or the batch doesn't divide.
    """
    optim = config.optim
    share = share_batch(optim.batch_size, optim.micro_batch_size, n_process=processes)
    left = seconds_left(config, vocab_size, first=0, n_process=processes)
    config = resolve(config, left).replace(micro_batch_size=share.micro_batch_size)
    run = config.run
    memory = _worst_moment(config, vocab_size, share)
    with torch.device("meta"):
        model = GPT(config.model, vocab_size)
    return Plan(
        config=config,
        vocab_size=vocab_size,
        n_token=n_token,
        share=share,
        end=_last_step(config),
        parameters=_count_parameters(model),
        flops_per_token=flops_per_token(model),
        memory=dict(memory),
        limit=limits.memory_limit(run.device),
    )


def _last_step(config: Config) -> int:
    """The step after which the run ends, be it done or not."""
    return min(config.run.stop_at or config.optim.max_steps, config.optim.max_steps)


def _count_parameters(model: GPT) -> dict[str, int]:
    """The model's parameters by part."""
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        part = next(part for part, names in PARTS.items() if re.search(names, name))
        counts[part] += parameter.numel()
    return counts


def _worst_moment(config: Config, vocab_size: int, share: Share) -> Counter[str]:
    """Bytes one process holds, by part, when it holds most: in a stage of a step, or when it copies
    its state to write a checkpoint.
    """
    run = config.run
    on_gpu = run.device.startswith("cuda")
    base: Counter[str] = Counter()
    if not on_gpu:
        base["interpreter and libraries"] = limits.baseline()[0]
    own = config.replace(batch_size=share.n_micro * share.micro_batch_size)
    moments, kept = training_bytes(own, vocab_size)
    state = Counter({part: kept[part] for part in ("weights", "optimizer")})
    copy: Counter[str] = Counter()
    if not on_gpu:  # a GPU's copy lies in the host's memory
        copy["checkpoint being written"] = state.total()
    if run.strategy == "fsdp":
        for held in (*moments, state):
            for part in ("weights", "gradients", "optimizer"):
                held[part] //= share.n_process
    end = _last_step(config)
    if any(0 < every < end for every in (run.eval_every, run.save_every)):
        # The next step goes on while a thread writes.
        moments = [held + copy for held in moments]
    return base + max(*moments, state + copy, key=Counter.total)
