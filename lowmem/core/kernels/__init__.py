"""Defines operators that read and write memory once instead of several times: updates, the loss, gradients of matrices.

operators.py registers them (`torch.ops.lowmem`), and triton_kernels.py has the Triton code. When training begins,
fused.py compiles them and compares them with the plain PyTorch code. If that fails, the plain code runs.
"""
