"""Options as nanoGPT's users and others write them are answered with their names here."""

import dataclasses
import re
import sys

import pytest

import sample
from configs import Config
from errors import UserError
from ops.command_line import parse
from ops.other_names import SAMPLING, TRAINING

OPTIONS = {name for section in Config().to_dict().values() for name in section}
NANOGPT = (
    "out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from "
    "wandb_log wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size "
    "block_size n_layer n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 "
    "beta2 grad_clip decay_lr warmup_iters lr_decay_iters min_lr backend device dtype compile "
)
"""Every option of its train.py."""


def refused(arguments, words):
    with pytest.raises(UserError) as caught:
        parse(["shakespeare-char", *arguments])
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_every_option_of_nanogpt_is_known():
    assert not [name for name in NANOGPT.split() if name not in OPTIONS | TRAINING.keys()]
    assert not OPTIONS & TRAINING.keys()


def test_every_answer_is_an_option():
    of_sample = {f.name for f in dataclasses.fields(sample.Options)}
    assert not of_sample & SAMPLING.keys()
    for names, options in ((TRAINING, OPTIONS), (SAMPLING, of_sample)):
        for answer in names.values():
            found = re.findall(r"--([a-z0-9-]+)", answer)
            assert all(name.replace("-", "_") in options for name in found), answer


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--learning_rate=1"], "there is no option --learning_rate: did you mean --lr?"),
        (["--learning-rate", "1"], "there is no option --learning-rate: did you mean --lr?"),
        (["--n_layer=2", "--dtype=float16"], "--dtype: did you mean --precision?"),
        (["--block-size", "64"], "--block-size: did you mean --context-length?"),
        (["--eval-interval=9"], "--eval-interval: did you mean --eval-every?"),
        (
            ["--max_iters=5", "--lr=1", "--n_embd=8"],
            "--max_iters, --n_embd: did you mean --max-steps, --d-model?",
        ),
        (["--fp16"], "did you mean --precision float16?"),
        (["--bias=False"], "did you mean --no-bias?"),
        (["--bias", "True"], "did you mean --bias?"),
        (["--tie_embeddings=0"], "did you mean --no-tie-embeddings?"),
        (["--compile=False"], "did you mean --compile off?"),
        (["--init_from=resume"], "did you mean --resume?"),
        (["--init-from", "scratch"], "did you mean to leave it out?"),
    ],
)
def test_what_is_meant(arguments, words):
    refused(arguments, words)


def test_what_is_right_passes(tmp_path, monkeypatch):
    """Values that look like other names, and a run that is named resume."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resume").mkdir()
    words = ["--bias", "--no-qk-norm", "--out", "dtype", "--seed", "1", "--init-from", "resume"]
    config = parse(["shakespeare-char", *words])
    assert (config.model.bias, config.run.out, config.run.seed) == (True, "dtype", 1)


def test_options_before_the_preset():
    with pytest.raises(UserError, match="a preset comes first, then its options"):
        parse(["--n_layer=2", "shakespeare-char"])


def test_sampling(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sample.py", "--out_dir=r", "--start=ROMEO:"])
    words = r"no option --out_dir, --start: did you mean the run folder alone, .*, --prompt\?"
    with pytest.raises(UserError, match=words):
        sample.main()
