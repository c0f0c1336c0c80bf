"""PARD: a draft model that drafts several tokens in one forward."""
