"""Monitor callbacks for Lightning and Hugging Face transformers, in modules that import these packages."""
