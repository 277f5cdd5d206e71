"""`make setup` and `pip install`: lowmem is there outside of its folder, too. Nothing is fetched."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest

# Not find_spec: looking for pip makes setuptools leave distutils to Python, and torch.compile then fails here.
INSTALLED = {distribution.name for distribution in distributions()}
pytestmark = pytest.mark.skipif(
    not {"pip", "setuptools"} <= INSTALLED, reason="installs with the pip and the setuptools that are here"
)
ROOT = Path(__file__).resolve().parent.parent
WHERE = "import lowmem; from lowmem.cudasim.gpus import CARDS; print(lowmem.__file__, len(CARDS) > 50)"


@pytest.fixture
def clone(tmp_path) -> Path:
    """A copy of what an installation needs. Its .venv is set up, with this interpreter's packages, but for lowmem."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "lowmem", folder / "lowmem", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    packages = next((folder / ".venv/lib").glob("python*/site-packages"))
    (packages / "beside.pth").write_text(sysconfig.get_path("purelib"))
    shutil.copy(ROOT / "requirements.txt", folder / ".venv/installed.txt")
    return folder


def run(*command, cwd: Path, **environment) -> str:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_after_make_setup_lowmem_is_there_from_anywhere_and_a_second_one_installs_nothing(clone, tmp_path):
    run("make", "-C", clone, "setup", cwd=tmp_path)
    program = clone / ".venv/bin/lowmem"
    assert (
        run(clone / ".venv/bin/python", "-c", WHERE, cwd=tmp_path).split("\n")[0] == f"{clone}/lowmem/__init__.py True"
    )
    assert "lowmem train|plan" in run(program, "--help", cwd=tmp_path)
    installed = program.stat().st_mtime_ns
    assert run("make", "setup", cwd=clone).strip() == ""
    assert program.stat().st_mtime_ns == installed
    moved = clone.rename(tmp_path / "moved")
    run("make", "setup", cwd=moved)
    assert run(moved / ".venv/bin/python", "-c", WHERE, cwd=tmp_path).startswith(f"{moved}/lowmem/")
    linked = tmp_path / "linked"
    shutil.copytree(moved, linked, ignore=shutil.ignore_patterns(".venv"))
    (linked / ".venv").symlink_to(moved / ".venv")
    run("make", "setup", cwd=linked)
    assert run(moved / ".venv/bin/python", "-c", WHERE, cwd=tmp_path).startswith(f"{moved}/lowmem/")


def test_pip_install_takes_all_that_lowmem_reads_along(clone, tmp_path):
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(clone / ".venv/bin/python", *pip, "--target", tmp_path / "there", clone, cwd=tmp_path)
    assert run(sys.executable, "-c", WHERE, cwd=tmp_path, PYTHONPATH=str(tmp_path / "there")).startswith(
        f"{tmp_path}/there/lowmem/__init__.py True"
    )
    data = {path.relative_to(ROOT) for path in (ROOT / "lowmem").rglob("*") if path.is_file()}
    data = {path for path in data if "__pycache__" not in path.parts}
    assert all((tmp_path / "there" / path).exists() for path in data)
