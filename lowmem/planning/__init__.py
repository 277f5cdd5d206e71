"""Chooses the layout of a training step: makes a `Plan`, or names the smallest memory caps that would do.

The question, with its precision and card, is defined in question.py. The answer begins in planner.py. For a GPU,
gpu_plan.py takes the allowed layouts from choices.py, and fastest.py finds the fastest one under both caps. For the
CPU, cpu_plan.py has fewer choices. The plan is defined in plan.py, and its RAM computed in ram.py. A separate process
can make it (process.py). Start with planner.py and gpu_plan.py, then read search.py. No data and no weights are read.
"""
