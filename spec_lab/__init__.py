"""spec_lab: a laboratory for speculative decoding."""
