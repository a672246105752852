"""From a dataset to a trained run: loss, optimizer, schedule, loop, checkpoints, evaluation."""
