"""Predicts which of PyTorch's methods for several GPUs (DDP, FSDP2, tensor parallelism) fits.

    python -m lowmem.plan --model gpt2-large --gpu rtx3090 --gpus 4

methods.py compares the methods: start there. rank.py simulates one rank of recipe.py, which trains with plain
transformers as ../plain.py does. tensor_parallel.py divides a decoder's layers. more_blocks.py turns a recording of
four blocks into one of many. lowmem itself trains on one device.
"""
