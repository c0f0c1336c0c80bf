"""Assertions after the last cell of notebooks/is_it_lossless.py; runs in its kernel."""

assert np.allclose(verdict.stop, [2 / 3, 1 / 3])  # accepted with min(1, p/q) = 0.2 / 0.6
assert np.allclose(verdict.residual(np.array([0]))[0], [0, 0.2, 0.2])  # not normalised
assert np.abs(first_token(Token()) - p[0].numpy()).max() < 1e-15
assert np.abs(first_token(Control()) - p[0].numpy()).max() > 0.05
assert len(proofs) == 7
for _, verifier, proof in proofs:
    exact = proof.worst.tv < 1e-12 and proof.failure is None
    assert exact == (verifier.lossless and not isinstance(verifier, Control))
assert control.failure.wrong.startswith("after [")
assert distances["token"] < 1.3
assert distances["control"] > 2
assert distances["lenient"] > 2
assert certificate["certified"] is True
assert pair["certified"] == "exact"
assert certificate["control"]["p_value"] < certificate["alpha"]  # the control was found
