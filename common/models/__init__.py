"""Public models: the generator and its architectures (all of ``common`` that knows torch) and the sentence embedder."""
