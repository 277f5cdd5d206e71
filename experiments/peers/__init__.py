"""Trains the same model with lowmem and with its alternatives, under the same two caps (README.md).

catalogue.py lists the peers; trainings.py sets them up. run.py compares trainings. train.py finds the largest
micro-batch that fits. update.py times updates alone.
"""
