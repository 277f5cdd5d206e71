"""Turns Hugging Face models into decoders that lowmem can train, and exports trained weights to a folder.

Start with build.py, which finds a model's config and builds the model without weights. load.py reads weights tensor by
tensor, and export.py writes weights. compatibility.py runs a small random copy of an architecture.
"""
