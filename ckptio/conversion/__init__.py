"""From one format of checkpoints to another, with the state never whole in memory."""
