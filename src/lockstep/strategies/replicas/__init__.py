"""What `lockstep.strategies.dp` is built of: the replicas of a model, each with a thread."""
