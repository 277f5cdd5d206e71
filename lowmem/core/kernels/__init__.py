"""Defines operators for updates, the loss, layers and gradients, each in one pass over memory.

operators.py registers them (`torch.ops.lowmem`). triton_kernels.py and layer_kernels.py have the Triton code. When
training begins, fused.py compiles them and compares them with the plain PyTorch code. If that fails, the plain code
runs.
"""
