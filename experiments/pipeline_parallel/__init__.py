"""Pipeline parallelism by hand: schedules as data, a checker, a runtime, and one process's bits (README.md)."""
