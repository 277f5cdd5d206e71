"""Predicts how much GPU memory any PyTorch code takes, and how long it runs: without a GPU, and without data.

Start with peak.py (`lowmem.cuda_peak`). recorder.py runs code on meta tensors, and lists its allocations and frees
(tape.py). allocator.py replays this list like PyTorch's caching allocator. device_model.py gathers the properties of a
GPU from cuda_ops.py, temporaries.py, reductions.py, roofline.py and gpus.py. No file here depends on lowmem's training
code. docs/cuda-memory.md has a diagram.
"""
