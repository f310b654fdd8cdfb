"""What a job measures in evaluations, beside the loss."""
