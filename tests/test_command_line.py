"""The command line of train.py: presets, flags, a run's own config.json, and what is said where
something is wrong.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    assert_same_run,
    command,
    flags,
    make_config,
    nonsense,
    train_here,
    write_corpus,
)

from configs import PRESETS, Config, read_config
from data.names import CORPORA
from errors import UserError
from model.gpt import GPT
from ops import distributed
from ops.command_line import check_data, list_presets, parse, preparing_command
from ops.device import resolve

pytestmark = pytest.mark.slow


def outcome(arguments, capsys):
    """(exit code, stdout, stderr) of parsing in this process, as `run_command` would end."""
    try:
        config = parse([str(argument) for argument in arguments])
    except UserError as error:
        return 2, "", f"error: {error}\n"
    except SystemExit as end:
        return end.code, *capsys.readouterr()
    return config


def refused(arguments, capsys, *words):
    code, out, error = outcome(arguments, capsys)
    assert code == 2
    assert out == ""
    assert "Traceback" not in error
    for word in words:
        assert word in " ".join(re.sub(r"[\u2500-\u257f]", " ", error).split()), error
    return error


# --- presets ---


def test_bare_lists_the_presets():
    out, error = command("train.py")
    assert error == ""
    lines = out.split("\n")
    for name, (description, _) in PRESETS.items():
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert line.endswith(description)
    assert "usage: python train.py PRESET" in out
    assert out.strip() == list_presets().strip()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_nothing_to_do(arguments):
    assert parse(arguments) is None


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build(name):
    """Each is named in one line, parses as it stands, fits together on any machine, and builds its
    model.
    """
    description, preset = PRESETS[name]
    assert len(description) < 130
    assert "\n" not in description
    config = parse([name])
    assert config == dataclasses.replace(
        preset, run=dataclasses.replace(preset.run, out=f"runs/{name}")
    )
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    resolved = resolve(parse([name, "--device", "cpu", "--precision", "auto"]))
    assert "auto" not in (resolved.run.device, resolved.run.precision, resolved.run.compile)
    assert config.optim.batch_size % (config.optim.micro_batch_size or 1) == 0
    with torch.device("meta"):
        model = GPT(config.model, 65)
        logits = model(torch.zeros(1, config.model.context_length, dtype=torch.int64))
    assert logits.shape == (1, config.model.context_length, 65)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_may_be_varied(name):
    config = parse(
        [name, "--n-layer", "2", "--lr", "1e-3", "--min-lr", "0", "--data", "d", "--seed", "5"]
    )
    assert (config.model.n_layer, config.optim.lr, config.data.data, config.run.seed) == (
        2,
        1e-3,
        "d",
        5,
    )
    assert config.model.n_head == PRESETS[name][1].model.n_head
    assert config.run.out == f"runs/{name}"


def test_hyphen_and_underscore(capsys):
    wanted = parse(
        ["nanogpt-cpu", "--n-layer", "6", "--max-steps", "5", "--no-qk-norm", "--tie-embeddings"]
    )
    assert (
        parse(
            ["nanogpt-cpu", "--n_layer", "6", "--max_steps=5", "--no_qk_norm", "--tie_embeddings"]
        )
        == wanted
    )
    assert outcome(["nanogpt-cpu", "--model.n-layer", "6"], capsys)[0] == 2


def test_every_field_is_a_flag():
    config = make_config(
        "d",
        "r",
        eval_every=3,
        wandb=True,
        schedule="linear",
        dropout=0.25,
        max_minutes=1.5,
        window=2,
    )
    fields = {
        name: value for section in config.to_dict().values() for name, value in section.items()
    }
    assert parse(["shakespeare-char", *flags(**fields)]) == config


def test_names_are_unique_across_sections():
    names = [name for section in Config().to_dict().values() for name in section]
    assert len(names) == len(set(names))


def test_help_of_a_preset_is_instant_and_explains_every_field(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    out, error = command(
        "train.py", "shakespeare-char", "--help", env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path
    )
    assert error == ""
    for name in (name for section in Config().to_dict().values() for name in section):
        assert f"--{name.replace('_', '-')}" in out
    assert "Learning rate at its peak." in out


def test_own_directory_does_not_matter(tmp_path):
    out, _ = command("train.py", cwd=tmp_path)
    assert "shakespeare-char" in out


# --- what is refused ---


def test_unknown_preset(capsys):
    refused(
        ["shakespear-char"],
        capsys,
        "no preset or config.json 'shakespear-char'",
        "did you mean shakespeare-char?",
    )
    error = refused(["xyzzy"], capsys, *PRESETS)
    assert "did you mean" not in error
    assert len(error.strip().split("\n")) <= 2
    refused(["--lr", "1"], capsys, "no preset")
    refused(["none/config.json"], capsys, "none/config.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n-layr", "3"], ["--n-layr", "--n-layer"]),
        (["--lr", "fast"], ["--lr", "fast"]),
        (["--lr", "-1"], ["lr is -1.0; it must be above 0"]),
        (["--lr", "nan"], ["lr is nan; it must be above 0"]),
        (["--lr", "inf"], ["lr is inf"]),
        (["--optimizer", "sgd"], ["sgd", "adamw", "muon"]),
        (["--precision", "int8"], ["int8", "bfloat16"]),
        (["--n-layer", "2.5"], ["--n-layer", "2.5"]),
        (["--n-layer", "0"], ["n_layer is 0; it must be at least 1"]),
        (["--n-layer"], ["--n-layer"]),
        (
            ["--d-model", "130", "--n-head", "4"],
            ["d_model 130 does not divide into n_head 4 equal heads"],
        ),
        (["--dropout", "1"], ["dropout is 1.0"]),
        (["--max-steps", "-1"], ["max_steps is -1"]),
        (["--min-lr", "1"], ["min_lr is 1.0; it must lie between 0 and lr"]),
        (["--batch-size", "0"], ["batch_size is 0"]),
        (["--beta2", "1"], ["beta2 is 1.0"]),
        (["--log-every", "0"], ["log_every is 0"]),
        (["--eval-every", "-5"], ["eval_every is -5"]),
        (["--seed", "-1"], ["seed is -1"]),
        (["--device", "gpu"], ["device is 'gpu'; it must be auto, cpu, cuda, cuda:N or mps"]),
        (["--device", "cuda:x"], ["cuda:x"]),
        (["--device", "cpu:1"], ["cpu:1"]),
        (["--resume", "--overwrite"], ["give one of them"]),
        (["extra"], ["extra"]),
    ],
)
def test_bad_options(options, words, capsys):
    error = refused(["nanogpt-cpu", *options], capsys, *words)
    assert len(error.strip().split("\n")) <= 12


def test_data_that_is_not_prepared(tmp_path):
    """The command that is printed is the one to type, and no run folder is left."""
    out, error = command("train.py", "nanogpt-cpu", cwd=tmp_path, code=2)
    assert out == ""
    wanted = "python -m data.prepare tinyshakespeare --tokenizer char"
    assert error.strip().split("\n")[-1].strip() == wanted
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("data/prepared/shakespeare-char", "python -m data.prepare shakespeare --tokenizer char"),
        ("data/prepared/stdlib-bpe", "python -m data.prepare stdlib --tokenizer bpe"),
        (
            "data/prepared/a-b-gpt2",
            "python -m data.prepare YOUR_TEXT --tokenizer gpt2 --out data/prepared/a-b-gpt2",
        ),
        ("elsewhere/x", "python -m data.prepare YOUR_TEXT.txt --out elsewhere/x"),
        ("data/prepared/x", "python -m data.prepare YOUR_TEXT.txt --out data/prepared/x"),
    ],
)
def test_the_preparing_command(tmp_path, monkeypatch, folder, line):
    monkeypatch.chdir(tmp_path)
    assert preparing_command(folder) == line
    with pytest.raises(UserError, match="isn't prepared"):
        check_data(make_config(folder, "r"))


def test_a_checkpoint_is_no_configuration(tmp_path):
    path = tmp_path / "best.pt"
    path.write_bytes(b"PK\x03\x04\x80")
    with pytest.raises(UserError, match="no configuration: give the run's folder"):
        parse([str(path), "--resume"])


def test_every_presets_data_has_a_command():
    for name, (_, config) in PRESETS.items():
        words = preparing_command(config.data.data).split()
        assert words[3] in CORPORA or (words[3] == "YOUR_TEXT" and words[-1] == config.data.data), (
            name
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context_length": 5000}, "train split has 3,600 tokens, a window needs 5,001"),
        ({"batch_size": 6, "micro_batch_size": 4}, "does not divide into micro-batches of 4"),
        ({"device": "cuda:99"}, "device is cuda:99"),
        ({"precision": "float16"}, "float16, which is for CUDA"),
        ({"init_from": "nowhere"}, "there is no run nowhere"),
    ],
)
def test_bad_combinations_leave_no_folder(tmp_path, options, words):
    data = write_corpus(tmp_path / "d", nonsense())
    with pytest.raises(UserError, match=words):
        train_here(make_config(data, tmp_path / "r", **options))
    assert not (tmp_path / "r").exists()


def announce(monkeypatch, count):
    """What torchrun sets for the first of `count` processes."""
    place = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (place | {"WORLD_SIZE": str(count)}).items():
        monkeypatch.setenv(name, value)


def test_processes_that_do_not_divide_the_batch(tmp_path, monkeypatch):
    """Refused before any process waits for another."""
    data = write_corpus(tmp_path / "d", nonsense())
    announce(monkeypatch, count=3)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_: pytest.fail("waited"))
    for batch_size, micro in ((4, 0), (8, 2), (6, 3)):
        words = f"batch_size {batch_size} does not divide among 3 processes"
        with pytest.raises(UserError, match=words):
            train_here(
                make_config(data, tmp_path / "r", batch_size=batch_size, micro_batch_size=micro)
            )
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "muon"}, "muon needs whole matrices"),
        ({"precision": "float16"}, "gradient scaler"),
    ],
)
def test_what_fsdp_does_not_do(monkeypatch, options, words):
    announce(monkeypatch, count=2)
    with pytest.raises(UserError, match=words):
        distributed.check(make_config("d", "r", strategy="fsdp", **options))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_gpu_for_several_processes(monkeypatch, strategy):
    announce(monkeypatch, count=2)
    with pytest.raises(UserError, match=r"device is cuda:0, .* use --device cuda$"):
        distributed.check(make_config("d", "r", strategy=strategy, device="cuda:0"))


# --- a run's own config.json ---


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ran")
    data = write_corpus(folder / "d", nonsense())
    options = flags(
        **{
            k: v
            for s in make_config(data, folder / "one", dropout=0.1).to_dict().values()
            for k, v in s.items()
        }
    )
    command("train.py", "shakespeare-char", *options)
    return folder


def test_config_json_repeats_the_run_bit_for_bit(ran):
    for given, name in ((ran / "one" / "config.json", "two"), (ran / "one", "three")):
        assert train_here(parse([str(given), "--out", str(ran / name)])) == 0
        assert_same_run(ran / "one", ran / name)


def test_config_json_may_be_varied(ran):
    config = parse([str(ran / "one" / "config.json"), "--lr", "0.25", "--out", "x"])
    before = read_config(ran / "one" / "config.json")
    assert config.optim == dataclasses.replace(before.optim, lr=0.25)
    assert (config.model, config.run.out) == (before.model, "x")


def test_config_json_without_a_run_folder_does_not_mean_this_one(tmp_path, monkeypatch):
    """A hand-written file need not name `out`; the run must not spill into the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text('{"model": {"n_layer": 1}}')
    try:
        config = parse(["mine.json"])
    except UserError as error:
        assert "out" in str(error)  # noqa: PT017
    else:
        assert Path(config.run.out).resolve() != tmp_path


@pytest.mark.parametrize(
    ("section", "field", "value", "words"),
    [
        ("model", "n_layers", 3, "model has no field 'n_layers'; it has n_layer, "),
        ("model", "n_layer", "3", "n_layer is '3'; it must be int"),
        ("model", "n_layer", 2.5, "n_layer is 2.5; it must be int"),
        ("model", "n_layer", True, "n_layer is True; it must be int"),
        ("model", "bias", 1, "bias is 1; it must be bool"),
        ("model", "mlp", "relu", "mlp is 'relu'; it must be gelu or gelu_exact or relu2 or swiglu"),
        ("model", "n_layer", 0, "n_layer is 0; it must be at least 1"),
        ("optim", "lr", None, "lr is None; it must be float"),
        ("optim", "lr", -1.0, "lr is -1.0; it must be above 0"),
        ("run", "out", 5, "out is 5; it must be str"),
        ("optimizer", "lr", 1e-3, "optimizer"),  # no such section
    ],
)
def test_config_json_that_does_not_fit(ran, tmp_path, section, field, value, words, capsys):
    plain = json.loads((ran / "one" / "config.json").read_text())
    plain.setdefault(section, {})[field] = value
    (tmp_path / "config.json").write_text(json.dumps(plain))
    error = refused([tmp_path / "config.json"], capsys, words)
    assert len(error.strip().split("\n")) <= 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"model": []}', b'{"model": null}']
)
def test_config_json_that_is_none(tmp_path, content, capsys):
    (tmp_path / "config.json").write_bytes(content)
    error = refused([tmp_path / "config.json"], capsys)
    assert len(error.strip().split("\n")) <= 2


def test_integers_may_stand_for_floats(ran, tmp_path):
    plain = json.loads((ran / "one" / "config.json").read_text())
    plain["optim"]["lr"] = 1
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert parse([str(tmp_path / "config.json")]).optim.lr == 1


# --- going on ---


def test_resume_refuses_another_rate_and_accepts_another_log(ran):
    one = ran / "one"
    before = (one / "checkpoint.pt").read_bytes()
    with pytest.raises(UserError, match=r"^lr is 0\.5, but the run to resume has 0\.0006"):
        train_here(parse([str(one / "config.json"), "--resume", "--lr", "0.5"]))
    assert (
        train_here(
            parse([str(one / "config.json"), "--resume", "--log-every", "3", "--eval-batches", "1"])
        )
        == 0
    )
    assert (one / "checkpoint.pt").read_bytes() == before
    assert json.loads((one / "config.json").read_text())["run"]["log_every"] == 3


def test_the_script_ends_as_promised(ran):
    """One error of each kind through the whole command: exit 2, nothing on stdout, no traceback."""
    out, error = command("train.py", ran / "one" / "config.json", code=2)
    assert out == ""
    assert error.startswith("error: ")
    assert "holds a run" in error
    assert len(error.strip().split("\n")) <= 2
    out, error = command("train.py", "nanogpt-cpu", "--lr", "-1", cwd=ran, code=2)
    assert out == ""
    assert "lr is -1.0" in error
    assert {path.name for path in ran.iterdir()} <= {"d", "one", "two", "three"}
    assert ROOT.joinpath("train.py").exists()
