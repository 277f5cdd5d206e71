"""Builds Hugging Face models, and loads and exports weights. Start with build.py (configs, models without weights),
then load.py and export.py. compatibility.py runs a small random copy of an architecture."""
