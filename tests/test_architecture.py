"""The tree is the method: imports go one way, and importing the library stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "nsr"

# Each part may import itself and what stands to its right; everything else is a step backwards.
LAYERS: dict[str, set[str]] = {
    "operators": set(),
    "residual": {"operators"},
    "kernels": {"operators", "residual"},
    "branches": {"residual"},
    "graph": {"operators", "residual", "kernels", "branches"},
    "tokens": {"operators", "residual", "kernels", "branches"},
    "data": set(),
    "training": {"operators", "residual", "kernels", "branches", "graph", "tokens", "data"},
    "bench": {"operators", "residual", "kernels", "branches", "graph", "tokens", "data", "training", "experiments"},
    "experiments": {"operators", "residual", "kernels", "branches", "graph", "tokens", "data", "training"},
    "report": {"experiments", "data"},
}
# Who may import which library; what is not named here is free.
ONLY = {
    "torch_geometric": {"graph", "data", "training", "experiments", "bench"},
    "timm": {"tokens", "experiments", "bench", "cli"},
}
CORE = {"operators", "residual", "kernels", "branches"}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "nsr" else {module}
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_go_up(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__", "cli"):
        return
    allowed = LAYERS[part] | {part}
    for name in imports(path):
        root, *rest = name.split(".")
        if root == "nsr" and rest:
            assert rest[0] in allowed, f"{part} must not import nsr.{rest[0]}"
        assert part in ONLY.get(root, {part}), f"{part} must not import {root}"
        if part in CORE:
            standard = root in sys.stdlib_module_names
            assert standard or root in {"torch", "triton", "safetensors", "nsr"}, f"the core must not import {root}"


def test_importing_nsr_is_light_and_silent() -> None:
    code = (
        "import sys, nsr\n"
        "heavy = {'torch_geometric', 'timm', 'torchvision', 'matplotlib', 'sklearn', 'typer', 'rich', 'triton'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    bare = subprocess.run(
        [sys.executable, "-c", code.replace(", nsr", ", torch")], capture_output=True, text=True, check=True
    )
    assert done.stdout == bare.stdout  # nothing that torch itself has not loaded already


def test_every_public_name_resolves() -> None:
    import nsr

    for name in nsr.__all__:
        assert getattr(nsr, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = nsr.nonsense
