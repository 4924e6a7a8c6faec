"""The run folder, what may change when a run goes on, and the few pure functions around the
loop.
"""

import dataclasses
import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers import make_config, make_model, nonsense, restored, train_here, write_corpus

from configs import Config, OptimConfig, RunConfig
from data.batches import dropout_seed
from data.dataset import Dataset
from data.prompts import empty_prompt
from data.share import share_batch
from data.tokenizer import ByteTokenizer, CharTokenizer
from errors import UserError
from ops.checkpoint import load
from ops.distributed import Processes
from ops.messages import not_finite, opening_lines, schedule_note
from ops.plan import agree_on_micro_batch
from ops.resume import initial_weights, merge_on_resume
from ops.run_folder import MADE_BY_A_RUN, open_folder, start_folder
from ops.stopping import Stop
from training.evaluate import draw_sample

FREE = {
    "data": "elsewhere",
    **{
        "micro_batch_size": 2,
        "out": "other",
        "eval_every": 7,
        "eval_batches": 7,
        "save_every": 7,
        "log_every": 7,
    },
    **{
        "sample_tokens": 7,
        "probe_tokens": 7,
        "wandb": True,
        "resume": True,
        "init_from": "x",
        "stop_at": 7,
        "patience": 7,
    },
    **{"max_minutes": 7.0, "strategy": "fsdp", "recompute": True, "plan": True},
}
ROUNDING = {
    "device": "mps",
    "threads": 7,
    "precision": "bfloat16",
    "compile": "on",
    "attention": "explicit",
    "deterministic": True,
}
MATHEMATICS = {
    **{
        "n_layer": 3,
        "n_head": 4,
        "d_model": 32,
        "context_length": 32,
        "positions": "rotary",
        "norm": "rmsnorm",
        "mlp": "swiglu",
    },
    **{
        "qk_norm": True,
        "zero_init": True,
        "tie_embeddings": False,
        "bias": False,
        "dropout": 0.5,
        "window": 4,
        "bigrams": 7,
        "n_kv_head": 1,
        "d_ff": 7,
        "norm_eps": 0.7,
    },
    **{
        "optimizer": "muon",
        "lr": 7.0,
        "min_lr": 1e-9,
        "warmup_steps": 7,
        "max_steps": 77,
        "schedule": "linear",
    },
    **{"batch_size": 8, "beta1": 0.7, "beta2": 0.7, "eps": 0.7},
    **{"weight_decay": 0.7, "grad_clip": 7.0},
    "seed": 7,
}
SAVED = make_config("d", "r")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "d", nonsense())


# --- what may change ---


def test_every_field_is_thought_of():
    fields = {
        f.name
        for section in (SAVED.model, SAVED.data, SAVED.optim, SAVED.run)
        for f in dataclasses.fields(section)
    }
    assert fields == {*FREE, *ROUNDING, *MATHEMATICS, "rope_base", "overwrite"}


@pytest.mark.parametrize("name", [*FREE, *ROUNDING])
def test_may_change(name):
    value = {**FREE, **ROUNDING}[name]
    given = make_config(**{"data": "d", "out": "r", name: value})
    assert merge_on_resume(given, SAVED) == given


@pytest.mark.parametrize("name", [*MATHEMATICS, "rope_base"])
def test_must_not_change(name):
    changed, saved = {name: MATHEMATICS.get(name)}, SAVED
    if name == "rope_base":  # rotary positions alone have one
        changed = {"positions": "rotary", "rope_base": 7.0}
        saved = make_config("d", "r", positions="rotary")
    with pytest.raises(UserError, match=rf"^{name} is .*, but the run to resume has ") as caught:
        merge_on_resume(make_config("d", "r", **changed), saved)
    assert len(str(caught.value).splitlines()) == 1
    assert str(changed[name]) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "step", "max_steps"),
    [
        ({"schedule": "constant"}, 8, 100),  # the run had come to its end
        ({"schedule": "constant"}, 3, 5),
        ({"schedule": "constant"}, 5, 5),
        ({"schedule": "cosine", "warmup_steps": 6}, 7, 100),  # still at the peak
        ({"schedule": "linear", "warmup_steps": 6}, 6, 100),
        ({"schedule": "cosine", "lr": 0.5, "min_lr": 0.5}, 8, 100),
        ({"schedule": "linear"}, 0, 100),
    ],
)
def test_another_end_where_the_steps_made_are_the_same(fields, step, max_steps):
    saved = make_config("d", "r", **fields)
    given = saved.replace(max_steps=max_steps)
    assert merge_on_resume(given, saved, step) == given


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("step", [4, 8])
def test_a_decay_has_one_end(tmp_path, schedule, step):
    saved = make_config("d", tmp_path / "my run", schedule=schedule)
    with pytest.raises(UserError) as caught:
        merge_on_resume(saved.replace(max_steps=20), saved, step)
    message = str(caught.value)
    assert f"max_steps is 20, but the run to resume has 8, to which its {schedule} sched" in message
    out = f"'{tmp_path}/my run"
    command = f"python train.py {out}' --init-from {out}' --out {out}-more' --max-steps {20 - step}"
    assert message.endswith(command)
    with pytest.raises(UserError, match=r"max_steps is 6, .* has 8: --stop-at 6 ends it there"):
        merge_on_resume(saved.replace(max_steps=6), saved, step)


def test_an_end_before_the_steps_made():
    saved = make_config("d", "r", schedule="constant")
    with pytest.raises(UserError, match="max_steps is 5, but the run to resume has made 6 steps"):
        merge_on_resume(saved.replace(max_steps=5), saved, 6)
    with pytest.raises(UserError, match="has made 1,000,000,000 steps"):
        merge_on_resume(saved, saved, 10**9)


def test_auto_keeps_what_was_resolved():
    saved = make_config("d", "r", device="cpu", precision="bfloat16", compile="on", threads=3)
    given = make_config("d", "r", device="auto", precision="auto", compile="auto", threads=0)
    assert merge_on_resume(given, saved) == saved.replace(threads=0)  # this machine's


ON_A_GPU = {"device": "cuda", "precision": "float16", "compile": "on", "threads": 24}


@pytest.mark.parametrize("asked", ["auto", "cpu"])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_run_from_a_gpu_goes_on_without_one(monkeypatch, asked, precision):
    """Device, precision, compiling and threads are this machine's, whether it is named or not."""
    monkeypatch.setattr("ops.resume.best_device", lambda: "cpu")
    saved = make_config("d", "r", **ON_A_GPU | {"precision": precision})
    given = make_config("d", "r", device=asked, precision="auto", compile="auto", threads=0)
    merged = merge_on_resume(given, saved)
    assert merged == given.replace(device="cpu")


def test_what_is_asked_for_on_the_new_machine_is_had(monkeypatch):
    saved = make_config("d", "r", **ON_A_GPU)
    here = {"device": "cpu", "precision": "bfloat16", "compile": "off", "threads": 3}
    assert (
        merge_on_resume(make_config("d", "r", **here), saved).run
        == make_config("d", "r", **here).run
    )


def test_on_another_device_of_the_same_kind_precision_stays(monkeypatch):
    monkeypatch.setattr("ops.resume.has_device", lambda device: device == "cuda")
    monkeypatch.setattr("ops.resume.best_device", lambda: "cuda")
    saved = make_config("d", "r", **ON_A_GPU | {"device": "cuda:3"})
    given = make_config("d", "r", device="auto", precision="auto", compile="auto", threads=5)
    assert merge_on_resume(given, saved) == saved.replace(device="cuda", threads=5)


def test_what_was_asked_for_once_is_not_asked_for_again():
    saved = make_config("d", "r", stop_at=5, max_minutes=1.0, overwrite=True)
    merged = merge_on_resume(make_config("d", "r", resume=True), saved)
    assert (
        merged.run.stop_at,
        merged.run.max_minutes,
        merged.run.overwrite,
        merged.run.resume,
    ) == (0, 0.0, False, True)


# --- the folder ---


@pytest.fixture(scope="module")
def ran(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("runs") / "r"
    assert train_here(make_config(data, folder)) == 0
    return folder


def test_a_run_folder_is_not_overwritten_silently(data, ran):
    with pytest.raises(UserError, match=r"holds a run: --resume .* --overwrite .* --out"):
        open_folder(make_config(data, ran), Dataset(data))
    for asked in ({"overwrite": True}, {"resume": True}):
        folder, _, resumed = open_folder(make_config(data, ran, **asked), Dataset(data))
        assert folder == ran
        assert (resumed is not None) == ("resume" in asked)
    assert len(list(ran.iterdir())) >= 5


@pytest.mark.parametrize(
    "name", ["config.json", "log.jsonl", "checkpoint.pt", "best.pt", "loss.png", "samples.txt"]
)
def test_any_trace_of_a_run_protects_a_folder(tmp_path, data, name):
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match="holds a run"):
        open_folder(make_config(data, tmp_path), Dataset(data))


def test_a_folder_of_other_things_is_no_run(tmp_path, data):
    (tmp_path / "notes.txt").write_text("mine")
    assert open_folder(make_config(data, tmp_path), Dataset(data))[2] is None
    start_folder(tmp_path, make_config(data, tmp_path), None)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_in_the_folders_place(tmp_path, data):
    (tmp_path / "r").write_text("")
    with pytest.raises(UserError, match="is a file, where the run folder should be"):
        open_folder(make_config(data, tmp_path / "r"), Dataset(data))


def test_opening_touches_nothing(tmp_path, data):
    open_folder(make_config(data, tmp_path / "r", resume=True), Dataset(data))
    assert not (tmp_path / "r").exists()


def test_other_data_is_refused(tmp_path, ran):
    other = Dataset(write_corpus(tmp_path / "d", nonsense(seed=1)))
    with pytest.raises(UserError, match="was trained on other data than"):
        open_folder(make_config(tmp_path / "d", ran, resume=True), other)


def test_the_same_data_elsewhere_is_accepted(tmp_path, data, ran):
    (tmp_path / "moved").symlink_to(data)
    assert (
        open_folder(make_config(tmp_path / "moved", ran, resume=True), Dataset(tmp_path / "moved"))[
            2
        ].step
        == 8
    )


def test_resuming_needs_the_checkpoint_alone(tmp_path, data, ran):
    (tmp_path / "checkpoint.pt").write_bytes((ran / "checkpoint.pt").read_bytes())
    _, config, resumed = open_folder(make_config(data, tmp_path, resume=True), Dataset(data))
    assert resumed.step == 8
    start_folder(tmp_path, config, resumed.step)
    assert json.loads((tmp_path / "config.json").read_text())["optim"]["max_steps"] == 8


def test_start_empties_the_folder_of_a_run(tmp_path, data):
    for name in MADE_BY_A_RUN:
        (tmp_path / name).write_text("old")
    (tmp_path / "attention").unlink()
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "step-000000009.npz").write_text("old")
    start_folder(tmp_path, make_config(data, tmp_path, overwrite=True), None)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "log.jsonl", "samples.txt"}
    assert (tmp_path / "log.jsonl").read_text() == (tmp_path / "samples.txt").read_text() == ""


def test_config_json_repeats_the_run(tmp_path, data):
    config = make_config(data, tmp_path / "r", overwrite=True, lr=0.125, dropout=0.25)
    start_folder(tmp_path / "r", config, None)
    plain = json.loads((tmp_path / "r" / "config.json").read_text())
    assert Config.from_dict(plain) == make_config(data, "", lr=0.125, dropout=0.25)


# --- the state to start from ---


def build(data, **options):
    vocab_size = len(Dataset(data).tokenizer_spec["symbols"])
    return make_model(vocab_size, seed=0, **{"n_layer": 1, "context_length": 16} | options)


def test_init_from_takes_weights_alone(tmp_path, data, ran):
    model = build(data)
    config = make_config(data, tmp_path / "r", init_from=str(ran))
    initial_weights(model, config, Dataset(data), None)
    assert torch.equal(model.norm.weight, load(ran / "best.pt").model["norm.weight"])


def test_init_from_another_shape(data, ran):
    with pytest.raises(UserError, match="don't fit this model"):
        initial_weights(
            build(data, d_model=32), make_config(data, "r", init_from=str(ran)), Dataset(data), None
        )


def test_init_from_another_alphabet(tmp_path, ran):
    """As many symbols, but others: the weights would fit, and mean nothing."""
    other = write_corpus(
        tmp_path / "d", nonsense().translate({ord(c): chr(ord(c) + 500) for c in set(nonsense())})
    )
    with pytest.raises(UserError, match="tokenizer"):
        initial_weights(
            build(other), make_config(other, "r", init_from=str(ran)), Dataset(other), None
        )


# --- small functions ---


def test_dropout_seeds_differ():
    seeds = {
        dropout_seed(seed, step, index)
        for seed in range(5)
        for step in range(20)
        for index in range(20)
    }
    assert len(seeds) == 2000
    assert dropout_seed(2**63 - 1, 10**9, 10**5) < 2**64
    assert dropout_seed(1, 2, 3) == dropout_seed(1, 2, 3)
    torch.manual_seed(max(seeds))  # torch takes 64 bits


@pytest.mark.parametrize(
    ("tokenizer", "first"),
    [
        (CharTokenizer("\nab"), [0]),
        (CharTokenizer("\nab", separator=True), [3]),
        (CharTokenizer(" \u00e9"), [0]),
        (ByteTokenizer(), [10]),
        (ByteTokenizer(separator=True), [256]),
    ],
)
def test_what_an_empty_prompt_starts_from(tokenizer, first):
    assert empty_prompt(tokenizer) == first


def test_a_sample_of_a_run_that_has_lost_its_way(data):
    """Training goes on, and says so in the sample's place; the model's mode is kept."""
    model = build(data, dropout=0.5).train()
    tokenizer = CharTokenizer(Dataset(data).tokenizer_spec["symbols"])
    with torch.no_grad():
        model.embed.weight.fill_(float("nan"))
    text = draw_sample(model, tokenizer, 5, 1)
    assert text == "(no text: the model's logits are not finite)"
    assert model.training


def test_the_sample_is_always_drawn_alike(data):
    model, tokenizer = (
        build(data, dropout=0.5).train(),
        CharTokenizer(Dataset(data).tokenizer_spec["symbols"]),
    )
    texts = []
    for state in (1, 2):
        torch.manual_seed(state)
        texts.append(draw_sample(model, tokenizer, 12, seed=5))
    assert texts[0] == texts[1] != draw_sample(model, tokenizer, 12, seed=6)
    assert len(texts[0]) == 12
    assert draw_sample(model, tokenizer, 0, seed=5) == ""


def test_sizes(tmp_path, data):
    assert share_batch(6, 3).n_micro == 2
    with pytest.raises(UserError, match="batch_size 6 does not divide into micro-batches of 4"):
        share_batch(6, 4)
    with pytest.raises(UserError, match="6 does not divide among 2 processes x micro_batch_size 2"):
        share_batch(6, 2, n_process=2)
    with pytest.raises(UserError, match="batch_size 5 does not divide among 2 processes:"):
        share_batch(5, 0, n_process=2)
    Dataset(data).check_context(3599)
    with pytest.raises(UserError, match=r"train split has 3,600 tokens, a window needs 3,601"):
        Dataset(data).check_context(3600)
    with pytest.raises(UserError, match=r"val split has 1 tokens, a window needs 2"):
        Dataset(write_corpus(tmp_path / "short", nonsense(), "a")).check_context(16)


def test_shares_of_a_batch():
    """The micro-batches of all processes are the global batch, each row once and in order."""
    shares = [share_batch(24, 2, rank, 3) for rank in range(3)]
    rows = [row for share in shares for index in share.micro_batches() for row in share.rows(index)]
    assert rows == list(range(24))
    assert share_batch(24, 0, 1, 3).micro_batch_size == 8


def test_tokens_per_step_are_spelt_out(data):
    corpus = Dataset(data)
    session = SimpleNamespace(
        config=make_config(data, "runs/x", batch_size=24, micro_batch_size=2, threads=1),
        share=share_batch(24, 2, 0, 3),
        dataset=corpus,
        tokenizer=CharTokenizer(corpus.tokenizer_spec["symbols"]),
        resumed_at=None,
        notes=[],
    )
    text = opening_lines(session, build(data))
    assert "micro-batch 2 x accumulation 4 x processes 3 x context 16 = 384 tokens" in text


def test_the_micro_batch_agreed_on_is_the_one_that_runs(tmp_path, data, monkeypatch, capsys):
    """It is in the folder's configuration, for who varies the run; and the note is printed."""

    def agree(config, vocab_size, processes):
        assert (config.optim.micro_batch_size, processes.count) == (0, 1)
        return config.replace(micro_batch_size=2), ["note     as agreed"]

    monkeypatch.setattr("ops.session.agree_on_micro_batch", agree)
    assert train_here(make_config(data, tmp_path / "r", max_steps=2)) == 0
    said = capsys.readouterr().out
    assert "micro-batch 2 x accumulation 2" in said
    assert "\nnote     as agreed" in said
    saved = json.loads((tmp_path / "r" / "config.json").read_text())
    assert saved["optim"]["micro_batch_size"] == 2


def test_on_a_cpu_an_open_micro_batch_is_all_of_the_batch(tmp_path, data):
    config = make_config(data, tmp_path / "r")
    assert agree_on_micro_batch(config, 50, Processes()) == (config, [])


@pytest.mark.parametrize(
    ("warmup_steps", "max_steps", "highest"),
    [(9, 4, "0.004"), (4, 4, "0.008"), (3, 4, None), (0, 1, None), (2, 0, None), (1, 1, "0.005")],
)
def test_a_warm_up_that_outlasts_the_run(warmup_steps, max_steps, highest):
    """The rate of the last update, by hand: 0.01 max_steps / (warmup_steps + 1)."""
    config = make_config("d", "r", lr=0.01, warmup_steps=warmup_steps, max_steps=max_steps)
    note = schedule_note(config)
    if highest is None:
        assert note is None
    else:
        assert f"a warm-up of {warmup_steps} steps in a run of {max_steps}" in note
        assert f"the rate rises to {highest} and never reaches its peak of 0.01" in note


def test_signals_are_remembered_and_the_second_one_ends_at_once():
    with restored():
        for number in (signal.SIGINT, signal.SIGTERM):
            stop = Stop(make_config("d", "r"))
            assert stop.received == ""
            os.kill(os.getpid(), number)
            assert stop.received == signal.Signals(number).name
        Stop(make_config("d", "r"))
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        stop = Stop(make_config("d", "r"))
        for name in ("SIGTERM", "SIGTERM", "SIGHUP", "SIGUSR1"):
            os.kill(os.getpid(), getattr(signal, name))
        assert stop.received == "SIGTERM"  # and what is being saved goes on being saved


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_other_signals_that_ask_for_an_end(name):
    with restored():
        stop = Stop(make_config("d", "r"))
        os.kill(os.getpid(), getattr(signal, name))
        assert (stop.received, stop.news()[0]) == (name, True)


def test_nohup_is_heeded():
    with restored():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = Stop(make_config("d", "r"))
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received == ""


def test_advice_names_the_dials():
    config = Config(
        optim=OptimConfig(lr=0.5, warmup_steps=9), run=RunConfig(precision="bfloat16", seed=77)
    )
    text = not_finite(12, config)
    for word in (
        "step 12",
        "seed 77",
        "--lr (now 0.5)",
        "--warmup-steps (now 9)",
        "now bfloat16",
        "best.pt",
    ):
        assert word in text
    assert len(text.splitlines()) <= 2
