"""Between the host and a device: what is sent without waiting, and where a token is drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pinned(numbers: Tensor, device: torch.device) -> Tensor:
    """`numbers`, on the host, where a copy to `device` need not be waited for: page-locked for
    CUDA, as they are for others.
    """
    return numbers.pin_memory() if device.type == "cuda" else numbers


def on_device(numbers: Sequence | Tensor, device: torch.device) -> Tensor:
    """The numbers, which the host holds, as a tensor on `device`.

    `torch.tensor(numbers, device=device)` does the same, but on CUDA it returns only when all that
    was launched before is done.
    """
    on_host = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
    return pinned(on_host, device).to(device, non_blocking=device.type == "cuda")


def where_drawn(logits_BV: Tensor) -> Tensor:
    """`logits_BV` where a token is drawn from them: on CUDA where they are, unless deterministic
    algorithms are asked for, of which CUDA has none for a running sum; else on the CPU, as other
    devices (MPS) have no float64.

    The uniform numbers are of the same generators either way, so a seed means the same. CUDA's
    exponentials and sums differ in the last of float64's bits, from the CPU's and from run to run,
    and equal probabilities may be ordered otherwise by top-k and top-p: given the same logits, that
    alone can change a token. The logits themselves differ far more.
    """
    stays = logits_BV.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
    return logits_BV if stays else logits_BV.cpu()
