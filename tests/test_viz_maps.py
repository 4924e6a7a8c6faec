"""viz.maps: labels, words, and maps that say what the model did."""

import numpy as np
import pytest
import torch

from data.tokenizer import ByteTokenizer
from model.attention import Mask
from model.config import ModelConfig
from model.gpt import GPT
from viz.maps import AttentionMaps, read_text
from viz.record import record_attention

NASTY = (
    "</script><img src=x onerror=alert(1)> a\tb\x07\x1b\r\n\u05e9\u05dc \U0001f600 "
    "\u202eabc $x$ &amp; \u0301"
)


def tiny_model(n_layer=2, n_head=3, seed=0, **fields):
    """A small GPT over bytes, with weights large enough that its heads have opinions."""
    torch.manual_seed(seed)
    config = ModelConfig(
        n_layer=n_layer, n_head=n_head, d_model=8 * n_head, **{"context_length": 128} | fields
    )
    model = GPT(config, 256).eval()
    for parameter in model.parameters():
        parameter.data.mul_(6)
    return model


def tiny_maps(text=NASTY, **fields):
    return read_text(tiny_model(**fields), list(text.encode()), ByteTokenizer().decode_bytes)


def test_maps_are_the_models_own_numbers():
    model = tiny_model(window=7, positions="rotary", qk_norm=True)
    tokens = torch.randint(256, (1, 20))
    with record_attention(model) as record:
        logits = model(tokens)
    maps = AttentionMaps.from_record(record, tokens, logits=logits, decode=bytes)
    assert maps.q.shape == (2, 3, 20, 8)
    for i, layer in enumerate(record):
        assert np.array_equal(maps.weights(i), layer.weights()[0].numpy())
        assert np.array_equal(maps.scores(i), layer.scores()[0].numpy())
    assert np.array_equal(maps.allowed(), Mask(window=7).allowed(20, 20)[0, 0].numpy())
    probabilities = logits[0].softmax(-1)
    for t in range(20):
        shown = [(piece[0], p) for piece, p in maps.predictions[t]]
        assert [i for i, _ in shown] == probabilities[t].argsort(descending=True)[:5].tolist()
        np.testing.assert_allclose(
            [p for _, p in shown],
            probabilities[t].sort(descending=True).values[:5].detach(),
            rtol=1e-5,
        )
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="none")
    np.testing.assert_allclose(maps.losses, expected.detach(), rtol=1e-5)


def test_a_padded_row_is_read_without_its_padding():
    model = tiny_model()
    tokens = torch.randint(256, (2, 12))
    with record_attention(model) as record:
        model(tokens, model.mask(torch.tensor([12, 7])))
    maps = AttentionMaps.from_record(record, tokens, row=1)
    assert maps.tokens == tokens[1, :7].tolist()
    assert maps.labels == [str(i) for i in maps.tokens]
    alone = read_text(model, maps.tokens, bytes)
    np.testing.assert_allclose(maps.weights(1), alone.weights(1), atol=1e-5)


def test_a_record_that_does_not_fit_is_refused():
    model = tiny_model()
    with record_attention(model) as record:
        model(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(
        ValueError, match="5 tokens were recorded; given were 4 tokens and 4 labels"
    ):
        AttentionMaps.from_record(record, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="5 tokens and 2 labels"):
        AttentionMaps.from_record(record, [1, 2, 3, 4, 5], labels=["a", "b"])
    with pytest.raises(ValueError, match="one whole forward"):
        AttentionMaps.from_record([], [1])


def test_select_by_number():
    maps = tiny_maps("abc")
    part = maps.select([1], [2, 0])
    assert (part.layers, part.heads, part.whole) == ([1], [2, 0], False)
    assert np.array_equal(part.weights(1), maps.weights(1)[[2, 0]])
    assert maps.select().whole
    with pytest.raises(
        ValueError, match="there is no head 3; heads are counted from 0 and end at 2"
    ):
        maps.select(heads=[3])


def test_bertviz_form():
    attention, tokens = tiny_maps("hi you").bertviz()
    assert [tuple(layer.shape) for layer in attention] == [(1, 3, 6, 6)] * 2
    assert tokens == ["h", "i", "␣", "y", "o", "u"]
    torch.testing.assert_close(attention[0].sum(-1), torch.ones(1, 3, 6))


def test_logits_that_are_no_numbers():
    """Refused where that is asked for: a run that has lost its way is looked at too."""
    model = tiny_model()
    with torch.no_grad():
        model.unembed.weight[3] = float("inf")
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        read_text(model, [1, 2], bytes, must_be_finite=True)
    assert read_text(model, [1, 2], bytes).tokens == [1, 2]
