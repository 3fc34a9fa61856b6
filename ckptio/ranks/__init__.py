"""Message rounds between the engines of a job: who talks to whom, and how it ends."""
