"""Certification: is a pair of proposer and verifier lossless? Enumerated exactly on toys, tested with samples
elsewhere.
"""
