"""Check what a learner wrote in docs/exercises: `make exercise N=3`, or
`python -m exercises.check 3`; without a number, list the exercises and which are done.

The learner's function and the product's are called on the same cases. Where they differ, functions
that are wrong in a known way (`exercises.part_1` and `part_2`) say why: the one that gives what the
learner's gives is the cause.

The files are programs and are run as such, with all that the user may do: what somebody else wrote
is to be read before it is checked.

The learner's code runs in a thread, so that a loop without end can be left: a thread that does
not come back is abandoned, and ends with the process.
"""

import argparse
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from errors import UserError, run_command
from exercises.kinds import FOLDER, Case, Exercise

SECONDS = 10.0
STATES = {
    "done": "done",
    "wrong": "not yet right",
    "unfilled": "not begun",
    "broken": "stops with an error",
    "endless": "does not come to an end",
}


@dataclass(frozen=True)
class Verdict:
    """What was found: a key of STATES, and lines for the learner."""

    state: str
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Failure:
    """A call that gave no value."""

    error: BaseException


def outcome(case: Case, function: Callable) -> Any:
    """What the case makes of the function: its value, or a Failure."""
    import torch

    try:
        with torch.no_grad():
            return case.run(function)
    except BaseException as error:  # a learner's sys.exit() must not end the checker
        return Failure(error)


def problem(expected: Any, got: Any) -> str:
    """What is wrong with `got` before any number is looked at; empty if nothing."""
    import torch
    from torch import Tensor

    if got is None:
        return "nothing: there is no `return`"
    if isinstance(expected, Tensor) and expected.ndim:
        if not isinstance(got, Tensor):
            return f"{type(got).__name__}, not a tensor"
        if got.shape != expected.shape:
            return f"a tensor of shape {tuple(got.shape)}"
        kinds = [(x.dtype.is_floating_point, str(x.dtype) == "torch.bool") for x in (expected, got)]
        if kinds[0] != kinds[1]:
            return f"a tensor of dtype {got.dtype}"
    elif isinstance(got, Tensor) and got.numel() != 1:
        return f"a tensor of shape {tuple(got.shape)}"
    elif not isinstance(got, int | float | Tensor):
        return f"{type(got).__name__}, not a number"
    if isinstance(got, Tensor) and (got.is_meta or got.layout is not torch.strided):
        return "a tensor that holds no numbers, or not in the usual way"
    return ""


def differences(expected: Any, got: Any) -> Any:
    """Where the two, fit to be compared, differ: a boolean tensor."""
    import torch

    one = torch.as_tensor(expected).double()
    other = torch.as_tensor(got).double().reshape(one.shape)
    return ~torch.isclose(other, one, rtol=1e-4, atol=1e-5, equal_nan=True)


def alike(one: Any, other: Any) -> bool:
    """Whether two outcomes are the same."""
    if isinstance(one, Failure) or isinstance(other, Failure):
        return False
    return not problem(one, other) and not bool(differences(one, other).any())


def in_words(value: Any, at: tuple[int, ...] = ()) -> str:
    """A number, or the row `at` of a tensor."""
    import torch

    row = torch.as_tensor(value)[at].detach().reshape(-1)
    if row.dtype == torch.bool:
        shown = [str(flag) for flag in row.tolist()]
    else:
        shown = [f"{number:.5g}" for number in row.tolist()]
    return " ".join(shown[:8]) + (" ..." if len(shown) > 8 else "")


def shape_in_words(value: Any) -> str:
    """What kind of value is expected."""
    from torch import Tensor

    if not isinstance(value, Tensor) or not value.ndim:
        return "a number"
    kind = "real numbers" if value.dtype.is_floating_point else "booleans"
    return f"a tensor of {kind}, shape {tuple(value.shape)}"


def compared(expected: Any, got: Any) -> list[str]:
    """The lines `expected` and `got` of a case in which they differ."""
    wrong = problem(expected, got)
    if wrong:
        return [f"expected  {shape_in_words(expected)}", f"got       {wrong}"]
    where = differences(expected, got)
    first = tuple(where.nonzero()[0].tolist())[:-1]
    place = f"   (row {', '.join(map(str, first))})" if any(where.shape[:-1]) else ""
    return [
        f"expected  {in_words(expected, first)}{place}",
        f"got       {in_words(got, first)}",
    ]


def cause(exercise: Exercise, outcomes: list[Any], failing: int) -> str:
    """The line that says why case number `failing`, the first that fails, does.

    Of the known mistakes that give the learner's value in this case, the one that does so in most
    others is named: it is the cause if in all, else perhaps. Where there is none, it is the case's
    own hint.
    """
    best, most = None, 0
    for mistake in exercise.mistakes:
        if not alike(outcome(exercise.cases[failing], mistake.function), outcomes[failing]):
            continue
        pairs = zip(exercise.cases, outcomes, strict=True)
        n_alike = sum(alike(outcome(case, mistake.function), got) for case, got in pairs)
        if n_alike > most:
            best, most = mistake, n_alike
    if best is None:
        return f"usually   {exercise.cases[failing].hint}"
    word = "cause  " if most == len(outcomes) else "perhaps"
    return f"{word}   {best.words}"


def line_of(path: Path, number: int | None) -> str:
    """A line of the learner's file, as a reader finds it."""
    text = linecache.getline(str(path), number or 0).strip()
    return f"{path.name}, line {number}: {text}" if text else f"{path.name}, line {number}"


def error_in_words(error: BaseException, path: Path) -> str:
    """An exception in one line, with the last line of the learner's file that it passed."""
    message = " ".join(str(error).split())
    said = f"{type(error).__name__}: {message}" if message else type(error).__name__
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
        said = f"{type(error).__name__}: {error.msg}"
    return f"{said}   ({line_of(path, lines[-1])})" if lines else said


def is_unfilled(result: Any, path: Path) -> bool:
    """Whether it is the stub's own `raise NotImplementedError`."""
    if not isinstance(result, Failure) or not isinstance(result.error, NotImplementedError):
        return False
    frames = traceback.extract_tb(result.error.__traceback__)
    return bool(frames) and frames[-1].filename == str(path)


def shown(path: Path) -> str:
    """A path as one would type it in the repository."""
    root = FOLDER.parents[1]
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def judge(exercise: Exercise, function: Callable, path: Path) -> Verdict:
    """Try a function, which stands in the file `path`, on every case."""
    outcomes = [outcome(case, function) for case in exercise.cases]
    if is_unfilled(outcomes[0], path):
        line = f"write {exercise.function}() in {shown(path)}, then run this again"
        return Verdict("unfilled", [line, f"what it is to do: {shown(FOLDER / exercise.stem)}.md"])
    right = [outcome(case, exercise.solution) for case in exercise.cases]
    agrees = [alike(*pair) for pair in zip(right, outcomes, strict=True)]
    if all(agrees):
        return Verdict("done", [f"all {len(agrees)} cases agree with the product's own function"])
    failing = agrees.index(False)
    head = [
        f"{sum(agrees)} of {len(agrees)} cases agree; the first that does not:",
        f"case      {exercise.cases[failing].words}",
    ]
    got = outcomes[failing]
    if isinstance(got, Failure):
        return Verdict("broken", [*head, f"error     {error_in_words(got.error, path)}"])
    lines = compared(right[failing], got)
    return Verdict("wrong", [*head, *lines, cause(exercise, outcomes, failing)])


def load(path: Path, name: str) -> Callable:
    """The learner's function of that name. Raises what the file raises, and AttributeError where
    it is not there.
    """
    linecache.checkcache(str(path))
    variables: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), variables)
    if not callable(variables.get(name)):
        raise AttributeError(f"there is no function {name}() in {path.name}")
    return variables[name]


def read_and_judge(exercise: Exercise, path: Path) -> Verdict:
    """Load the learner's file and try it."""
    try:
        function = load(path, exercise.function)
    except BaseException as error:  # whatever a learner's file does when it is read
        return Verdict("broken", [f"error     {error_in_words(error, path)}"])
    return judge(exercise, function, path)


def innermost(frame: FrameType | None, path: Path) -> int | None:
    """The line of the learner's file at which a thread is."""
    while frame is not None and frame.f_code.co_filename != str(path):
        frame = frame.f_back
    return frame.f_lineno if frame else None


def in_time(work: Callable[[], Verdict], path: Path, seconds: float) -> Verdict:
    """`work`, left where it takes longer."""
    found: Future[Verdict] = Future()

    def try_it() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # a fault of the checker is raised where it is seen
            found.set_exception(error)

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(seconds)
    if found.done():
        return found.result()
    number = innermost(sys._current_frames().get(thread.ident or 0), path)
    said = f"after {seconds:g} s it was still at {line_of(path, number)}"
    return Verdict("endless", [said, "usually   a loop whose condition never becomes false"])


def examine(exercise: Exercise, folder: Path = FOLDER, seconds: float = SECONDS) -> Verdict:
    """The verdict on the learner's file in `folder`."""
    path = folder / f"{exercise.stem}.py"
    if not path.exists():
        return Verdict("broken", [f"error     {path.name} is not in {folder}"])
    return in_time(lambda: read_and_judge(exercise, path), path, seconds)


def find(word: str, exercises: list[Exercise]) -> Exercise:
    """The exercise with that number or name. Raises UserError where there is none."""
    for exercise in exercises:
        if word.strip().lower() in (str(exercise.number), exercise.name, exercise.stem):
            return exercise
    names = ", ".join(f"{exercise.number} {exercise.name}" for exercise in exercises)
    raise UserError(f"there is no exercise {word!r}; there are {names}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("exercises.check", description="Check a learner's exercises.")
    parser.add_argument("exercise", nargs="?", help="number or name; none: list them all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the learner's files lie")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long one may take")
    return parser.parse_args()


def main() -> int:
    """Check one exercise, or list all."""
    given = arguments()
    from exercises.all import EXERCISES  # torch, which --help need not wait for

    if not given.exercise:
        for exercise in EXERCISES:
            verdict = examine(exercise, given.folder, given.seconds)
            print(f"{exercise.number:2}  {exercise.name:10} {STATES[verdict.state]}", flush=True)
        return 0
    exercise = find(given.exercise, EXERCISES)
    verdict = examine(exercise, given.folder, given.seconds)
    print(f"exercise {exercise.number}, {exercise.name}: {STATES[verdict.state]}")
    for line in verdict.lines:
        print(f"  {line}")
    return 0 if verdict.state == "done" else 1


def leave_threads() -> None:
    """End at once, with the code that was asked for: Python's own end aborts a thread that is still
    at work inside torch.
    """
    code = 1
    try:
        run_command(main)
    except SystemExit as end:
        code = int(end.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave_threads()
