"""Answers what a training step asks of ranks, the processes that train one model together (core/ranks.py).

In: torchrun's environment, a decoder and its store. Out: weights gathered by PyTorch's FSDP2 when blocks run, gradients
summed in the order of the ranks, and what rank 0 reads of the others. Start with several.py. No GPU and no NCCL
has run this; docs/several-gpus.md says what has.
"""
