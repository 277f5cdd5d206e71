"""Which of PyTorch's methods for several GPUs (DDP, FSDP2, tensor parallelism) fits? Simulates one rank of each.

    python -m lowmem.plan --model gpt2-large --gpu rtx3090 --gpus 4

methods.py compares the methods: start there. rank.py simulates one rank of the training in recipe.py, which is plain
transformers as in ../plain.py. tensor_parallel.py divides a decoder's layers. more_blocks.py turns a recording of four
blocks into one of many. lowmem itself trains on one device.
"""
