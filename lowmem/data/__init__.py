"""Documents to batches: sources.py reads them, formats.py makes text of their columns, tokenizer.py tokens,
documents.py lays these end to end in files (stored.py, prepared.py), and dataset.py cuts them into the `Batch` of each
step, a pure function of the seed and the step's number. Start with dataset.py.
"""
