"""Chooses the layout of a training step: makes a `Plan`, or names the smallest memory caps that would do.

target.py has the question, with its precision and card. planner.py answers it. gpu_plan.py takes the layouts that the
settings allow from choices.py. fastest.py finds the fastest one under both caps. cpu_plan.py has fewer choices.
plan.py defines the plan, ram.py counts RAM from loading to export, and process.py plans in a separate process. Start
with planner.py and gpu_plan.py, then read search.py. No data and no weights are read.
"""
