"""Policies: how much a proposer drafts in each step, decided from what happened before it."""
