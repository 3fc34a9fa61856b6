"""Memory between tensors and storage: the pool of slabs, and the copies in and out."""
