"""The strong tier: trains the adapter with DP-SGD."""
