"""Fine-tune all 11,307,321,344 parameters of T5-11B under 24 GiB of GPU memory, or 11: full Adam, fp32 master weights.

Memory in GiB (2**30 bytes), for N parameters in 24 + 24 blocks of width 1,024 with 65,536 within. A batch has 64 rows,
each a source of 512 tokens and a target of 512:

    working weights, bf16      2 N                             21.06   3.8 on the GPU, with ten of the encoder's blocks;
                                                                       the rest in RAM, brought over block by block
    two blocks' slots          2 x 2 x 268,435,456              1.00   one that computes, one that comes
    gradients, fp32            4 N                             42.12   in RAM until their updates, for they are clipped
    gradients of a block       4 x 4 x 67,108,864               1.00   of a decoder's, with its cross-attention; those
                                                                       of the block above are on their way
    boundaries, fp32           64 x 1,024 x 1,024 x 4 x 48     12.00   of source and target; under 11 GiB in RAM
    a block at work            4 rows                           3.5    of them T x T scores of 128 heads, in fp32
    Adam's m and v, fp32       8 N                             84.25   in RAM, or with --states-folder DIR on a disk
    low half of the weights    2 N                             21.06   there, too

Kept the usual way (fp32 weights, gradients, m and v, all on the GPU) it would be 16 N, 168.5, before the first
activation. Blocks are small beside their weights, so RAM and the bus are what it needs: the plans are in README.md.

    python -m experiments.bigger_models.train_t5 --data pairs.jsonl --ram-limit 64GiB --states-folder /fast/disk
    python -m experiments.bigger_models.train_t5 --gpu-limit 11GiB --ram-limit 64GiB --states-folder /fast/disk
    python -m experiments.bigger_models.train_t5 --blocks 24 --plan-only --gpu rtx3090               # needs no network
    python -m experiments.bigger_models.train_t5 --blocks 1 --seq 64 --target-tokens 32 --batch 2 --steps 2   # a slice

Rows with `prompt` and `completion` are sources and targets; plain text is cut into both (lowmem/data/pairs.py). All
options but --blocks, which counts those of the encoder and those of the decoder, are those of the main scripts.
"""

import sys

from experiments.bigger_models.recipe import main
from lowmem.settings import Settings
from lowmem.units import GIB

SETTINGS = Settings(model="google-t5/t5-11b", out="runs/t5-11b", gpu_limit_bytes=24 * GIB, target_tokens=512)

if __name__ == "__main__":
    sys.exit(main("t5-11b", SETTINGS))
