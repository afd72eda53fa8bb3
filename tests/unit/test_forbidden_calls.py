"""Nothing in the package may run what it reads: the syntax trees of all modules are searched."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedprompt

pytestmark = pytest.mark.unit

PACKAGE = Path(fedprompt.__file__).parent
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("torch.jit", "load"), ("torch.hub", "load")}
YAML = {"unsafe_load", "full_load", "load_all", "unsafe_load_all", "full_load_all"}
UNIX_MODULES = {"fcntl", "resource", "pwd", "grp", "termios"}
UNIX_FUNCTIONS = {
    f"os.{name}" for name in ("pread", "pwrite", "sysconf", "fork", "getpgid", "killpg", "sched_getaffinity")
}
SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}


def forbidden(tree: ast.AST) -> Iterator[str]:
    """What a module must not do, one finding a line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = {name.split(".")[0] for name in [*origin, *(alias.name for alias in node.names)]}
            yield from (f"line {node.lineno}: import of {name}" for name in sorted(names & MODULES))
            if origin and (origin[0].split(".")[0], "load") in LOADERS and any(a.name == "load" for a in node.names):
                yield f"line {node.lineno}: import of {origin[0]}.load"
        elif isinstance(node, ast.Call):
            yield from (f"line {node.lineno}: {finding}" for finding in _of_call(node))


def _of_call(call: ast.Call) -> Iterator[str]:
    if isinstance(call.func, ast.Name) and call.func.id in BUILTINS:
        yield f"{call.func.id}()"
    if isinstance(call.func, ast.Attribute):
        called = (ast.unparse(call.func.value), call.func.attr)
        if called in LOADERS | SHELLS or (called[0] == "yaml" and called[1] in YAML):
            yield ".".join(called)
        if called == ("yaml", "load") and [ast.unparse(word.value) for word in call.keywords] != ["Loader"]:
            yield "yaml.load with a loader that is not ours"
    for word in call.keywords:
        if word.arg in ("allow_pickle", "shell", "trust_remote_code") and ast.unparse(word.value) != "False":
            yield f"{word.arg}={ast.unparse(word.value)}"


@cache
def parsed(folder: Path) -> list[tuple[str, ast.Module]]:
    """The syntax trees of all modules below a folder, by their paths."""
    paths = sorted(folder.rglob("*.py"))
    return [(path.relative_to(folder).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def findings(folder: Path) -> tuple[int, list[str]]:
    """How many modules there are below a folder, and what they must not do."""
    trees = parsed(folder)
    return len(trees), [f"{name}, {finding}" for name, tree in trees for finding in forbidden(tree)]


def unix_only(tree: ast.AST) -> Iterator[str]:
    """What Windows lacks, and `os.kill(process, 0)`, which ends the process there."""
    guarded = {
        id(each)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try | ast.If)
        for inner in node.body
        for each in ast.walk(inner)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in guarded:
            yield from (
                f"line {node.lineno}: import of {each.name}" for each in node.names if each.name in UNIX_MODULES
            )
        if isinstance(node, ast.Attribute) and id(node) not in guarded and ast.unparse(node) in UNIX_FUNCTIONS:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.kill" and ast.unparse(node.args[1]) == "0":
            yield f"line {node.lineno}: os.kill(process, 0)"


def test_what_windows_lacks_is_used_only_where_there_is_another_way() -> None:
    assert [f"{name}, {finding}" for name, tree in parsed(PACKAGE) for finding in unix_only(tree)] == []


@pytest.mark.parametrize(
    "code", ["import fcntl", "import os\nos.pread(1, 2, 3)", "os.sysconf('SC_PAGE_SIZE')", "os.kill(process, 0)"]
)
def test_the_search_finds_what_windows_lacks(code: str) -> None:
    assert len(list(unix_only(ast.parse(code)))) == 1


def test_no_module_can_run_what_it_reads() -> None:
    modules, found = findings(PACKAGE)
    assert modules > 200
    assert found == []


def test_every_module_that_does_is_told(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.py").write_text("import json\nimport pickle\n")
    (tmp_path / "two.py").write_text("eval(text)\n")
    (tmp_path / "good.py").write_text("import json\n")
    assert findings(tmp_path) == (3, ["inner/one.py, line 2: import of pickle", "two.py, line 1: eval()"])


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "import os, marshal",
        "from pickle import loads",
        "from torch import load",
        "import cloudpickle.compat",
        "def f():\n    from shelve import open",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "numpy.load(path, allow_pickle=False)",
        "np.lib.format.read_array(stream, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "x = [compile(text, '', 'exec')]",
        "__import__(name)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.UnsafeLoader)",
        "yaml.load(text, yaml.Loader)",
        "yaml.full_load(text)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=flag)",
        "os.system(command)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_a_planted_call_is_found(planted: str) -> None:
    assert list(forbidden(ast.parse(planted)))


@pytest.mark.parametrize(
    "innocent",
    [
        "model.eval()",
        "cursor.execute(query)",
        "re.compile(pattern)",
        "yaml.load(text, Loader=Loader)",
        "json.load(stream)",
        "subprocess.run(command, shell=False)",
        "config.load(path)",
        "PICKLES = ('.pkl',)",
    ],
)
def test_what_only_looks_like_it_is_left_alone(innocent: str) -> None:
    assert list(forbidden(ast.parse(innocent))) == []


def test_yaml_is_read_by_a_safe_loader() -> None:
    import yaml

    from fedprompt.config.strict_yaml import Loader

    assert issubclass(Loader, yaml.SafeLoader)
