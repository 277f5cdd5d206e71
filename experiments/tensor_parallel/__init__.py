"""Tensor parallelism by hand: each process holds a part of the neurons of each layer. Start with sharding.py."""
