"""Documents to batches: sources.py reads them, formats.py makes text of their columns, encoder.py tokens by the model's
own tokenizer.py, documents.py lays these end to end in files (stored.py, prepared.py), and batches.py cuts them into
the `Batch` of each step, a pure function of the seed and the step's number. Start with dataset.py: it calls them all.
"""
