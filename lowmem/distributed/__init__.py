"""Implements core/ranks.py for several ranks, the processes that train one model together.

In: torchrun's environment, a decoder and its store. Out: weights gathered by PyTorch's FSDP2 when blocks run, gradients
summed in the order of the ranks, and other ranks' shares, if rank 0 reads them. Start with several.py. No GPU and no
NCCL has run this; docs/several-gpus.md says what has been run.
"""
