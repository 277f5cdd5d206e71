"""Ragged batches: padded, bucketed, nested and packed forward and backward of stock models (README.md)."""
