"""Operators that pass over memory once where PyTorch passes several times: updates, the loss, gradients of matrices.

operators.py registers them (`torch.ops.lowmem`), triton_kernels.py has the Triton code, fused.py says whether a GPU can
have them and holds them to the plain lines when a run begins. Without them the plain lines run.
"""
