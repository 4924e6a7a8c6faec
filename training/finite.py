"""An update that would spoil the weights is left out, without the host having to wait for a GPU."""

from torch import Tensor
from torch.optim import Optimizer

from training.optimizer import set_learning_rate


def step_if_finite(optimizers: list[Optimizer], lr: float, loss: Tensor, norm: Tensor) -> None:
    """Let every optimizer step at the rate `lr`, unless the loss or the gradients' norm, numbers on
    the weights' device, is not finite: then none does.

    On a CPU the two are read. On a GPU, where reading would wait for the whole step, each optimizer
    gets the answer as `found_inf`, 0 or 1 on the device, and changes nothing where it is 1: the way
    in which PyTorch's gradient scaler tells its fused optimizers.
    """
    wrong = ~(loss.isfinite() & norm.isfinite())
    if not wrong.is_cuda and wrong:
        return
    set_learning_rate(optimizers, lr)
    for optimizer in optimizers:
        if wrong.is_cuda:
            optimizer.found_inf = wrong.float()  # type: ignore[attr-defined]
        optimizer.step()
