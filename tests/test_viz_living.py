"""viz.living: in how many bits a model goes into the page, what they cost, when it stays out."""

import base64
import dataclasses
import json
from typing import get_args

import numpy as np
import pytest
import torch
from helpers import make_model, write_byte_corpus

from data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from model.config import ModelConfig
from viz.living import (
    BITS,
    KNOWN,
    OTHERS,
    as_held,
    example_texts,
    matrices_and_vectors,
    pack,
    put_into_page,
    what_bits_cost,
)

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def unpacked(tensors, block):
    """What `pack` wrote, read bit by bit."""
    weights = {}
    for told in tensors:
        rows, size, bits = told["shape"][0], int(np.prod(told["shape"])), told["bits"]
        raw = block[told["offset"] :]
        if bits == 32:
            weights[told["name"]] = np.frombuffer(raw, "<f4", size)
            continue
        scales = np.frombuffer(raw, "<f4", rows)
        number = int.from_bytes(raw[4 * rows : 4 * rows + (bits * size + 7) // 8], "little")
        whole = [(number >> (bits * i)) % 2**bits for i in range(size)]
        whole = np.array([n - 2**bits if n >= 2 ** (bits - 1) else n for n in whole], np.float32)
        weights[told["name"]] = scales[:, None] * whole.reshape(told["shape"])
    return weights


@pytest.mark.parametrize("bits", BITS)
def test_what_is_packed_is_what_is_measured(bits):
    """Also a row of zeros, and the extremes of a row, which have the largest whole number."""
    model = make_model(seed=0, bigrams=5, tie_embeddings=False)  # its bigrams are zeros
    tensors, block = pack(matrices_and_vectors(model), bits)
    assert all(told["offset"] % 4 == 0 for told in tensors)
    held = as_held(model, bits).state_dict()
    found = unpacked(tensors, block)
    assert found.keys() == held.keys()
    for name, weight in model.state_dict().items():
        assert np.array_equal(found[name], held[name].numpy())
        if weight.ndim == 2:
            unit = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            assert ((held[name] - weight).abs() <= 0.501 * unit).all()
            assert torch.allclose(held[name].abs().amax(1), weight.abs().amax(1))
        else:
            assert torch.equal(held[name], weight)


def test_a_tied_matrix_travels_once():
    tensors, _ = pack(matrices_and_vectors(make_model()), 8)
    names = [told["name"] for told in tensors]
    assert "embed.weight" in names
    assert "unembed.weight" not in names


def test_the_fewest_bits_that_are_good_else_the_most_that_fit(monkeypatch):
    model, tokenizer = make_model(seed=0, vocab_size=256).eval(), ByteTokenizer()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)
    costs = {bits: what_bits_cost(model, as_held(model, bits), IDS) for bits in BITS}
    assert sorted(costs.values(), key=lambda cost: -cost["logits"]) == list(costs.values())
    monkeypatch.setattr("viz.living.WORST", 1)
    for wanted in BITS:
        monkeypatch.setattr("viz.living.GOOD", costs[wanted]["probability"])
        living = put_into_page(model, tokenizer, IDS, 10**6)
        assert living.told["bits"] == wanted
        assert living.told["cost"] == costs[wanted]
        moved = float(living.fact.split()[-2])
        assert 0 <= moved - 100 * costs[wanted]["probability"] < 0.001
    monkeypatch.setattr("viz.living.GOOD", 0)
    size = len(base64.b64encode(pack(matrices_and_vectors(model), 10)[1]))
    limit = size + 400 * len(IDS) + 50_000 + 500
    living = put_into_page(model, tokenizer, IDS, limit, beside=50_000)
    assert living.told["bits"] == 10
    written = len(base64.b64encode(living.block)) + len(json.dumps(living.told))
    assert living.size == pytest.approx(written, abs=2)
    monkeypatch.setattr("viz.living.WORST", 0)
    with pytest.raises(ValueError, match=r"10 bits a weight, the most that .* change the loss by"):
        put_into_page(model, tokenizer, IDS, limit, 50_000)
    with pytest.raises(ValueError, match=r"in 8 bits .* 0\.3 MB, 0\.2 MB more than --max-mb 0\.1"):
        put_into_page(model, tokenizer, IDS, 10**5, 250_000)


def test_one_token_has_no_loss_to_change():
    model = make_model().eval()
    assert what_bits_cost(model, as_held(model, 8), [1])["loss"] == 0


def test_a_tokenizer_that_the_page_does_not_know_is_named():
    tokenizer = BPETokenizer("bpe", r"\w+|\W+", [bytes([i]) for i in range(256)])
    with pytest.raises(ValueError, match="this tokenizer's pattern"):
        put_into_page(make_model(vocab_size=257), tokenizer, IDS, 10**7)


def test_examples_are_passages_of_the_validation_split(tmp_path):
    lines = [f"A:\nThis is line {i}.\n\n" for i in range(200)]
    folder = write_byte_corpus(tmp_path / "corpus", "".join(lines))
    examples = example_texts(folder, ByteTokenizer(), 40)
    assert len(examples) == 4
    assert all(example.startswith("A:\nThis is line") for example in examples)
    assert all(len(example) == 40 for example in examples[:3])
    assert example_texts(folder, CharTokenizer("abc"), 40) == []
    assert example_texts(tmp_path / "nowhere", ByteTokenizer(), 40) == []
    (folder / "dataset.json").write_text(json.dumps({"format": 1}))
    assert example_texts(folder, ByteTokenizer(), 40) == []


def test_the_page_knows_every_choice_and_field_of_a_model():
    """What is added to ModelConfig is to be computed in viz/web/ too, or the page refuses it."""
    choices = {f.name: get_args(f.type) for f in dataclasses.fields(ModelConfig)}
    assert {name: found for name, found in choices.items() if found} == KNOWN
    assert set(choices) == {*KNOWN, *OTHERS}


def test_what_a_fork_added_is_not_shown_as_something_else():
    """A choice or a field that the page's script has never heard of, in words."""

    @dataclasses.dataclass(frozen=True)
    class Forked(ModelConfig):
        gate: bool = False

    model, tokenizer = make_model(vocab_size=256), ByteTokenizer()
    usual = dataclasses.asdict(model.config)
    model.config = Forked(**usual)
    assert put_into_page(model, tokenizer, IDS, 10**7)
    model.config = Forked(**usual, gate=True)
    with pytest.raises(ValueError, match=r"know gate$"):
        put_into_page(model, tokenizer, IDS, 10**7)
    model.config = Forked(**usual)
    object.__setattr__(model.config, "norm", "scalenorm")
    with pytest.raises(ValueError, match=r"know norm scalenorm$"):
        put_into_page(model, tokenizer, IDS, 10**7)
