"""Pipeline, tensor and data parallelism at once, on a mesh of processes."""
