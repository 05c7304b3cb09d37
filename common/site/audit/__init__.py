"""The leak check: what a site can look for in a corpus, on its own documents, before the corpus is published."""
