"""From text to token batches: tokenizer, indexed files, the order of samples, blending, and the tool that prepares them."""
