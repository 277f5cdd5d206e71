"""Predicts how much GPU memory any PyTorch code takes, and how long it runs: without a GPU, and without data.

Start with peak.py (`lowmem.cuda_peak`); docs/cuda-memory.md has a diagram. No file here depends on lowmem's training
code.
"""
