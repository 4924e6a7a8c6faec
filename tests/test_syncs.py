"""Where the host waits for the GPU: a short list, checked on a pretend GPU (tests/pretend_cuda.py),
and, where there is a real one, by PyTorch's own guard.
"""

import json
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, environment, make_config, nonsense, restored, write_corpus
from pretend_cuda import TRAININGS

from ops.session import READ_WITHIN, Session
from training.trainer import Trainer

IN_A_STEP = {"accumulate", "agree", "update", "record"}
"""The functions that train.py calls for an update."""
WAITS_OF_A_STEP = {("number read", "ops/session.py:_read")}
"""None in most steps; one, for all that is unread, in each that is logged, here every third."""
WAITS_OF_A_TOKEN = {("number read", "model/generate.py:next_token")}
WAITS_OF_A_PROMPT = {("copy to the device, waited for", "model/attention.py:allowed")}
"""Where prompts of unequal length are read: once a layer."""


@pytest.fixture(scope="module")
def pretended():
    """What tests/pretend_cuda.py has found."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: no need to pretend one")
    script = ROOT / "tests" / "pretend_cuda.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_keeps_its_tensors_on_one_device(pretended, name):
    """A mix of devices raises on the pretend GPU as on a real one."""
    run = pretended["trainings"][name]
    assert run["code"] == 0, run["error"] + run["printed"]
    assert run["threads"] == []
    said = "as asked: stopped after step 3" if name == "begun" else "done: best validation loss"
    assert said in run["printed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_step_waits_where_it_is_meant_to(pretended, name):
    """No tensor is built on the host in a layer, and no number read where none is told."""
    waits = pretended["trainings"][name]["waits"]
    found = {(what, place): n for what, caller, place, n in waits if caller in IN_A_STEP}
    n_read = 1 if TRAININGS[name].get("out") else 2  # of three steps, or six
    assert found == dict.fromkeys(WAITS_OF_A_STEP, n_read)


@pytest.mark.slow
def test_sampling_waits_where_it_is_meant_to(pretended):
    for name, run in pretended["samplings"].items():
        assert run["code"], name + run["error"]
        waits = {(what, place) for what, _, place, _ in run["waits"]}
        assert waits <= WAITS_OF_A_TOKEN | WAITS_OF_A_PROMPT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inf", "nan in float16"])
def test_a_skipped_update_changes_nothing(pretended, name):
    """Neither weights nor moments of either optimizer, and the log says so, if late."""
    run = pretended["failures"][name]
    assert run["code"] == 0, run["error"] + run["printed"]
    assert run["changed"] == []
    assert run["printed"].count("update skipped") == 1
    assert f"step 3: loss {name[:3]}, gradient norm" in run["printed"]
    assert run["losses"] == {"10": True, "12": True}  # steps logged: finite


@pytest.mark.slow
def test_losses_that_stay_no_numbers_end_the_run(pretended):
    """By the same words as on a CPU, at most READ_WITHIN steps later; nothing is lost."""
    run = pretended["failures"]["nan for ever"]
    assert run["code"] is None
    assert "loss or gradient is not finite at step 5 and" in run["error"].replace("\n", " ")
    assert run["printed"].count("update skipped") == 5
    assert run["threads"] == []
    after = pretended["failures"]["resumed"]
    assert after["code"] == 0, after["error"] + after["printed"]


def test_updates_are_read_within_ten_steps(tmp_path):
    """On a GPU, where a run says nothing for a long time, which it hears of no later."""
    data = write_corpus(tmp_path / "data", nonsense())
    fields = {"log_every": 1000, "eval_every": 0, "save_every": 0, "max_steps": 1000}
    with restored(), Session(make_config(data, tmp_path / "r", **fields)) as session:
        trainer = Trainer(session)
        numbers = trainer.accumulate(), torch.tensor(1.0)
        session.device = "cuda:0"
        unread = []
        for step in range(25):
            session.record(step + 1, numbers[0], 1e-3, numbers[1])
            unread.append(len(session.unread))
        session.device = "cpu"
    assert unread == [*range(1, READ_WITHIN), 0, *range(1, READ_WITHIN), 0, 1, 2, 3, 4, 5]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_pytorch_sees_no_wait_in_a_step(tmp_path, optimizer, precision):
    """`set_sync_debug_mode` raises where the host waits."""
    data = write_corpus(tmp_path / "data", nonsense())
    fields = {"optimizer": optimizer, "precision": precision, "micro_batch_size": 2}
    config = make_config(
        data, tmp_path / "r", device="cuda", log_every=9, eval_every=0, save_every=0, **fields
    )
    with restored(), Session(config) as session:
        trainer = Trainer(session)
        try:
            for step in range(8):
                if step == 1:  # the first makes the moments, and waits for the kernels to load
                    torch.cuda.set_sync_debug_mode("error")
                trainer.state.step = step
                loss = session.agree(trainer.accumulate())
                lr, grad_norm = trainer.update(loss)
                if step < 7:  # the last one is read
                    session.record(step + 1, loss, lr, grad_norm)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert grad_norm.isfinite()
