"""The weak tier: profiles its documents and votes. Runs without torch."""
