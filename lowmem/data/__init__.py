"""From documents to batches. docs/data.md draws the way. Start with dataset.py, which calls the other files."""
