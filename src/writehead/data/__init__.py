"""From text to batches: tokenizer, corpora, datasets, packing."""
