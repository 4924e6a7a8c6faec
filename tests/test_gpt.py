"""The whole model: what it may look at, what it must not, what it is initialised to, and that it is
GPT-2 (or Llama) when told to be.
"""

import math
from itertools import pairwise, product
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from helpers import MODERN, make_model
from torch import nn
from torch.testing import assert_close

from model.attention import Mask, explicit_attention
from model.cache import KVCache
from model.config import ModelConfig
from model.fast_attention import fast_attention
from model.gpt import GPT, MLP, make_norm
from viz.record import record_attention

TWINS = pytest.mark.parametrize("attend", [explicit_attention, fast_attention])
KINDS = pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
WINDOWS = pytest.mark.parametrize("window", [0, 3])


def near(actual, expected, atol=1e-11):
    """float64 throughout, so that 1e-11 leaves room for some thousand roundings; a mistake is of
    the order of 1.
    """
    assert_close(actual, expected, rtol=0, atol=atol)


def same_weights(tiny, **options):
    """One model with either attention."""
    explicit, fused = tiny(explicit_attention, **options), tiny(fast_attention, **options)
    fused.load_state_dict(explicit.state_dict())
    return explicit, fused


# --- twins ---


@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 3},
        MODERN,
        {"mlp": "relu2", "norm": "rmsnorm"},
        {"qk_norm": True, "window": 2},
    ],
    ids=["gpt2", "window", "modern", "relu2", "qk_norm"],
)
def test_twins_through_the_model(tiny, positions, options, device):
    explicit, fused = same_weights(tiny, device=device, **(options | {"positions": positions}))
    tokens = torch.randint(11, (3, 8), device=device)
    for lengths in (None, torch.tensor([8, 3, 5], device=device)):
        results = []
        for model in (explicit, fused):
            logits = model(tokens, model.mask(lengths))
            gradients = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
            results.append((logits, *gradients))
        for one, other in zip(*results, strict=True):
            near(one, other)
        assert all(gradient.any() for gradient in results[0][1:])


# --- what a position may look at ---


def influence(model, tokens, mask=None):
    """(T, T): the largest |d logit_t / d embedding_s| over all entries."""
    embedded = []
    hook = model.embed.register_forward_hook(
        lambda module, arguments, output: embedded.append(output)
    )
    logits = model(tokens, mask)
    hook.remove()
    (found,) = embedded
    targets = (logits[0] * torch.randn_like(logits[0])).sum(-1)
    return torch.stack(
        [
            torch.autograd.grad(target, found, retain_graph=True)[0][0].abs().amax(-1)
            for target in targets
        ]
    )


@KINDS
@TWINS
@pytest.mark.parametrize("n_layer", [1, 3])
def test_causality_by_gradient(tiny, positions, attend, n_layer, device):
    """Exactly zero from the future. And in one layer already, every earlier position reaches every
    later one.
    """
    model = tiny(attend, positions=positions, n_layer=n_layer, device=device)
    reached = influence(model, torch.randint(11, (1, 7), device=device))
    assert torch.equal(reached != 0, torch.ones(7, 7, dtype=torch.bool, device=device).tril())
    assert reached[reached != 0].min() > 1e-6


@TWINS
@pytest.mark.parametrize("n_layer", [1, 2])
@pytest.mark.parametrize("window", [2, 3])
def test_a_window_reaches_farther_by_layers(tiny, attend, n_layer, window):
    """A layer carries over window - 1 places."""
    reached = influence(tiny(attend, window=window, n_layer=n_layer), torch.randint(11, (1, 8)))
    distance = torch.arange(8)[:, None] - torch.arange(8)
    assert torch.equal(reached != 0, (distance >= 0) & (distance <= n_layer * (window - 1)))


@TWINS
def test_bidirectional_reaches_everywhere(tiny, attend):
    assert influence(tiny(attend, n_layer=1), torch.randint(11, (1, 6)), Mask(causal=False)).all()


@KINDS
@TWINS
@WINDOWS
def test_padding_changes_nothing(tiny, positions, attend, window, device):
    """Rows of 7, 2 and 5 tokens: values and gradients are those of each row alone, whatever stands
    in the padding.
    """
    model = tiny(attend, positions=positions, window=window, device=device)
    lengths = [7, 2, 5]
    tokens = torch.randint(11, (3, 7), device=device)
    logits = model(tokens, model.mask(torch.tensor(lengths, device=device)))
    alone = [model(tokens[row : row + 1, :length])[0] for row, length in enumerate(lengths)]
    for row, length in enumerate(lengths):
        near(logits[row, :length], alone[row], atol=1e-12)
    parameters = list(model.parameters())
    together = torch.autograd.grad(
        sum(logits[row, :length].square().sum() for row, length in enumerate(lengths)), parameters
    )
    apart = torch.autograd.grad(sum(row.square().sum() for row in alone), parameters)
    for one, other in zip(together, apart, strict=True):
        near(one, other, atol=1e-10)
    assert logits.isfinite().all()


@TWINS
def test_rows_do_not_touch(tiny, attend):
    model, tokens = tiny(attend), torch.randint(11, (3, 6))
    logits = model(tokens)
    for row in range(3):
        near(model(tokens[row : row + 1])[0], logits[row], atol=1e-12)


@KINDS
@TWINS
def test_order_is_known_by_positions_alone(tiny, positions, attend):
    """With a bidirectional mask and no positions, permuting the tokens permutes the outputs; with
    positions of any kind it does not.
    """
    model, tokens = tiny(attend, positions=positions), torch.randint(11, (1, 8))
    order = torch.tensor([3, 0, 7, 5, 1, 2, 6, 4])
    everything = Mask(causal=False)
    difference = (
        (model(tokens[:, order], everything) - model(tokens, everything)[:, order])
        .abs()
        .max()
        .item()
    )
    assert difference < 1e-12 if positions == "none" else difference > 1e-2


@TWINS
def test_one_word_in_two_contexts(tiny, attend):
    """The token after 3 and after 8 gets two vectors from attention, and one where a window of 1
    shows it itself alone.
    """
    tokens = torch.tensor([[3, 5], [8, 5]])
    one, other = tiny(attend).features(tokens)[:, 1]
    assert (one - other).norm() > 1e-2 * one.norm()
    one, other = tiny(attend, window=1).features(tokens)[:, 1]
    assert torch.equal(one, other)


# --- the parts against their formulas ---


@pytest.mark.parametrize("bias", [True, False])
def test_norms(bias):
    x = torch.randn(3, 8, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    for norm, expected in (
        ("layernorm", centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()),
        ("rmsnorm", x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()),
    ):
        module = make_norm(ModelConfig(d_model=8, n_head=1, norm=norm, bias=bias)).double()
        near(module(x), expected, atol=1e-14)
        assert len(list(module.parameters())) == 1 + (bias and norm == "layernorm")


def test_mlps():
    x = torch.randn(3, 6, dtype=torch.float64)
    for kind in ("gelu", "gelu_exact", "relu2", "swiglu"):
        mlp = MLP(ModelConfig(d_model=6, n_head=1, mlp=kind)).double()
        up = mlp.up(x)
        if kind == "gelu":
            hidden = up / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        elif kind == "gelu_exact":
            hidden = up.detach().clone().apply_(lambda x: x * NormalDist().cdf(x))
        elif kind == "relu2":
            hidden = torch.where(up > 0, up * up, 0)
        else:
            hidden = mlp.gate(x) / (1 + torch.exp(-mlp.gate(x))) * up
        near(mlp(x), hidden @ mlp.project.weight.mT + mlp.project.bias, atol=1e-14)


@pytest.mark.parametrize("bigrams", [1, 7, 121])
def test_bigrams_by_hand(tiny, bigrams):
    """A token's embedding and its pair's: with 121 vectors for 11 tokens every pair has its own."""
    model, seen = tiny(positions="none", bigrams=bigrams), []
    model.dropout.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    tokens = torch.randint(11, (3, 8))
    model(tokens)
    number = {pair: index for index, pair in enumerate(product(range(11), repeat=2))}
    for row, stream in zip(tokens.tolist(), seen[0], strict=True):
        for before, token, x in zip([0, *row], row, stream, strict=False):
            near(
                x,
                model.embed.weight[token] + model.bigrams.weight[number[before, token] % bigrams],
                atol=1e-15,
            )


def test_bigrams_add_nothing_to_begin_with():
    model = GPT(ModelConfig(n_layer=1, n_head=1, d_model=4, context_length=4, bigrams=30), 5)
    assert model.bigrams.weight.shape == (30, 4)
    assert not model.bigrams.weight.any()
    assert model.embed.weight.all()


def test_qk_norm(tiny, device):
    """Every query and key has length sqrt(d_head), before it is turned and after; under autocast up
    to the rounding of bfloat16.
    """
    options = {"qk_norm": True, "positions": "rotary", "device": device}
    tokens = torch.randint(11, (2, 8), device=device)
    model = tiny(**options)
    for block in model.blocks:
        torch.nn.init.ones_(block.attention.query_norm.weight)
        torch.nn.init.ones_(block.attention.key_norm.weight)
    with record_attention(model) as record:
        model(tokens)
    with torch.autocast(device.type, torch.bfloat16), record_attention(model.float()) as rounded:
        model(tokens)
    for layers, dtype, slack in ((record, torch.float64, 1e-3), (rounded, torch.bfloat16, 2e-2)):
        for layer in layers:
            assert layer.q.dtype == layer.k.dtype == dtype
            for x in (layer.q, layer.k):
                assert ((x.double().square().mean(-1) - 1).abs() < slack).all()


@TWINS
@KINDS
def test_autocast(tiny, attend, positions, device):
    """Under bfloat16 autocast attention runs in bfloat16 and the logits stay near: off by some
    dozen roundings of 2^-8.
    """
    model, tokens = (
        tiny(attend, positions=positions, device=device),
        torch.randint(11, (2, 8), device=device),
    )
    exact = model(tokens)
    with torch.autocast(device.type, torch.bfloat16), record_attention(model.float()) as record:
        logits = model(tokens)
    assert all(
        layer.q.dtype == layer.k.dtype == layer.v.dtype == torch.bfloat16 for layer in record
    )
    assert (logits.double() - exact).norm() < 12 * 2**-8 * exact.norm()


# --- against other libraries ---


def scattered(model):
    """All parameters random: biases and gains too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@TWINS
def test_logits_are_gpt2(attend, dtype, atol):
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(
        GPT2Config(vocab_size=13, n_positions=9, n_embd=12, n_layer=3, n_head=2)
    ).to(dtype)
    source = {
        name.removeprefix("transformer."): x for name, x in scattered(theirs).state_dict().items()
    }
    weights = {"embed.weight": source["wte.weight"], "positions.table.weight": source["wpe.weight"]}
    weights |= {"norm.weight": source["ln_f.weight"], "norm.bias": source["ln_f.bias"]}
    weights |= {"unembed.weight": source["lm_head.weight"]}
    for i in range(3):
        for end in ("weight", "bias"):

            def read(name, i=i, end=end):
                found = source[f"h.{i}.{name}.{end}"]
                return found.mT if end == "weight" and "c_" in name else found

            there = {
                name: read(name)
                for name in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            }
            query, key, value = there["attn.c_attn"].chunk(3)
            here = {
                "attention_norm": there["ln_1"],
                "attention.query": query,
                "attention.key": key,
                "attention.value": value,
                "attention.project": there["attn.c_proj"],
                "mlp_norm": there["ln_2"],
                "mlp.up": there["mlp.c_fc"],
                "mlp.project": there["mlp.c_proj"],
            }
            weights |= {f"blocks.{i}.{name}.{end}": x for name, x in here.items()}
    ours = (
        GPT(ModelConfig(n_layer=3, n_head=2, d_model=12, context_length=9), 13, attend)
        .to(dtype)
        .eval()
    )
    ours.load_state_dict(weights)
    tokens = torch.randint(13, (2, 9))
    assert ours(tokens).std() > 0.1
    assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=atol)


LLAMA = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.project": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.project": "mlp.down_proj",
}


@pytest.mark.slow
@TWINS
@pytest.mark.parametrize("case", ["plain", "bias", "tied", "qk_norm"])
def test_logits_are_llama(attend, case):
    """Rotary, RMSNorm and SwiGLU; with QK-norm it is Qwen3. transformers computes angles in
    float32, and so do we: the rest is float64.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = ModelConfig(
        n_layer=2,
        n_head=3,
        d_model=12,
        context_length=9,
        positions="rotary",
        norm="rmsnorm",
        mlp="swiglu",
        bias=case == "bias",
        tie_embeddings=case == "tied",
        qk_norm=case == "qk_norm",
    )
    shape = {
        "vocab_size": 13,
        "hidden_size": 12,
        "intermediate_size": config.d_mlp,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "attention_bias": config.bias,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if case == "qk_norm":
        theirs = Qwen3ForCausalLM(Qwen3Config(**shape))
    else:
        theirs = LlamaForCausalLM(LlamaConfig(**shape, mlp_bias=config.bias))
    source = {
        name.removeprefix("model."): x
        for name, x in scattered(theirs.double()).state_dict().items()
    }
    ours = GPT(config, 13, attend).double().eval()
    outer = {
        "embed.weight": "embed_tokens.weight",
        "norm.weight": "norm.weight",
        "unembed.weight": "lm_head.weight",
    }
    weights = {name: source[there] for name, there in outer.items()}
    for name in ours.state_dict().keys() - weights.keys():
        _, layer, part = name.split(".", 2)
        stem, end = part.rsplit(".", 1)
        weights[name] = source[f"layers.{layer}.{LLAMA[stem]}.{end}"]
    assert len(weights) == len(source)
    ours.load_state_dict(weights)
    tokens = torch.randint(13, (2, 9))
    assert ours(tokens).std() > 0.1
    assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-6)


# --- parameters ---


@TWINS
@pytest.mark.parametrize("options", [{}, {"window": 2}, MODERN], ids=["plain", "window", "modern"])
def test_grouped_queries_share_keys_and_values(attend, options):
    """As if each head had its own, with the same weights; with a cache, which is smaller, too."""
    shape = {"n_head": 6, "d_model": 24, "d_ff": 11, **options}
    grouped = make_model(attend=attend, seed=0, n_kv_head=2, **shape).double().eval()
    full = make_model(attend=attend, **shape).double().eval()
    weights = grouped.state_dict()
    for name, tensor in weights.items():
        if ".key." in name or ".value." in name:
            weights[name] = tensor.unflatten(0, (2, 4)).repeat_interleave(3, 0).flatten(0, 1)
    full.load_state_dict(weights)
    tokens = torch.arange(14).reshape(2, 7) % 11
    with torch.no_grad():
        expected = full(tokens)
        assert_close(grouped(tokens), expected, rtol=0, atol=1e-12)
        mask = grouped.mask([7, 4])
        assert_close(grouped(tokens, mask)[1, :4], expected[1, :4], rtol=0, atol=1e-12)
        cache = KVCache(2, 8)
        steps = [grouped(tokens[:, t : t + 1], cache=cache) for t in range(7)]
        assert_close(torch.cat(steps, 1), expected, rtol=0, atol=1e-12)
    assert cache.layers[0][0].shape == (2, 2, 8, 4)


def test_rope_base_by_hand():
    """The slowest pair of four numbers turns by pos / base^(1/2)."""
    config = ModelConfig(n_head=1, d_model=4, positions="rotary", rope_base=400.0)
    cos, sin = GPT(config, 3).positions.rotation(torch.tensor([[0, 10]]))
    assert_close(sin[0, 0], torch.tensor([[0.0, 0.0], [10.0, 0.5]]).sin(), rtol=0, atol=1e-6)
    assert_close(cos[0, 0], torch.tensor([[0.0, 0.0], [10.0, 0.5]]).cos(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norm_eps_is_that_of_every_norm(norm):
    model = make_model(norm=norm, qk_norm=True, norm_eps=1e-3)
    found = [m.eps for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]
    assert found == [1e-3] * (2 * (2 + 2) + 1)


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "separate"])
@KINDS
def test_number_of_parameters(positions, tie_embeddings):
    v, c, d, k, n = 13, 9, 12, 4, 3
    for norm, mlp, qk_norm, bias in product(
        ("layernorm", "rmsnorm"), ("gelu", "relu2", "swiglu"), (True, False), (True, False)
    ):
        config = ModelConfig(
            n_layer=n,
            n_head=3,
            d_model=d,
            context_length=c,
            positions=positions,
            norm=norm,
            mlp=mlp,
            qk_norm=qk_norm,
            tie_embeddings=tie_embeddings,
            bias=bias,
        )
        attention = 4 * d * d + (4 * d if bias else 0) + (2 * k if qk_norm else 0)
        feed = (
            (3 * d * 32 + (2 * 32 + d) * bias)
            if mlp == "swiglu"
            else (8 * d * d + (4 * d + d) * bias)
        )
        scale = 2 * d if norm == "layernorm" and bias else d
        expected = v * d * (1 if tie_embeddings else 2) + (c * d if positions == "learned" else 0)
        expected += n * (attention + feed + 2 * scale) + scale
        with torch.device("meta"):
            model = GPT(config, v)
        assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_gpt2_has_124_million():
    with torch.device("meta"):
        model = GPT(ModelConfig(), 50257)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


@pytest.mark.parametrize(
    "options",
    [{}, MODERN, {"positions": "sinusoidal", "window": 4}],
    ids=["gpt2", "modern", "window"],
)
def test_nothing_but_parameters_is_saved(tiny, options):
    """No buffer, so no mask; and of the parameters the learned positions alone grow with the
    context, in proportion.
    """
    short, long = (tiny(**({"context_length": length} | options)) for length in (8, 4096))
    short(torch.randint(11, (1, 8)))
    assert not list(short.buffers())
    assert short.state_dict().keys() == {
        name for name, _ in short.named_parameters(remove_duplicate=False)
    }
    after = long.state_dict()
    grown = {name for name, x in short.state_dict().items() if x.shape != after[name].shape}
    assert grown == ({"positions.table.weight"} if "positions" not in options else set())


def test_tied_embeddings_are_one():
    for tie in (True, False):
        model = GPT(
            ModelConfig(n_layer=1, n_head=1, d_model=4, context_length=4, tie_embeddings=tie), 5
        )
        assert (model.unembed.weight is model.embed.weight) == tie
        assert model.unembed.bias is None


# --- initialisation ---


def test_initial_weights():
    """Normal, standard deviation 0.02, and 0.02 / sqrt(2 n_layer) where a matrix writes to the
    stream; of n entries, the mean has a standard deviation of sigma / sqrt(n) and the measured
    deviation one of sigma / sqrt(2 n): five of either are allowed.
    """
    for options in ({}, MODERN):
        model = GPT(ModelConfig(n_layer=3, n_head=2, d_model=64, context_length=64, **options), 70)
        for name, x in model.named_parameters():
            if name.endswith("bias"):
                assert not x.any()
            elif "norm" in name:
                assert (x == 1).all()
            else:
                sigma = (
                    0.02 / math.sqrt(6)
                    if name.endswith(("attention.project.weight", "mlp.project.weight"))
                    else 0.02
                )
                assert abs(x.mean()) < 5 * sigma / math.sqrt(x.numel())
                assert abs(x.std() / sigma - 1) < 5 / math.sqrt(2 * x.numel())
                assert x.abs().max() > 3 * sigma  # a uniform distribution ends at 1.7


def test_zero_init(tiny):
    """What writes to the stream starts at zero, so that every block is the identity; all else
    starts as without.
    """
    plain = make_model(seed=0, d_model=8)
    model = make_model(seed=0, d_model=8, zero_init=True)
    for (name, x), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert not x.any() if "project" in name else torch.equal(x, other)
    tokens = torch.randint(11, (2, 8))
    stream = model.embed(tokens) + model.positions.table(torch.arange(8))
    assert torch.equal(model.features(tokens), model.norm(stream))


@pytest.mark.slow
@torch.no_grad()
@KINDS
@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": False}, {"norm": "rmsnorm", "mlp": "relu2", "qk_norm": True}]
)
def test_loss_at_step_0(positions, options):
    """Logits of a normed stream have variance d_model * 0.02^2, and E ln sum exp of V such is ln V
    + half the variance.
    """
    config = ModelConfig(
        n_layer=6, n_head=6, d_model=384, context_length=64, positions=positions, **options
    )
    tokens, targets = torch.randint(65, (2, 16, 64))
    loss = F.cross_entropy(GPT(config, 65).eval()(tokens).flatten(0, 1), targets.flatten()).item()
    assert abs(loss / (math.log(65) + 384 * 0.02**2 / 2) - 1) < 0.01


@pytest.mark.slow
@TWINS
@pytest.mark.parametrize(
    "options",
    [{}, MODERN, {"positions": "sinusoidal", "mlp": "relu2"}],
    ids=["gpt2", "modern", "relu2"],
)
def test_one_batch_overfits(attend, options, device):
    """Random tokens, so that nothing but memory helps: the loss starts at ln 20 = 3.0."""
    model = GPT(
        ModelConfig(n_layer=2, n_head=2, d_model=32, context_length=16, **options), 20, attend
    ).to(device)
    tokens = torch.randint(20, (4, 17), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


# --- dropout ---


def test_dropout_in_training_alone(tiny):
    model, tokens = tiny(dropout=0.4), torch.randint(11, (2, 8))
    without = tiny()
    without.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), without(tokens))
    model.train(), without.train()
    assert torch.equal(without(tokens), without(tokens))
    assert not torch.equal(model(tokens), model(tokens))
    torch.manual_seed(1)
    once = model(tokens)
    torch.manual_seed(1)
    assert torch.equal(model(tokens), once)


def test_dropout_where_gpt2_has_it(tiny):
    """On the embeddings, the weights of attention, and what attention and MLP give to the stream;
    nowhere else. A share is off by no more than five standard deviations of a binomial.
    """
    shares, p = [], 0.4

    def attend(query, key, value, mask, dropout):
        shares.append(dropout)
        return explicit_attention(query, key, value, mask, 0.0)

    model = tiny(attend, dropout=p, n_layer=1, d_model=64)
    dropped = {}

    def note(name):
        return lambda module, arguments, output: dropped.update(
            {name: (output == 0).double().mean().item()}
        )

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    model.train()(torch.randint(11, (4, 8)))
    model.eval()(torch.randint(11, (4, 8)))
    assert shares == [p, 0.0]
    assert not any(dropped.values())
    dropped.clear()
    model.train()(torch.randint(11, (4, 8)))
    del dropped["blocks.0"]  # both drop an entry now and then
    found = {name for name, share in dropped.items() if share}
    assert found == {"dropout", "blocks.0.attention", "blocks.0.mlp"}
    assert all(abs(dropped[name] - p) < 5 * math.sqrt(p * (1 - p) / (4 * 8 * 64)) for name in found)


# --- the cache ---


@torch.no_grad()
@KINDS
@TWINS
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"qk_norm": True}], ids=["whole", "window", "qk_norm"]
)
def test_cached_logits_are_uncached(tiny, positions, attend, options, device):
    model, tokens = (
        tiny(attend, positions=positions, device=device, **options),
        torch.randint(11, (2, 8), device=device),
    )
    expected = model(tokens)
    for cuts in ([0, 8], [0, *range(1, 9)], [0, 5, 6, 7, 8], [0, 3, 7, 8]):
        cache = KVCache(2, 8)
        pieces = [model(tokens[:, start:end], cache=cache) for start, end in pairwise(cuts)]
        near(torch.cat(pieces, 1), expected, atol=1e-12)
        assert cache.lengths == [8, 8]
        assert len(cache.layers) == 2


@torch.no_grad()
@KINDS
@TWINS
@WINDOWS
def test_cached_rows_of_unequal_length(tiny, positions, attend, window, device):
    """Rows of 5, 1 and 3 tokens are read at once, then each is continued one by one: all logits are
    those of the row alone.
    """
    model = tiny(attend, positions=positions, window=window, device=device)
    lengths, cache = [5, 1, 3], KVCache(3, 8)
    tokens = torch.randint(11, (3, 8), device=device)
    expected = [model(tokens[row : row + 1])[0] for row in range(3)]
    logits = model(tokens[:, :5], model.mask(torch.tensor(lengths, device=device)), cache)
    for row, length in enumerate(lengths):
        near(logits[row, :length], expected[row][:length], atol=1e-12)
    for _ in range(3):
        assert cache.lengths == lengths
        new = torch.stack([tokens[row, length : length + 1] for row, length in enumerate(lengths)])
        lengths = [length + 1 for length in lengths]
        logits = model(new, model.mask(torch.tensor(lengths, device=device)), cache)
        for row, length in enumerate(lengths):
            near(logits[row, 0], expected[row][length - 1], atol=1e-12)


@torch.no_grad()
@KINDS
def test_cached_chunks_of_unequal_length(tiny, positions):
    """Rows hold 3 tokens and get 4 and 2 more, padded to 4. The logits are right, or the call is
    refused.
    """
    model, cache = tiny(positions=positions), KVCache(2, 8)
    tokens = torch.randint(11, (2, 7))
    model(tokens[:, :3], cache=cache)
    try:
        logits = model(tokens[:, 3:], model.mask(torch.tensor([7, 5])), cache)
    except ValueError:
        return
    expected = model(tokens)
    near(logits[0], expected[0, 3:], atol=1e-12)
    near(logits[1, :2], expected[1, 3:5], atol=1e-12)


@torch.no_grad()
def test_ragged_cache_without_lengths(tiny):
    """Where rows end at different places a mask that does not say where is not enough: the logits
    are right all the same, or it is refused.
    """
    model, cache = tiny(), KVCache(2, 8)
    tokens = torch.randint(11, (2, 6))
    model(tokens[:, :5], model.mask(torch.tensor([2, 5])), cache)
    try:
        logits = model(torch.stack((tokens[0, 2:3], tokens[1, 5:])), cache=cache)
    except ValueError:
        return
    near(logits[0, 0], model(tokens[:1, :3])[0, 2], atol=1e-12)


@torch.no_grad()
def test_a_cache_that_was_full_goes_on_as_before(tiny):
    model, cache = tiny(bigrams=121), KVCache(1, 4)
    model(torch.tensor([[1, 2, 3]]), cache=cache)
    with pytest.raises(ValueError, match="do not fit"):
        model(torch.tensor([[4, 5]]), cache=cache)
    near(model(torch.tensor([[6]]), cache=cache)[0, -1], model(torch.tensor([[1, 2, 3, 6]]))[0, -1])


@pytest.mark.parametrize("bigrams", [0, 7])
def test_a_replaced_row_goes_on_as_its_own(tiny, bigrams):
    model, cache, other = tiny(bigrams=bigrams), KVCache(2, 8), KVCache(1, 8)
    model(torch.tensor([[1, 2], [3, 4]]), cache=cache)
    model(torch.tensor([[5, 6, 7]]), cache=other)
    cache.replace([1], other)
    after = model(torch.tensor([[8], [9]]), cache=cache)[:, -1]
    near(after[0], model(torch.tensor([[1, 2, 8]]))[0, -1])
    near(after[1], model(torch.tensor([[5, 6, 7, 9]]))[0, -1])


@torch.no_grad()
def test_cache_is_no_wider_than_the_values(tiny, device):
    """Under autocast it holds bfloat16."""
    cache = KVCache(1, 8)
    model = tiny(positions="rotary", qk_norm=True, device=device).float()
    with torch.autocast(device.type, torch.bfloat16):
        model(torch.randint(11, (1, 4), device=device), cache=cache)
    assert {store.dtype for layer in cache.layers for store in layer} == {torch.bfloat16}
