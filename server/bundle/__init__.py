"""The corpus as a folder that can be published as it stands, and that anyone can check."""
