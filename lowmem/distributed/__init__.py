"""Trains one model in several processes (ranks), by torch.distributed.

collectives.py sends data for core/shares.py, which sums gradients over the ranks; read that first. launch.py connects
torchrun's processes. gathered.py all-gathers a block's weights. No GPU and no NCCL has run this code
(docs/several-gpus.md).
"""
