"""Public models: the generator (the only module of ``common`` that knows torch) and the sentence embedder."""
