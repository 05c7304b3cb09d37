"""The mathematics of the guarantee: accounting, noise and bounding. No I/O, no Flower, no torch; read it alone."""
