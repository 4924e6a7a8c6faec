"""Weights, shapes and tokenizers in and out: against transformers and tokenizers, with weights
drawn here, and against files that were made to harm.
"""

import json
import random
import re
import struct
import subprocess
import sys

import pytest
import torch
from helpers import MODERN, SHARED, command, make_config, make_model
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from configs import Config
from data.patterns import GPT2
from data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, load_gpt2, train_bpe
from data.tokenizer_in import read_tokenizer
from data.tokenizer_out import all_merges, tokenizer_json
from errors import UserError
from interop import gpt2, llama, program
from interop.giving import choose_format, give_out
from interop.keys import Keys
from interop.taking import take_in
from interop.tracing import write_program
from model.cache import KVCache
from model.config import ModelConfig
from model.generate import generate
from model.sampling import Sampling
from ops.checkpoint import Checkpoint, load, open_run, save

LLAMA = {
    **{"positions": "rotary", "norm": "rmsnorm", "mlp": "swiglu", "bias": False},
    **{"n_head": 6, "n_kv_head": 2, "d_model": 24, "d_ff": 37, "rope_base": 500_000.0},
    **{"norm_eps": 1e-6, "tie_embeddings": False},
}
"""Llama's shape, grouped queries, an odd width of the MLP."""
SHAPES = {
    "gpt2": {},
    "gpt2 untied": {"tie_embeddings": False, "mlp": "gelu_exact", "d_ff": 11, "norm_eps": 1e-3},
    "gpt2 without biases": {"bias": False, "mlp": "relu2", "dropout": 0.25},
    "llama": LLAMA,
    "llama tied": {**LLAMA, "tie_embeddings": True, "n_kv_head": 0, "d_ff": 0, "bias": True},
}


def write_run(folder, tokenizer=None, **options):
    """A run folder with weights drawn here, every vector among them; the checkpoint."""
    tokenizer = tokenizer or ByteTokenizer()
    model = make_model(vocab_size=tokenizer.vocab_size, seed=1, **{"context_length": 32, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    plain = make_config("", "").to_dict() | {"model": vars(model.config)}
    config = Config.from_dict(plain).to_dict()
    checkpoint = Checkpoint(3, model.state_dict(), config, tokenizer.spec(), "", counters={})
    folder.mkdir()
    save(checkpoint, folder / "checkpoint.pt")
    return checkpoint


@pytest.mark.parametrize("name", SHAPES)
def test_out_and_in_again_is_the_same(name, tmp_path):
    """Every weight to the last bit, the shape, and the tokenizer."""
    before = write_run(tmp_path / "run", **SHAPES[name])
    give_out(str(tmp_path / "run"), tmp_path / "out")
    take_in(str(tmp_path / "out"), tmp_path / "again")
    after = load(tmp_path / "again" / "checkpoint.pt")
    assert before.model.keys() == after.model.keys()
    assert all(torch.equal(before.model[key], after.model[key]) for key in before.model)
    assert after.tokenizer == before.tokenizer
    config = dict(before.config["model"])
    if config["positions"] == "rotary":
        config["dropout"] = 0.0
    assert after.config["model"] == config
    assert open_run(tmp_path / "again")[2].step == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"qk_norm": True}, "--qk-norm"),
        ({"bigrams": 5}, "--bigrams 5"),
        ({"window": 3}, "--window 3"),
        ({"positions": "sinusoidal"}, "GPT-2's format has no --positions sinusoidal; Llama's"),
        ({"positions": "none"}, "--positions none"),
        ({"norm": "rmsnorm"}, "GPT-2's format has no --norm rmsnorm"),
        ({"mlp": "swiglu"}, "GPT-2's format has no --mlp swiglu"),
        ({"n_kv_head": 1}, "--n-kv-head 1"),
        ({"positions": "rotary", "norm": "rmsnorm"}, "Llama's format has no --mlp gelu"),
    ],
)
def test_what_no_format_has_is_named(options, words):
    shape = {"n_head": 2, "d_model": 16, "context_length": 8}
    with pytest.raises(UserError, match=re.escape(words)):
        choose_format(ModelConfig(**shape | options), "runs/a")
    assert choose_format(ModelConfig(**shape, window=8), "runs/a") is gpt2


GPT2_CONFIG = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32}
LLAMA_CONFIG = {
    **{"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6},
    "intermediate_size": 37,
}


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (GPT2_CONFIG | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        (GPT2_CONFIG | {"add_cross_attention": True}, "add_cross_attention is 'True'"),
        (GPT2_CONFIG | {"activation_function": "relu"}, "activation_function is 'relu'"),
        (GPT2_CONFIG | {"n_ctx": 16}, "n_ctx is '16'"),
        (GPT2_CONFIG | {"n_embd": "48"}, "n_embd is '48'; it must be a whole number"),
        (GPT2_CONFIG | {"n_embd": True}, "n_embd"),
        (GPT2_CONFIG | {"n_layer": -1}, "n_layer is '-1'"),
        (GPT2_CONFIG | {"n_head": 5}, "n_head 5 equal heads"),
        (GPT2_CONFIG | {"alibi": True}, "alibi is 'True'; this program doesn't know that key"),
        (GPT2_CONFIG | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA_CONFIG | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
        (LLAMA_CONFIG | {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        (LLAMA_CONFIG | {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
        (LLAMA_CONFIG | {"head_dim": 16}, "head_dim is '16'; heads here share the width 48"),
        (LLAMA_CONFIG | {"num_key_value_heads": 4}, "n_kv_head 4 does not divide n_head 6"),
        (LLAMA_CONFIG | {"mlp_bias": True}, "mlp_bias"),
        (LLAMA_CONFIG | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA_CONFIG | {"sliding_window": 16}, "sliding_window is '16'"),
        ({"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6}, "intermediate_size"),
    ],
)
def test_a_key_that_matters_is_refused_by_name(plain, words):
    keys = Keys(dict(plain), "config.json")
    kind = keys.take("model_type")

    def read():
        (gpt2 if kind == "gpt2" else llama).read_config(keys)
        keys.finish()

    with pytest.raises((UserError, ValueError), match=re.escape(words)):
        read()


def test_known_keys_are_read():
    harmless = {"use_cache": True, "rope_scaling": {"type": "default"}, "transformers_version": "4"}
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    keys = Keys(LLAMA_CONFIG | harmless | newer, "config.json")
    keys.take("model_type")
    config, notes = llama.read_config(keys)
    keys.finish()
    assert (config.rope_base, config.d_ff, config.norm_eps, notes) == (5e5, 37, 1e-6, [])


def exported(tmp_path, **options):
    write_run(tmp_path / "run", **options)
    give_out(str(tmp_path / "run"), tmp_path / "out")
    return tmp_path / "out"


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def huge_header(folder):
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate((1 << 30) + 8)


def header_beyond_the_end(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")


def nan(folder):
    change(folder, lambda weights: weights["transformer.ln_f.weight"].fill_(float("nan")))


def other_shape(folder):
    change(folder, lambda weights: weights.update({"transformer.wpe.weight": torch.zeros(31, 16)}))


def missing(folder):
    change(folder, lambda weights: weights.pop("transformer.h.1.mlp.c_fc.bias"))


def no_embeddings(folder):
    change(folder, lambda weights: weights.pop("transformer.wte.weight"))


def flat_embeddings(folder):
    change(folder, lambda weights: weights.update({"transformer.wte.weight": torch.tensor(1.0)}))


def too_many(folder):
    change(folder, lambda weights: weights.update({"score.weight": torch.zeros(2, 16)}))


def whole_numbers(folder):
    change(folder, lambda weights: weights.update({"transformer.ln_f.bias": torch.zeros(16).int()}))


def change(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def path_upwards(folder):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"transformer.wte.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def absurd_size(folder):
    edit_json(folder / "config.json", n_inner=2**31 - 1, n_layer=2**30)


def absurd_width(folder):
    edit_json(folder / "config.json", n_inner=2**31 - 1)


def another_model(folder):
    edit_json(folder / "config.json", model_type="bert")


def other_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"word_index": {"a": 1}}')


def unigrams_damaged(folder):
    edit_json(folder / "tokenizer.json", model={"type": "Unigram", "vocab": 3})


def larger_tokenizer(folder):
    tokenizer = CharTokenizer("".join(map(chr, range(33, 400))))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(tokenizer)))


def no_json(folder):
    (folder / "config.json").write_bytes(b"\x00\xff")


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (truncate, "no whole safetensors file"),
        (huge_header, "no whole safetensors file"),
        (header_beyond_the_end, "no whole safetensors file"),
        (nan, "ln_f.weight: 16 of its 16 numbers are NaN"),
        (other_shape, "wpe.weight is 31 x 16, by the configuration it must be 32 x 16"),
        (missing, "h.1.mlp.c_fc.bias is missing"),
        (no_embeddings, "wte.weight is missing among the weights"),
        (flat_embeddings, "wte.weight is no table of embeddings, its shape is ()"),
        (too_many, "there is no place for 'score.weight'"),
        (whole_numbers, "numbers of type I32"),
        (path_upwards, "'../model.safetensors', which is no file of its own folder"),
        (absurd_size, "names 1,073,741,824 layers"),
        (absurd_width, "c_fc.weight is 16 x 64, by the configuration it must be 16 x 2,147,"),
        (another_model, "model_type is 'bert'; models here are of the kinds gpt2, llama"),
        (other_tokenizer, "tokenizer.json is no tokenizer"),
        (unigrams_damaged, "tokenizer.json"),
        (larger_tokenizer, "256 embeddings, its tokenizer (char) 367 ids"),
        (no_json, "is no JSON"),
    ],
)
def test_a_hostile_folder_is_refused_in_a_line(harm, words, tmp_path):
    folder = exported(tmp_path)
    harm(folder)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        take_in(str(folder), tmp_path / "in")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*in*"))


def test_a_run_with_nan_is_not_given_out(tmp_path):
    checkpoint = write_run(tmp_path / "run")
    checkpoint.model["norm.bias"][0] = float("inf")
    save(checkpoint, tmp_path / "run" / "checkpoint.pt")
    with pytest.raises(UserError, match=r"ln_f\.bias has NaN or infinity"):
        give_out(str(tmp_path / "run"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_nanogpt_comes_in(tmp_path):
    """Compiled, of an older torch with its mask, padded to 70 rows, tied by being equal."""
    symbols = "".join(map(chr, range(50, 115)))
    tokenizer = CharTokenizer(symbols)
    model = make_model(vocab_size=70, seed=2, mlp="gelu_exact", bias=False, context_length=32)
    ours = model.state_dict()
    state = {
        "_orig_mod.transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32),
        "_orig_mod.lm_head.weight": ours["embed.weight"],
    }
    parts = {}
    for name, place in gpt2.places(model.config, linear=True).items():
        parts.setdefault(place.name, []).append(ours[name])
    for name, tensors in parts.items():
        state[f"_orig_mod.transformer.{name}"] = torch.cat(tensors)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "vocab_size": 70}
    arguments = shape | {"bias": False, "dropout": 0.0}
    whole = {"model": state, "model_args": arguments, "optimizer": {}, "config": {}}
    whole |= {"iter_num": 500, "best_val_loss": torch.tensor(1.5)}
    torch.save(whole, tmp_path / "ckpt.pt")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(tokenizer)))
    notes = take_in(str(tmp_path / "ckpt.pt"), tmp_path / "run")
    assert "of 70 embeddings the first 65 are taken" in notes[0]
    taken, found, checkpoint = open_run(tmp_path / "run")
    assert (found.spec(), checkpoint.step, checkpoint.best_val_loss) == (tokenizer.spec(), 500, 1.5)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert_close(taken(tokens), model.eval()(tokens)[..., :65], rtol=0, atol=1e-6)
    for changes, words in (
        ({"n_kv": 2}, "n_kv is '2'; nanoGPT has no such argument"),
        ({"n_embd": 18}, "wte.weight is 70 x 16, by the configuration it must be 70 x 18"),
    ):
        torch.save(whole | {"model_args": arguments | changes}, tmp_path / "other.pt")
        with pytest.raises(UserError, match=words):
            take_in(str(tmp_path / "other.pt"), tmp_path / "no", str(tmp_path / "tokenizer.json"))
    torch.save(whole | {"config": open}, tmp_path / "unsafe.pt")
    with pytest.raises(UserError, match="unsafe"):
        take_in(str(tmp_path / "unsafe.pt"), tmp_path / "no")


def test_parts_of_weights_are_found_by_their_index(tmp_path):
    folder = exported(tmp_path, **LLAMA)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    index = {}
    for number, share in enumerate((names[::2], names[1::2])):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name].double() for name in share}, folder / file)
        index |= dict.fromkeys(share, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    take_in(str(folder), tmp_path / "again")
    after = load(tmp_path / "again" / "checkpoint.pt").model
    before = load(tmp_path / "run" / "checkpoint.pt").model
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_name_that_is_no_folder_costs_a_line(tmp_path, monkeypatch):
    import huggingface_hub

    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match=r"huggingface\.co gave no model .*no network"):
        take_in("someone/some-model", tmp_path / "in")
    with pytest.raises(UserError, match=r"there is no \.\./nothing"):
        take_in("../nothing", tmp_path / "in")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_name_is_fetched_through_the_hub(file, tmp_path, monkeypatch):
    """safetensors alone where there are any, else torch's own format."""
    import huggingface_hub

    folder = exported(tmp_path, **LLAMA)
    if file == "pytorch_model.bin":
        torch.save(load_file(folder / "model.safetensors"), folder / file)
        (folder / "model.safetensors").unlink()
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns[-1]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (line,) = take_in("someone/some-model", tmp_path / "in")
    assert "llama's shape" in line
    fallback = [("someone/some-model", "pytorch_model*")] if file == "pytorch_model.bin" else []
    assert asked == [("someone/some-model", "*.safetensors*"), *fallback]
    before, after = (load(tmp_path / name / "checkpoint.pt").model for name in ("run", "in"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"package huggingface_hub: pip install huggingface_hub"):
        take_in("someone/some-model", tmp_path / "other")


def test_a_file_of_weights_is_read_with_the_configuration_beside_it(tmp_path):
    folder = exported(tmp_path)
    file = folder / "weights.safetensors"
    (folder / "model.safetensors").rename(file)
    take_in(str(file), tmp_path / "in")
    before, after = (load(tmp_path / name / "checkpoint.pt").model for name in ("run", "in"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"out holds no config\.json, which says how"):
        take_in(str(file), tmp_path / "other")


# --- tokenizers ---

HOSTILE = [
    *("", "a" * 1000, "\x00", "\r\n\r\n  \t", "<|endoftext|>", "a<|endoftext|>b", "e\u0301\ufeffx"),
    *(
        "👩‍👩‍👧‍👦",
        " " * 50 + "x",
        " " * 50,
        "\n" * 20,
        "don't DON'T I'LL 'S's 'ReRE",
        "１２３٣12345",
    ),
    *("\u2028\u2029\x85\xa0\u3000", "x\u200b\u200dy", "İıſK'ſ 'ſ", "𝒳𝟙", "  \n  a\n\n b", "日本語"),
    *("\u1680\u180e", "ไทย", "\U0010ffff\ue000", "a\u0300" * 50, "ab" * 300, "\r", "\r\r\n", " \r"),
]


def random_texts(n_text):
    draw = random.Random(0)
    ordinary = "  \n\r\t'sStTabcAB1234.,!?\u00a0\u3000\u2028éß''RrEe"
    kinds = (
        lambda: chr(draw.choice((draw.randint(0, 0xD7FF), draw.randint(0xE000, 0x10FFFF)))),
        lambda: draw.choice(ordinary),
        lambda: chr(draw.randint(0, 0x2FFF)),
    )
    texts = []
    for _ in range(n_text):
        letter = draw.choice(kinds)
        texts.append("".join(letter() for _ in range(draw.randint(0, 40))))
    return HOSTILE + texts


def assert_same_ids(tokenizer, texts, path):
    """As `tokenizers` reads the file, and as we read it back."""
    from tokenizers import Tokenizer

    path.write_text(json.dumps(tokenizer_json(tokenizer), ensure_ascii=False), encoding="utf-8")
    theirs = Tokenizer.from_file(str(path))
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert theirs.encode(text).ids == ids, ascii(text)
        assert theirs.decode(ids) == text, ascii(text)
    assert read_tokenizer(path, None).spec() == tokenizer.spec()


def small_bpe():
    tokens = [bytes([i]) for i in range(256)] + [b"ab", b"bc", b"abc", b" a", b"  ", b"\n\n"]
    return BPETokenizer("bpe", GPT2, tokens)


@pytest.mark.parametrize("kind", ["char", "byte", "byte with separator", "small bpe"])
def test_tokenizers_have_the_same_ids(kind, tmp_path):
    texts = random_texts(200)
    tokenizer = {
        "char": lambda: CharTokenizer("".join(sorted(set("".join(texts)))), separator=True),
        "byte": ByteTokenizer,
        "byte with separator": lambda: ByteTokenizer(separator=True),
        "small bpe": small_bpe,
    }[kind]()
    assert_same_ids(tokenizer, texts, tmp_path / "tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_bpes_have_the_same_ids_on_ten_thousand_strings(kind, tmp_path, monkeypatch):
    if kind == "gpt2" and not (SHARED / "tiktoken_cache").is_dir():
        pytest.skip("no ../shared/tiktoken_cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    texts = random_texts(10_000)
    tokenizer = load_gpt2() if kind == "gpt2" else train_bpe(texts[:2000], 2000)
    assert_same_ids(tokenizer, texts, tmp_path / "tokenizer.json")


def test_all_pairs_that_make_a_word_are_merges():
    assert all_merges(["a", "b", "c", "ab", "bc", "abc"]) == [
        *(["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"]),
    ]


def test_another_programs_tokenizer_is_run_as_it_is(tmp_path):
    """A BPE of SentencePiece's kind: spaces spelt, bytes for what it doesn't know."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab"]
    vocabulary = {word: i for i, word in enumerate(words)}
    special = [{"id": i, "content": word, "special": True} for i, word in enumerate(words[:3])]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    parts = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    plain = {
        "version": "1.0",
        "added_tokens": [token | flags for token in special],
        "normalizer": {"type": "Sequence", "normalizers": parts},
        "decoder": None,
        "model": {
            **{"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]], "unk_token": "<unk>"},
            **{"byte_fallback": True, "fuse_unk": True},
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json", end=2)
    assert (tokenizer.kind, tokenizer.separator, tokenizer.vocab_size) == ("tokenizers", 2, 263)
    ids = tokenizer.encode("ab é</s>").tolist()
    assert ids[:2] == [vocabulary["▁"], vocabulary["ab"]]
    assert 2 not in ids  # spelt out, it is text
    assert tokenizer.decode(ids) == " ab é</s>"
    assert tokenizer.byte_lengths()[[2, 3, 262]].tolist() == [0, 1, 2]


# --- against transformers ---


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_transformers_reads_and_continues_as_we_do(name, transformers, tmp_path):
    """Logits in float32, without a cache, with one, padded; 200 tokens drawn greedily; the same
    text from the same prompt.
    """
    options = SHAPES[name] | {"context_length": 256}
    write_run(tmp_path / "run", ByteTokenizer(separator=True), **options)
    give_out(str(tmp_path / "run"), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours, tokenizer, _ = open_run(tmp_path / "run")
    tokens = torch.randint(257, (2, 40))
    lengths = [40, 23]
    attended = torch.arange(40)[None] < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        logits = theirs(tokens).logits
        assert_close(ours(tokens), logits, rtol=0, atol=1e-5)
        cache = KVCache(2, 40)
        steps = [ours(some, cache=cache) for some in tokens.split([30, 1, 9], dim=1)]
        assert_close(torch.cat(steps, 1), logits, rtol=0, atol=1e-5)
        padded = theirs(tokens, attention_mask=attended.long()).logits
        assert_close(
            ours(tokens, ours.mask(lengths))[attended], padded[attended], rtol=0, atol=1e-5
        )
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = "To be, <|endoftext|> ö"
    ids = tokenizer.encode(prompt).tolist()
    assert reader(prompt)["input_ids"] == ids
    drawn = [row for (row,) in generate(ours, [ids], 200, Sampling(temperature=0))]
    greedy = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None}
    found = theirs.generate(torch.tensor([ids]), **greedy)[0].tolist()
    assert found == ids + drawn
    assert reader.decode(found) == tokenizer.decode(ids + drawn)


@pytest.mark.slow
def test_models_of_transformers_come_in(transformers, tmp_path):
    """As transformers itself writes them, in bfloat16 too."""
    small = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
    shape = {"n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
    models = {
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **shape)),
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **small,
                **{"hidden_size": 48, "intermediate_size": 101, "num_hidden_layers": 2},
                **{"num_attention_heads": 6, "num_key_value_heads": 2, "rope_theta": 500_000.0},
                **{"max_position_embeddings": 64, "initializer_range": 0.2},
            )
        ),
    }
    tokens = torch.randint(256, (2, 64))
    for name, theirs in models.items():
        theirs.bfloat16().save_pretrained(tmp_path / name)
        theirs = type(theirs).from_pretrained(tmp_path / name, dtype=torch.float32).eval()
        take_in(str(tmp_path / name), tmp_path / f"{name}-run", "byte")
        ours, _, _ = open_run(tmp_path / f"{name}-run")
        with torch.no_grad():
            assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "bigrams"])
def test_a_traced_step_is_the_model(name, tmp_path):
    """Its logits at every place, of two texts, one behind the other, as read back from the file."""
    shape = SHAPES.get(name, {"bigrams": 7, "window": 5, "positions": "sinusoidal"})
    write_run(tmp_path / "run", **shape)
    said = write_program(str(tmp_path / "run"), tmp_path / "step.pt2", 2)
    assert "step 3, for 2 rows of up to 32 tokens; 256 ids (byte)" in said
    files = {"tokenizer.json": ""}
    step = torch.export.load(tmp_path / "step.pt2", extra_files=files).module()
    (tmp_path / "tokenizer.json").write_text(files["tokenizer.json"], encoding="utf-8")
    assert read_tokenizer(tmp_path / "tokenizer.json", None).spec() == ByteTokenizer().spec()
    model, _, _ = open_run(tmp_path / "run")
    for n_token in (32, 20):
        tokens = torch.randint(256, (2, n_token))
        rows = [step(tokens[:, i], torch.tensor([i, i])) for i in range(n_token)]
        assert_close(torch.stack(rows, 1), model(tokens), rtol=0, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "step.pt2", "tokenizer.json"]


DRAW = """
import sys, torch
step = torch.export.load("step.pt2").module()
tokens = [97, 98]
for i in range(22):
    logits = step(torch.tensor([tokens[i]]), torch.tensor([i]))
    tokens += [int(logits[0].argmax())] if i >= 1 else []
print(tokens, "model" in sys.modules)
"""


@pytest.mark.slow
def test_a_program_needs_torch_alone(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run", **LLAMA)
    monkeypatch.chdir(tmp_path)
    words = ["program", "run", "--out", "step.pt2"]
    monkeypatch.setattr(sys, "argv", words)
    assert program.main() == 0
    assert "wrote step.pt2: " in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-c", DRAW], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    drawn = generate(open_run("run")[0], [[97, 98]], 21, Sampling(temperature=0))
    assert done.stdout.strip() == f"{[97, 98, *(row[0] for row in drawn)]} False"
    with pytest.raises(UserError, match=r"step.pt2 is there: --overwrite replaces it"):
        program.main()
    for out, message in (("nowhere/x.pt2", "nowhere is not there: make it"), ("run", "a folder")):
        words[3] = out
        with pytest.raises(UserError, match=message):
            program.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "step.pt2"]


@pytest.mark.slow
def test_the_commands(tmp_path):
    """Out, in, and drawn from; a folder that holds a run is left alone."""
    write_run(tmp_path / "run", **LLAMA)
    out, again = tmp_path / "out", tmp_path / "again"
    assert "in Llama's format" in command("interop/export.py", tmp_path / "run", "--out", out)[0]
    assert "llama's shape" in command("interop/load.py", out, "--out", again)[0]
    drawn = command("sample.py", again, "--prompt", "ab", "--max-new-tokens", 20)[0]
    assert drawn.startswith("ab")
    error = command("interop/load.py", out, "--out", again, code=2)[1]
    assert error.count("\n") == 1
    assert "is not empty: --overwrite" in error


def test_a_run_that_cannot_be_expressed_leaves_nothing(tmp_path):
    write_run(tmp_path / "modern", **MODERN)
    with pytest.raises(UserError, match="no format has its --qk-norm"):
        give_out(str(tmp_path / "modern"), tmp_path / "no")
    assert not (tmp_path / "no").exists()
