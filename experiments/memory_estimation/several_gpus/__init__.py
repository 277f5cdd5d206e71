"""Predicts which of PyTorch's methods for several GPUs (DDP, FSDP2, tensor parallelism) fits.

    python -m experiments.memory_estimation.several_gpus.methods --model gpt2-large --gpu rtx3090 --gpus 4

Start with methods.py, which compares the methods. rank.py simulates one rank of recipe.py: plain transformers, as in
../plain.py. tensor_parallel.py divides a decoder's layers. more_blocks.py extends a recording of four blocks to many.
published.py compares predictions with published
measurements. How lowmem itself trains on several: docs/several-gpus.md.
"""
