"""The rooms of the package, which imports go between them, and a picture of that.

    python -m tests.rooms      # the picture, in Mermaid's words; docs/tree.md has it

What each file imports is read from its syntax tree, so imports inside functions count and nothing is run. A room may
import those that stand before it in ROOMS, and itself.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOUNDATION, PROGRAMS = "foundation", "programs"  # the files that lie in lowmem/ itself, below and above the rooms
PROGRAM_FILES = {"__init__", "__main__", "allocator", "plan"}
ROOMS = (FOUNDATION, "core", "models", "data", "distributed", "cudasim", "planning", "run", PROGRAMS)
# Neighbours in that order that know nothing of each other all the same.
STRANGERS = {("data", "models"), ("cudasim", "core"), ("cudasim", "models"), ("cudasim", "data"), ("planning", "data")}
STRANGERS |= {("distributed", "models"), ("distributed", "data"), ("cudasim", "distributed")}
STRANGERS |= {("planning", "distributed")}
COMPOSED = {"parallel_3d": ["pipeline_parallel", "tensor_parallel"]}  # experiments that are made of others
OPTIONAL_PACKAGES = {"wandb", "bitsandbytes", "datasets", "matplotlib", "pyarrow", "tensorboard"}


def imported_modules(path: Path, root: Path, module_level_only: bool = False) -> set[str]:
    """Full names of the modules that the file imports; ``from a import b`` gives a.b where that is a module, else a."""
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
            inner = {name for name in names if _is_module(name, root)}
            found |= inner if len(inner) == len(names) else inner | {module}
        if not (module_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            nodes.extend(ast.iter_child_nodes(node))
    return found


def _is_module(name: str, root: Path) -> bool:
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def room_of(module: str) -> str:
    """The room of a module of lowmem, by its full name."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in PROGRAM_FILES:
        return PROGRAMS
    return parts[1] if parts[1] in ROOMS else FOUNDATION


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files(root: Path, folder: str) -> list[Path]:
    return sorted((root / folder).rglob("*.py"))


def arrows(root: Path = ROOT) -> dict[tuple[str, str], int]:
    """How many imports each room has of each other one: {(importer, imported): files and modules}."""
    found: dict[tuple[str, str], int] = {}
    for path in python_files(root, "lowmem"):
        room = room_of(module_of(path, root))
        for module in imported_modules(path, root):
            if module.split(".")[0] == "lowmem" and room_of(module) != room:
                arrow = room, room_of(module)
                found[arrow] = found.get(arrow, 0) + 1
    return found


def violations(root: Path = ROOT) -> list[str]:
    """One sentence for every import that points the wrong way in the tree under `root`."""
    scripts = {path.stem for path in root.glob("*.py")}
    found = []
    for path in python_files(root, "lowmem"):
        place, room = path.relative_to(root), room_of(module_of(path, root))
        for module in sorted(imported_modules(path, root)):
            top = module.split(".")[0]
            if top in {"experiments", "tests", "stand_in", *scripts}:
                found.append(f"{place} imports {module}, which stands above the package")
            if top != "lowmem" or room_of(module) == room:
                continue
            if ROOMS.index(room_of(module)) > ROOMS.index(room) or (room, room_of(module)) in STRANGERS:
                found.append(f"{place} imports {module}: {room} knows nothing of {room_of(module)}")
        for module in sorted(imported_modules(path, root, module_level_only=True)):
            if module.split(".")[0] in OPTIONAL_PACKAGES:
                found.append(f"{place} imports the optional {module} outside the function that uses it")
    for path in python_files(root, "experiments"):
        own = path.relative_to(root / "experiments").parts[0].removesuffix(".py")
        for module in sorted(imported_modules(path, root)):
            parts = module.split(".")
            known = [own, "harness", *COMPOSED.get(own, [])]
            others = path.parent.name != "experiments" and parts[1:2] not in ([], *([of] for of in known))
            if parts[0] in scripts or (parts[0] == "experiments" and others):
                found.append(
                    f"{path.relative_to(root)} imports {module}: experiments import lowmem, the harness and themselves"
                )
    for path in root.glob("*.py"):
        for module in sorted(imported_modules(path, root)):
            if module.split(".")[0] in {"experiments", "tests", *scripts}:
                found.append(f"{path.name} imports {module}: a script imports lowmem only")
    return found


def floors(root: Path = ROOT) -> list[list[str]]:
    """The rooms by floor: each stands above all that it imports. CycleError where rooms import each other."""
    found_arrows = arrows(root)
    sorter = TopologicalSorter({room: {imported for importer, imported in found_arrows if importer == room}
                                for room in ROOMS})  # fmt: skip
    sorter.prepare()
    found = []
    while sorter.is_active():
        ready = sorter.get_ready()
        found.append(sorted(ready, key=ROOMS.index))
        sorter.done(*ready)
    return found


def picture(root: Path = ROOT) -> str:
    """The rooms and their imports, as a Mermaid chart. An arrow that a path of others already says is left out."""
    drawn = set(arrows(root))
    below: dict[str, set[str]] = {}
    for floor in floors(root):
        for room in floor:
            direct = {imported for importer, imported in drawn if importer == room}
            below[room] = direct.union(*(below[other] for other in direct))
    lines = ["flowchart BT"]
    for importer, imported in sorted(drawn, key=lambda arrow: tuple(map(ROOMS.index, arrow))):
        others = {other for which, other in drawn if which == importer and other != imported}
        if not any(imported in below[other] for other in others):
            lines.append(f"    {importer} --> {imported}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())
