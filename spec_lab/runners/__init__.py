"""Running a model's forwards: preparation, KV cache, attention, graphs, adaptors; transformers and llama.cpp."""
