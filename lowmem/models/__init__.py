"""Hugging Face models: from a name or folder to a decoder, from trained weights to a folder.

build.py finds the config and builds the model without weights. load.py reads the weights piece by piece, and export.py
writes them back. compatibility.py runs a small random copy of an architecture. Start with build.py.
"""
