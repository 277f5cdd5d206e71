"""Hugging Face models in and out: a name or folder becomes a decoder, trained weights become a folder.

build.py finds the config and builds the model without weights, load.py reads safetensors piece by piece into the flat
parameters, export.py writes them back, compatibility.py tries an architecture with a small random copy before its
weights are there. Start with build.py.
"""
