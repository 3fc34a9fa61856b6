"""Doors for those who save with something else."""
