"""What a compiler is given is one graph, whatever the architecture, and the same one at every step.

No compiler is needed: dynamo traces, and what it has traced runs as it stands.
"""

import pytest
import torch
from helpers import MODERN, make_model

from model.attention import explicit_attention
from model.fast_attention import fast_attention
from ops.compiling import WithLoss, recompute_blocks
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
        loss.backward()
        torch.manual_seed(step)
        assert torch.equal(loss, eager(tokens, tokens))
    assert len(graphs) == 1
    eager.eval()
    with torch.no_grad():
        assert torch.equal(compiled(tokens, tokens), eager(tokens, tokens))
    assert len(graphs) == 2
    torch._dynamo.reset()
