"""The coordinator: the Flower ServerApp, its two strategies, generation, the aggregator and the command line."""
