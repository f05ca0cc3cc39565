"""One training run: configuration, loop, optimizer, learning rate, checkpoints, monitoring, resilience."""
