"""Several GPUs: which of PyTorch's methods (DDP, FSDP2, tensor parallelism) fits, by simulating one rank of it.

methods.py compares them, rank.py simulates one rank of recipe.py's training, tensor_parallel.py cuts a decoder's
layers, more_blocks.py makes a recording of four blocks one of many. Start with methods.py. lowmem itself trains on one
device so far.
"""
