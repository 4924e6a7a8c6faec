"""What several tests share: the devices, a seed for every test, and a small model whose every
parameter matters.
"""

import signal

import pytest
import torch

from model.config import ModelConfig
from model.fast_attention import fast_attention
from model.gpt import GPT

torch.set_num_threads(
    1
)  # for tensors as small as the tests' a second thread costs more than it brings
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a job in the background ignores it, and so would what a test starts


def pytest_collection_modifyitems(items):
    """What is marked `gpu` is skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def tiny():
    """Builds a float64 model in eval mode. Options are those of ModelConfig, over very small
    defaults.

    Every parameter is moved off its initial value: at a standard deviation of 0.02 all attention is
    nearly uniform, and a bias of zero or a gain of one cannot be told from none.
    """

    def build(attend=fast_attention, vocab_size=11, device="cpu", **options):
        shape = {"n_layer": 2, "n_head": 2, "d_model": 8, "context_length": 8} | options
        model = GPT(ModelConfig(**shape), vocab_size, attend).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.4 * torch.randn_like(parameter))
        return model.to(device).eval()

    return build
