"""Compares how a model continues held-out beginnings of functions, before and after it is trained on code."""
