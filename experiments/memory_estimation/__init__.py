"""Predicts the GPU memory of training without a GPU, beside others' predictions and measurements. Start with run.py."""
