"""Evaluate verifiers, trees and rules on recorded distributions, without the model. See ``designs``."""
