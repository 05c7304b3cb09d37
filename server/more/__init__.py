"""More text from a finished run: as much as anyone likes, at no privacy cost."""
