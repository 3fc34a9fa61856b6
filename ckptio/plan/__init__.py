"""Decisions, before anything happens. Pure: no I/O, no tensors, no clock."""
