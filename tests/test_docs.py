"""README.md and docs/: they are short, their links lead somewhere, and their commands run.

A block of commands that begins with ```sh is run. One that begins with ```sh why="..." is not, for that reason; its
options are parsed all the same.
"""

import importlib.util
import re
import shlex

import pytest

import train_gpt2_large
import train_gpt2_xl
from experiments.bigger_models import today
from lowmem.run import plan_command
from lowmem.run.cli import parse_arguments, parse_plan
from lowmem.settings import Settings
from runs import ROOT, python

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = {"train_gpt2_large.py": train_gpt2_large.SETTINGS, "train_gpt2_xl.py": train_gpt2_xl.SETTINGS}
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
README_LINES, README_WORDS, PAGE_LINES = 150, 900, 200


def commands() -> list[tuple[str, str, bool]]:
    """Returns (page, command, whether it is marked as one that is not run) of all blocks of commands."""
    found = []
    for page in PAGES:
        for language, mark, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language == "sh":
                assert not mark or re.search(r'why="[^"]{10,}"', mark), f"{page.name}: {mark} gives no reason"
                lines = [shlex.join(shlex.split(line, comments=True)) for line in block.splitlines()]
                found += [(page.name, line, bool(mark)) for line in lines if line]
    return found


def parsed(command: str) -> None:
    """Raises an error if the command's program or one of its options does not exist."""
    words = shlex.split(command)
    match words[words.index("torchrun") if "torchrun" in words else 0 :]:  # behind a variable
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target
        case ["lowmem", "train", *options]:
            parse_arguments(options, Settings())
        case ["lowmem", "plan", *options]:
            parse_plan(options, plan_command._PROGRAM)
        case ["lowmem", "report", *options]:
            assert [word for word in options if word.startswith("-")] in ([], ["--out"])
        case ["torchrun", "--nproc-per-node", "2", "-m", "lowmem", "train", *options]:
            parse_arguments(options, Settings())
        case ["torchrun", *rest]:
            script = next(word for word in rest if word.endswith(".py"))
            parse_arguments(rest[rest.index(script) + 1 :], SCRIPTS[script])
        case ["python", script, *options]:
            parse_arguments(options, SCRIPTS[script])
        case [".venv-cuda/bin/python", "-m", "stand_in", *rest]:
            script, *options = rest[rest.index("--") + 1 :]
            parse_arguments(options, SCRIPTS[script])
        case [".venv/bin/pip", "install", package, "--index-url", _]:
            assert package in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
        case _:
            raise ValueError(f"no parser is known for: {command}")


def test_the_readme_is_short_and_no_page_is_long():
    text = PAGES[0].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES
    assert len(re.findall(r"\S*\w\S*", text)) <= README_WORDS
    assert {page.name: lines for page in PAGES if (lines := len(page.read_text().splitlines())) >= PAGE_LINES} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            path, _, heading = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), target
            if heading:
                titles = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
                assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target


@pytest.mark.parametrize(("page", "command"), [(page, command) for page, command, _ in commands()])
def test_a_command_has_the_options_that_a_page_types(page, command):
    parsed(command)


@pytest.mark.parametrize("module", sorted({
    module for page in PAGES for module in re.findall(r"python3? -m ([\w.]+)", page.read_text(encoding="utf-8"))
}))  # fmt: skip
def test_a_module_that_a_page_runs_exists(module):
    assert importlib.util.find_spec(module) is not None


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", [command for _, command, marked in commands() if not marked])
def test_a_command_runs(command, tmp_path):
    words = shlex.split(command)
    assert words[0] == "lowmem", f"{command}: mark its block with a reason, or run it here"
    done = python("-m", *words, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0 and done.stdout, done.stderr


def test_every_file_of_the_package_is_in_the_tree():
    tree = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8")
    ours = [path for path in (ROOT / "lowmem").rglob("*.*") if "__pycache__" not in path.parts]
    assert [path.name for path in ours if path.name != "__init__.py" and path.name not in tree] == []


def test_models_that_a_page_calls_known_are_known():
    assert today.MODELS.keys() <= set(
        re.findall(r"^\| ([^|]+?) \|", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    )
