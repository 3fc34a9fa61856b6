"""Bulk data between the ranks of a group: one reads, the others take."""
