"""Who may import whom: the rules that keep `core/` free of tensors and the backends free of their clients.

Read from the source, so that an import inside a function counts as well; what is imported when a module is merely
loaded is tried in a fresh process.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "dflash"
TENSORS = {"torch", "transformers", "safetensors", "mlx", "accelerate", "gguf"}
OTHER_CLIENTS = {"dflash.bench", "dflash.audit", "dflash.check", "dflash.serve", "dflash.launch", "dflash.cli"}
CLIENTS = {"dflash.prepare", "dflash.train"} | OTHER_CLIENTS
PURE = ["core", "types.py", "errors.py", "arguments.py", "registry.py", "resolve.py", "cache.py"]


def sources(*places: str) -> list[Path]:
    """Python files of the given files or folders inside the package."""
    found = [path for place in places for path in sorted((PACKAGE / place).rglob("*.py")) or [PACKAGE / place]]
    return [path for path in found if path.exists()]


def imports(path: Path, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """(module, line) of every import outside `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in tree.body if top_level_only else ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from dflash import train` imports dflash.train
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def forbidden(path: Path, names: set[str], top_level_only: bool = False) -> list[str]:
    """Imports of `names` or anything below them, as 'file:line module'."""
    return [
        f"{path.relative_to(SRC)}:{line} {module}"
        for module, line in imports(path, top_level_only)
        if any(module == name or module.startswith(f"{name}.") for name in names)
    ]


def test_the_rules_see_the_code() -> None:
    """Guards against rules that pass because a folder was renamed and nothing was read."""
    assert len(sources("core")) >= 6
    assert len(sources("backends")) >= 8
    assert len(sources("prepare")) >= 6
    assert len(sources("train")) >= 12
    assert len(sources("cli")) >= 8
    assert forbidden(PACKAGE / "backends/torch/target.py", {"torch"})


def test_core_knows_no_tensors_and_no_clients() -> None:
    """Guards against tensor code in the part that decides (it must serve every backend) and against cycles."""
    backends = {"dflash.backends"}
    found = [line for path in sources(*PURE) for line in forbidden(path, TENSORS | CLIENTS | backends)]
    assert not found


def test_backends_know_no_clients() -> None:
    """Guards against a backend that needs the trainer, the command line or a server."""
    assert not [line for path in sources("backends") for line in forbidden(path, CLIENTS)]


def test_prepare_and_train_use_torch_only_and_no_later_job() -> None:
    """Guards against training code that drags another backend or the command line in, and against answers that cannot
    be made without the trainer: prepare comes first, train reads what it wrote."""
    later = OTHER_CLIENTS | {"dflash.backends.mlx"}
    assert not [line for path in sources("train") for line in forbidden(path, later)]
    assert not [line for path in sources("prepare") for line in forbidden(path, later | {"dflash.train"})]


def test_nobody_imports_the_command_line() -> None:
    """Guards against library code that prints through, or asks, the command line."""
    paths = [path for path in sources(".") if "cli" not in path.parts and path.name != "__main__.py"]
    assert not [line for path in paths for line in forbidden(path, {"dflash.cli"})]


def test_verbs_import_nothing_heavy_at_the_top() -> None:
    """Guards against a slow `dflash --help`."""
    heavy = TENSORS | {"numpy", "huggingface_hub", "dflash.backends", "dflash.train"}
    heavy |= {"dflash.prepare.run", "dflash.prepare.regenerate"}
    assert not [line for path in sources("cli") for line in forbidden(path, heavy, top_level_only=True)]


@pytest.mark.parametrize(
    "modules",
    ["dflash", "dflash.types, dflash.errors, dflash.registry, dflash.resolve, dflash.cache", "CORE", "dflash.cli.main"],
)
def test_loading_them_loads_no_tensor_library(modules: str) -> None:
    """Guards against heavy imports through a third module, which the source of one file does not show."""
    if modules == "CORE":
        files = [path.relative_to(SRC).with_suffix("") for path in sources("core") if path.stem != "__init__"]
        modules = ", ".join(".".join(file.parts) for file in files)
    code = f"import {modules}, sys; found = {TENSORS!r} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_exist_and_are_lazy() -> None:
    """Guards against a name in `__all__` that cannot be imported, and against one that nobody listed."""
    import dflash

    assert sorted(dflash.__all__) == sorted(dflash._PUBLIC)
    for name in dflash.__all__:
        assert getattr(dflash, name) is not None
    with pytest.raises(AttributeError):
        dflash.__getattr__("nonsense")
