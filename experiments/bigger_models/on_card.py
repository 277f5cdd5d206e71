"""Runs train_gptj for its GPU memory alone: `python -m stand_in -- -m experiments.bigger_models.on_card`.

No weights are drawn, and nothing is saved or exported.
"""

import sys

from experiments.bigger_models.recipe import main
from experiments.bigger_models.train_gptj import SETTINGS
from experiments.harness.whole_runs import memory_alone

if __name__ == "__main__":
    with memory_alone():
        code = main("gpt-j-6b", SETTINGS)
    sys.exit(code)
