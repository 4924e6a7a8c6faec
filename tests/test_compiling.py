"""What a compiler is given is one graph, whatever the architecture, and the same one at every step.

No compiler is needed: dynamo traces, and what it has traced runs as it stands.
"""

import pytest
import torch
from helpers import MODERN, make_model

from model.attention import explicit_attention
from model.fast_attention import fast_attention
from ops.compiling import WithLoss, recompute_blocks
from ops.device import autocast
from training import head_loss
from training.loss import cross_entropy

pytestmark = pytest.mark.slow

SHORT = [
    (fast_attention, MODERN | {"dropout": 0.1}, True),
    (fast_attention, {"positions": "none", "mlp": "relu2", "bigrams": 7, "window": 2}, False),
    (explicit_attention, {"positions": "sinusoidal", "window": 6}, False),
]
LONG = [
    (attend, options, recompute)
    for attend in (fast_attention, explicit_attention)
    for options in ({}, MODERN, {"dropout": 0.1}, {"window": 2}, {"bigrams": 7, "zero_init": True})
    for recompute in (False, True)
]


@pytest.mark.parametrize(
    ("attend", "options", "recompute"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.drill) for case in LONG)],
)
def test_a_step_is_one_graph(attend, options, recompute):
    """`fullgraph` refuses a break. Steps of one shape share a graph, and its loss is the eager
    model's: in the same order, so bit for bit.
    """
    model = make_model(attend=attend, seed=0, **options)
    if recompute:
        recompute_blocks(model)
    eager = WithLoss(model, cross_entropy)
    check_graphs(eager)


@pytest.mark.parametrize(("options", "precision"), [({}, "float32"), (MODERN, "bfloat16")])
def test_head_and_loss_in_chunks_are_in_the_graph(options, precision, monkeypatch):
    """What an accelerator takes: three chunks here, the last one short."""
    monkeypatch.setattr(head_loss, "in_chunks", lambda device: True)
    monkeypatch.setattr(head_loss, "chunk_rows", lambda *_: 10)
    with autocast("cpu", precision):
        check_graphs(WithLoss(make_model(seed=0, **options), cross_entropy))


def check_graphs(eager):
    """One graph for all steps, one more for evaluation, each with the eager module's loss; and its
    gradients, but where dropout is computed again, for which dynamo alone draws other masks.
    """
    torch._dynamo.reset()
    graphs = []

    def backend(module, example):
        graphs.append(module)
        return module

    compiled = torch.compile(eager, fullgraph=True, backend=backend)
    for step in range(3):
        tokens = torch.randint(11, (3, 8))
        torch.manual_seed(step)
        loss = compiled(tokens, tokens)
        found = torch.autograd.grad(loss, eager.parameters())
        torch.manual_seed(step)
        expected = eager(tokens, tokens)
        assert torch.equal(loss, expected)
        gradients = torch.autograd.grad(expected, eager.parameters())
        if not eager.model.config.dropout:
            for pair in zip(found, gradients, strict=True):
                torch.testing.assert_close(*pair)
    assert len(graphs) == 1
    eager.eval()
    with torch.no_grad():
        assert torch.equal(compiled(tokens, tokens), eager(tokens, tokens))
    assert len(graphs) == 2
    torch._dynamo.reset()
