"""Where the host waits for the GPU: a short list, checked on a pretend GPU (tests/pretend_cuda.py),
and, where there is a real one, by PyTorch's own guard.
"""

import json
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, environment
from pretend_cuda import TRAININGS

IN_A_STEP = {"accumulate", "agree", "update", "check_finite"}
"""The functions that train.py calls for an update."""
WAITS_OF_A_STEP = {
    ("copy to the device, waited for", "training/trainer.py:micro_batch"),
    ("number read", "ops/distributed.py:<listcomp>"),
    ("number read", "training/trainer.py:update"),
}
WAITS_OF_A_TOKEN = {
    ("copy to the device, waited for", "model/attention.py:allowed"),
    ("copy to the device, waited for", "model/cache.py:place"),
    ("copy to the device, waited for", "model/cache.py:tokens_before"),
    ("copy to the device, waited for", "model/cache.py:write"),
    ("copy to the device, waited for", "model/generate.py:_logits_with_cache"),
    ("copy to the device, waited for", "model/generate.py:_pad"),
    ("copy to the host", "model/generate.py:next_distribution"),
    ("index on the host", "model/cache.py:replace"),
    ("number read", "model/generate.py:next_token"),
}


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
    said = "as asked: stopped after step 3" if name == "begun" else "done: best validation loss"
    assert said in run["printed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_step_waits_where_it_is_meant_to(pretended, name):
    """No tensor is built on the host in a layer, and no number read but the two of the log."""
    waits = pretended["trainings"][name]["waits"]
    found = {(what, place) for what, caller, place, _ in waits if caller in IN_A_STEP}
    assert found == WAITS_OF_A_STEP


@pytest.mark.slow
def test_sampling_waits_where_it_is_meant_to(pretended):
    for name, run in pretended["samplings"].items():
        assert run["code"], name + run["error"]
        assert {(what, place) for what, _, place, _ in run["waits"]} <= WAITS_OF_A_TOKEN
