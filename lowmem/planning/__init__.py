"""Which layout: settings, a config and a card in, a `Plan` out, or the smallest caps that would do.

target.py settles what is planned for, planner.py makes the plan: gpu_plan.py tries what settings leave open
(alternatives.py) and asks search.py for the fastest layout that fits both caps, cpu_plan.py has fewer choices. plan.py
is what a plan says, ram.py counts RAM from loading to export, process.py plans in a process of its own. Start with
planner.py and gpu_plan.py; then search.py, which stands on columns.py and simulations.py. Reads no data and no weights.
"""
