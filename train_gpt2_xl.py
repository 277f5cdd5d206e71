"""Fine-tune all 1,557,611,200 parameters of GPT-2-XL under 11 GiB of GPU memory and 16 GiB of RAM: full Adam, fp32
master weights.

What it takes, in GiB (2**30 bytes), for N parameters and a batch of 64 x 1,024 tokens:

    working weights, bf16      2 N                            2.90
    gradients, fp32            4 N                            5.80   whole model: summed over all micro-batches
    Adam's m and v, fp32       8 N                           11.61   most in RAM; with the low half that would be 14.5
    low half of the weights    2 N                            2.90   there, so some has to stay on the GPU
    16 blocks' products        1,024 x 1,600 x 16 x 18        0.44   norms, GELU run again; the other 32 run again whole
    boundaries, fp32           1,024 x 1,600 x 48 x 4         0.29
    a chunk of logits          1,024 x 50,257 x 2             0.10
    gradients of the first block's input                      0.39   64 x 1,024 x 1,600 x 4

With fp32 weights, gradients, m and v on the GPU, the usual way, the first lines alone would be 23.2.

    python train_gpt2_xl.py                         # pretrained weights, Python's standard library as text
    python train_gpt2_xl.py --plan-only             # what it will take; needs no GPU, no weights, no network
"""

import sys

from lowmem.run.main import main
from lowmem.settings import Settings
from lowmem.units import GIB

SETTINGS = Settings(model="gpt2-xl", ram_limit_bytes=16 * GIB)

if __name__ == "__main__":
    sys.exit(main(SETTINGS))
