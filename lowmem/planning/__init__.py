"""Chooses the layout. In: settings, a config and a card. Out: a `Plan`, or the smallest caps that would do.

target.py says what to plan for, and planner.py makes the plan. gpu_plan.py lists what settings leave open (choices.py)
and asks fastest.py for the fastest layout under both caps. cpu_plan.py has fewer choices. plan.py defines the plan,
ram.py counts RAM from loading to export, and process.py plans in a process of its own. Start with planner.py and
gpu_plan.py, then read search.py. No data and no weights are read.
"""
