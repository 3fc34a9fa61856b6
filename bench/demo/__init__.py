"""Train, be killed in the middle of a save, resume, and end with the very same bits."""
