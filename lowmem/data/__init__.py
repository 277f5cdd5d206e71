"""Turns documents into training batches. docs/data.md has a diagram. Start reading with dataset.py, which calls the
other files."""
