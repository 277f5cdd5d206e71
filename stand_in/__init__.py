"""Runs PyTorch's CUDA build, and this project on it, on a machine without a GPU (docs/without-a-gpu.md).

PyTorch's own libraries run unchanged. Below them, libraries that model a card (card/*.c) replace CUDA's. They track
memory, streams, events and properties; kernels are counted and not run. With --values the CPU computes each operator of
a training step. Start with __main__.py.
"""
