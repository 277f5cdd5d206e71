"""Fine-tune all 6,050,882,784 parameters of GPT-J-6B under 24 GiB of GPU memory: full Adam, fp32 master weights.

What it takes, in GiB (2**30 bytes), for N parameters, 28 blocks of width 4,096 and a batch of 64 x 1,024 tokens:

    working weights, bf16      2 N                             11.27   1.15 on the GPU; the rest in RAM, from where two
                                                                       blocks at a time are brought over
    two segments' slots        2 x 2 x 2 x 201,355,264          1.50   one that computes, one that comes
    gradients, fp32            4 N                             22.54   in RAM until their updates, for they are clipped
    gradients of a segment     4 x 2 x 201,355,264              1.50   of two blocks; those above it are on their way
    boundaries, fp32           64 x 1,024 x 4,096 x 4           1.00   of the whole batch, for each segment that is
                                                                       still to go back
    boundary gradients, fp32   the same                         1.00   handed from one segment to the one before
    a vocabulary's matrix      2 x 50,400 x 4,096               0.38   two of them: GPT-J's head is not its embedding
    Adam's m and v, fp32       8 N                             45.08   in RAM, or with --states-folder DIR on a disk
    low half of the weights    2 N                             11.27   there, too

So a machine with 96 GiB of RAM holds all of it. A machine with 64 GiB keeps half of Adam's states on a disk or, without
a disk, runs forward and backward twice (--gradients resident). With 32 GiB all states are on the disk. Kept the usual
way (fp32 weights, gradients, m and v, all on the GPU) it would be 16 N, 90.2, before the first activation.

    python -m experiments.bigger_models.train_gptj                                   # the hub's weights, 96 GiB of RAM
    python -m experiments.bigger_models.train_gptj --ram-limit 60GiB --states-folder /fast/disk
    python -m experiments.bigger_models.train_gptj --blocks 28 --plan-only --gpu rtx3090             # needs no network
    python -m experiments.bigger_models.train_gptj --blocks 2 --seq 64 --batch 2 --steps 2         # a slice, anywhere

All options but --blocks are those of the main scripts.
"""

import sys

from experiments.bigger_models.recipe import main
from lowmem.settings import Settings
from lowmem.units import GIB

SETTINGS = Settings(model="EleutherAI/gpt-j-6b", out="runs/gpt-j-6b", gpu_limit_bytes=24 * GIB)

if __name__ == "__main__":
    sys.exit(main("gpt-j-6b", SETTINGS))
