"""When memory is short: a warning before the run, and the way out once it has failed."""

import sys
import traceback

from configs import Config
from data.dataset import Dataset
from data.share import share_batch
from data.tokenizer import load_tokenizer
from ops.device import is_out_of_memory, resolve
from ops.distributed import Processes, world_size
from ops.plan import limits
from ops.plan.counting import (
    Plan,
    make_plan,
    micro_batch_sizes,
    rough_bytes,
    settle_micro_batch,
)


def memory_warning(plan: Plan) -> str | None:
    """A line for the start of a run on CPU that takes more memory than there is; None where it
    fits, or nobody can tell.
    """
    if plan.config.run.device != "cpu" or not plan.limit or plan.peak <= plan.limit:
        return None
    return (
        f"warning: the run will hold about {plan.peak / 2**20:,.0f} MiB, "
        f"{plan.limit / 2**20:,.0f} MiB can be had: "
        "lower --micro-batch-size or use --recompute; --plan tells more"
    )


def warn_at_start(config: Config, vocab_size: int, processes: int = 1) -> None:
    """Print `memory_warning` for a resolved configuration. It is planned only where a rough
    reckoning comes near the limit, as planning takes seconds.
    """
    held, _ = limits.baseline()  # on any device: `out_of_memory_advice` builds on it
    if config.run.device != "cpu":
        return
    if 2 * rough_bytes(config, vocab_size, processes) + 2 * held <= limits.memory_limit("cpu"):
        return
    if warning := memory_warning(make_plan(config, vocab_size, processes=processes)):
        print(warning, file=sys.stderr)


def advise(error: BaseException, config: Config) -> str | None:
    """`out_of_memory_advice` with the vocabulary of the configuration's data, for this many
    processes as torchrun has started.
    """
    vocab_size = load_tokenizer(Dataset(config.data.data).tokenizer_spec).vocab_size
    return out_of_memory_advice(error, config, vocab_size, world_size())


def out_of_memory_advice(
    error: BaseException, config: Config, vocab_size: int, processes: int = 1
) -> str | None:
    """What to change when an allocation has failed, the global batch kept; None where `error` is
    something else.

    The micro-batch named is the largest for which the plan finds room. What the failed calls hold
    is freed; `baseline` must have been asked, as `warn_at_start` does, when the run began.
    """
    if not is_out_of_memory(error):
        return None
    traceback.clear_frames(error.__traceback__)
    if not config.optim.micro_batch_size:
        config = settle_micro_batch(resolve(config), vocab_size, processes)
    optim = config.optim
    micro = share_batch(optim.batch_size, optim.micro_batch_size, n_process=processes)
    failed = f"out of memory at micro_batch_size {micro.micro_batch_size}"
    if found := roomier(config, vocab_size, processes):
        return f"{failed}; {found[0]}"
    return (
        f"{failed}, and even 1 with --recompute would not fit: "
        "choose a smaller model (--n-layer, --d-model) or a shorter --context-length; "
        "--plan tells what they take"
    )


def roomier(
    config: Config, vocab_size: int, processes: int = 1, n_token: int | None = None
) -> tuple[str, Plan] | None:
    """The largest smaller micro-batch for which the plan finds room, else one sequence with
    recomputing: what to say of it, and its plan. None where even that does not fit.
    """
    batch_size = config.optim.batch_size
    share = share_batch(batch_size, config.optim.micro_batch_size, n_process=processes)
    micro = share.micro_batch_size
    rows = share.n_micro * micro
    ways = [("", size, config) for size in range(micro - 1, 0, -1) if rows % size == 0]
    if not config.run.recompute:
        ways.append(("--recompute ", 1, config.replace(recompute=True)))
    for option, size, way in ways:
        plan = make_plan(way.replace(micro_batch_size=size), vocab_size, n_token, processes)
        if plan.fits:
            remedy = (
                f"{option}--micro-batch-size {size} should fit and keeps "
                f"batch_size {batch_size} ({plan.share.n_micro} accumulation steps)"
            )
            return remedy, plan
    return None


def agree_on_micro_batch(
    config: Config, vocab_size: int, processes: Processes
) -> tuple[Config, list[str]]:
    """`config`, resolved, with the micro-batch that `settle_micro_batch` finds room for in every
    process, as all of them must take one, and a line that says so where it is less than all that a
    process has of the batch.
    """
    settled = settle_micro_batch(config, vocab_size, processes.count)
    size = settled.optim.micro_batch_size
    if size == config.optim.micro_batch_size:
        return config, []
    sizes = micro_batch_sizes(config.optim.batch_size, processes.count)
    device = processes.device(config.run.device)
    votes = processes.sum(*(other <= size for other in sizes), device=device)
    size = max(other for other, n in zip(sizes, votes, strict=True) if n == processes.count)
    settled = config.replace(micro_batch_size=size)
    if size == sizes[-1]:
        return settled, []
    note = f"micro-batch {size} is the largest that fits; --micro-batch-size sets another"
    if size == 1 and not make_plan(settled, vocab_size, None, processes.count).fits:
        note = "micro-batch 1, for which the plan finds no room either: --recompute takes less"
    return settled, [f"note     {note}"]
