"""Chooses how a training step is computed: micro-batches, recomputation, and the device that stores each kind of
tensor.

The result is a `Plan` (plan.py). If nothing fits, it is an error that names the smallest memory caps that would do. The
input is a `Question` (question.py): model, settings, precision and GPU. For a GPU, gpu_plan.py gets the allowed layouts
from choices.py, and fastest.py finds the fastest one under the caps of GPU memory and RAM. For the CPU, cpu_plan.py
takes the first layout that fits. ram.py predicts the RAM of a plan. process.py makes plans in a separate process. Start
with planner.py and gpu_plan.py, then read search.py. Planning reads no data and no weights.
"""
