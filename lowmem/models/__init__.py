"""Hugging Face models: from a name or folder to a decoder, and from trained weights to a folder.

Start with build.py, which finds the config and builds the model without weights. load.py reads weights piece by piece,
and export.py writes them. compatibility.py runs a small random copy of an architecture.
"""
