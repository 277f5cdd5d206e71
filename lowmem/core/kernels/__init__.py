"""Defines operators that pass over memory once: of updates, the loss, layers and gradients.

operators.py registers them (`torch.ops.lowmem`). triton_kernels.py and layer_kernels.py have the Triton code. When
training begins, fused.py compiles them and compares them with the plain PyTorch code. If that fails, the plain code
runs.
"""
