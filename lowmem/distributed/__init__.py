"""Implements core/ranks.py for several ranks, the processes that train one model together.

launch.py joins the processes started by torchrun. gathered.py gathers weights by PyTorch's FSDP2 before blocks run.
several.py sends gradients and shares between ranks; read it first. No GPU and no NCCL has run this code.
docs/several-gpus.md lists the tests that have run it.
"""
