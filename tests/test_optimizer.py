"""The schedule by hand, what is decayed, and one step of either optimiser against plain
arithmetic.
"""

import dataclasses
import math

import pytest
import torch
from helpers import make_model, same_value

from configs import OptimConfig
from training.optimizer import learning_rate, make_optimizers, parameter_groups, set_learning_rate

ULP = 2.0**-24  # unit roundoff of float32
PLAN = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4, max_steps=12)


def table(schedule, steps, **changes):
    plan = dataclasses.replace(PLAN, schedule=schedule, **changes)
    return [learning_rate(step, plan) for step in steps]


# --- the schedule ---

WARM_UP = [0.2, 0.4, 0.6, 0.8]  # fifths, so that step 4 has the whole rate


def test_cosine_by_hand():
    # 0.1 + 0.45 (1 + cos(pi k / 8)) for k = 0 ... 8: the cosines are 1, 0.923880, 0.707107,
    # 0.382683, 0 and their mirror images
    fall = [1.0, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1]
    assert table("cosine", range(13)) == pytest.approx(WARM_UP + fall, abs=5e-7)


def test_linear_by_hand():
    # 0.9 / 8 = 0.1125 less with every step
    fall = [1.0, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1]
    assert table("linear", range(13)) == pytest.approx(WARM_UP + fall, abs=1e-12)


def test_constant_by_hand():
    assert table("constant", range(13)) == pytest.approx([*WARM_UP, *[1.0] * 9], abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_end_of_a_schedule(schedule):
    assert table(schedule, [13, 100]) == pytest.approx([0.1, 0.1], abs=1e-12)
    assert table(schedule, [0, 11, 12], min_lr=0.0, warmup_steps=0)[0] == 1.0
    assert table(schedule, [12], min_lr=0.0)[0] == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_warm_up_as_long_as_the_run_or_longer(schedule):
    assert table(schedule, range(4), warmup_steps=4, max_steps=4) == pytest.approx(WARM_UP)
    assert table(schedule, range(2), warmup_steps=4, max_steps=2) == pytest.approx(WARM_UP[:2])


# --- the groups ---

SHAPES = [
    {},
    {"tie_embeddings": False},
    {
        "positions": "rotary",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "qk_norm": True,
        "tie_embeddings": False,
        "bias": False,
    },
]


def build(**options):
    return make_model(**{"d_model": 8} | options)


def block_matrices(model):
    names = [
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.project",
        "mlp.up",
        "mlp.project",
    ]
    names += ["mlp.gate"] if model.config.mlp == "swiglu" else []
    return {f"blocks.{layer}.{name}.weight" for layer in range(2) for name in names}


def names_of(model, parameters):
    found = {id(parameter): name for name, parameter in model.named_parameters()}
    return [found[id(parameter)] for parameter in parameters]


@pytest.mark.parametrize("options", SHAPES)
def test_groups(options):
    model = build(**options)
    blocks, embeddings, vectors = (names_of(model, group) for group in parameter_groups(model))
    assert sorted(blocks) == sorted(block_matrices(model))
    tables = {"embed.weight"} | (
        {"positions.table.weight"} if model.config.positions == "learned" else set()
    )
    assert set(embeddings) == tables | (
        set() if model.config.tie_embeddings else {"unembed.weight"}
    )
    assert sorted(blocks + embeddings + vectors) == sorted(
        name for name, _ in model.named_parameters()
    )  # each of them once


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("options", SHAPES)
def test_decay_touches_the_blocks_matrices_alone(kind, options):
    """With gradients of zero an optimiser changes nothing but what decays: by the factor 1 - lr
    weight_decay.
    """
    model = build(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
            parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for optimizer in make_optimizers(model, OptimConfig(optimizer=kind, lr=0.5, weight_decay=0.25)):
        optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.5 * 0.25 if name in block_matrices(model) else 1.0
        assert torch.equal(parameter, before[name] * factor), name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("options", SHAPES)
def test_every_parameter_has_one_optimiser(kind, options):
    model = build(**options)
    optimizers = make_optimizers(model, OptimConfig(optimizer=kind))
    kinds = [torch.optim.AdamW, torch.optim.Muon][: len(optimizers)]
    assert len(optimizers) == (2 if kind == "muon" else 1)
    assert all(map(isinstance, optimizers, kinds))
    owned = [
        names_of(model, [p for g in optimizer.param_groups for p in g["params"]])
        for optimizer in optimizers
    ]
    assert sorted(name for names in owned for name in names) == sorted(
        name for name, _ in model.named_parameters()
    )
    if kind == "muon":
        assert set(owned[1]) == block_matrices(model)


def test_the_rate_reaches_every_group():
    optimizers = make_optimizers(build(), OptimConfig(optimizer="muon"))
    set_learning_rate(optimizers, 0.125)
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.125}


# --- a step ---


def test_eps_reaches_adamw():
    model = make_model()
    for kind in ("adamw", "muon"):
        adamw = make_optimizers(model, OptimConfig(optimizer=kind, eps=1e-4))[0]
        assert {group["eps"] for group in adamw.param_groups} == {1e-4}


def test_adamw_against_the_formula():
    """Three steps in float64 (Loshchilov and Hutter 2019, algorithm 2), epsilon 1e-8. A float32
    step makes about eight roundings of numbers no larger than the parameter or the rate.
    """
    model, lr, decay, beta1, beta2 = build(), 0.01, 0.1, 0.8, 0.95
    optim = OptimConfig(lr=1.0, weight_decay=decay, beta1=beta1, beta2=beta2)
    (optimizer,) = make_optimizers(model, optim)
    set_learning_rate([optimizer], lr)
    wanted = {name: p.detach().double() for name, p in model.named_parameters()}
    mean = {name: torch.zeros_like(p) for name, p in wanted.items()}
    square = {name: torch.zeros_like(p) for name, p in wanted.items()}
    for step in (1, 2, 3):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            g, rate = parameter.grad.double(), decay if name in block_matrices(model) else 0.0
            mean[name] = beta1 * mean[name] + (1 - beta1) * g
            square[name] = beta2 * square[name] + (1 - beta2) * g**2
            update = (mean[name] / (1 - beta1**step)) / (
                (square[name] / (1 - beta2**step)).sqrt() + 1e-8
            )
            wanted[name] = wanted[name] * (1 - lr * rate) - lr * update
        optimizer.step()
    for name, parameter in model.named_parameters():
        bound = 3 * 8 * ULP * (wanted[name].abs() + 3 * lr)
        assert ((parameter - wanted[name]).abs() <= bound).all(), name


def muon_alone(shape, n=1, precision="float32", **options):
    """`n` matrices of a shape, as a model's blocks, and the Muon that `make_optimizers` gives
    them.
    """
    holder = torch.nn.Module()
    holder.blocks = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for _ in range(n))
    holder.norm = torch.nn.Parameter(torch.zeros(2))
    return list(holder.blocks), make_optimizers(
        holder, OptimConfig(optimizer="muon", **options), precision
    )[1]


def polynomial(value):
    """What an iteration makes of a singular value (Jordan et al. 2024)."""
    return 3.4445 * value - 4.775 * value**3 + 2.0315 * value**5


@pytest.mark.parametrize(("precision", "ulp"), [("float32", ULP), ("bfloat16", 2.0**-8)])
@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (64, 256)])
def test_muon_has_the_size_of_adamw(shape, precision, ulp):
    """A gradient with equal singular values keeps its direction; five iterations take the values
    along the polynomial, and the step is lr 0.2 sqrt(the longer side) times that (Liu et al. 2025,
    equation 4).
    """
    (weight,), optimizer = muon_alone(shape, precision=precision, weight_decay=0.0)
    torch.nn.init.zeros_(weight)
    direction = torch.linalg.qr(torch.randn(max(shape), min(shape)))[0]
    direction = direction if shape[0] >= shape[1] else direction.T
    weight.grad = 7.0 * direction
    set_learning_rate([optimizer], 0.01)
    optimizer.step()
    value = 1 / math.sqrt(min(shape))  # the norm is brought to 1
    for _ in range(5):
        value = polynomial(value)
    measured = (weight.detach() * direction).sum() / min(shape)
    tolerance = 5 * 4 * ulp  # four roundings in each of five iterations
    assert measured == pytest.approx(-0.01 * 0.2 * math.sqrt(max(shape)) * value, rel=tolerance)
    assert (weight.detach() - measured * direction).norm() <= tolerance * weight.detach().norm()


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
def test_muon_against_the_formula(shape):
    """Three steps of two matrices in float64: momentum 0.95, Nesterov's look ahead, orthogonalised,
    decoupled decay. An iteration makes some four roundings, and no singular value's relative error
    more than three times larger.
    """
    lr, decay = 0.02, 0.1
    weights, optimizer = muon_alone(shape, n=2, lr=lr, weight_decay=decay)
    wanted = [weight.detach().double() for weight in weights]
    momentum = [torch.zeros(shape, dtype=torch.float64) for _ in weights]
    for _ in range(3):
        for index, weight in enumerate(weights):
            weight.grad = torch.randn(shape)
            g = weight.grad.double()
            momentum[index] = 0.95 * momentum[index] + 0.05 * g
            ahead = 0.95 * momentum[index] + 0.05 * g
            u, values, v = torch.linalg.svd(ahead, full_matrices=False)
            values = values / values.norm()
            for _ in range(5):
                values = polynomial(values)
            update = 0.2 * math.sqrt(max(shape)) * (u * values) @ v
            wanted[index] = (1 - lr * decay) * wanted[index] - lr * update
        optimizer.step()
    for weight, expected in zip(weights, wanted, strict=True):
        bound = (
            3 * lr * 0.2 * math.sqrt(max(shape) * min(shape)) * 3**5 * 20 * ULP
            + 3 * 3 * ULP * expected.norm()
        )
        assert (weight - expected).norm() <= bound


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_flag_on_the_device(kind):
    """`found_inf` 0 leaves a step as it is to the last bit; with 1 a gradient of NaN changes
    neither weights nor moments.
    """

    def trained(flags):
        torch.manual_seed(0)
        model = make_model()
        optimizers = make_optimizers(model, OptimConfig(optimizer=kind, weight_decay=0.1))
        for flag in flags:
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) if flag != 1.0 else parameter * nan
            for optimizer in optimizers:
                optimizer.found_inf = None if flag is None else torch.tensor(flag)
                optimizer.step()
        return dict(model.state_dict()), [one.state_dict()["state"] for one in optimizers]

    nan = float("nan")
    plain = trained([None, None])
    assert same_value(plain, trained([0.0, 0.0]))
    assert same_value(plain, trained([0.0, 0.0, 1.0]))
    assert not same_value(plain, trained([0.0, 0.0, 0.0]))
