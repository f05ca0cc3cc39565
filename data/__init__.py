"""From text to token batches: tokenizer, indexed files, order of samples, blending, and the tool that prepares them."""
