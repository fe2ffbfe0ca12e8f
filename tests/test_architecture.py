"""The import rules of docs/architecture.md, read from the source itself (imports inside functions included)."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import tidegate

SOURCE = Path(__file__).parents[1] / "src" / "tidegate"
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
LEVELS = [
    set(line.split())
    for line in reversed(re.search(r"checks it\):\n\n```\n(.*?)```", PAGE.read_text(), re.S)[1].splitlines())
]
TORCH_ALLOWED = ("backends.cuda", "train")


def _modules() -> dict[str, Path]:
    out = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


MODULES = _modules()


def _imports(path: Path) -> set[str]:
    """Dotted names that a file imports; ours come without the leading package name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: line {node.lineno} is a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if not name.startswith("tidegate."):
                found.add("::" + name)
                continue
            inner = name.removeprefix("tidegate.")
            while inner and inner not in MODULES and inner != "_core":
                inner = inner.rpartition(".")[0]
            found.add(inner)
    return found


def _level(module: str) -> int:
    for rank in reversed(range(len(LEVELS))):
        if any(module == name or module.startswith(name + ".") for name in LEVELS[rank] if "." in name):
            return rank
    top = module.split(".", maxsplit=1)[0]
    return next(rank for rank, names in enumerate(LEVELS) if top in names)


def test_the_tests_read_the_tree_that_is_being_developed():
    assert tidegate.__version__
    assert {"errors", "experts.cache", "cli"} <= MODULES.keys()
    assert {name for names in LEVELS for name in names} <= {*MODULES, "_core"}, "the page names what there is"


def test_imports_point_down():
    wrong = [
        f"{module} -> {target}"
        for module, path in MODULES.items()
        if module
        for target in _imports(path)
        if target and not target.startswith("::") and _level(target) > _level(module)
    ]
    assert not wrong, wrong


def test_there_is_no_import_cycle():
    graph = {
        module: {t for t in _imports(path) if t in MODULES and t != module}
        for module, path in MODULES.items()
        if module
    }
    TopologicalSorter(graph).prepare()


def test_torch_stays_in_its_rooms():
    wrong = [
        module
        for module, path in MODULES.items()
        if not module.startswith(TORCH_ALLOWED)
        and any(name.split(".")[0] in ("::torch", "::transformers") for name in _imports(path))
    ]
    assert not wrong, wrong


def test_files_and_functions_stay_small():
    for module, path in MODULES.items():
        text = path.read_text()
        assert text.count("\n") <= 450, f"{module} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 80, f"{module}.{node.name} is too long"
