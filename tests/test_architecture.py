"""Imports point one way: scripts and experiments -> lowmem.train -> the rest of lowmem -> techniques -> units, errors.

What each file imports is read from its syntax tree, so imports inside functions count and nothing is run.
"""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A technique file stands alone: torch, the standard library, units and errors. What else one may import is listed here.
TECHNIQUES = {
    "units": set(),
    "errors": set(),
    "operators": {"lowmem.kernels"},
    "precision": set(),
    "layers": {"transformers", "lowmem.operators"},
    "recompute": {"lowmem.blocks", "lowmem.products"},
    "products": set(),
    "loss": {"lowmem.operators", "lowmem.logits"},
    "logits": set(),
    "blocks": {"transformers", "lowmem.logits"},
    "adam": {"lowmem.precision", "bitsandbytes"},
    "streaming": set(),
    "budget": {"psutil"},
    "clock": set(),
    "trace": {"lowmem.clock"},
    "cards": set(),
    "roofline": {"lowmem.operators", "lowmem.cards"},
    "capabilities": set(),
    "cuda_ops": {"lowmem.operators", "lowmem.capabilities"},
    "reductions": {"lowmem.capabilities"},
    "temporaries": {"lowmem.operators", "lowmem.capabilities", "lowmem.reductions"},
    "stretch": {"lowmem.trace"},
    "tensor_parallel": {"transformers", "lowmem.blocks"},
    "parallel_recipe": {"lowmem.blocks"},
}
EVERY_TECHNIQUE = {"torch", "lowmem.units", "lowmem.errors"}
OPTIONAL_PACKAGES = {"wandb", "bitsandbytes", "datasets", "matplotlib", "pyarrow"}


def imported_modules(path: Path, root: Path, module_level_only: bool = False) -> set[str]:
    """Full names of the modules that the file imports; ``from a import b`` gives both a and a.b where b is a module."""
    package = path.relative_to(root).parent.parts
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"), str(path))]
    found = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" for alias in node.names]
            inner = {name for name in names if is_module(name, root)}
            # `from lowmem import units` imports lowmem.units; lowmem itself is empty
            found |= inner if len(inner) == len(names) else inner | {module}
        if not (module_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            nodes.extend(ast.iter_child_nodes(node))
    return found


def is_module(name: str, root: Path) -> bool:
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def python_files(root: Path, folder: str) -> list[Path]:
    return sorted((root / folder).rglob("*.py"))


def violations(root: Path) -> list[str]:
    """One sentence for every import that points the wrong way in the tree under `root`."""
    scripts = sorted(path.stem for path in root.glob("*.py"))
    found = []
    for path in python_files(root, "lowmem"):
        name = path.stem
        allowed = EVERY_TECHNIQUE | TECHNIQUES.get(name, set()) | {f"lowmem.{name}"}
        for module in sorted(imported_modules(path, root)):
            top = module.split(".")[0]
            if top == "experiments" or top == "tests" or top in scripts:
                found.append(f"lowmem/{path.name} imports {module}, which stands above it")
            if module == "lowmem.train" and name != "main":
                found.append(f"lowmem/{path.name} imports lowmem.train, which only main, scripts and experiments may")
            within = any(module == other or module.startswith(f"{other}.") for other in allowed)
            if name in TECHNIQUES and top not in sys.stdlib_module_names and not within:
                found.append(f"lowmem/{path.name} is a technique and imports {module}; see the table in this test")
        for module in sorted(imported_modules(path, root, module_level_only=True)):
            if module.split(".")[0] in OPTIONAL_PACKAGES:
                found.append(f"lowmem/{path.name} imports the optional {module} outside the function that uses it")
    for path in python_files(root, "experiments"):
        own = path.relative_to(root / "experiments").parts[0].removesuffix(".py")
        for module in sorted(imported_modules(path, root)):
            parts = module.split(".")
            others = path.parent.name != "experiments" and parts[1:2] not in ([], [own], ["harness"])
            if parts[0] in scripts or (parts[0] == "experiments" and others):
                found.append(
                    f"{path.relative_to(root)} imports {module}: experiments import lowmem, the harness and themselves"
                )
    for path in root.glob("*.py"):
        for module in sorted(imported_modules(path, root)):
            if module.split(".")[0] in {"experiments", "tests", *scripts}:
                found.append(f"{path.name} imports {module}: a script imports lowmem only")
    return found


def test_imports_point_one_way():
    assert violations(ROOT) == []


def test_lowmem_has_no_import_cycle():
    graph = {f"lowmem.{path.stem}": imported_modules(path, ROOT) for path in python_files(ROOT, "lowmem")}
    for name, modules in graph.items():
        graph[name] = modules & graph.keys() - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("lowmem/plan.py", "import experiments.peers"),
        ("lowmem/plan.py", "def f():\n    from experiments import peers"),
        ("lowmem/plan.py", "import train_gpt2_xl"),
        ("lowmem/plan.py", "from lowmem import train"),
        ("lowmem/plan.py", "from lowmem.train import main"),
        ("lowmem/plan.py", "from .train import main"),
        ("lowmem/loss.py", "from lowmem.plan import choose"),
        ("lowmem/loss.py", "from . import plan"),
        ("lowmem/loss.py", "def f():\n    import transformers"),
        ("lowmem/loss.py", "import torchvision"),
        ("lowmem/log.py", "import wandb"),
        ("lowmem/log.py", "try:\n    from matplotlib import pyplot\nexcept ImportError:\n    pass"),
        ("lowmem/log.py", "class Log:\n    import pyarrow.parquet"),
        ("experiments/peers/run.py", "from experiments.scaling.run import main"),
        ("experiments/peers/run.py", "from ..scaling import run"),
        ("experiments/peers/run.py", "import train_gpt2_xl"),
        ("train_gpt2_xl.py", "from experiments.peers import run"),
    ],
)
def test_an_import_that_points_the_wrong_way_is_found(tmp_path, file, code):
    tree = ["lowmem/train.py", "lowmem/plan.py", "lowmem/loss.py", "lowmem/log.py", "train_gpt2_xl.py"]
    for name in [*tree, "experiments/peers/run.py", "experiments/scaling/run.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert violations(tmp_path) == []
    (tmp_path / file).write_text(code)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("lowmem/loss.py", "import math, torch\nimport torch.nn.functional as F\nfrom lowmem.errors import InputError"),
        ("lowmem/loss.py", "from lowmem import units\nfrom .units import GIB"),
        ("lowmem/log.py", "def log():\n    import wandb"),
        ("experiments/peers/run.py", "import lowmem.train\nfrom experiments.peers import table\nfrom . import table"),
        ("train_gpt2_xl.py", "from lowmem.train import main"),
    ],
)
def test_an_import_that_points_the_right_way_is_not(tmp_path, file, code):
    for name in ("lowmem/train.py", "lowmem/units.py", "lowmem/errors.py", "experiments/peers/table.py", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / file).write_text(code)
    assert violations(tmp_path) == []
