"""The two strategies that one run goes through in sequence."""
