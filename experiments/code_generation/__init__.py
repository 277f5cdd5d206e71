"""Does a model learn to write code: the same held-out beginnings, continued before and after training."""
