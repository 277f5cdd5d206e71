"""Turns documents into training batches. docs/data.md has a diagram. Start with dataset.py, which calls the other
files."""
