"""For programs that save with something else: torch.distributed.checkpoint."""
