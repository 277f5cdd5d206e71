"""What CUDA would allocate for any PyTorch code, and how long it would take: without a GPU, and without data.

Its door is peak.py (`lowmem.cuda_peak`). recorder.py runs code on meta tensors and writes a tape (tape.py), which
allocator.py replays as PyTorch's caching allocator would. device_model.py gathers what a card adds: cuda_ops.py,
temporaries.py, reductions.py, roofline.py, gpus.py. docs/cuda-memory.md has the drawing. Knows nothing of training.
"""
