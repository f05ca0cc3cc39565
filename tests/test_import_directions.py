"""Folders are floors: a file imports from its own floor's folder or from floors below it, never upwards."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "model": {"model"},
    "data": {"data"},
    "parallel": {"parallel", "data", "model"},
    "training": {"training", "parallel", "data", "model"},
    "launcher": {"launcher", "training", "parallel", "data", "model"},
}
"""The folders that a folder's files may import from; `model` and `data` stand beside each other."""

TOOLS = {"tests", "benchmarks"}
"""Folders that nothing else imports from."""


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of each import in a file, those inside functions and by constant name included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                # One dot is the file's own folder, each further one the folder above.
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                yield node.lineno, ".".join([*parents, *([node.module] if node.module else [])])
            elif node.module:
                yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def violations(source: str, path: Path) -> list[str]:
    """The imports of a file, named by its path under the root, that go where they must not."""
    folder, package = path.parts[0], ".".join(path.parts[:-1])
    found = []
    for line, module in imported_modules(source, package):
        target = module.partition(".")[0]
        if target in (MAY_IMPORT.keys() | TOOLS) - MAY_IMPORT[folder]:
            found.append(f"{path}:{line} imports {module}")
        # DeepSpeed's types and globals stay behind the parallel floor.
        if target == "deepspeed" and folder != "parallel":
            found.append(f"{path}:{line} imports {module}, which only parallel/ may")
    return found


def files_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_nothing_is_imported_from_a_floor_above(folder: str) -> None:
    files = files_of(folder)
    assert files, f"no Python files in {folder}/"
    found = [violation for file in files for violation in violations(file.read_text(), file.relative_to(ROOT))]
    assert not found, "\n".join(found)


def test_the_oracle_of_the_parity_tests_shares_no_code_with_what_it_checks() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in files_of("tests/parity")
        if file.stem.startswith("oracle")
        for line, module in imported_modules(file.read_text(), "tests.parity")
        if module.partition(".")[0] in ("parallel", "training", "launcher", "deepspeed")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("model/block.py", "import parallel.mesh"),
        ("model/block.py", "from data.indexed import IndexedDataset"),
        ("data/batches.py", "from model.configuration import Section"),
        ("parallel/engine.py", "def late():\n    from training.trainer import Trainer"),
        ("parallel/engine.py", "from ..training import trainer"),
        ("training/trainer.py", "import launcher.train"),
        ("training/trainer.py", "from deepspeed.utils import groups"),
        ("launcher/train.py", "import importlib\nimportlib.import_module('tests.helpers')"),
    ],
)
def test_a_planted_violation_is_seen(path: str, source: str) -> None:
    assert len(violations(source, Path(path))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("training/trainer.py", "from parallel.engine import TrainingEngine\nimport data.batches\nimport model.block"),
        ("training/trainer.py", "from . import learning_rate"),
        ("parallel/engine.py", "import deepspeed"),
        ("model/block.py", "import torch\nfrom model.norm import RMSNorm"),
    ],
)
def test_a_sound_import_is_let_through(path: str, source: str) -> None:
    assert violations(source, Path(path)) == []
