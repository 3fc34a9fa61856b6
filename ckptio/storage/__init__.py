"""Where bytes go: one storage object carries every file of a checkpoint."""
