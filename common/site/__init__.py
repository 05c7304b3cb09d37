"""What runs inside a hospital, on either tier: its configuration, documents, policy, ledger and the one door."""
