"""attention_map.py: from a run and a text to a page, a picture or numbers; what a user gets wrong
ends in a line.
"""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
import torch
from helpers import write_byte_corpus
from test_viz_maps import tiny_model
from test_viz_page import Elements, held, weights

import attention_map
from configs import Config, DataConfig
from data.tokenizer import ByteTokenizer, CharTokenizer
from errors import UserError
from model.gpt import GPT
from ops.checkpoint import Checkpoint, load, save
from viz.maps import read_text
from viz.page import beside_numbers
from viz.probe import save_probe
from viz.roles import ROLES, check_finite, measure_roles

pytestmark = pytest.mark.slow

TEXT = "It is the east, and Juliet is the sun.\n"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "the run"
    folder.mkdir()
    model = tiny_model(context_length=48)
    config = Config(model=model.config, data=DataConfig(str(tmp_path / "data")))
    checkpoint = Checkpoint(
        step=20,
        model=model.state_dict(),
        config=config.to_dict(),
        tokenizer=ByteTokenizer().spec(),
        dataset="",
    )
    save(checkpoint, folder / "checkpoint.pt")
    return folder


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["attention_map.py", *map(str, arguments)])
    return attention_map.main()


def test_a_page_of_the_runs_own_numbers(run, monkeypatch, capsys):
    log = [
        {"kind": "train", "step": 20, "loss": 2.0},
        {"kind": "eval", "step": 20, "train_loss": 2.5, "val_loss": 2.75},
    ]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    assert command(monkeypatch, run, "--text", TEXT, "--recorded") == 0
    data, heads = held((run / "attention.html").read_text(encoding="utf-8"))
    assert data["model"] is None
    maps = read_text(tiny_model(context_length=48), list(TEXT.encode()), bytes)
    assert np.array_equal(weights(heads["head-1-2"], data), maps.weights(1)[2])
    assert data["title"] == "the run"
    assert data["facts"] == [
        "2 layers of 3 heads, width 24, context 48",
        "step 20",
        "validation loss 2.750",
    ]
    assert data["learning"] is None
    assert data["roles"]["scores"][0][0][list(ROLES).index("induction")] is not None
    assert f"2 layers x 3 heads x {len(TEXT)} tokens, 0." in capsys.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == [
        "attention.html",
        "checkpoint.pt",
        "log.jsonl",
    ]


def test_layers_heads_and_a_range_of_tokens(run, monkeypatch, tmp_path):
    options = [
        "--text",
        TEXT * 3,
        "--tokens",
        "39:60",
        "--layer",
        "1",
        "--head",
        "2",
        "0",
        "--recorded",
        "--out",
        tmp_path / "x.html",
    ]
    command(monkeypatch, run / "checkpoint.pt", *options)
    data, heads = held((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert (data["layers"], data["heads"], data["whole"], len(data["tokens"])) == (
        [1],
        [2, 0],
        False,
        21,
    )
    maps = read_text(tiny_model(context_length=48), list(TEXT.encode())[:21], bytes)
    assert np.array_equal(weights(heads["head-1-2"], data), maps.weights(1)[2])


def test_the_model_is_in_the_page(run, monkeypatch, capsys, tmp_path):
    write_byte_corpus(tmp_path / "data", "To be,\n\nor not to be.\n" * 99)
    command(monkeypatch, run, "--text", TEXT, "--layer", "1")
    text = (run / "attention-layer-1.html").read_text(encoding="utf-8")
    data, heads = held(text)
    assert heads == {}
    model = tiny_model(context_length=48)
    told = data["model"]
    assert told["config"] == dataclasses.asdict(model.config)
    assert (told["ids"], told["start"]) == (list(TEXT.encode()), [10])
    assert told["tokenizer"] == ByteTokenizer().spec()
    assert told["examples"] == [("or not to be.\nTo be,\n\n" * 3)[:48]]
    assert len(Elements(text).scripts()["weights"]) > sum(x.numel() for x in model.parameters())
    assert data["facts"][-1].startswith(
        f"the model in {told['bits']} bits a weight, which moves no"
    )
    assert (data["layers"], data["whole"]) == ([1], False)
    assert "note" not in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_left_out_and_that_is_said(run, monkeypatch, capsys):
    monkeypatch.setattr("viz.living.BITS", (16,))
    limit = (beside_numbers() + 70_000) / 1e6
    command(monkeypatch, run, "--text", TEXT, "--max-mb", limit)
    data, heads = held((run / "attention.html").read_text(encoding="utf-8"))
    assert (data["model"], len(heads)) == (None, 6)
    assert re.fullmatch(
        r"note: the page shows this one text: with the model, in 16 bits a weight, it takes "
        rf"0\.\d MB, 0\.0 MB more than --max-mb {limit:g}",
        capsys.readouterr().err.splitlines()[1],
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--layer", "0"], "attention-layer-0.html"),
        (["--layer", "1", "0", "--head", "2"], "attention-layer-1-0-head-2.html"),
        (["--tokens", "3:9"], "attention-tokens-3-9.html"),
        (["--show", "roles"], "attention-roles.png"),
        (["--show", "roles", "--layer", "1"], "attention-roles-layer-1.png"),
    ],
)
def test_a_part_does_not_take_the_place_of_the_page(run, monkeypatch, capsys, options, name):
    (run / "attention.html").write_text("the whole page")
    numbers = run / "roles.json"
    command(monkeypatch, run, "--text", TEXT, "--json", numbers, *options)
    assert (run / "attention.html").read_text() == "the whole page"
    assert sorted(path.name for path in run.iterdir()) == sorted(
        ["attention.html", "checkpoint.pt", "roles.json", name]
    )
    out = capsys.readouterr().out
    for path in (run / name, numbers):  # every file written is named
        assert any(line.startswith(f"{path}: ") for line in out.splitlines())


def test_a_text_with_escapes(run, monkeypatch, tmp_path):
    command(monkeypatch, run, "--text", r"A:\n\\n\d", "--out", tmp_path / "x.html")
    data = held((tmp_path / "x.html").read_text(encoding="utf-8"))[0]
    assert len(data["tokens"]) == len("A:\n" + r"\n\d")


def test_paths_that_cannot_be(run, monkeypatch, tmp_path):
    for options, words in (
        (["--out", "x.html", "--show", "roles"], "--show roles draws a picture"),
        (["--json", tmp_path], "is a folder: name a file in it"),
        (["--out", tmp_path / "x.html", "--json", tmp_path / "x.html"], "--json and --out both"),
    ):
        with pytest.raises(UserError, match=words):
            command(monkeypatch, run, "--text", "abc", *options)
    assert list(tmp_path.glob("x.html")) == []


@pytest.mark.parametrize("options", [["--text", TEXT], [], ["--text", "a"]])
@pytest.mark.parametrize("factor", [float("nan"), 1e25])
def test_numbers_that_are_none(run, monkeypatch, options, factor):
    """Damaged weights, and logits that overflow: nothing is drawn."""
    state = load(run / "checkpoint.pt")
    weights = {name: tensor * factor for name, tensor in state.model.items()}
    save(dataclasses.replace(state, model=weights), run / "checkpoint.pt")
    with pytest.raises(UserError, match=r"NaN or infinite|not finite"):
        command(monkeypatch, run, *options)
    assert [path.name for path in run.iterdir()] == ["checkpoint.pt"]


def test_heads_whose_numbers_are_none():
    """A kernel may hide a NaN from the logits; a role without targets has one by right."""
    maps = read_text(tiny_model(context_length=48), list(TEXT.encode()), bytes)
    roles = measure_roles(maps)
    assert np.isnan(roles.scores).any()
    check_finite(roles)
    roles.scores[1, 2, 0] = np.nan
    with pytest.raises(FloatingPointError):
        check_finite(roles)


def test_without_a_text_the_watched_one_is_shown_else_the_models_own(run, monkeypatch):
    command(monkeypatch, run)
    first = held((run / "attention.html").read_text(encoding="utf-8"))[0]
    assert len(first["tokens"]) == 48
    command(monkeypatch, run)
    assert held((run / "attention.html").read_text(encoding="utf-8"))[0] == first
    for step in (0, 20):
        save_probe(run / "attention", step, tiny_model(context_length=48), list(TEXT.encode()))
    command(monkeypatch, run)
    data = held((run / "attention.html").read_text(encoding="utf-8"))[0]
    assert [token[0] for token in data["tokens"]][:5] == ["I", "t", "␣", "i", "s"]
    assert data["learning"]["steps"] == [0, 20]
    assert data["learning"]["tokens"] == data["tokens"]


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.png", []), ("a.svg", ["--layer", "0"]), ("a.svg", ["--show", "roles"])],
)
def test_pictures(run, monkeypatch, tmp_path, name, options):
    command(monkeypatch, run, "--text", "abc", "--out", tmp_path / name, *options)
    assert (tmp_path / name).stat().st_size > 5000


def test_learning_picture_needs_snapshots(run, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="holds no snapshots of its training"):
        command(monkeypatch, run, "--out", tmp_path / "l.png", "--show", "learning")
    save_probe(run / "attention", 0, tiny_model(context_length=48), list(TEXT.encode()))
    assert command(monkeypatch, run, "--out", tmp_path / "l.png", "--show", "learning") == 0


def test_json_and_ablation(run, monkeypatch, tmp_path, capsys):
    tokens = np.random.default_rng(0).integers(0, 256, 200).astype("<u2")
    (tmp_path / "data").mkdir()
    tokens.tofile(tmp_path / "data" / "val.bin")
    tokens.tofile(tmp_path / "data" / "train.bin")
    split = {"tokens": 200, "bytes": 200, "sha256": ""}
    info = {
        "format": 1,
        "dtype": "uint16",
        "tokenizer": ByteTokenizer().spec(),
        "splits": {"train": split, "val": split},
    }
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(info))
    command(
        monkeypatch,
        run,
        "--text",
        TEXT,
        "--json",
        tmp_path / "roles.json",
        "--ablate",
        "1.2",
        "0.0",
    )
    report = json.loads((tmp_path / "roles.json").read_text())
    assert [(head["layer"], head["head"]) for head in report["heads"]] == [
        (i, j) for i in (0, 1) for j in (0, 1, 2)
    ]
    assert report["heads"][0]["scores"].keys() == ROLES.keys() == report["uniform"].keys()
    assert len(report["heads"][0]["distance_profile"]) == len(TEXT)
    assert [line["ablated"] for line in report["ablations"]] == [
        [],
        ["1.2"],
        ["0.0"],
        ["1.2", "0.0"],
    ]
    model, ids = tiny_model(context_length=48), torch.tensor([list(TEXT.encode())])
    for heads, line in zip([[], [(1, 2)]], report["ablations"], strict=False):
        for layer, head in heads:
            model.blocks[layer].attention.project.weight.data[:, 8 * head : 8 * head + 8] = 0
        loss = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:]).item()
        assert line["loss"]["text"] == pytest.approx(loss, rel=1e-5)
        assert line["loss"].keys() == {"text", "validation"}
    assert "loss without 1.2: text" in capsys.readouterr().out


def test_validation_data_of_another_tokenizer_is_not_used(run, monkeypatch, tmp_path, capsys):
    test_json_and_ablation(run, monkeypatch, tmp_path, capsys)
    info = json.loads((tmp_path / "data" / "dataset.json").read_text())
    info["tokenizer"] = CharTokenizer("abc").spec()
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(info))
    command(monkeypatch, run, "--text", TEXT, "--json", tmp_path / "roles.json", "--ablate", "0.1")
    assert json.loads((tmp_path / "roles.json").read_text())["ablations"][0]["loss"].keys() == {
        "text"
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--text", "a" * 49],
            "49 tokens are to be read, the model reads 48 at once\nchoose a part of",
        ),
        (
            ["--text", "a" * 99, "--tokens", "2:99"],
            "97 tokens are to be read, the model reads 48 at once\nchoose a part of",
        ),
        (["--text", "a" * 99, "--tokens", "2:99"], "for example --tokens 2:50"),
        (
            ["--text", "abc", "--tokens", "1:9"],
            "--tokens is '1:9'; it must be FIRST:END, 0 <= FIRST < END <= 3",
        ),
        (["--text", "abc", "--tokens", "2:2"], "--tokens is '2:2'"),
        (["--text", "abc", "--tokens", "-1:2"], "--tokens is '-1:2'"),
        (
            ["--text", "abc", "--layer", "2"],
            "there is no layer 2; layers are counted from 0 and end at 1",
        ),
        (["--text", "abc", "--head", "0", "7"], "there is no head 7"),
        (["--text", "abc", "--ablate", "1"], "--ablate takes LAYER.HEAD, such as 2.1; found '1'"),
        (["--text", "abc", "--ablate", "5.0"], "there is no head 5.0"),
        (
            ["--text", "abc", "--out", "map.pdf"],
            "--out is map.pdf; it must end in .html, .png or .svg",
        ),
        (
            ["--text", "abc", "--out", "nowhere/map.html"],
            "there is no folder nowhere to write map.html to",
        ),
        (
            ["--text", "abc", "--json", "nowhere/a.json"],
            "there is no folder nowhere to write a.json to",
        ),
        (["--text", "abc", "--max-mb", "0.1"], "the limit is 0.1 MB"),
        (["--recorded", "--out", "x.png"], "--recorded is about a page, and --out is the picture"),
    ],
)
def test_mistakes_are_named(run, monkeypatch, options, message):
    before = sorted(run.iterdir())
    with pytest.raises(UserError) as caught:
        command(monkeypatch, run, *options)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2
    assert sorted(run.iterdir()) == before


def test_a_models_own_text_starts_at_the_separator(tmp_path, monkeypatch):
    model, tokenizer = tiny_model(), ByteTokenizer(separator=True)
    model = GPT(model.config, tokenizer.vocab_size).eval()
    options = attention_map.Options(run="")
    ids = attention_map.choose_tokens(options, model, tokenizer, None)
    assert len(ids) == 128
    assert max(ids) <= 256
