"""Measures correctness, speed and memory on a GPU by one command, within a given number of minutes (README.md)."""
