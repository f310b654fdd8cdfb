"""Training: the loop, evaluation, what is resumed, the scheduler, the page of a run."""
