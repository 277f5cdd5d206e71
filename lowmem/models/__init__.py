"""Turns Hugging Face models into decoders that lowmem can train, and exports trained weights to a folder.

Start with build.py, which finds a model's config and builds the model without weights. load.py reads weights piece by
piece, and export.py writes them. compatibility.py runs a small random copy of an architecture.
"""
