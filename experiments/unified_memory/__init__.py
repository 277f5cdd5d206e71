"""Weights in CUDA managed memory, with prefetch and eviction by a schedule; layer fusion that keeps the function."""
