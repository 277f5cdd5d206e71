"""Imports between rooms go one way, and the tree page's picture of them is the code's."""

import re

import pytest

from tests.rooms import ROOMS, ROOT, arrows, floors, picture, room_of, violations

MOST_FLOORS = 7


def test_imports_point_one_way():
    assert violations(ROOT) == []


def test_rooms_stand_on_few_floors():
    found = floors(ROOT)
    assert sum(map(len, found)) == len(ROOMS) and len(found) <= MOST_FLOORS
    assert len(arrows(ROOT)) > len(ROOMS)  # the code was read


def test_the_picture_in_the_readme_is_the_code_s():
    drawn = re.findall(r"```mermaid\n(.*?)\n```", (ROOT / "docs/tree.md").read_text(encoding="utf-8"), re.DOTALL)
    assert drawn == [picture(ROOT)], "python -m tests.rooms prints the picture"


def test_every_folder_of_the_package_is_a_room_that_says_what_it_is():
    for folder in (path for path in (ROOT / "lowmem").iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert folder.name in ROOMS
        assert (folder / "__init__.py").read_text(encoding="utf-8").startswith('"""')
    assert room_of("lowmem.units") == ROOMS[0] and room_of("lowmem.plan") == room_of("lowmem") == ROOMS[-1]


def tree(folder, *more: str):
    """Empty files in the place of a project's."""
    files = ["lowmem/__init__.py", "lowmem/plan.py", "lowmem/units.py", "lowmem/core/loss.py", "lowmem/data/dataset.py"]
    files += ["lowmem/cudasim/recorder.py", "lowmem/planning/search.py", "lowmem/run/train.py", "train_gpt2_xl.py"]
    files += ["experiments/peers/run.py", "experiments/peers/table.py", "experiments/scaling/run.py", *more]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert violations(folder) == []


@pytest.mark.parametrize(("file", "code"), [
    ("lowmem/plan.py", "import experiments.peers"), ("lowmem/plan.py", "def f():\n    from experiments import peers"),
    ("lowmem/plan.py", "import train_gpt2_xl"), ("lowmem/units.py", "from lowmem import plan"),
    ("lowmem/units.py", "from lowmem.core.loss import IGNORED"),
    ("lowmem/core/loss.py", "from lowmem.cudasim import recorder"),
    ("lowmem/core/loss.py", "from ..data import dataset"),
    ("lowmem/core/loss.py", "def f():\n    from lowmem.planning.search import fastest"),
    ("lowmem/cudasim/recorder.py", "import lowmem.planning.search"),
    ("lowmem/cudasim/recorder.py", "import lowmem.data.dataset"),
    ("lowmem/cudasim/recorder.py", "from lowmem.core.kernels import operators"),
    ("lowmem/planning/search.py", "from lowmem.data.dataset import Rows"),
    ("lowmem/planning/search.py", "from lowmem.run import train"), ("lowmem/run/train.py", "import wandb"),
    ("lowmem/run/train.py", "try:\n    from matplotlib import pyplot\nexcept ImportError:\n    pass"),
    ("lowmem/run/train.py", "class Log:\n    import pyarrow.parquet"),
    ("experiments/peers/run.py", "from experiments.scaling.run import main"),
    ("experiments/peers/run.py", "from ..scaling import run"), ("experiments/peers/run.py", "import train_gpt2_xl"),
    ("experiments/tensor_parallel/run.py", "from experiments.parallel_3d import mesh"),
    ("experiments/parallel_3d/run.py", "from experiments.peers import run"),
    ("train_gpt2_xl.py", "from experiments.peers import run"),
])  # fmt: skip
def test_an_import_that_points_the_wrong_way_is_found(tmp_path, file, code):
    tree(tmp_path, file)
    (tmp_path / file).write_text(code)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("lowmem/core/loss.py", "import math, torch\nimport transformers\nfrom lowmem.units import GIB"),
        ("lowmem/core/loss.py", "from lowmem import units\nfrom ..units import GIB"),
        ("lowmem/planning/search.py", "from lowmem.cudasim.recorder import Tape\nfrom lowmem.core import loss"),
        ("lowmem/run/train.py", "def log():\n    import wandb\nfrom lowmem.data import dataset"),
        ("experiments/peers/run.py", "import lowmem.run\nfrom experiments.peers import table\nfrom . import run"),
        ("experiments/parallel_3d/run.py", "from experiments.tensor_parallel import rules"),
        ("train_gpt2_xl.py", "from lowmem.run.train import main"),
    ],
)
def test_an_import_that_points_the_right_way_is_not(tmp_path, file, code):
    tree(tmp_path, file)
    (tmp_path / file).write_text(code)
    assert violations(tmp_path) == []
