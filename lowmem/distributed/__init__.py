"""Trains one model in several processes (ranks), by torch.distributed. Implements the methods of core/ranks.py.

launch.py connects the processes started by torchrun. gathered.py all-gathers a block's weights before the block runs,
by PyTorch's FSDP2. several.py sums gradients over the ranks, and sends shards to rank 0; read it first. No GPU and no
NCCL has run this code. docs/several-gpus.md lists the tests that have run it.
"""
