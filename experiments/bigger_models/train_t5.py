"""Fine-tune all 11,307,321,344 parameters of T5-11B under 24 GiB of GPU memory, or 11: full Adam, fp32 master weights.

In GiB (2**30 bytes), for N parameters and a batch of 64 sources and targets of 512 tokens each:

    working weights, bf16      2 N    21.06   3.8 on the GPU; the rest in RAM, copied to the GPU block by block
    gradients, fp32            4 N    42.12   in RAM until their updates, because they are clipped
    Adam's m and v, fp32       8 N    84.25   in RAM, or with --states-folder DIR on a disk
    low half of the weights    2 N    21.06   there, too

    python -m experiments.bigger_models.train_t5 --data pairs.jsonl --ram-limit 64GiB --states-folder /fast/disk
    python -m experiments.bigger_models.train_t5 --gpu-limit 11GiB --ram-limit 64GiB --states-folder /fast/disk
    python -m experiments.bigger_models.train_t5 --blocks 24 --plan-only --gpu rtx3090               # needs no network
    python -m experiments.bigger_models.train_t5 --blocks 1 --seq 64 --target-tokens 32 --batch 2 --steps 2   # a slice

Rows have `prompt` and `completion`; plain text is cut into both. With --blocks N, encoder and decoder have N
blocks each.
"""

import sys

from experiments.bigger_models.recipe import main
from lowmem.settings import Settings
from lowmem.units import GIB

# On the GPU, in GiB, for 24 + 24 blocks of width 1,024, and of width 65,536 inside the MLP:
# buffers for two blocks         2 x 2 x 268,435,456             1.00   one computes while the other arrives
# a block's gradients, fp32      4 x 4 x 67,108,864              1.00   next to those of the decoder block above
# inputs of blocks, fp32         64 x 1,024 x 1,024 x 4 x 48    12.00   of source and target; under 11 GiB in RAM
# the block that runs            4 rows                          3.5    most are T x T scores of 128 heads, in fp32
SETTINGS = Settings(model="google-t5/t5-11b", out="runs/t5-11b", gpu_limit_bytes=24 * GIB, target_tokens=512)

if __name__ == "__main__":
    sys.exit(main("t5-11b", SETTINGS))
