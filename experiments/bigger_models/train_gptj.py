"""Fine-tune all 6,050,882,784 parameters of GPT-J-6B under 24 GiB of GPU memory: full Adam, fp32 master weights.

In GiB (2**30 bytes), for N parameters and a batch of 64 x 1,024 tokens:

    working weights, bf16      2 N    11.27   most in RAM, copied to the GPU two blocks at a time
    gradients, fp32            4 N    22.54   in RAM until their updates, because they are clipped
    Adam's m and v, fp32       8 N    45.08   in RAM, or with --states-folder DIR on a disk
    low half of the weights    2 N    11.27   there, too

A machine with 96 GiB of RAM holds all of it. With 64 GiB, half of Adam's states are on a disk, or forward and backward
run twice (--gradients resident).

    python -m experiments.bigger_models.train_gptj                                   # the hub's weights, 96 GiB of RAM
    python -m experiments.bigger_models.train_gptj --ram-limit 60GiB --states-folder /fast/disk
    python -m experiments.bigger_models.train_gptj --blocks 28 --plan-only --gpu rtx3090             # needs no network
    python -m experiments.bigger_models.train_gptj --blocks 2 --seq 64 --batch 2 --steps 2         # a slice, anywhere
"""

import sys

from experiments.bigger_models.recipe import main
from lowmem.settings import Settings
from lowmem.units import GIB

# On the GPU, in GiB, for 28 blocks of width 4,096:
# two segments of two blocks     2 x 2 x 2 x 201,355,264     1.50   one computes while the other arrives
# a segment's gradients, fp32    4 x 2 x 201,355,264         1.50   next to those of the segment above
# a segment's input, fp32        64 x 1,024 x 4,096 x 4      1.00   stays until that segment's backward
# gradients of an input, fp32    the same                    1.00   exist for one segment at a time
# a vocabulary's matrix          2 x 50,400 x 4,096          0.38   exists twice: GPT-J's head is not its embedding
SETTINGS = Settings(model="EleutherAI/gpt-j-6b", out="runs/gpt-j-6b", gpu_limit_bytes=24 * GIB)

if __name__ == "__main__":
    sys.exit(main("gpt-j-6b", SETTINGS))
