"""Predicts which GPU memory any PyTorch code takes, and how long it runs: without a GPU, and without data.

Start with peak.py (`lowmem.cuda_peak`). recorder.py runs code on meta tensors and writes a tape (tape.py). allocator.py
replays the tape like PyTorch's caching allocator. device_model.py gathers a card's own rules: cuda_ops.py,
temporaries.py, reductions.py, roofline.py, gpus.py. Nothing here knows of training. docs/cuda-memory.md has the
drawing.
"""
