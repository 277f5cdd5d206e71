"""What a step takes, found by running the step that trains on tensors without data.

step.py runs it under recorder.py, which notes every allocation and adds up time (clock.py, roofline.py, gpus.py);
replay.py runs each part of it once and replays the rest. cuda_ops.py, temporaries.py, reductions.py and
multiprocessors.py know what CUDA does otherwise; allocator.py says what its caching allocator makes of it under a cap.
In: a decoder, a case, a card. Out: a `Recording`, a `Memory`. Start with step.py. Knows nothing of planning.
"""
