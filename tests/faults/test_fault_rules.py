"""What no file may contain: `os._exit`, what loads code out of a file, and a collective where not
every rank comes by."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("*.py"), *ROOT.glob("ups/**/*.py")])
CODE = {("torch", "load"), ("pickle", "load"), ("pickle", "loads"), ("joblib", "load"),
        ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("marshal", "loads"),
        ("os", "system"), ("", "eval"), ("", "exec"), ("os", "_exit"), ("os", "abort")}
COLLECTIVES = {
    "all_reduce", "broadcast", "broadcast_object_list", "monitored_barrier", "barrier", "reduce",
    "all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object",
    "gather_for_metrics", "scatter", "reduce_scatter", "wait_for_everyone", "full_tensor",
    "save_state", "on_main", "together", "everyone", "take_lock", "gather_state", "whole"}


def called(node):
    """Names of all functions that are called below a node."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            function = call.func
            name = getattr(function, "attr", None) or getattr(function, "id", "")
            bare = isinstance(function, ast.Name)
            owner = "" if bare else getattr(getattr(function, "value", None), "id", "?")
            yield call.lineno, owner, name


def faults(source):
    tree = ast.parse(source)
    handlers = {arg.id for call in ast.walk(tree) if isinstance(call, ast.Call)
                and getattr(call.func, "attr", "") == "signal" and len(call.args) == 2
                for arg in call.args[1:] if isinstance(arg, ast.Name)}
    for line, owner, name in called(tree):
        if (owner, name) in CODE:
            yield f"line {line}: {owner}.{name}".replace(" .", " ")  # a bare name has no owner
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for word in call.keywords:
            allowed = getattr(word.value, "value", True) is False
            if word.arg in ("allow_pickle", "shell", "trust_remote_code") and not allowed:
                yield f"line {call.lineno}: {word.arg}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            where = "an except block"
        elif isinstance(node, ast.FunctionDef) and node.name in handlers:
            where = "a signal handler"
        else:
            continue
        for line, _, name in called(node):
            if name in COLLECTIVES:
                yield f"line {line}: {name} in {where}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_hidden_end_and_no_collective_alone(file):
    assert list(faults(file.read_text())) == []


@pytest.mark.parametrize("source, found", [
    ("import os\nos._exit(0)", "line 2: os._exit"),
    ("x = eval(text)", "line 1: eval"),
    ("np.load(path, allow_pickle=True)", "line 1: allow_pickle"),
    ("try:\n    f()\nexcept ValueError:\n    if x:\n        dist.all_reduce(t)",
     "line 5: all_reduce in an except block"),
    ("def ask(number, frame):\n    on_main(a, f)\nsignal.signal(15, ask)",
     "line 2: on_main in a signal handler"),
])
def test_the_rules_find_what_they_forbid(source, found):
    assert list(faults(source)) == [found]
    assert "signal.signal(number, ask)" in (ROOT / "ups/train/run.py").read_text()  # it is seen
