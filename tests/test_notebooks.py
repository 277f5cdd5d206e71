"""The notebooks run from the first cell to the last: here with a tiny model, without Jupyter and without network."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import lowmem

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] ~ ': ' ~ message['content'] ~ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def cells(notebook: Path) -> list[dict]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4 and content["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    return content["cells"]


def execute(notebook: Path, parameters: dict) -> dict:
    """Runs the code cells in their order. `parameters` replace those of the cell with that tag, as in papermill."""
    names: dict = {"__name__": "__main__"}
    for cell in cells(notebook):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, {cell['id']}", "exec"), names)
            if "parameters" in cell["metadata"].get("tags", []):
                assert parameters.keys() <= names.keys()
                names |= parameters
    return names


@pytest.fixture
def chat_model(tmp_path) -> Path:
    """A folder with a tiny model that has a chat template."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    settings = lowmem.Settings(
        model="gpt2-demo", init="random", seq=16, batch=1, device="cpu", chat_template=str(tmp_path / "chat.jinja")
    )
    lowmem.export(lowmem.load(settings), tmp_path / "model")
    return tmp_path / "model"


def test_there_are_notebooks_without_results():
    assert NOTEBOOKS
    for notebook in NOTEBOOKS:
        assert all(not cell["outputs"] for cell in cells(notebook) if cell["cell_type"] == "code")


def test_your_own_text(chat_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (notebook,) = (path for path in NOTEBOOKS if path.stem == "your_own_text")
    names = execute(notebook, {"MODEL": str(chat_model), "STEPS": 12, "BATCH": 4, "LEARNING_RATE": 1e-3})
    said = capsys.readouterr().out
    assert names["model"].evaluate([names["batch_of"](names["held_out"])]) < names["held_out_before"] - 0.5
    assert said.count("  before: ") == said.count("  after:  ") == len(names["questions"])
    assert "held-out loss" in said and "859,008 parameters in runs/notebook/model" in said
    resumed = lowmem.load(names["settings"], resume="runs/notebook")
    assert resumed.done == 12
    assert AutoModelForCausalLM.from_pretrained("runs/notebook/model").num_parameters() == 859_008
