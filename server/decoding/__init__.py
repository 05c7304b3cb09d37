"""Many texts at once from one model: slots that are refilled, an exact nucleus, weights packed for the processor."""
