"""Checkpoints that other programs wrote, read as if they were our own."""
