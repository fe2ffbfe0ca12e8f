"""Training small MoE models: corpus, tokenizer, router losses, trainer, export (the only extra that needs torch)."""
