"""Runs a notebook's code as a notebook does, without one: cell by cell in one namespace, the value
of a cell's last line shown. So no test needs the dozens of packages behind a real kernel.

    python tests/notebook_cells.py docs/tour.ipynb N_STEP=12     # a parameter with another value
"""

import ast
import json
import sys
from pathlib import Path


def read_notebook(path):
    """The notebook as a dictionary, as nbformat describes it."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def code_cells(notebook):
    """(source, tags) of each code cell, in order."""
    return [
        ("".join(cell["source"]), cell["metadata"].get("tags", []))
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


def run_cell(source, name, namespace):
    """Run a cell's source; the value of its last line where that is an expression, else None.
    `name` stands in tracebacks.
    """
    tree = ast.parse(source, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, name, "exec"), namespace)
    return None if last is None else eval(compile(last, name, "eval"), namespace)


def run_notebook(path, parameters):
    """Run all code cells; the namespace and what they showed. `parameters` are set behind the cell
    that is tagged so, as papermill does.
    """
    namespace = {"__name__": "__main__"}
    shown = []
    for index, (source, tags) in enumerate(code_cells(read_notebook(path))):
        value = run_cell(source, f"code cell {index} of {path}", namespace)
        if value is not None:
            shown.append(value)
        if "parameters" in tags:
            unknown = parameters.keys() - namespace.keys()
            assert not unknown, f"no such parameter: {unknown}"
            namespace.update(parameters)
    return namespace, shown


if __name__ == "__main__":
    settings = [word.partition("=") for word in sys.argv[2:]]
    _, values = run_notebook(sys.argv[1], {name: int(value) for name, _, value in settings})
    for value in values:
        page = value._repr_html_() if hasattr(value, "_repr_html_") else ""
        print(f"shown: {type(value).__name__}, {len(page)} characters of HTML")
