"""Turns documents into training batches (docs/data.md has a diagram). dataset.py calls the other files: start there."""
