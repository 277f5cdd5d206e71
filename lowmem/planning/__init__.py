"""Chooses how a training step is computed: micro-batches, recomputation, and the device that stores each kind of
tensor.

A `Question` (question.py) goes in. A `Plan` (plan.py) comes out, or an error that names the smallest memory caps that
would do. Start with planner.py and gpu_plan.py, then read search.py; docs/planning.md has drawings. Planning reads no
data and no weights.
"""
