"""The stream of documents: corpora, their order, their lengths."""
