"""Fine-tune all 774,030,080 parameters of GPT-2-Large under 11 GiB of GPU memory: full Adam, fp32 master weights.

What it takes, in GiB (2**30 bytes), for N parameters and a batch of 64 x 1,024 tokens, as planned for an RTX 3060:

    working weights, bf16      2 N                            1.44
    gradients, fp32            4 N                            2.88   whole model: summed over all micro-batches
    Adam's m and v, fp32       8 N                            5.77   in RAM
    low half of the weights    2 N                            1.44   with m and v; hi + low is the fp32 master, exactly
    36 blocks' activations     4 x 1,024 tokens               5.9    in 10 blocks, norms and GELU are computed twice
    gradients of the first block's input                      0.29   64 x 1,024 x 1,280 x 4, less what has been used

With fp32 weights, gradients, m and v on the GPU, the usual way, the first lines alone would be 11.53.

    python train_gpt2_large.py                      # pretrained weights, Python's standard library as text
    python train_gpt2_large.py --data wikitext --steps 500
    python train_gpt2_large.py --plan-only          # what it will take; needs no GPU, no weights, no network
    python train_gpt2_large.py --demo               # a small model, a minute on a laptop
"""

import sys

from lowmem.run.main import main
from lowmem.settings import Settings

SETTINGS = Settings(model="gpt2-large")

if __name__ == "__main__":
    sys.exit(main(SETTINGS))
