"""Chooses the layout of a training step: makes a `Plan`, or names the smallest memory caps that would do.

The question, with its precision and card, is defined in question.py. The answer, a plan (plan.py), begins in
planner.py. For a GPU, gpu_plan.py gets the allowed layouts from choices.py, and fastest.py finds the fastest one under
both caps. For the CPU, cpu_plan.py takes the first layout that fits. A plan's RAM is predicted in ram.py. A separate
process can make plans (process.py). Start with planner.py and gpu_plan.py, then read search.py. Planning reads no data
and no weights.
"""
