"""Benchmarks of fastipc, its rivals and the machine's floor: see README.md in this folder."""
